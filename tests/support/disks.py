"""File systems of a size, for what fills a disk."""

from __future__ import annotations

import contextlib
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextlib.contextmanager
def small_disk(place: Path, n_bytes: int) -> Iterator[Path]:
    """A file system of its own there, in memory; skips where this user may mount nothing."""
    place.mkdir(mode=0o700)
    size = f"size={n_bytes},mode=700"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", size, "tmpfs", place], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("this user may mount nothing here")
    try:
        yield place
    finally:
        unmount(place)


def unmount(place: Path) -> None:
    """The uppermost of what is mounted there goes, whoever has it open."""
    subprocess.run(["umount", "-l", place], check=True)
