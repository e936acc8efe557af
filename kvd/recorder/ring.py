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
from typing import TYPE_CHECKING, Final

from kvd.recorder.record_layout import (
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

_END_AT: Final = 0
_BEGIN_AT: Final = 8
"""In words of 8 bytes; on another cache line, for each is written by one side only."""


def create(size: int) -> int:
    """Make the memory of a ring for ``size`` bytes of records; returns its descriptor.

    Pages are taken from the system when they are first written to.
    """
    descriptor = os.memfd_create("kvd-recorder", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, FIRST + size)
    return descriptor


class RecordRing:
    """One side's view of a ring; its ``descriptor`` stays whoever's made it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, 0)
        self.size = len(self._memory) - FIRST
        if self.size < ALIGNMENT or self.size % ALIGNMENT:
            raise ValueError(f"a ring of {self.size} bytes: it must be a multiple of {ALIGNMENT}")
        self._positions = memoryview(self._memory)[:FIRST].cast("Q")
        self._end = self.end
        self._at = self._stop = FIRST
        """Where the next record goes, and how far it may reach in one piece."""
        self._find_room()

    @property
    def end(self) -> int:
        """Where the newest record ends."""
        return self._positions[_END_AT]

    @property
    def begin(self) -> int:
        """Where the oldest record begins."""
        return self._positions[_BEGIN_AT]

    def close(self) -> None:
        """Unmap it."""
        self._positions.release()
        self._memory.close()

    # ---- writing -----------------------------------------------------------------------------

    def write(self, message: bytes, tokens: bytes = b"") -> bool:
        """Append one record: its header with its message behind, and its tokens.

        False if there is no room for it; then nothing was written.
        """
        n_bytes = len(message) + len(tokens)
        # What lies in the padding may be left of another record: nobody reads it.
        room = n_bytes + (-n_bytes % ALIGNMENT)
        if self._at + room > self._stop and not self._find_room(room):
            return self._write_around(message + tokens)
        memory, at = self._memory, self._at
        middle = at + len(message)
        memory[at:middle] = message
        if tokens:
            memory[middle : at + n_bytes] = tokens
        self._at = at + room
        # Behind what it passes: the reader may look at any time.
        self._end = self._positions[_END_AT] = self._end + room
        return True

    def _find_room(self, n_bytes: int = 0) -> bool:
        """Look how far the reader has come; whether so much can be written in one piece."""
        at = self._at = FIRST + self._end % self.size
        room = self.begin + self.size - self._end
        self._stop = min(at + room, FIRST + self.size)
        return at + n_bytes <= self._stop

    def _write_around(self, record: bytes) -> bool:
        """Append a record that closes the ring; False if there is no room for it."""
        n_bytes = len(record) + (-len(record) % ALIGNMENT)
        end = self._end + n_bytes
        # It crosses the end of the memory, or what lies before the reader.
        if end - self.begin > self.size:
            return False
        at = self._at
        n_first = FIRST + self.size - at
        self._memory[at : FIRST + self.size] = record[:n_first]
        rest = record[n_first:]
        self._memory[FIRST : FIRST + len(rest)] = rest
        self._end = self._positions[_END_AT] = end
        self._find_room()
        return True

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
        self._positions[_BEGIN_AT] = upto
