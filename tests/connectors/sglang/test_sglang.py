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

MLA_PAGE_BYTES = 3 * 128 * 2 * 16
"""Layers, latents, bfloat16, tokens."""

pytestmark = pytest.mark.skipif(
    not PYTHON, reason="set KVD_SGLANG_PYTHON to a Python with SGLang 0.5.23 to run its classes"
)


@pytest.fixture(scope="module")
def sglang():
    """A process of SGLang's, which takes one scenario after the other."""
    process = subprocess.Popen(
        [PYTHON, "-m", "tests.connectors.sglang.engine"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process
        process.kill()


def run(sglang, scenario: str, daemon) -> None:
    """One of them; it may ask for another life of the daemon."""
    told(sglang, json.dumps([scenario, daemon.client, daemon.pid]))
    for line in sglang.stdout:
        if not line.startswith('"'):
            continue
        said = json.loads(line)
        if said in {"kill", "restart"}:
            daemon.kill()
        if said in {"start", "restart"}:
            daemon.start()
            daemon.wait_ready()
        if said not in {"kill", "start", "restart"}:
            assert said == "passed", said
            return
        told(sglang, "done")
    pytest.fail("SGLang's process has ended")


def told(sglang, line: str) -> None:
    """It reads one at a time."""
    sglang.stdin.write(f"{line}\n")
    sglang.stdin.flush()


SCENARIOS = (
    "same_hits_as_files",
    "mla_pages",
    "nothing_is_shared_with_unlike_ranks",
    "pages_behind_those_that_sglang_has",
    "beside_pools",
    "cleared",
    "weights_that_change",
    "refused",
    "injected_faults",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_sglang(sglang, scenario) -> None:
    page_bytes = MLA_PAGE_BYTES if scenario == "mla_pages" else PAGE_BYTES
    with daemon_for(page_bytes, pages=400) as daemon:
        run(sglang, scenario, daemon)
        nothing_is_held(daemon)


LINKED = (
    "linker_keeps_what_the_device_evicts",
    "linker_finds_the_end_of_a_prompt_whose_start_the_device_has",
    "linker_has_latents",
    "linker_shares_with_another_engine",
    "linker_holds_what_it_has_told",
    "linker_aborts_nobody_whose_pages_are_gone",
    "linker_cancels_and_resets",
    "linker_refuses_other_models_and_options",
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scenario", LINKED)
def test_linker(sglang, scenario) -> None:
    """SGLang's own tree, allocator and device pool, with kvd behind them."""
    page_bytes = MLA_PAGE_BYTES if scenario == "linker_has_latents" else PAGE_BYTES
    with daemon_for(page_bytes, pages=40) as daemon:
        run(sglang, scenario, daemon)
        nothing_is_held(daemon)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", ["before", "found", "queued", "saving", "ordered save"])
@pytest.mark.parametrize("kind", ["killed", "stopped", "restarted"])
def test_a_fault_of_the_daemon_and_a_linker(sglang, kind, step) -> None:
    """No request goes on with pages that did not come; and the daemon is used again."""
    with daemon_for(PAGE_BYTES, pages=400) as daemon:
        run(sglang, f"linker:{kind}:{step}", daemon)
        nothing_is_held(daemon)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("step", ["before", "loading", "ordered load", "saving", "ordered save"])
@pytest.mark.parametrize("kind", ["killed", "stopped", "restarted", "restarted, kept"])
def test_a_fault_of_the_daemon_costs_pages_and_no_wait(sglang, kind, step) -> None:
    """Kept is the memory of its pool; else what was stored is lost with the daemon."""
    kind, _, kept = kind.partition(", ")
    more = {"backing": "shm"} if kept else {}
    with daemon_for(PAGE_BYTES, pages=400, **more) as daemon:
        run(sglang, f"fault:{kind}:{step}", daemon)
        nothing_is_held(daemon)
