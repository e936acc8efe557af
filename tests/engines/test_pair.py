"""``make demo-vllm`` as whoever has cloned the project would see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    """The demo; what it leaves behind is found by the folder that it was given."""
    demo = subprocess.Popen(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "DEMO_OF": str(tmp_path)},
    )
    before = set(os.listdir("/dev/shm"))
    yield demo
    demo.kill()
    demo.wait()
    assert set(os.listdir("/dev/shm")) - before == set()


def left(tmp_path):
    """Processes that the demo started, at any remove; titles may lie over an environment."""
    mark, found = f"DEMO_OF={tmp_path}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment, folder = (process / "environ").read_bytes(), (process / "cwd").readlink()
            if mark in environment or folder == DEMO.parent:
                found.append(process.name)
        except OSError:  # it has ended
            continue
    return found


def test_it_shows_what_it_promises_and_leaves_nothing(started, tmp_path):
    said, _ = started.communicate(timeout=800)

    assert started.returncode == 0, said
    assert said.splitlines()[-1].startswith("OK: 280 tokens of 10 answers are those of one vLLM")
    assert said.count("curl -sN http://127.0.0.1:") == 10
    assert "the decode daemon is started again" in said
    assert "The new prefill engine took" in said
    assert left(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_all_of_it(started, tmp_path):
    for line in started.stdout:
        if "two vLLM start" in line:
            break
    started.send_signal(signal.SIGINT)
    said, _ = started.communicate(timeout=60)

    assert started.returncode == 130, said
    assert left(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
