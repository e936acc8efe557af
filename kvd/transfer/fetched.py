"""Windows of pages that the processor cannot read: fetched whole, then brought together.

The pages of each region come into host memory, in the order of their bytes, some at a time; there
they are pieces like any others (see ``assembly``). What is summed of a device's pages is read so:
sums run beside the transfer, and a page that is sampled is one in many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.geometry import Row
from kvd.transfer.assembly import Assembly
from kvd.transfer.copies import Area
from kvd.transfer.metadata import RegionNote
from kvd.transfer.page_split import strips
from kvd.transfer.reading import GATHERED_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvd.core.shards import Piece, Window
    from kvd.transfer.copies import Bytes

    Ids = NDArray[np.int32]


class FetchedWindows:
    """A window of the peer's pages, made of pages of ours that lie on devices."""

    def __init__(self, window: Window, pieces: Sequence[tuple[Area, Piece]]) -> None:
        """``pieces`` tile the window."""
        self._window = window
        self._pieces = pieces
        self.page_bytes = self._assembly(np.zeros(0, np.int32)).page_bytes
        self._stride = max(1, GATHERED_BYTES // max(area.note.page_bytes for area, _ in pieces))

    def gather(self, ids: Ids, into: Bytes) -> None:
        """The window of each page becomes a row of ``into``. Any thread may, beside others."""
        for low in range(0, ids.size, self._stride):
            some = ids[low : low + self._stride]
            order = np.arange(some.size, dtype=np.int32)
            self._assembly(some).gather(order, into[low : low + some.size])

    def _assembly(self, ids: Ids) -> Assembly:
        """Of these pages, whose bytes are here."""
        return Assembly(self._window, [(_fetch(area, ids), piece) for area, piece in self._pieces])


def _fetch(area: Area, ids: Ids) -> Area:
    """Pages of a region, as a region of host memory whose pages they are in this order."""
    note = area.note
    size = note.page_bytes
    room = np.empty((ids.size, size), np.uint8)
    if ids.size:
        area.gather(1, ids, room)
    rows = (Row(0, size, size),)
    sizes = tuple(row.piece_bytes for row in strips(note))
    tensors = (note.page_tokens, sizes, note.layers, note.heads)
    return Area(
        RegionNote("fetched", 0, ids.size * size, ids.size, size, rows, *tensors), room.ravel()
    )
