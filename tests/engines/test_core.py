"""What every version of vLLM that the connector takes is held to, in a minute or two.

``tests/engines/versions.py`` runs these, and a few more, for each of them, and writes down what
came of it. Tokens are those of the same engine without kvd.
"""

from __future__ import annotations

import pytest

from tests.engines.environment import PYTHON
from tests.engines.forks import IDS, PATIENT, WARM, engines_at, handed_over, prompt
from tests.engines.test_vllm import POOL
from tests.support.daemons import one_daemon, two_daemons

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(600),
]

CACHED = 288
"""Whole blocks of ``IDS``."""

CHUNKS = {"max_num_batched_tokens": 128}


TURN = [*IDS[:200], *prompt(80, 1)]
TAKEN_BACK = [prompt(400, seed) for seed in range(5)]
CROWD = [prompt(250, seed) for seed in range(6)]
OTHER = prompt(200, 3)
LONGEST = 40


@pytest.fixture(scope="module")
def alone(forks, models):
    """By prompt, the tokens of the same engine without kvd."""
    prompts = [WARM["ids"], IDS, IDS[:100], TURN, *TAKEN_BACK, *CROWD, OTHER]
    asks = [{"ids": ids, "max_tokens": LONGEST} for ids in prompts]
    answers = forks.answers(models / "model", None, asks)
    found = {tuple(ids): answer["tokens"] for ids, answer in zip(prompts, answers, strict=True)}
    assert len({tuple(tokens) for tokens in found.values()}) == len(found)
    return found


@pytest.fixture
def run(forks, models, alone):
    """What an engine answers: tokens of that one alone, and nothing was a mistake."""

    def answers(daemon, asks, **how):
        found, log = forks.run(models / "model", daemon, asks, PATIENT, **how)
        assert isinstance(found, list), f"{found}\n{log[-3000:]}"
        assert "a bug in kvd's connector" not in log
        answers.log = log
        asked = [ask for ask in asks if "abort" not in ask]
        prompts = [ids for ask in asked for ids in (ask.get("ids", IDS), *ask.get("more", ()))]
        for ids, answer in zip(prompts, found, strict=True):
            assert answer["tokens"] == alone[tuple(ids)][: len(answer["tokens"])]
        return found

    return answers


def test_hit(run, tmp_path):
    """What one engine has computed and generated another one finds."""
    asks = [WARM, {}, {"ids": TURN}]
    with one_daemon(tmp_path, POOL) as daemon:
        first, again = run(daemon, asks), run(daemon, asks)
        few = run(daemon, [WARM, {"params": {"max_load_tokens": 100}}])
    assert [answer["cached"] for answer in again[1:]] == [CACHED, 256]
    assert first[1]["cached"] == 0
    assert few[1]["cached"] == 96


def test_handoff(forks, models, alone, tmp_path):
    """What another node has prefilled, in chunks: whole pages, and a last one that is not."""
    with (
        two_daemons(tmp_path, POOL) as pair,
        engines_at(forks, models / "model", (pair.prefill, CHUNKS), (pair.decode, {})) as (p, d),
    ):
        for number, ids in enumerate(CROWD, 1):
            answer = handed_over(p, d, ids)
            moved = pair.decode.snapshot().totals.received_bytes
            assert answer["tokens"] == alone[tuple(ids)][:8]
            assert (answer["cached"], moved) == (249, number * 8 * 8 * 32768)


def test_abort(run, tmp_path):
    """Requests that are taken back after so many steps: what they saved is theirs."""
    asks = [{"ids": ids, "abort": n} for n, ids in enumerate(TAKEN_BACK)]
    again = [WARM, *({"ids": ids} for ids in TAKEN_BACK)]
    with one_daemon(tmp_path, POOL) as daemon:
        run(daemon, [*asks, *again], **CHUNKS)
        found = run(daemon, again, **CHUNKS)
        assert [answer["cached"] for answer in found[1:]] == [384] * 5
        assert not daemon.snapshot().leases


def test_preemption(run, tmp_path):
    """A cache too small for what runs: requests come back from their pages."""
    asks = [WARM, {"ids": CROWD[0], "more": CROWD[1:], "max_tokens": LONGEST}]
    tight = CHUNKS | {"num_gpu_blocks_override": 34, "max_model_len": 512}
    with one_daemon(tmp_path, POOL) as daemon:
        for _ in range(2):
            run(daemon, asks, **tight)
        assert not daemon.snapshot().leases


@pytest.mark.parametrize("where", ["worker", "scheduler"])
def test_failed_load(run, tmp_path, where):
    """Blocks that nobody fills are computed, and nothing of them is found later.

    With a prefix that vLLM has itself, which other requests have too, and without.
    """
    asks = [WARM, {"ids": IDS[:100]}, {}, {}, {"ids": OTHER}, {"ids": OTHER}]
    with one_daemon(tmp_path, POOL) as daemon:
        run(daemon, asks)
        run(daemon, asks, breaks=where)
    assert "this load is broken" in run.log
