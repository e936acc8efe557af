"""Where the bytes of a page lie in this process: region by region, each row by row.

A companion has ``factor`` pages for each page of the pool, which lie side by side: so an object has
everything that goes in lockstep with its page.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from kvd.storage.sizes import BLOCK_BYTES
from kvd.transfer.descriptors import strays

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvd.storage.orders import ObjectPart
    from kvd.transfer.metadata import RegionNote
    from kvd.types import Pages

    Words = NDArray[np.uint64]


class ObjectPages:
    """The pages of the pool as objects have them."""

    def __init__(self, notes: Mapping[str, RegionNote], parts: Sequence[ObjectPart]) -> None:
        """``notes``: the regions that are mapped, by name."""
        self._notes = [(notes[part.region], part.factor) for part in parts]
        rows = [
            (note.address + row.offset_bytes + nth * row.stride_bytes, row.stride_bytes * factor)
            for note, factor in self._notes
            for nth in range(factor)
            for row in note.rows
        ]
        self._begin = np.array([begin for begin, _ in rows], np.uint64)
        self._step = np.array([step for _, step in rows], np.uint64)
        self.sizes: Words = np.array(
            [
                row.piece_bytes
                for note, factor in self._notes
                for _ in range(factor)
                for row in note.rows
            ],
            np.uint64,
        )
        self.page_bytes = int(self.sizes.sum())
        self.offsets: Words = self.sizes.cumsum() - self.sizes
        """Of each piece in the page."""

    @property
    def are_blocks(self) -> bool:
        """Whether each piece of each page is whole blocks, in memory and in an object."""
        ends = np.concatenate([self._begin, self._step, self.sizes])
        return not (ends % BLOCK_BYTES).any()

    def strays(self, pages: Pages) -> list[int]:
        """Those that are no pages of the pool."""
        note, _ = self._notes[0]
        found: list[int] = strays(pages, note).tolist()
        return found

    def addresses(self, page: int) -> Words:
        """Where each piece of it begins."""
        return self._begin + np.uint64(page) * self._step

    def pieces(self, page: int) -> Iterator[ctypes.Array[ctypes.c_ubyte]]:
        """Its bytes, where they lie."""
        for address, size in zip(self.addresses(page).tolist(), self.sizes.tolist(), strict=True):
            yield (ctypes.c_ubyte * size).from_address(address)
