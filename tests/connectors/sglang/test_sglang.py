"""SGLang's own classes over real daemons: its host pools, storage threads and file backend.

They are run by the Python that ``KVD_SGLANG_PYTHON`` names, where SGLang is installed; kernels that
only a GPU has are empty modules there (``absent``). Without it everything here is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.connectors.sglang.world import daemon_for, nothing_is_held

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("KVD_SGLANG_PYTHON", "")

PAGE_BYTES = 3 * 2 * 2 * 32 * 2 * 16
"""Layers, K and V, heads, their size, bfloat16, tokens: as ``engine`` has it."""

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="set KVD_SGLANG_PYTHON to a Python with SGLang 0.5.23 to run its classes"
)


def run(scenario: str, daemon) -> None:
    """One scenario in a process of SGLang's; it may ask for another life of the daemon."""
    command = [PYTHON, "-m", "tests.connectors.sglang.engine", scenario, daemon.client]
    process = subprocess.Popen(
        [*command, str(daemon.pid)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = ""
    with process:
        for line in process.stdout:
            said = json.loads(line) if line.startswith('"') else said
            if said in {"kill", "restart"}:
                daemon.kill()
            if said in {"start", "restart"}:
                daemon.start()
                daemon.wait_ready()
            if said in {"kill", "restart", "start"}:
                process.stdin.write("done\n")
                process.stdin.flush()
        errors = process.stderr.read()
    assert said == "passed", errors[-4000:]


SCENARIOS = (
    "same_hits_as_files",
    "mla_pages",
    "nothing_is_shared_with_unlike_ranks",
    "pages_behind_those_that_sglang_has",
    "beside_pools",
    "cleared",
    "refused",
    "injected_faults",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sglang(scenario) -> None:
    page_bytes = 3 * 128 * 2 * 16 if scenario == "mla_pages" else PAGE_BYTES
    with daemon_for(page_bytes, pages=400) as daemon:
        run(scenario, daemon)
        nothing_is_held(daemon)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["killed", "stopped", "restarted"])
@pytest.mark.parametrize(
    "step", ["before", "loading", "ordered load", "saving", "ordered save"]
)
def test_a_fault_of_the_daemon_costs_pages_and_no_wait(kind, step) -> None:
    with daemon_for(PAGE_BYTES, pages=400) as daemon:
        run(f"fault:{kind}:{step}", daemon)
        nothing_is_held(daemon)
