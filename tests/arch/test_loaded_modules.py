"""What is really loaded, seen from inside a fresh interpreter: the static rules cannot lie."""

from __future__ import annotations

import importlib.util
import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "textual", "transformers")
WATCH = """
import sys
try:
    {doing}
except SystemExit:
    pass
print([name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""
HELP = "import kvd.cli; sys.argv = ['kvd', '--help']; kvd.cli.main()"
HELP_LIMIT_S = 0.25
ATTEMPTS = 5


def loaded(doing: str, *heavy: str) -> str:
    """Which of ``heavy`` a fresh interpreter has loaded after ``doing``."""
    script = WATCH.format(doing=doing, heavy=heavy)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_importing_the_client_loads_nothing_heavy():
    device = ("kvd.device", "kvd.client.mover.device_lane")
    assert loaded("import kvd.client", *HEAVY, *device) == "[]"


BLOCKS = """
from tests.support.copies import WordsDaemon, raw_pool
import numpy as np
daemon = WordsDaemon(raw_pool())
layers = {n: np.ones((20, 4096), np.uint8) for n in range(3)}
blocks = daemon.worker.blocks(layers, block_size=16)
blocks.begin_save(daemon.key(), {"kv": [1]}, pages={"kv": [1]}).result(5)
daemon.close()
maps = open("/proc/self/maps").read()
import sys
print([name for name in sys.modules if name.startswith("kvd.device") or name == "torch"],
      "libcuda" in maps, [name for name in sys.modules if "device_lane" in name])
"""


def test_blocks_in_host_memory_load_nothing_of_cuda():
    done = subprocess.run(
        [sys.executable, "-c", BLOCKS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[] False []"


def test_kvd_help_loads_nothing_heavy():
    assert loaded(HELP, *HEAVY, "numpy", "zmq", "asyncio", "rich") == "[]"


@pytest.mark.parametrize(
    "module", ["kvd.daemon.app", "kvd.transfer.process", "kvd.core", "kvd.cli.look"]
)
def test_the_daemon_and_the_verbs_load_neither_torch_nor_nixl(module):
    if importlib.util.find_spec(module) is None:
        pytest.fail(f"{module} does not exist; name here what the daemon is started by")
    assert loaded(f"import {module}", *HEAVY) == "[]"


def test_the_daemon_does_not_load_what_its_log_does_not_use():
    assert loaded("import kvd.daemon.app", "rich", "pygments") == "[]"


def test_the_console_starts_without_arrays_engines_and_configuration():
    """It has a second until its first frame, and Textual takes half of it."""
    unused = ("numpy", "kvd.client", "kvd.core", "kvd.config", "torch", "transformers")
    assert loaded("import tui.cli, tui.app, tui.link", *unused) == "[]"


def test_kvd_help_answers_at_once():
    """In processor time, the best of a few runs: a busy machine only ever adds."""
    best_s = min(_help_cpu_s() for _ in range(ATTEMPTS))
    assert best_s < HELP_LIMIT_S, (
        f"kvd --help took {best_s:.2f} s of a core: find what it loads with "
        "python -X importtime -m kvd --help, and import that inside the verb that needs it"
    )


def _help_cpu_s() -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "kvd", "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
