"""How much memory this process may still take: the host's, and its control group's.

A memfd has no size limit of its own: taking more than there is does not fail, it wakes the OOM
killer. So whoever reserves an arena asks here first.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator


class Free(msgspec.Struct, frozen=True):
    """Bytes that may still be taken, and which limit says so."""

    free_bytes: int
    limited_by: str


def free_memory(root: Path = Path("/")) -> Free:
    """The tightest of the host's available memory and every control group above this process.

    Args:
        root: where ``proc`` and ``sys`` are; another directory in tests.
    """
    limits = [Free(_available(root), "MemAvailable of this host"), *_group_limits(root)]
    return min(limits, key=lambda limit: limit.free_bytes)


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


def _group_limits(root: Path) -> Iterator[Free]:
    """Limit minus use of each group from ours up; cgroup v2 and v1, whichever is mounted."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, use = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            limit, use = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for group in _up_to(mount, path):
            found = _group_limit(group, limit, use)
            if found is not None:
                yield Free(found, f"{limit} of control group {group}")


def _up_to(mount: Path, path: str) -> list[Path]:
    """The group at ``path`` and those above it; only the mount where the path leads out of it."""
    parts = [] if ".." in Path(path).parts else [part for part in path.split("/") if part]
    return [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _group_limit(group: Path, limit: str, use: str) -> int | None:
    """Bytes left in one group; None where it has no limit or no such file.

    Pages of the file cache count as used but give way, so they are counted as free.
    """
    try:
        allowed = (group / limit).read_text().strip()
        used = int((group / use).read_text())
        stat = (group / "memory.stat").read_text()
    except FileNotFoundError:
        return None
    if allowed == "max":
        return None
    cached = 0
    for line in stat.splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "active_file"}:
            cached += int(value)
    return max(0, int(allowed) - used + cached)
