"""Host regions mapped into the transfer process, the end of its map, and their huge pages.

A region is mapped shared at an address that is a multiple of 2 MiB, because a huge page of a file
can be mapped huge only there; a file of larger pages, at a multiple of those. Collapsing copies
each 2 MiB of small pages into one huge page, in place and safe beside readers and writers; it
doubles the bandwidth of copies on one host. What is huge already is only looked at: that takes 8 ms
per GiB, where making it takes seconds.

Regions are never unmapped before the process ends: peers hold their addresses.

A process that copies into another one (``process_vm_writev``, which UCX uses on one host) holds
the other's memory map while the call lasts. So a transfer process can be dead and reaped while a
peer still writes through its map, into pages that the daemon would like to use again. The witness
is a file that the transfer process maps writable and nobody else maps. Linux refuses to seal a file
against writing while a writable mapping of it exists, so a seal that succeeds proves that the map
is gone, and with it every such copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import threading
import time
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.transfer.metadata import HOST, RegionNote, extent_bytes
from kvd.transfer.orders import Collapsed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.transfer.metadata import MemorySite
    from kvd.transfer.orders import RegionPlan

HUGE_BYTES: Final = 2 * 2**20
PART_BYTES: Final = 256 * 2**20
"""Of a region that is registered at a time: a device waits for one some 10 ms."""

_PROT_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
_FAILED: Final = ctypes.c_void_p(-1).value
_BUSY: Final = frozenset({errno.EAGAIN, errno.EBUSY, errno.ENOMEM})
_GIVE_UP_AFTER: Final = 16
_NICENESS: Final = 15
_WITNESS_BYTES: Final = 4096

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class RegionUnusable(Exception):
    """A region cannot be mapped; the message says which and why."""


def map_region(plan: RegionPlan) -> RegionNote:
    """Map a region for the life of the process.

    Raises:
        RegionUnusable: its file is shorter than its pages, or the kernel refuses.
    """
    shape = plan.geometry
    needed = extent_bytes(shape.pages, shape.rows)
    file = os.fstat(plan.fd)
    there = file.st_size
    if needed > there or not needed:
        raise RegionUnusable(
            f"region {plan.name!r} has {shape.pages} pages ending at byte {needed}, "
            f"its file has {there} bytes"
        )
    unit = max(HUGE_BYTES, file.st_blksize)
    # Reserved wider than it is, for an aligned address within; mapped over that place, so that
    # nothing else can have come between.
    room = _map(0, there + unit, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    address = -(-room // unit) * unit
    _map(address, there, mmap.MAP_SHARED | _MAP_FIXED, plan.fd)
    # Refused where the kernel has none: then pages stay small, which is slower and no error.
    _libc.madvise(address, there, _MADV_HUGEPAGE)
    return noted(plan, address, there)


def noted(
    plan: RegionPlan, address: int, region_bytes: int, place: MemorySite = HOST
) -> RegionNote:
    """A region that lies at ``address``, as peers are told of it."""
    shape = plan.geometry
    return RegionNote(
        name=plan.name,
        address=address,
        region_bytes=region_bytes,
        pages=shape.pages,
        page_bytes=shape.page_bytes,
        rows=shape.rows,
        page_tokens=shape.page_tokens,
        strips=shape.strips,
        layers=shape.layers,
        heads=shape.heads,
        place=place,
    )


def map_scratch(size: int, *, in_huge_pages: bool = False) -> int:
    """The address of fresh private memory, kept for the life of the process; none is taken yet.

    ``in_huge_pages``: 2 MiB of it are taken with the first byte of them, where the kernel has them.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if not in_huge_pages:
        return _map(0, size, flags, -1)
    # What is too much at either end is address space, and no memory.
    address = -(-_map(0, size + HUGE_BYTES, flags, -1) // HUGE_BYTES) * HUGE_BYTES
    _libc.madvise(address, size, _MADV_HUGEPAGE)
    return address


def _map(address: int, size: int, flags: int, descriptor: int) -> int:
    """One mmap call; a reservation (anonymous at no address) gets no memory until it is touched."""
    mapped: int | None = _libc.mmap(
        address, size, _PROT_READ_WRITE, flags | _MAP_NORESERVE, descriptor, 0
    )
    if mapped is None or mapped == _FAILED:
        code = ctypes.get_errno()
        raise RegionUnusable(f"mapping {size} bytes: {os.strerror(code)}")
    return mapped


# ---- proof that a map is gone --------------------------------------------------------------------


def create_witness() -> int:
    """A new witness, as a file descriptor for the transfer process to inherit."""
    descriptor = os.memfd_create("kvd-witness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, _WITNESS_BYTES)
    return descriptor


def keep_map(descriptor: int) -> None:
    """Map a witness, or a lock file, until this process's memory map goes.

    A mapping keeps the open file alive, and a lock that was taken through it: so whoever gets the
    lock next has the same proof. It is never touched, so the file may be empty.
    """
    _map(0, _WITNESS_BYTES, mmap.MAP_SHARED, descriptor)


def is_map_gone(descriptor: int) -> bool:
    """Whether no memory map holds the witness any more; stays true once it was."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    except OSError as exc:
        # A writable mapping exists. Any other refusal would prove nothing, and must not look like
        # waiting.
        if exc.errno == errno.EBUSY:
            return False
        raise
    return True


# ---- huge pages ----------------------------------------------------------------------------------


class Upkeep(NamedTuple):
    """What is done to a region in the background: huge pages, and then registered, or one of it."""

    region: RegionNote
    in_huge_pages: bool
    register: Callable[[int, int], None] | None = None
    """Called with each part of it, where that begins and its bytes, once its pages are as they
    stay: memory that is registered is pinned, and no page of it can be made huge any more."""


class Collapser:
    """Works through regions at the lowest priority, huge page by huge page, giving way to posts."""

    def __init__(
        self,
        regions: list[Upkeep],
        *,
        is_busy: Callable[[], bool],
        on_over: Callable[[Collapsed], None],
    ) -> None:
        self._regions = regions
        self._is_busy = is_busy
        self._on_over = on_over

    def start(self) -> None:
        """Work through the regions on a thread of its own and report each collapsed one."""
        threading.Thread(target=self._run, name="collapse", daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        for region, in_huge_pages, register in self._regions:
            pages = _HugePages(region, self._is_busy)
            for low in range(0, region.region_bytes, PART_BYTES):
                size = min(PART_BYTES, region.region_bytes - low)
                if in_huge_pages:
                    pages.collapse(region.address + low, size)
                if register is not None:
                    register(region.address + low, size)
            if in_huge_pages:
                self._on_over(pages.report())


class _HugePages:
    """What became of the pages of one region."""

    def __init__(self, region: RegionNote, is_busy: Callable[[], bool]) -> None:
        self._region = region
        self._is_busy = is_busy
        self._done, self._failed, self._last = 0, 0, 0
        self._is_given_up = False

    def collapse(self, begin: int, size: int) -> None:
        """Make huge pages of this part."""
        for address in range(begin, begin + size // HUGE_BYTES * HUGE_BYTES, HUGE_BYTES):
            if self._is_given_up:
                return
            # A page that is being moved holds up whoever touches it.
            while self._is_busy():
                time.sleep(0.02)
            code = _collapse_one(address)
            if not code:
                self._done += HUGE_BYTES
                continue
            self._failed, self._last = self._failed + 1, code
            # A kernel that cannot do it would refuse every page alike, and there may be many.
            is_hopeless = not self._done and self._failed >= _GIVE_UP_AFTER
            self._is_given_up = code not in _BUSY or is_hopeless

    def report(self) -> Collapsed:
        """How much is huge now, and why not all of it."""
        whole = self._done == self._region.region_bytes
        last = os.strerror(self._last) if self._last else "its size is no multiple of 2 MiB"
        return Collapsed(self._region.name, self._done, "" if whole else last)


def _collapse_one(address: int) -> int:
    """Make one huge page of 2 MiB; the error number, 0 for done.

    Reading a byte first makes the page table the kernel wants to see. A page that a copy holds at
    the moment cannot move, so there is a second attempt.
    """
    code = 0
    for _attempt in range(2):
        _ = ctypes.c_ubyte.from_address(address).value
        if not _libc.madvise(address, HUGE_BYTES, _MADV_COLLAPSE):
            return 0
        code = ctypes.get_errno()
        if code not in _BUSY:
            return code
        time.sleep(0.005)
    return code
