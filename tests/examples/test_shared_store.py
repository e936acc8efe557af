"""``examples/shared-store`` runs as its README says, and says what that says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.harness.store import ABSENT, weed

HERE = Path(__file__).parents[2] / "examples" / "shared-store"


@pytest.mark.skipif(weed() is None, reason=ABSENT)
def test_the_second_node_finds_what_went_through_the_first(tmp_path) -> None:
    done = subprocess.run(
        [sys.executable, "demo.py", str(tmp_path)],
        cwd=HERE,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "node a: 0 of 512 tokens found, the rest computed"
    assert lines[3].startswith("node b: 512 of 512 tokens found in ")
    assert lines[4] == "bytes: equal"
