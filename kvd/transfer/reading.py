"""How the bytes that are summed of a page are read: in place, or brought together first.

Whole pages, and windows of all heads, are a few stretches in the order of the sum. Slots or heads
of a page are many small ones: they are gathered, some pages at a time, into memory that stays in
the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvd.transfer.copies import Bytes
    from kvd.transfer.staging import Gather

    Ids = NDArray[np.int32]

GATHERED_BYTES: Final = 512 * 2**10
"""Of which at most are gathered at once, unless a page has more."""


class InPlace:
    """Arrays ``(pages, 1, bytes)`` that hold, one after the other, what is summed of each page."""

    def __init__(self, arrays: list[Bytes]) -> None:
        self._arrays = arrays
        self.page_bytes: int = sum(array.shape[2] for array in arrays)

    def pages(self, ids: Ids) -> Iterator[Iterable[Buffer]]:
        """What is summed of each of these pages, piece by piece."""
        for page in ids.tolist():
            yield (array[page, 0] for array in self._arrays)


class Gathered:
    """Pages whose bytes are brought into their order before they are summed."""

    def __init__(self, gather: Gather, page_bytes: int) -> None:
        self._gather = gather
        self.page_bytes = page_bytes

    def pages(self, ids: Ids) -> Iterator[Iterable[Buffer]]:
        """What is summed of each of these pages; to be used before the next is asked for."""
        stride = max(1, GATHERED_BYTES // self.page_bytes)
        room = np.empty((min(stride, ids.size), self.page_bytes), np.uint8)
        for low in range(0, ids.size, stride):
            some = ids[low : low + stride]
            self._gather(some, room[: some.size])
            for row in room[: some.size]:
                yield (row,)


Reading = InPlace | Gathered
