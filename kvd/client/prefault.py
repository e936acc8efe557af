"""Page tables of mapped pool memory, filled in before an engine touches it.

The daemon has reserved every page, but a process that maps them has no entry for any: the first
write to each costs a fault, which makes the first copies several times slower than all later ones,
and it is a user's request that meets it. So a thread at low priority asks for the entries, piece by
piece from the start, where the pages lie that are given first. Huge pages take a fault for each
2 MiB, so there it is over at once.

The kernel may not know how (before 5.14), or refuse: then pages come one by one, as they do
without this.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from typing import Final

STEP_BYTES: Final = 2 * 2**20
"""For a call: less than a millisecond, in which nothing else of this process can be mapped."""

_MADV_POPULATE_WRITE: Final = 23
_NICENESS: Final = 15

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Prefault:
    """Begins at once. ``stop`` it before the memory is unmapped."""

    def __init__(self, address: int, size_bytes: int) -> None:
        """The memory is mapped writable at ``address``, a page border."""
        self.over = threading.Event()
        """All of it is there, or no more will be."""
        self.done_bytes = 0
        self._address = address
        self._size_bytes = size_bytes
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="kvd-prefault", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Touch nothing any more; returns within a step; repeatable."""
        self._is_stopped = True
        # A child that was forked has no such thread.
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        for offset in range(0, self._size_bytes, STEP_BYTES):
            step = min(STEP_BYTES, self._size_bytes - offset)
            if self._is_stopped or _libc.madvise(
                self._address + offset, step, _MADV_POPULATE_WRITE
            ):
                break
            self.done_bytes += step
        self.over.set()
