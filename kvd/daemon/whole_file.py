"""A small file that is always whole: what the next daemon reads of this one."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_MODE: Final = 0o600


def write_whole(path: Path, said: bytes) -> None:
    """Put this in the place of a file; a crash of the host then leaves it there.

    Raises:
        OSError: it may not be there, and what was before is then; never a half of it.
    """
    fresh = path.with_name(f"{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        fresh.unlink()  # of a daemon that was killed while it wrote
    file = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)
    try:
        left = memoryview(said)
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)
    fresh.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
