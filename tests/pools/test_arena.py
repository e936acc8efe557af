"""Arenas: reserved for real, sealed, and refused in words before the host runs out."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import resource

import pytest

from kvd.pools.arena import (
    HUGE_PAGE_BYTES,
    SPARE_BYTES,
    NotReserved,
    check_free,
    reserve,
    round_up,
)
from kvd.pools.host_memory import Free

MIB = 2**20


def test_reserve_takes_zeroed_pages_now_and_rounds_up_to_huge_pages() -> None:
    arena = reserve("kv", 3 * MIB + 1)

    stat = os.fstat(arena.fd)
    with mmap.mmap(arena.fd, arena.size_bytes) as memory:
        content = memory[:]
    arena.close()

    assert arena.size_bytes == stat.st_size == 2 * HUGE_PAGE_BYTES
    assert stat.st_blocks * 512 == arena.size_bytes
    assert content == bytes(arena.size_bytes)


@pytest.mark.parametrize("size_bytes", [0, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES])
def test_nobody_can_truncate_or_unseal_an_arena(size_bytes: int) -> None:
    """A holder of the descriptor that shrank it would make every other mapping fault."""
    arena = reserve("kv", HUGE_PAGE_BYTES)

    with pytest.raises(PermissionError):
        os.ftruncate(arena.fd, size_bytes if size_bytes != HUGE_PAGE_BYTES else 1)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)

    arena.close()


def test_the_descriptor_does_not_cross_exec_and_close_is_repeatable() -> None:
    arena = reserve("kv", 1)
    fd = arena.fd

    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    arena.close()
    arena.close()

    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_memory_outlives_its_descriptor_while_it_is_mapped() -> None:
    arena = reserve("kv", 1)
    with mmap.mmap(arena.fd, arena.size_bytes) as memory:
        arena.close()
        memory[0] = 7
        assert memory[0] == 7


def test_check_free_says_how_much_what_is_free_and_what_to_lower() -> None:
    free = Free(2**30, "memory.max of control group /sys/fs/cgroup/kvd")

    with pytest.raises(NotReserved) as refused:
        check_free({"kv": 900 * MIB, "swa": 100 * MIB + 1}, free)

    assert str(refused.value) == (
        "the pool needs 1,002 MiB (kv 900 MiB, swa 100 MiB), but only 1,024 MiB are free here "
        "(memory.max of control group /sys/fs/cgroup/kvd), of which 256 MiB are left to the rest "
        "of the host: lower pool.pages or pool.size to at most 768 MiB, or raise that limit"
    )


def test_check_free_says_nothing_when_it_just_fits() -> None:
    check_free({"kv": 10 * MIB}, Free(10 * MIB + SPARE_BYTES, "a limit"))


def test_reserve_refuses_what_is_not_there_before_taking_any() -> None:
    """The kernel would not refuse: it would kill somebody."""
    with pytest.raises(NotReserved, match=r"^the pool needs 8,796,093,022,208 MiB \(kv .*\), but"):
        reserve("kv", 2**63)


def test_reserve_teaches_when_the_kernel_refuses() -> None:
    """Nothing stays taken: the descriptor is closed too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, limits[1]))
    try:
        with pytest.raises(NotReserved) as refused:
            reserve("refused", HUGE_PAGE_BYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    words = (
        r"reserving 2 MiB for refused failed: File too large; .* free .*: lower pool.pages or .*"
    )
    assert re.fullmatch(words, str(refused.value))
    assert not [path for path in _open_files() if path.startswith("/memfd:kvd:refused")]


def test_round_up_leaves_whole_huge_pages_alone() -> None:
    assert [round_up(size) for size in (0, 1, 2 * MIB, 2 * MIB + 1)] == [
        0,
        2 * MIB,
        2 * MIB,
        4 * MIB,
    ]


def _open_files() -> list[str]:
    """What this process has open; other threads may open and close what they like meanwhile."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found
