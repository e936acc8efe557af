"""What every measurement does at its end, however that comes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest


def daemons_in(directory: Path) -> list[str]:
    """Command lines of running daemons with sockets in there."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"serve" in words and any(str(directory).encode() in word for word in words):
            found.append(b" ".join(words).decode())
    return found


@pytest.fixture
def short_path():
    """For sockets, whose names the kernel bounds: that of a test among workers is too long."""
    with tempfile.TemporaryDirectory(prefix="kvd-") as name:
        yield Path(name)


def test_a_bench_stops_its_daemons_when_it_is_terminated(short_path):
    command = [sys.executable, "-m", "kvd", "bench", "footprint", "--starts", "1"]
    bench = subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(short_path)}, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 60
    while not list(short_path.glob("*/*/admin.sock")):
        assert time.monotonic() < deadline_s
        assert bench.poll() is None, bench.communicate()

    bench.send_signal(signal.SIGTERM)
    _, said = bench.communicate(timeout=60)

    assert (bench.returncode, said.endswith("Aborted!\n")) == (1, True), said
    assert daemons_in(short_path) == []
    assert list(short_path.iterdir()) == []
