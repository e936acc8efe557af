"""``make demo-vllm`` as whoever has cloned the project would see it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engines.environment import PYTHON

DEMO = Path(__file__).parents[2] / "examples" / "vllm-pair" / "demo.py"

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(900),
]


@pytest.fixture
def started(tmp_path):
    """The demo, and afterwards a look at what it has left."""
    before = files()
    demo = subprocess.Popen(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "DEMO_OF": str(tmp_path)},
    )
    yield demo
    demo.kill()
    demo.wait()
    assert left(f"DEMO_OF={tmp_path}".encode()) == []
    assert unused(files() - before) == []


def files():
    """Where the demo has its own, and where vLLM has shared memory."""
    return {*Path("/tmp").glob("kvd-vllm-*"), *Path("/dev/shm").iterdir()}


def unused(found):
    """Those that no process has mapped: others may be at work on this host."""
    mapped = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            mapped |= {line.split()[4] for line in maps.read_text().splitlines()}
    own = [file for file in found if file.is_file() or file.name.startswith("kvd-vllm-")]
    return [file for file in own if str(file.stat().st_ino) not in mapped]


def left(mark):
    """Processes that the demo started, at any remove; titles may lie over an environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            environment, folder = (process / "environ").read_bytes(), (process / "cwd").readlink()
            if mark in environment or folder == DEMO.parent:
                found.append(process.name)
    return found


def test_it_shows_what_it_promises_and_leaves_nothing(started):
    said, _ = started.communicate(timeout=800)

    assert started.returncode == 0, said
    assert said.splitlines()[-1].startswith("OK: 280 tokens of 10 answers are those of one vLLM")
    assert said.count("curl -sN http://127.0.0.1:") == 10
    assert "the decode daemon is started again" in said
    assert "The new prefill engine took" in said


def test_ctrl_c_ends_all_of_it(started):
    for line in started.stdout:
        if "two vLLM start" in line:
            break
    time.sleep(5)  # their processes have processes of their own by then
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=60)

    assert started.returncode == 130, said
