"""Files and memory, moved by NIXL's POSIX backend over libaio; nothing else in kvd speaks to it.

Rules learned by measuring NIXL 1.5.1:
  - Only libaio: with io_uring, reads of a process that was dead and reaped still landed; with
    posix_aio the first failure makes every later transfer fail.
  - More descriptors than its pool has are refused, and what was queued of them is done all the
    same; so few are under way, always far fewer than that.
  - A handle that is released while it is in progress makes the next one lie, and stops nothing. So
    one is released when it is done, and never else.
  - A failure has no reason, it may be told of the wrong handle, and it may leave others in progress
    for ever: after the first one nothing that this process says of its reads could be believed. So
    whatever can be known to go wrong is found before (a file that is short, a disk that is full),
    and a failure all the same is the end of the process.
  - A post may block for as long as the disk takes: this is for a thread that nobody waits for.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvd.storage.backend import StorageLost
from kvd.transfer.metadata import MemoryKind

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvd.transfer.nixl import Binding, MemorySpan

    Words = NDArray[np.uint64]

MOST_IN_FLIGHT: Final = 1024
"""Descriptors under way together, of one queue; one file alone may have more."""
MOST_OF_FILE: Final = 8192
POOL: Final = 2 * MOST_OF_FILE
"""The kernel has 65536 for the whole host, unless fs.aio-max-nr says otherwise."""
LOOK_EVERY_S: Final = 0.0001


class FileMove(NamedTuple):
    """One file, and where its pieces lie in memory."""

    fd: int
    addresses: Words


class FileQueue:
    """Moves pieces of files of one shape, on one thread: between memory and files, and waits."""

    def __init__(
        self, binding: Binding, name: str, spans: Sequence[MemorySpan], shape: tuple[Words, Words]
    ) -> None:
        """``spans``: the memory; ``shape``: where each piece begins in a file, and its bytes.

        Raises:
            NixlUnusable: it does not begin.
            StorageLost: the shape has more pieces than a queue takes.
        """
        self._binding, self._api = binding, binding.api
        self._name = name
        self._memory = binding.segments[MemoryKind.DRAM]
        self._offsets, self._sizes = shape
        if self._sizes.size > MOST_OF_FILE:
            raise StorageLost(
                f"a page has {self._sizes.size} pieces of memory, and a file can be moved in "
                f"{MOST_OF_FILE}: set pool.order to page_first"
            )
        with binding.translating(f"creating the file queue {name!r}"):
            self._agent: Any = binding.agent(name, progress_delay_us=0)
            self._agent.createBackend(
                "POSIX",
                {"use_aio": "true", "ios_pool_size": str(POOL), "kernel_queue_size": "256"},
            )
            binding.register(self._agent, list(spans))

    def write(self, moves: Sequence[FileMove]) -> None:
        """Write the pieces into the files.

        Raises:
            StorageLost: one could not be written; which one is not known.
        """
        self._move(self._api.NIXL_WRITE, moves)

    def read(self, moves: Sequence[FileMove]) -> None:
        """Read the pieces out of the files.

        Raises:
            StorageLost: one could not be read, and others may still be written to memory.
        """
        self._move(self._api.NIXL_READ, moves)

    def _move(self, operation: Any, moves: Sequence[FileMove]) -> None:
        if not moves:
            return
        api, errors = self._api, self._binding.errors
        end = int(self._offsets[-1] + self._sizes[-1])
        files = api.nixlRegDList(api.FILE_SEG, [(0, end, move.fd, "") for move in moves])
        under_way: deque[int] = deque()
        n_pieces = self._sizes.size
        try:
            self._agent.registerMem(files)
            for move in moves:
                while under_way and (len(under_way) + 1) * n_pieces > MOST_IN_FLIGHT:
                    self._await(under_way)
                handle = self._agent.createXferReq(
                    operation,
                    api.nixlXferDList(self._memory, _rows(move.addresses, self._sizes, 0)),
                    api.nixlXferDList(api.FILE_SEG, _rows(self._offsets, self._sizes, move.fd)),
                    self._name,
                )
                under_way.append(handle)
                self._agent.postXferReq(handle)
            while under_way:
                self._await(under_way)
            self._agent.deregisterMem(files)
        except errors as exc:
            why = f"{type(exc).__name__} {exc}".strip()
            raise StorageLost(f"NIXL's POSIX backend failed: {why}") from exc

    def _await(self, under_way: deque[int]) -> None:
        """Return when the oldest is done; it is released."""
        handle = under_way[0]
        while self._agent.getXferStatus(handle) == self._api.NIXL_IN_PROG:
            time.sleep(LOOK_EVERY_S)
        self._agent.releaseXferReq(handle)
        under_way.popleft()


def _rows(address: Words, size: Words, device: int) -> Words:
    rows = np.empty((size.size, 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = size
    rows[:, 2] = device
    return rows
