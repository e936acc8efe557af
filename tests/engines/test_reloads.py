"""Weights of a model that are changed while its engine runs: none of it is found under its name."""

from __future__ import annotations

import pytest

from tests.engines.environment import PYTHON
from tests.engines.forks import PATIENT, WARM, prompt
from tests.engines.test_unlike import pool_of
from tests.support.daemons import one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]

WHOLE = 288
"""Tokens of whole blocks of a prompt of 300."""


@pytest.mark.parametrize("method", ["reload_weights", "apply_model", "a function"])
def test_weights_that_are_changed_by_a_call(forks, models, tmp_path, method):
    how = {"weights_path": str(models / "other")} if method == "reload_weights" else {}
    first, second, third = (prompt(300, seed) for seed in (1, 2, 3))
    asks = [
        WARM,
        {"ids": first},
        {"ids": second, "call": [method, how]},
        {"ids": second, "drop": True},
        {"ids": third, "reset": True},
        {"ids": third, "drop": True},
    ]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found, log = forks.run(models / "model", daemon, asks, PATIENT)
        _, _, changed, again, reset, anew = found
        assert again["cached"] == 0, "before a reset nothing is cached"
        assert (reset["cached"], anew["cached"]) == (0, WHOLE)
        assert reset["tokens"] == anew["tokens"]
        assert "is cached by nobody until its caches are reset" in log
        assert "is for itself alone" in log
        theirs = [WARM, {"ids": first}, {"ids": second}, {"ids": third}]
        other = forks.answers(models / "model", daemon, theirs, PATIENT)[1:]
    alone = forks.answers(models / "model", None, theirs)[1:]
    assert [one["tokens"] for one in other] == [one["tokens"] for one in alone]
    # The reset ended what was cached before; what came behind it has another name.
    assert [one["cached"] for one in other] == [0, 0, 0]
    assert changed["tokens"] != alone[1]["tokens"], "the weights do decide the tokens"


def test_weights_that_are_changed_behind_a_reset_and_before_anything_is_computed(
    forks, models, tmp_path
):
    """As where an engine is paused, its caches are reset, and it goes on with other weights."""
    ids = prompt(300, 4)
    call = ["reload_weights", {"weights_path": str(models / "other")}]
    asks = [WARM, {"ids": ids}, {"ids": ids, "reset": True, "call": call}]
    named = PATIENT | {"kvd.weights": "of today"}
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        asks.append({"ids": ids, "drop": True})
        found, log = forks.run(models / "model", daemon, asks, named)
    _, former, changed, again = found
    assert changed["tokens"] == again["tokens"] != former["tokens"]
    assert (changed["cached"], again["cached"]) == (0, WHOLE)
    assert "is cached by nobody" not in log


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_has_slept(forks, models, tmp_path, level):
    """At level 2 it wakes without its weights: what it computes before it has others is nobody's.

    On a CPU vLLM frees nothing, so here only the call is that of such an engine.
    """
    ids = prompt(300, 7)
    asks = [WARM, {"ids": ids, "call": ["sleep", {"level": level}]}, {"ids": ids, "drop": True}]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found, log = forks.run(models / "model", daemon, asks, PATIENT)
        (_, other) = forks.answers(models / "model", daemon, [WARM, {"ids": ids}], PATIENT)
    wanted = WHOLE if level == 1 else 0
    assert (found[-1]["cached"], other["cached"]) == (wanted, wanted)
    assert ("given away by sleep at level 2" in log) == (level == 2)


def test_a_reset_that_vllm_does_not_do_itself(forks, models, tmp_path):
    """Requests have blocks of its cache: it says no, and goes on finding KV of before in it."""
    ids, running = prompt(300, 5), prompt(300, 6)
    asks = [
        WARM,
        {"ids": ids},
        {"amid": True, "ids": running, "steps": 3, "max_tokens": 20},
        {"ids": ids},
        {"ids": ids, "drop": True},
        {"ids": ids, "drop": True},
    ]
    with one_daemon(tmp_path, pool_of(4)) as daemon:
        found, log = forks.run(models / "model", daemon, asks, PATIENT)
    _, _, reset, own, none, mine = found
    assert reset["said"] is False
    assert own["cached"] == WHOLE, "this is vLLM's own, of before the reset"
    assert none["cached"] == 0, "and was cached by nobody"
    assert mine["cached"] == WHOLE, "behind its own reset it is used again"
    assert "vLLM's own was not" in log
