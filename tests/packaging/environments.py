"""Environments of their own, with the wheel of this checkout in them, and a daemon to talk to."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.daemons import Daemon

ROOT = Path(__file__).resolve().parents[2]
ENGINE = Path(__file__).parent / "engine.py"
INSTALL_S = 600
FAMILY = {"pool.layers": "2", "pool.heads": "2", "pool.head_dim": "8", "pool.pages": "16"}


class Environment:
    """A virtual environment; ``python`` makes it where it is not there yet."""

    def __init__(self, directory: Path, python: str = sys.executable) -> None:
        self.bin = directory / "bin"
        if not self.bin.is_dir():
            subprocess.run([python, "-m", "venv", directory], check=True, timeout=INSTALL_S)

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """A command of its ``bin``, nothing of this checkout on its path."""
        hidden = {"PYTHONPATH", "VIRTUAL_ENV", "PIP_CONSTRAINT"}
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=INSTALL_S,
            cwd=cwd or self.bin,
            env={name: value for name, value in os.environ.items() if name not in hidden},
        )

    def install(self, *requirements: str) -> None:
        """As a user would, without constraints."""
        done = self.run("python", "-m", "pip", "install", "-q", *requirements)
        assert done.returncode == 0, done.stderr

    def versions(self) -> dict[str, str]:
        """What is installed, but for what makes an environment."""
        done = self.run("python", "-m", "pip", "list", "--format", "json")
        found = {canonical(one["name"]): one["version"] for one in json.loads(done.stdout)}
        return {name: version for name, version in found.items() if name not in MAKERS}

    def check(self) -> str:
        """What ``pip check`` says."""
        return self.run("python", "-m", "pip", "check").stdout.strip()

    def engine(self, daemon: Daemon) -> dict[str, object]:
        """What ``engine.py`` says, run by this environment's Python."""
        done = self.run("python", "-I", str(ENGINE), daemon.client)
        assert done.returncode == 0, done.stderr
        said: dict[str, object] = json.loads(done.stdout)
        assert str(said["kvd"]).startswith(str(self.bin.parent)), "it is not the wheel's kvd"
        return said


def canonical(name: str) -> str:
    """A package's name as every tool means it: some write a dash where others write a line."""
    return re.sub(r"[-_.]+", "-", name).lower()


MAKERS = {"pip", "setuptools", "wheel"}

SOUND = "No broken requirements found."

ANSWER = {"before": 0, "after": 64, "prefix": 64, "kept": True, "shape": [16, 16, 2, 8]}
"""Of an engine that was served: its prompt is four whole pages."""


def said_right(said: dict[str, object]) -> bool:
    """Whether an engine was served."""
    return {name: said[name] for name in ANSWER} == ANSWER


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel without compiled code, by way of the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    env = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
    subprocess.run(
        [sys.executable, "-m", "build", "-o", out],
        check=True,
        cwd=ROOT,
        env=env,
        timeout=INSTALL_S,
        stdout=subprocess.DEVNULL,
    )
    (found,) = out.glob("kvd-*-none-any.whl")
    return found


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    """One of this checkout, with a cold cache."""
    with one_daemon(tmp_path, FAMILY) as own:
        yield own
