"""Copies by processors: host memory to host memory, by as many threads as given.

A thread copies up to 1,024 pieces in one call that has let go of the interpreter: taking it back
after each piece would wait for the engine's Python, up to 5 ms a time. The call is
``process_vm_readv`` or ``process_vm_writev`` of this very process: as fast as memcpy from pieces of
64 KiB on, and memory that is not there any more is an error instead of the end of the engine. Where
a sandbox forbids it, memmove does it, piece by piece.

Of the two sides the kernel looks up the pages of the far one, stretch by stretch, and each of 4 KiB
by itself where they are no huge ones. That is the pool in both directions: it is in huge pages, and
an engine's memory seldom is. With the engine's as the far one saves took 1.3 times as long. And the
pool's pieces follow each other where the engine's do not, as those of all layers in a page: they
are one stretch there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
from typing import TYPE_CHECKING, Final

import numpy as np

from kvd.client.mover.pending_copy import CopyMark, MemoryFault
from kvd.client.mover.pieces import PieceColumns, cut_pieces, merged_pieces

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


PIECES_PER_READ: Final = 1024
"""IOV_MAX of Linux."""

FEW_PIECES: Final = 32
"""Copied sooner than it is seen which of them are one."""

ALONE_BYTES: Final = 512 * 1024
"""So much is not shared among threads: waking them takes longer."""

_FORBIDDEN: Final = {errno.EPERM, errno.ENOSYS, errno.EACCES}

_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.argtypes = (
        ctypes.c_int,
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong),
        ctypes.c_ulong,
    )
    _call.restype = ctypes.c_ssize_t
_libc.memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memmove.restype = None


class RunningCopy:
    """Pieces that were begun, and who of the threads is not done with its part."""

    def __init__(self, n_parts: int, done: Callable[[], object]) -> None:
        self._left = n_parts
        self._done = done
        self._lock = threading.Lock()
        self.fault: MemoryFault | None = None

    @property
    def is_over(self) -> bool:
        """Whether no byte of it moves any more."""
        return not self._left

    def part_over(self, fault: MemoryFault | None) -> None:
        """One thread is done with its part."""
        with self._lock:
            self.fault = self.fault or fault
            self._left -= 1
            is_last = not self._left
        if is_last:
            self._done()


class HostLane:
    """Threads that copy; one thread: who begins a copy makes it."""

    device: Final = ""
    mark_kind: Final = CopyMark
    chunk_bytes: Final = 16 * 2**20
    """Begun at once: some milliseconds, after which a shorter order may come."""
    polls: Final = False
    """Whether nothing tells that a copy is over or a mark has come, so that one must look."""

    def __init__(self, n_threads: int, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._parts: queue.SimpleQueue[tuple[PieceColumns, bool, RunningCopy] | None] = (
            queue.SimpleQueue()
        )
        self.depth: Final = 2 if n_threads > 1 else 1
        """Threads that are done with one chunk have the next one without the mover's turn."""
        self._threads = [
            threading.Thread(target=self._serve, name=f"kvd-copy-{number}", daemon=True)
            for number in range(n_threads if n_threads > 1 else 0)
        ]
        for thread in self._threads:
            thread.start()

    def mark(self, stream: object = None) -> CopyMark:
        """What a processor has done is done."""
        return CopyMark.COME

    def has_come(self, mark: object) -> bool:
        """Whether what was before the mark is done."""
        return mark is None or mark is CopyMark.COME

    def enter(self) -> None:
        """The mover's thread begins here."""

    def begin(self, columns: PieceColumns, *, to_pages: bool) -> RunningCopy:
        """Copy these pieces, in any order."""
        if len(columns.sizes) > FEW_PIECES:
            columns = merged_pieces(columns)
        total = int(columns.sizes.sum())
        if not self._threads or total <= ALONE_BYTES:
            running = RunningCopy(1, _nothing)
            running.part_over(copy_pieces(columns, to_pages=to_pages))
            return running
        parts = cut_pieces(columns, -(-total // len(self._threads)))
        running = RunningCopy(len(parts), self._ring)
        for part in parts:
            self._parts.put((part, to_pages, running))
        return running

    def close(self) -> None:
        """End the threads, once they are done with what was begun."""
        for _ in self._threads:
            self._parts.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _serve(self) -> None:
        while (part := self._parts.get()) is not None:
            columns, to_pages, running = part
            running.part_over(copy_pieces(columns, to_pages=to_pages))


def copy_pieces(columns: PieceColumns, *, to_pages: bool) -> MemoryFault | None:
    """Copy piece by piece; why it ended in the middle, None where all of it is there."""
    call = _libc.process_vm_writev if to_pages else _libc.process_vm_readv
    for first in range(0, len(columns.sizes), PIECES_PER_READ):
        engine, pool, sizes = (column[first : first + PIECES_PER_READ] for column in columns)
        wanted = int(sizes.sum())
        near, far = _vectors(engine, sizes), _vectors(*_stretches(pool, sizes))
        copied = call(os.getpid(), near.ctypes.data, len(near), far.ctypes.data, len(far), 0)
        if copied != wanted:
            number = ctypes.get_errno() if copied < 0 else errno.EFAULT
            if copied < 0 and number in _FORBIDDEN:
                _move(PieceColumns(*(column[first:] for column in columns)), to_pages=to_pages)
                return None
            source, to = (engine, pool) if to_pages else (pool, engine)
            return MemoryFault(
                f"copying {wanted:,} bytes in {len(near)} pieces between {int(source[0]):#x} and "
                f"{int(to[0]):#x} ended after {max(0, copied):,}: {os.strerror(number)}"
            )
    return None


def _stretches(
    addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The same bytes in as few stretches as there are, where they are worth to be found."""
    if len(sizes) <= FEW_PIECES:
        return addresses, sizes
    is_first = np.concatenate(([True], addresses[1:] != addresses[:-1] + sizes[:-1]))
    first = np.flatnonzero(is_first)
    return addresses[first], np.add.reduceat(sizes, first)


def _vectors(addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The kernel's iovec: an address and a length each."""
    found = np.empty((len(sizes), 2), np.uint64)
    found[:, 0], found[:, 1] = addresses, sizes
    return found


def _move(columns: PieceColumns, *, to_pages: bool) -> None:
    move = _libc.memmove
    for engine, pool, size in zip(*(column.tolist() for column in columns), strict=True):
        if to_pages:
            move(pool, engine, size)
        else:
            move(engine, pool, size)


def _nothing() -> None:
    """Who begins it sees that it is over."""
