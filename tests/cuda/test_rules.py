"""The double keeps the rules that a real device is held to, as CUDA 12 and as CUDA 13."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

RULES = Path(__file__).parents[1] / "gpu" / "test_rules.py"


@pytest.mark.parametrize("version", ["12080", "13000"])
def test_the_double_keeps_every_rule(double, version):
    environment = {**os.environ, **double.environment, "DOUBLE_VERSION": version}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(RULES)]

    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )

    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout
