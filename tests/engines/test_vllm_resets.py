"""vLLM's caches are reset for new weights, in chosen states of a request: it goes on with those."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.engines.environment import PYTHON
from tests.engines.test_vllm import POOL
from tests.support.daemons import one_daemon

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(300),
]

SCRIPT = Path(__file__).with_name("vllm_resets.py")


def outcomes(models, directory, **how):
    """By state, what became of a request whose engine was reset in it."""
    with one_daemon(directory, POOL) as daemon:
        done = subprocess.run(
            [PYTHON, str(SCRIPT), str(models / "model"), daemon.client, json.dumps(how)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def told(models, tmp_path_factory):
    return outcomes(models, tmp_path_factory.mktemp("reset"))


@pytest.fixture(scope="module")
def told_amid(models, tmp_path_factory):
    """The same of an engine whose batches overlap (asynchronous scheduling)."""
    return outcomes(models, tmp_path_factory.mktemp("amid"), overlaps=True)


@pytest.mark.parametrize("state", ["loading", "filled", "running"])
def test_a_reset_that_preempts_succeeds_and_nothing_of_former_weights_is_used(told, state):
    found = told[state]
    assert found["said"] is True
    assert found["tokens"] == found["computed"]
    assert found["held"] == 0


@pytest.mark.parametrize("state", ["loading", "filled"])
def test_so_does_one_of_batches_that_overlap(told_amid, state):
    found = told_amid[state]
    assert found["in_flight"] >= 0
    assert found["said"] is True
    assert found["tokens"] == found["computed"]
    assert found["held"] == 0


def test_amid_a_batch_that_runs_vllm_ends_it_in_an_error_and_nothing_was_reset(told_amid):
    """It keeps the blocks of what it preempts until that batch is over."""
    found = told_amid["running"]
    assert found["in_flight"] >= 1
    assert found["said"].startswith("Failed to reset KV cache even when all the running requests")
    assert found["held"] == 0


def test_the_weights_do_decide_the_tokens(told):
    """The negative control: KV of former ones would give others."""
    assert told["loading"]["computed"] != told["filled"]["computed"]
