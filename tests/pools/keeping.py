"""Pools that are kept: a small one, places for it, and what is looked at afterwards."""

from __future__ import annotations

import mmap
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvd.core.layout.spec import Component, Mha, PageOrder, PoolSpec
from kvd.pools.location import Backing, PoolLocation
from kvd.pools.memory import DaemonMemory, open_memory

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvd.pools.arena import Arena

MIB = 2**20
JOURNAL_BYTES = 5000

KV = Component("kv", 2, Mha(2, 8, 4, "bfloat16"), 4)


def spec(pages: int = 10, saved: int = 0) -> PoolSpec:
    return PoolSpec("main", "mha", PageOrder.PAGE_FIRST, (KV,), (pages,), saved_pages=(saved,))


LARGER = 6000
"""Pages whose arena has more than the 2 MiB that every small one is rounded up to."""


@contextmanager
def shm_directory() -> Iterator[Path]:
    """A directory of the test's own on the tmpfs of this host."""
    path = Path(tempfile.mkdtemp(prefix="kvd-test-", dir="/dev/shm"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def at(directory: Path) -> PoolLocation:
    return PoolLocation(Backing.SHM, str(directory), "/run/kvd")


STORE = PoolLocation(Backing.FDSTORE, None, "/run/kvd")
ANON = PoolLocation(Backing.ANON, None, "/run/kvd")


@contextmanager
def opened(
    place: PoolLocation, *, pages: int = 10, saved: int = 0, given: Mapping[str, int] | None = None
) -> Iterator[DaemonMemory]:
    """The memory, closed afterwards."""
    memory = open_memory(spec(pages, saved), place, JOURNAL_BYTES, given)
    try:
        yield memory
    finally:
        memory.close()


def written(arena: Arena, mark: bytes) -> None:
    """Put ``mark`` at the beginning and the end."""
    with mmap.mmap(arena.fd, arena.size_bytes) as seen:
        seen[: len(mark)] = mark
        seen[-len(mark) :] = mark


def content(arena: Arena, n: int) -> tuple[bytes, bytes]:
    """The first and the last ``n`` bytes."""
    with mmap.mmap(arena.fd, arena.size_bytes) as seen:
        return seen[:n], seen[-n:]
