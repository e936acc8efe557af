"""What a process has open, for tests that hold that nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

GONE_WITHIN_S = 5.0


class OpenFile(NamedTuple):
    """A descriptor of this process, and which file it is: another one may have its number later."""

    number: int
    device: int
    inode: int
    path: str


def open_files() -> set[OpenFile]:
    """All of this process, but the one that looks."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{name}")
            seen = os.stat(f"/proc/self/fd/{name}")
            found.add(OpenFile(int(name), seen.st_dev, seen.st_ino, path))
    return found


@contextlib.contextmanager
def none_left() -> Iterator[None]:
    """Nothing is open after it that was not before.

    What other tests have left in this process may close meanwhile, and threads of theirs may open
    some for a moment: those are no fault of what is looked at.

    Raises:
        AssertionError: some are; the message names them.
    """
    before = open_files()
    yield
    end_s = time.monotonic() + GONE_WITHIN_S
    while left := open_files() - before:
        assert time.monotonic() < end_s, f"left open: {sorted(left)}"
        time.sleep(0.01)
