"""Real engines of several ranks: each has its part of a page, and hands that to the same part.

Tokens are those of one vLLM of one rank. What cannot be exchanged is refused in words, on both
sides, and computed. An engine here is three processes or five, on a machine that may have two
cores: a model of four layers, and answers of few tokens.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.engines.engine import transfer_of
from tests.engines.environment import PYTHON
from tests.engines.forks import PATIENT, WARM, engines_at, handed_over, tokens_of
from tests.engines.test_layouts import KV
from tests.engines.test_layouts import pool_of as any_pool
from tests.engines.test_shapes import FIRST, SEVERAL, TIGHT, TOKEN, TURN, nodes, pool_of
from tests.support.daemons import free_port, one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

LAYERS = 4
ONE = pool_of(LAYERS)
BY_PROCESSES = {"distributed_executor_backend": "mp"}
HEADS = BY_PROCESSES | {"tensor_parallel_size": 2}
STAGES = BY_PROCESSES | {"pipeline_parallel_size": 2, "worker_cls": "staged.StagedWorker"}

RANKS = {
    "stages": (STAGES, pool_of(LAYERS // 2, ranks=2)),
    "heads": (HEADS, pool_of(LAYERS, parts=2, ranks=2)),
    "both": (STAGES | HEADS, pool_of(LAYERS // 2, parts=2, ranks=4)),
}


@pytest.fixture(scope="module")
def model(models):
    return models / "shallow"


@pytest.fixture(scope="module")
def alone(forks, model):
    """What one vLLM of one rank answers."""
    asks = [{"ids": FIRST}, {"ids": TURN}, {"ids": SEVERAL[0], "more": SEVERAL[1:]}]
    found = forks.answers(model, None, [{**ask, "max_tokens": 24} for ask in asks])
    first, turn, *several = tokens_of(found)
    return first, turn, several


@pytest.mark.parametrize("what", RANKS)
def test_each_rank_has_its_part_of_a_page(forks, model, alone, tmp_path, what):
    ranks, pool = RANKS[what]
    with one_daemon(tmp_path, pool) as daemon:
        with engines_at(forks, model, (daemon, TIGHT | ranks)) as (engine,):
            for turn in range(2):
                # With what vLLM itself has, and then without: all of it comes from pages.
                how = {"max_tokens": 24, "drop": bool(turn)}
                found = [engine.ask(ids, **how) for ids in (FIRST, TURN)]
                several = engine.ask_all(SEVERAL, **how)
                assert (*tokens_of(found), tokens_of(several)) == alone
            assert [answer["cached"] for answer in found] == [288, 384]
            assert [answer["cached"] for answer in several] == [224] * 6
        assert not daemon.snapshot().leases
    assert "a bug in kvd's connector" not in engine.log.read_text()


def test_stages_that_are_not_alike_are_refused_in_a_sentence(forks, models, tmp_path):
    three = STAGES | {"pipeline_parallel_size": 3}
    with one_daemon(tmp_path, pool_of(layers=3, ranks=3)) as daemon:
        found, log = forks.run(models / "model", daemon, **three)
    assert "error" in found
    assert re.search(r"stages of this pipeline have 3, 3, 2 layers.*divides 8", log)


def test_stages_whose_layers_are_in_groups(forks, families, tmp_path):
    """Of each group a stage has a part; windows move on in all of them at once."""
    asks = [WARM, {"ids": FIRST}, {"ids": TURN}]
    alone = forks.answers(families / "gemma", None, asks)
    pool = any_pool(6 // 2, KV) | {"pool.tp_size": "2"}
    with one_daemon(tmp_path, pool) as daemon:
        for n in range(2):
            how = STAGES | {"max_num_batched_tokens": 128}
            found, log = forks.run(families / "gemma", daemon, asks, PATIENT, **how)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            assert tokens_of(found) == tokens_of(alone)
            assert [answer["cached"] for answer in found[1:]] == [288 * n, 384 if n else 288]
            assert "a bug in kvd's connector" not in log
        assert not daemon.snapshot().leases


# ---- from one node to another --------------------------------------------------------------------


def why_peer(daemon, name):
    """What an operator is told."""
    asked = [sys.executable, "-m", "kvd", "why", "peer", name, "--connect", daemon.admin]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("what", ["heads", "stages"])
def test_each_rank_hands_its_part_to_the_same_of_another_node(forks, model, alone, tmp_path, what):
    ranks, pool = RANKS[what]
    with (
        nodes(tmp_path, p=pool, d=pool) as found,
        engines_at(forks, model, (found["p"], ranks), (found["d"], ranks)) as (p, d),
    ):
        answer = handed_over(p, d, FIRST)
        moved = found["d"].snapshot().totals.received_bytes
    assert answer["tokens"] == alone[0][:8]
    assert (answer["cached"], moved) == (299, -(-300 // 32) * LAYERS * 32 * TOKEN)


@pytest.mark.parametrize("order", [("several", "one"), ("one", "several")])
def test_ranks_that_are_not_as_many_hand_nothing_over_and_both_nodes_say_so(
    forks, model, alone, tmp_path, order
):
    ranks, pool = RANKS["heads"]
    of = {"several": (pool, ranks), "one": (ONE, {})}
    prefill, decode = order
    with nodes(tmp_path, **{name: made for name, (made, _) in of.items()}) as found:
        asked = [(found[name], of[name][1]) for name in order]
        with engines_at(forks, model, *asked) as (p, d):
            answer = handed_over(p, d, FIRST)
        assert (answer["tokens"], answer["cached"]) == (alone[0][:8], 0)
        assert found[decode].snapshot().totals.received_bytes == 0
        # The engine that was to get it, and the daemons of both: all say what differs.
        said = d.log.read_text()
        assert re.search(r"did not get what another node was to send.*layout\.ranks", said)
        assert "layout.ranks: ours" in why_peer(found[decode], prefill)
        assert "layout.ranks: ours" in why_peer(found[prefill], decode)


# ---- data parallel -------------------------------------------------------------------------------


class Served:
    """``vllm serve`` with several engines behind one port; its balancer can be overruled."""

    def __init__(self, daemon, model, log, *more):
        self.port = free_port()
        self.log = log
        how = transfer_of({"kvd.endpoint": daemon.client, **PATIENT})
        words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        words += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--dtype", "float32", "--block-size", "32", "--max-model-len", "2048"]
        words += ["--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
        words += ["--skip-tokenizer-init", "--enable-prompt-tokens-details"]
        words += ["--kv-transfer-config", json.dumps(how), *more]
        own = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        own |= {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        with log.open("w") as target:
            self._process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=target, stderr=target, env=os.environ | own
            )

    def ready(self, within_s=300):
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s:
            assert self._process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                self.asked("GET", "/health")
                return
            time.sleep(0.5)
        raise AssertionError(self.log.read_text()[-3000:])

    def asked(self, method, path, body=None, **headers):
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        told = {"Content-Type": "application/json", **headers}
        link.request(method, path, None if body is None else json.dumps(body), told)
        answer = link.getresponse()
        text = answer.read().decode()
        link.close()
        assert answer.status == 200, text
        return text

    def ask(self, ids, rank, max_tokens=24):
        """What the engine of that rank answers."""
        body = {"model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "return_token_ids": True, "detokenize": False}
        text = self.asked("POST", "/v1/completions", body, **{"X-data-parallel-rank": str(rank)})
        answer = json.loads(text)
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return {"tokens": answer["choices"][0]["token_ids"], "cached": cached}

    def close(self):
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def test_data_parallel_engines_share_what_each_has_cached(alone, model, tmp_path):
    with one_daemon(tmp_path, ONE) as daemon:
        served = Served(daemon, model, tmp_path / "log", "--data-parallel-size", "2")
        try:
            served.ready()
            for rank in range(2):
                served.ask(WARM["ids"], rank)
            first, other = served.ask(FIRST, 0), served.ask(FIRST, 1)
            assert (first["cached"], other["cached"]) == (0, 288)
            assert tokens_of([first, other]) == [alone[0]] * 2
            names = {client.name for client in daemon.snapshot().clients}
            assert [sum(name.endswith(f"_dp{rank}") for name in names) for rank in range(2)] == [
                1, 1,
            ]  # fmt: skip
            said = re.findall(r"kvd namespace (\S+) is of", served.log.read_text())
            assert len(said) == 2
            assert len(set(said)) == 1
            metrics = served.asked("GET", "/metrics")
            of_rank = dict(re.findall(r'kvd_hit_tokens_total\{.*engine="(\d)".*\} (\S+)', metrics))
            assert float(of_rank["1"]) == 288.0
            # Each of them begins an epoch: nothing of before is found by either.
            served.asked("POST", "/reset_prefix_cache?reset_external=true")
            assert [served.ask(TURN, rank)["cached"] for rank in (1, 0)] == [0, 384]
        finally:
            served.close()
        assert not daemon.snapshot().leases
