"""``python -m tests.gpu.vllm`` with vLLM for the CPU: its engines, its checks, its file."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from tests.engines.environment import PYTHON
from tests.gpu.results import GpuRun
from tests.gpu.vllm import PARTS

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="KVD_VLLM_PYTHON names no environment with vLLM"),
    pytest.mark.timeout(3600),  # ten engines one after the other: a quarter of an hour, or more
]


def test_all_of_it_is_rehearsed_and_no_figure_is_written(tmp_path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "tests.gpu.vllm", "--rehearse", "--json", str(file)]

    done = subprocess.run(
        [*command, "--python", PYTHON], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    found = msgspec.json.decode(file.read_bytes(), type=GpuRun)
    assert (found.name, found.is_rehearsal, found.found.goals) == ("gpu_vllm", True, ())
    assert list(found.parts) == [*PARTS]
    cells = [cell for table in found.found.tables for row in table.rows for cell in row.values()]
    assert not [cell for cell in cells if isinstance(cell, float)]
    assert "tokens of two engines" in [table.title for table in found.found.tables]
