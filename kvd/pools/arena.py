"""One piece of host memory that other processes map, reserved for real: a sealed memfd, or a file.

What lives here: making, sealing and closing a memfd. What must not: what lies in it (``geometry``),
who maps it (the transfer process and engines do; the daemon itself never maps pages), files with a
name (``file_memory``).

A memfd has no name, so nothing leaks when everybody has died; its seals refuse truncation, so no
holder of the descriptor can make another's access fault. ``posix_fallocate`` gives it its pages
now: a plain ``ftruncate`` of 10 TiB succeeds too, and the process dies later, under load.

Invariant: the size is a multiple of 2 MiB and never changes; all bytes are zero at first.
"""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING, Final

from kvd.pools.host_memory import Free, free_memory

if TYPE_CHECKING:
    from collections.abc import Callable

HUGE_PAGE_BYTES: Final = 2 * 1024 * 1024
"""Arenas are multiples of it and mapped at multiples of it, so that they can be collapsed."""

SPARE_BYTES: Final = 256 * 1024 * 1024
"""Left to everything else on the host when the check before reserving says yes."""

_STEP_BYTES: Final = 256 * 1024 * 1024
"""Reserved per system call: a signal is answered between two, and none undoes much."""

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What every memfd of an arena has: nobody can change its size, or add a seal against writing."""


class NotReserved(Exception):
    """There is not enough memory for an arena; the message says how much, and what to lower."""


class Arena:
    """``size_bytes`` of reserved host memory behind ``fd``.

    The descriptor is close-on-exec: passing it on (SCM_RIGHTS, ``pass_fds``) is deliberate.
    """

    def __init__(self, name: str, *, fd: int, size_bytes: int) -> None:
        """Take over ``fd``; use ``reserve`` to make a new one."""
        self.name = name
        self.fd = fd
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Drop our descriptor. The memory lives on as long as anybody maps it; repeatable."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def round_up(size_bytes: int) -> int:
    """``size_bytes`` up to whole huge pages."""
    return -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def check_free(wanted: dict[str, int], free: Free | None = None) -> None:
    """Refuse before anything is taken when the arenas together cannot fit.

    Args:
        wanted: bytes by arena name.
        free: what there is; measured now when left out.

    Raises:
        NotReserved: they do not fit; nothing was taken.
    """
    free = free_memory() if free is None else free
    total = sum(round_up(size) for size in wanted.values())
    if total + SPARE_BYTES <= free.free_bytes:
        return
    each = ", ".join(f"{name} {mib(size)}" for name, size in wanted.items())
    raise NotReserved(
        f"the pool needs {mib(total)} ({each}), but only {mib(free.free_bytes)} are free here "
        f"({free.limited_by}), of which {mib(SPARE_BYTES)} are left to the rest of the host: "
        f"lower pool.pages or pool.size to at most {mib(free.free_bytes - SPARE_BYTES)}, "
        "or raise that limit"
    )


def _nobody_waits(_size_bytes: int) -> None:
    """Who reserves little need not be told how far it is."""


def reserve(name: str, size_bytes: int, advance: Callable[[int], None] = _nobody_waits) -> Arena:
    """Make an arena of at least ``size_bytes``, rounded up to whole huge pages.

    Takes about a second per GiB: every page is allocated and zeroed here and now. ``advance`` is
    called now and then, with the bytes since the last time.

    Raises:
        NotReserved: it would not fit, or the kernel refused; nothing stays taken.
    """
    size = round_up(size_bytes)
    check_free({name: size})
    fd = os.memfd_create(f"kvd:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        fill(fd, size, advance)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError as exc:
        os.close(fd)
        free = free_memory()
        raise NotReserved(
            f"reserving {mib(size)} for {name} failed: {exc.strerror}; {mib(free.free_bytes)} "
            f"are free here ({free.limited_by}): lower pool.pages or pool.size"
        ) from exc
    return Arena(name, fd=fd, size_bytes=size)


def fill(fd: int, size_bytes: int, advance: Callable[[int], None] = _nobody_waits) -> None:
    """Give an empty file ``size_bytes`` of zeroed pages, and say each step to ``advance``.

    Raises:
        OSError: there are not so many.
    """
    for start in range(0, size_bytes, _STEP_BYTES):
        step = min(_STEP_BYTES, size_bytes - start)
        os.posix_fallocate(fd, start, step)
        advance(step)


def mib(size_bytes: int) -> str:
    """A size as it is said in messages."""
    return f"{size_bytes / 2**20:,.0f} MiB"
