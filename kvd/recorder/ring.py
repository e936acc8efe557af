"""The ring of records: memory that the daemon writes and the recorder process reads.

It is a memfd that both map, so what the daemon has written is there however the daemon ends, the
input included in whose step it crashed; and writing takes no system call. One page of positions
comes first, then the records::

    u64 end, u64 begin | ......... begin [ records, oldest first ] end .........

Positions count bytes from the first record ever and only grow; modulo ``size`` they are places in
the ring. The writer moves ``end``, the reader moves ``begin``. A record is whole before ``end``
passes it.

Invariants: begin <= end <= begin + size; a header lies in one piece.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import TYPE_CHECKING, Final

from kvd.recorder.input_records import (
    ALIGNMENT,
    HEADER,
    KIND_AT,
    LENGTH,
    MARK,
    InputRecord,
    padded,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

FIRST: Final = mmap.PAGESIZE
"""Where the records begin, after the page of the positions."""

_POSITION: Final = struct.Struct("<Q")
_END_AT: Final = 0
_BEGIN_AT: Final = 64
"""On another cache line: each is written by one side only."""


def create(size: int) -> int:
    """Make the memory of a ring for ``size`` bytes of records; returns its descriptor.

    Pages are taken from the system when they are first written to.
    """
    descriptor = os.memfd_create("kvd-recorder", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, FIRST + size)
    return descriptor


class RecordRing:
    """One side's view of a ring."""

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, 0)
        self.size = len(self._memory) - FIRST
        if self.size < ALIGNMENT or self.size % ALIGNMENT:
            raise ValueError(f"a ring of {self.size} bytes: it must be a multiple of {ALIGNMENT}")
        self._end = self.end
        self._begin = self.begin

    @property
    def end(self) -> int:
        """Where the newest record ends."""
        return int(_POSITION.unpack_from(self._memory, _END_AT)[0])

    @property
    def begin(self) -> int:
        """Where the oldest record begins."""
        return int(_POSITION.unpack_from(self._memory, _BEGIN_AT)[0])

    def close(self) -> None:
        """Unmap it."""
        self._memory.close()

    # ---- writing -----------------------------------------------------------------------------

    def write(self, *pieces: bytes) -> bool:
        """Append whole records; False if there is no room for them, and nothing was written."""
        start = self._end
        end = start + sum(map(len, pieces))
        if end - self._begin > self.size:
            self._begin = self.begin
            if end - self._begin > self.size:
                return False
        for piece in pieces:
            self._put(start, piece)
            start += len(piece)
        # Behind what it passes: the reader may look at any time.
        self._end = end
        _POSITION.pack_into(self._memory, _END_AT, end)
        return True

    def _put(self, position: int, data: bytes) -> None:
        at = position % self.size
        n_first = self.size - at
        if len(data) <= n_first:
            self._memory[FIRST + at : FIRST + at + len(data)] = data
        else:
            self._memory[FIRST + at :] = data[:n_first]
            self._memory[FIRST : FIRST + len(data) - n_first] = data[n_first:]

    # ---- reading -----------------------------------------------------------------------------

    def read(self, position: int) -> tuple[InputRecord, int]:
        """The record at ``position``, and where the next one begins."""
        at = FIRST + position % self.size
        length, n_tokens, at_s = HEADER.unpack_from(self._memory, at)
        n_message = length & LENGTH
        data = self.bytes_at(position + HEADER.size, n_message + n_tokens)
        record = InputRecord(at_s, data[:n_message], data[n_message:], length >> KIND_AT)
        return record, position + padded(len(data))

    def skim(self, position: int) -> tuple[bool, float, int]:
        """Of the record at ``position``: is it a mark, its time, where the next one begins."""
        at = FIRST + position % self.size
        length, n_tokens, at_s = HEADER.unpack_from(self._memory, at)
        next_one = position + padded((length & LENGTH) + n_tokens)
        return length >> KIND_AT == MARK, at_s, next_one

    def bytes_at(self, position: int, n_bytes: int) -> bytes:
        """A copy of a stretch, put together where the ring closes."""
        at = position % self.size
        n_first = min(n_bytes, self.size - at)
        first = self._memory[FIRST + at : FIRST + at + n_first]
        rest = n_bytes - n_first
        return first + self._memory[FIRST : FIRST + rest] if rest else first

    def pieces(self, begin: int, end: int, n_bytes: int) -> Iterator[bytes]:
        """The stretch ``[begin, end)`` in copies of at most ``n_bytes``."""
        for position in range(begin, end, n_bytes):
            yield self.bytes_at(position, min(n_bytes, end - position))

    def forget(self, upto: int) -> None:
        """Give the room before ``upto`` back to the writer."""
        _POSITION.pack_into(self._memory, _BEGIN_AT, upto)
