"""Which file system a directory lies on, and where memory is mounted as files.

Read from ``/proc`` of this process, so that what a mount namespace hides is not there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

TMPFS: Final = "tmpfs"
HUGETLBFS: Final = "hugetlbfs"
DEFAULT_TMPFS: Final = Path("/dev/shm")

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


def kind_of(device: int, root: Path = Path("/")) -> str:
    """The type of the file system with this ``st_dev``, like ``tmpfs``; ``unknown`` if not seen.

    Args:
        device: of a stat result.
        root: where ``proc`` is; another directory in tests.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for fields, after in _rows(root):
        if fields[2] == wanted:
            return after[0]
    return "unknown"


def first_hugetlbfs(root: Path = Path("/")) -> Path | None:
    """Where the first hugetlbfs is mounted that may be written to; None if there is none."""
    for fields, after in _rows(root):
        if after[0] == HUGETLBFS and "ro" not in fields[5].split(","):
            return Path(_ESCAPED.sub(lambda code: chr(int(code[1], 8)), fields[4]))
    return None


def free_huge_bytes(page_bytes: int, root: Path = Path("/")) -> int:
    """Huge pages of one size that nobody has or was promised, in bytes."""
    pages = root / f"sys/kernel/mm/hugepages/hugepages-{page_bytes // 1024}kB"
    try:
        free = int((pages / "free_hugepages").read_text())
        promised = int((pages / "resv_hugepages").read_text())
    except FileNotFoundError:
        return 0
    return (free - promised) * page_bytes


def _rows(root: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Each mount: the fields before the dash of mountinfo, and those after it."""
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        yield before.split(" "), after.split(" ")
