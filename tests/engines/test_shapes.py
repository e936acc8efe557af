"""Requests that vLLM computes in other ways, and other connectors beside kvd: the same tokens.

Each is compared with vLLM alone, and what is to be found is found: by a second engine at the same
daemon, or at another node.
"""

from __future__ import annotations

import contextlib
import os
import subprocess

import pytest

from tests.engines.engine import TO_DECODE, VllmEngine
from tests.engines.environment import PYTHON
from tests.engines.forks import HERE, PATIENT, WARM, prompt, tokens_of
from tests.support.daemons import Daemon, free_port, one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

TOKEN = 4 * 2 * 32 * 4
"""Bytes of a token in a layer: K and V of 4 heads, 32 wide, of 4 bytes."""


def pool_of(layers=8, page_size=32, parts=1, ranks=1, pages=400):
    """Of a Llama with 8 layers: a rank has ``layers`` of them, and a part of their heads."""
    return {
        "pool.family": "raw",
        "pool.layers": str(layers),
        "pool.page_size": str(page_size),
        "pool.page_bytes": str(page_size * TOKEN // parts),
        "pool.pages": str(pages),
        "pool.tp_size": str(ranks),
    }


@contextlib.contextmanager
def engine_at(daemon, model, log, options=PATIENT, engine=None, environment=None, **how):
    """A vLLM in a process of its own."""
    told = {"kvd.endpoint": daemon.client, **options}
    engine = {"distributed_executor_backend": "uni", **(engine or {})}
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONPATH": path, **(environment or {})}
    made = VllmEngine(
        PYTHON, model, log, options=told, engine=engine, environment=os.environ | own, **how
    )
    try:
        made.ready()
        yield made
    finally:
        made.close()


TIGHT = {"num_gpu_blocks_override": 40, "max_model_len": 1024, "max_num_batched_tokens": 128}
"""Less than the prompts below need together: some are preempted, and come back."""

FIRST = prompt(300)
TURN = [*FIRST, *prompt(90)]
SEVERAL = [prompt(250, seed) for seed in range(6)]


@pytest.fixture(scope="module")
def alone(forks, models):
    """What one vLLM of one rank answers."""
    asks = [{"ids": FIRST}, {"ids": TURN}, {"ids": SEVERAL[0], "more": SEVERAL[1:]}]
    first, turn, *several = forks.answers(
        models / "model", None, [{**ask, "max_tokens": 24} for ask in asks]
    )
    return first["tokens"], turn["tokens"], tokens_of(several)


@contextlib.contextmanager
def nodes(directory, **pools):
    """Daemons by name, each a peer of all others."""
    found = {name: Daemon(name, directory, pool) for name, pool in pools.items()}
    try:
        for daemon in found.values():
            for other in found.values():
                if other is not daemon:
                    daemon.knows(other)
            daemon.start()
        for daemon in found.values():
            daemon.wait_ready()
            daemon.wait_for(lambda daemon=daemon: knows_all(daemon, found), "lacks a peer", 30)
        yield found
    finally:
        for daemon in found.values():
            daemon.stop()


def knows_all(daemon, every):
    heard = [peer for peer in daemon.snapshot().peers if peer.state == "up"]
    return len([peer for peer in heard if peer.agent == "loaded" or peer.layout != "same"]) == (
        len(every) - 1
    )


def test_a_second_turn_is_prefilled_with_what_another_node_has_decoded(forks, models, tmp_path):
    """An engine that prefills and decodes, and one that decodes: KV of an answer comes back."""
    page = 8 * 32 * TOKEN
    model = models / "model"

    def received(name):
        return found[name].snapshot().totals.received_bytes // page

    with (
        nodes(tmp_path, p=pool_of(), d=pool_of()) as found,
        engine_at(found["p"], model, tmp_path / "p.log") as p,
        engine_at(found["d"], model, tmp_path / "d.log") as d,
    ):
        for engine in (p, d):
            engine.ask(**WARM)
        told = p.ask(FIRST, 1, TO_DECODE)["params"]
        first = d.ask(FIRST, 120, told)
        assert (first["params"]["kvd"]["peer"], received("d")) == ("d", 10)
        turn = [*FIRST, *first["tokens"], *prompt(60)]
        # P has 288 tokens of it. What D has answered says where more is: 416, in 4 pages.
        pulled = p.ask(turn, 1, TO_DECODE | first["params"], reset=True)
        assert (pulled["cached"], received("p")) == (416, 4)
        # And D gets what it lacks: of 480 tokens those behind 416.
        second = d.ask(turn, 24, pulled["params"], reset=True)
        assert (second["cached"], received("d")) == (479, 10 + 2)
        # One engine that does both: nothing moves between nodes.
        told = p.ask(SEVERAL[0], 1, TO_DECODE)["params"]
        itself = p.ask(SEVERAL[0], 24, told, reset=True)
        assert (itself["cached"], received("p")) == (224, 4)
    asks = [{"ids": FIRST, "max_tokens": 120}, {"ids": turn, "max_tokens": 24}]
    asks.append({"ids": SEVERAL[0], "max_tokens": 24})
    assert tokens_of(forks.answers(model, None, asks)) == tokens_of([first, second, itself])


# ---- requests that are computed in other ways ----------------------------------------------------


@pytest.mark.parametrize("block_size", [32, 64, 128])
def test_sizes_of_blocks(forks, models, alone, tmp_path, block_size):
    asks = [WARM, {"ids": FIRST, "max_tokens": 24}, {"ids": TURN, "max_tokens": 24}]
    with one_daemon(tmp_path, pool_of(page_size=block_size)) as daemon:
        for n in range(2):
            _, first, turn = forks.answers(
                models / "model", daemon, asks, PATIENT, block_size=block_size
            )
            assert tokens_of([first, turn]) == [alone[0], alone[1]]
            whole = [n_tokens // block_size * block_size for n_tokens in (300, 390)]
            assert [first["cached"], turn["cached"]] == (whole if n else [0, whole[0]])


WAYS = {
    "a draft of what was said before": (
        {"ids": [*prompt(40), *prompt(40), *prompt(40), *prompt(40)], "max_tokens": 40},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4,
                                "prompt_lookup_max": 4, "prompt_lookup_min": 2}},
        159,
    ),
    "logprobs of the prompt": ({"ids": FIRST, "sampling": {"prompt_logprobs": 1}}, {}, 0),
    "no prefix of a cache": (
        {"ids": FIRST, "sampling": {"skip_reading_prefix_cache": True}}, {}, 0,
    ),
    "priorities": (
        {"ids": SEVERAL[0], "more": SEVERAL[1:], "max_tokens": 40, "priority": [5, 4, 3, 2, 1, 0]},
        TIGHT | {"scheduling_policy": "priority"},
        224,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WAYS)
def test_what_is_computed_in_another_way(forks, models, tmp_path, what):
    ask, engine, cached = WAYS[what]
    plain = {name: value for name, value in ask.items() if name not in {"priority", "sampling"}}
    alone = forks.answers(models / "model", None, [ask], **engine)
    with one_daemon(tmp_path, pool_of()) as daemon:
        # What the KV is of counts the longest prompt; how many blocks there are does not.
        like = {name: engine[name] for name in engine if name == "max_model_len"}
        forks.answers(models / "model", daemon, [WARM, plain], PATIENT, **like)
        found, log = forks.run(models / "model", daemon, [WARM, ask, WARM], PATIENT, **engine)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        mine = found[1:-1]
        assert tokens_of(mine) == tokens_of(alone)
        assert [one["of_prompt"] for one in mine] == [one["of_prompt"] for one in alone]
        assert {one["cached"] for one in mine} == {cached}
        assert bool(mine[-1]["preempted"]) == ("priority" in ask)
        assert "a bug in kvd's connector" not in log
        assert not daemon.snapshot().leases


def test_of_an_answer_that_was_drafted_what_was_accepted_is_cached(forks, models, tmp_path):
    ask, engine, _ = WAYS["a draft of what was said before"]
    (alone,) = forks.answers(models / "model", None, [ask])
    turn = {"ids": [*ask["ids"], *alone["tokens"], 5], "max_tokens": 24}
    (next_alone,) = forks.answers(models / "model", None, [turn])
    with one_daemon(tmp_path, pool_of()) as daemon:
        _, drafted = forks.answers(models / "model", daemon, [WARM, ask], PATIENT, **engine)
        assert drafted["tokens"] == alone["tokens"]
        _, found = forks.answers(models / "model", daemon, [WARM, turn], PATIENT)
    assert (found["cached"], found["tokens"]) == (192, next_alone["tokens"])


@pytest.mark.parametrize("draft", ["model", "shallow"])
def test_a_model_that_drafts(forks, models, tmp_path, draft):
    """Its layers have a part of each page: found, by an engine that drafts with the same one."""
    layers = 8 + (8 if draft == "model" else 4)
    how = {"method": "draft_model", "model": str(models / draft), "num_speculative_tokens": 3}
    drafts = {"speculative_config": how}
    asks = [{"ids": FIRST, "max_tokens": 24}, {"ids": TURN, "max_tokens": 24}]
    alone = tokens_of(forks.answers(models / "model", None, asks))
    with one_daemon(tmp_path, pool_of(layers)) as daemon:
        for n in range(2):
            found, log = forks.run(models / "model", daemon, [WARM, *asks], PATIENT, **drafts)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            assert tokens_of(found[1:]) == alone
            assert [answer["cached"] for answer in found[1:]] == [288 * n, 384 if n else 288]
            assert "a bug in kvd's connector" not in log
        # What is generated with drafts, and some of them taken back, is cached for a next turn.
        turn = {"ids": [*TURN, *alone[1], 5, 6, 7], "max_tokens": 24}
        (wanted,) = tokens_of(forks.answers(models / "model", None, [turn]))
        _, found = forks.answers(models / "model", daemon, [WARM, turn], PATIENT, **drafts)
        assert (found["tokens"], found["cached"]) == (wanted, 384)
        assert not daemon.snapshot().leases


def test_structured_output(forks, tmp_path):
    """What may be sampled is the same, whoever has computed the prompt."""
    model = tmp_path / "tiny"
    script = HERE.parents[1] / "examples" / "vllm-pair" / "model.py"
    subprocess.run([PYTHON, str(script), str(model)], check=True)
    pool = pool_of()  # it has the shape of the other one
    ids = [n % 1000 for n in FIRST]
    regex = {"ids": ids, "max_tokens": 24, "sampling": {"structured_outputs": {"regex": "[a-z]+"}}}
    asks = [WARM, regex, {"ids": ids, "max_tokens": 24}]
    how = {"skip_tokenizer_init": False}
    alone = forks.answers(model, None, asks, **how)
    assert alone[1]["tokens"] != alone[2]["tokens"]
    with one_daemon(tmp_path, pool) as daemon:
        for n in range(2):
            found = forks.answers(model, daemon, asks[: 2 + n], PATIENT, **how)
            assert tokens_of(found) == tokens_of(alone[: 2 + n])
            assert found[1]["cached"] == 288 * n


# ---- beside other connectors ---------------------------------------------------------------------

CACHE_ONLY = PATIENT | {"kvd.handoffs": False}
ORDERS = [0, 1]


def beside(other, at):
    """Both, in one order or the other."""
    return ["kvd", other] if at else [other, "kvd"]


def own(name, module="beside", **options):
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }


@pytest.mark.parametrize("at", ORDERS)
def test_blocks_that_another_connector_did_not_fill_are_cached_by_nobody(
    forks, models, tmp_path, at
):
    """It says so behind the step; vLLM has computed with them by then, and does so again."""
    ids = [7, *prompt(299)]
    asks = [WARM, {"ids": ids, "max_tokens": 24}]
    _, alone = forks.answers(models / "model", None, asks)
    both = beside(own("UnfilledConnector"), at)
    with one_daemon(tmp_path, pool_of()) as daemon:
        found, log = forks.run(models / "model", daemon, asks, CACHE_ONLY, both)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        assert "1 request(s) rescheduled" in log
        assert found[1]["tokens"] == alone["tokens"]
        _, again = forks.answers(models / "model", daemon, asks, CACHE_ONLY)
    assert (again["cached"], again["tokens"]) == (0, alone["tokens"])


@pytest.mark.parametrize("at", ORDERS)
def test_beside_a_connector_that_loads_within_a_step(forks, models, alone, tmp_path, at):
    """vLLM's example: it keeps prompts in files, and reads them before a step computes."""
    asks = [WARM, {"ids": FIRST, "max_tokens": 24}, {"ids": TURN, "max_tokens": 24}]
    (tmp_path / "files").mkdir()
    example = own(
        "ExampleConnector",
        "vllm.distributed.kv_transfer.kv_connector.v1.example_connector",
        shared_storage_path=str(tmp_path / "files"),
    )
    engine = {"disable_hybrid_kv_cache_manager": True}
    with one_daemon(tmp_path, pool_of()) as daemon:
        for n in range(2):
            how = {"options": CACHE_ONLY, "beside": beside(example, at), **engine}
            found, log = forks.run(models / "model", daemon, asks, **how)
            assert isinstance(found, list), f"{found}\n{log[-3000:]}"
            assert tokens_of(found[1:]) == [alone[0], alone[1]]
            assert found[1]["cached"] == (288 if n else 0)
        _, *found = forks.answers(models / "model", daemon, asks, PATIENT, **engine)
        assert tokens_of(found) == [alone[0], alone[1]]
        assert [answer["cached"] for answer in found] == [288, 384]


def has_nixl():
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nixl') is None)"
    return not subprocess.run([PYTHON, "-c", look], check=False).returncode


@pytest.mark.parametrize("at", ORDERS)
def test_beside_the_connector_of_nixl(forks, models, alone, tmp_path, at):
    if not has_nixl():
        pytest.skip("that environment has no nixl")

    def engine(name):
        side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        nixl = own("NixlConnector") | {"kv_buffer_device": "cpu"}
        return engine_at(
            found[name],
            models / "model",
            tmp_path / f"{name}.log",
            options=CACHE_ONLY,
            beside=beside(nixl, at),
            engine={"disable_log_stats": False},  # what each of them counts has its way out
            environment=side,
        )

    with nodes(tmp_path, p=pool_of(), d=pool_of()) as found, engine("p") as p, engine("d") as d:
        for one in (p, d):
            one.ask(**WARM)
        told = p.ask(FIRST, 1, TO_DECODE)["params"]
        assert told["remote_engine_id"]
        assert "kvd" not in told
        # What was cached where it was prefilled is said of it, not what NIXL has brought.
        first = d.ask(FIRST, 24, told)
        assert first["tokens"] == alone[0]
        assert "Transfer plan" in (tmp_path / "d.log").read_text()
        assert found["d"].snapshot().totals.received_bytes == 0
        # What NIXL has brought is cached, too: without vLLM's own cache it is found in kvd's.
        again = d.ask(FIRST, 24, reset=True)
        assert (again["tokens"], again["cached"]) == (alone[0], 288)
        # And a second turn, part of which lies here: whoever stands first loads what it has.
        told = p.ask(TURN, 1, TO_DECODE, reset=True)["params"]
        assert d.ask(TURN, 24, told, reset=True)["tokens"] == alone[1]
