"""Blocks of one piece of memory, handed out one behind the other, round and round: offsets alone.

::

    capacity 1000     take 600    take 300    take 300        take 1001
                      [0, 600)    [600, 900)  [0, 300) again  None, and nothing moves

Where a block lies depends on the sizes that were asked for so far and on nothing else: not on who
is done, not on time. So ranks that ask for the same sizes in the same order have their blocks at
the same places, and agree on what does not fit, without a word between them. The price: a block may
lie over earlier ones, whose users must be done with them before it is written.

Invariant: ``0 <= start <= end <= capacity``; every start is a multiple of ``ALIGNMENT``.
"""

from __future__ import annotations

from typing import NamedTuple

ALIGNMENT = 256
"""Bytes: what device allocators align to, and a multiple of every element's size."""


class RingSpan(NamedTuple):
    """Bytes ``[start, end)``."""

    start: int
    end: int

    def overlaps(self, other: RingSpan) -> bool:
        """Whether a byte is in both."""
        return self.start < other.end and other.start < self.end


class SpanRing:
    """``capacity`` bytes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._next = 0

    def take(self, size: int) -> RingSpan | None:
        """The next block of ``size`` bytes; None if it is larger than all of the memory."""
        if size > self.capacity:
            return None
        start = self._next if self._next + size <= self.capacity else 0
        self._next = aligned(start + size)
        return RingSpan(start, start + size)


def aligned(size: int) -> int:
    """The first multiple of ``ALIGNMENT`` that is not below ``size``."""
    return -(-size // ALIGNMENT) * ALIGNMENT
