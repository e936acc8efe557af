"""Which file system a directory lies on, and where memory is mounted as files.

Read from ``/proc`` of this process, so that what a mount namespace hides is not there.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

TMPFS: Final = "tmpfs"
HUGETLBFS: Final = "hugetlbfs"
DEFAULT_TMPFS: Final = Path("/dev/shm")

_ESCAPED: Final = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    """Where a file system is, and what it is; ``device`` is its number, like ``8:1``."""

    device: str
    point: str
    options: tuple[str, ...]
    kind: str


def kind_of(device: int, root: Path = Path("/")) -> str:
    """The type of the file system with this ``st_dev``, like ``tmpfs``; ``unknown`` if not seen.

    Args:
        device: of a stat result.
        root: where ``proc`` is; another directory in tests.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for mount in mounts(root):
        if mount.device == wanted:
            return mount.kind
    return "unknown"


def first_hugetlbfs(root: Path = Path("/")) -> Path | None:
    """Where the first hugetlbfs is mounted that may be written to; None if there is none."""
    for mount in mounts(root):
        if mount.kind == HUGETLBFS and "ro" not in mount.options:
            return Path(mount.point)
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


def mounts(root: Path = Path("/")) -> Iterator[Mount]:
    """As the kernel lists them: what is mounted later hides what was before.

    Raises:
        OSError: there is no such list.
    """
    listed = (root / "proc/self/mountinfo").read_text(errors="surrogateescape")
    for line in listed.splitlines():
        before, _, after = line.partition(" - ")
        _, _, device, _, point, options, *_ = before.split(" ")
        shown = _ESCAPED.sub(lambda code: chr(int(code[1], 8)), point)
        yield Mount(device, shown, tuple(options.split(",")), after.partition(" ")[0])
