"""Copies by processors: host memory to host memory, by as many threads as given.

A thread copies up to 1,024 pieces in one call that has let go of the interpreter: taking it back
after each piece would wait for the engine's Python, up to 5 ms a time. The call is
``process_vm_readv`` or ``process_vm_writev`` of this very process: as fast as memcpy from pieces of
64 KiB on, and memory that is not there any more is an error instead of the end of the engine. Where
a sandbox forbids it, memmove does it, piece by piece.

Of the two sides the kernel looks up the pages of the far one, each of 4 KiB by itself where they
are no huge ones. That is the pool in both directions: it is in huge pages, and an engine's memory
seldom is. With the engine's as the far one saves took 1.3 times as long.
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

_IOVEC_BYTES: Final = 16

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
    engine, pool, sizes = columns
    # The kernel's iovec, twice: an address and a length each.
    vectors = np.empty((2, len(sizes), 2), np.uint64)
    vectors[0, :, 0], vectors[1, :, 0], vectors[:, :, 1] = engine, pool, sizes
    near = vectors.ctypes.data
    far = near + vectors.nbytes // 2
    call = _libc.process_vm_writev if to_pages else _libc.process_vm_readv
    for first in range(0, len(sizes), PIECES_PER_READ):
        n = min(PIECES_PER_READ, len(sizes) - first)
        wanted = int(sizes[first : first + n].sum())
        skipped = first * _IOVEC_BYTES
        copied = call(os.getpid(), near + skipped, n, far + skipped, n, 0)
        if copied != wanted:
            number = ctypes.get_errno() if copied < 0 else errno.EFAULT
            if copied < 0 and number in _FORBIDDEN:
                _move(vectors[:, first:] if to_pages else vectors[::-1, first:])
                return None
            source, to = (engine, pool) if to_pages else (pool, engine)
            return MemoryFault(
                f"copying {wanted:,} bytes in {n} pieces between {int(source[first]):#x} and "
                f"{int(to[first]):#x} ended after {max(0, copied):,}: {os.strerror(number)}"
            )
    return None


def _move(vectors: NDArray[np.uint64]) -> None:
    """From the first to the second."""
    move = _libc.memmove
    for (source, size), (to, _) in zip(*vectors.tolist(), strict=True):
        move(to, source, size)


def _nothing() -> None:
    """Who begins it sees that it is over."""
