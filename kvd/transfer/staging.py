"""Pieces of our pages brought into the peer's order before they travel.

Page-first, a piece of a page is a stretch of a few kilobytes in each of its tensors, while the
peer's page is contiguous. Written from where they lie that is a descriptor for each stretch, and a
descriptor costs microseconds; so the pieces of one handle are packed into a slot of registered
memory first and leave it as whole pages::

    our page 7   [L0: 0 1 2 3][L1: 0 1 2 3]
    the slot     [L0: 0 1][L1: 0 1] [L0: 2 3][L1: 2 3]      written over the peer's pages

Measured, 30 layers of 1152 bytes a token, pages of 64 tokens written into pages of one: 0.23 GiB/s
from where they lie and 3.8 packed on one host, 0.18 and 1.0 over TCP; pages of 16: 1.6 and 3.8, 0.5
and 1.8. Layer-first, pieces of neighbouring pages touch on both sides and nothing is packed.

Pieces of several shards that make one page of the peer are packed alike (see ``assembly``), of a
page larger than a slot some layers at a time. Measured on two busy cores, 32 pages of a Llama-8B
shape, two shards onto one: descriptors of 1 KiB take 2.7 seconds of computing a gigabyte, packed
0.28, whole pages 0.11. A thread of its own for packing took 0.4 and was no faster.

Invariant: a slot is in one place: free, or with one handle until that is done or its agent is gone.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvd.transfer.page_split import strips

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from kvd.transfer.copies import Bytes
    from kvd.transfer.metadata import RegionNote
    from kvd.transfer.window_layout import Stretches
    from kvd.types import Pages

    Gather = Callable[[NDArray[np.int32], Bytes], None]
    """Brings what is written for each of these pages together, in a row of the array each."""

SLOT_BYTES: Final = 2 * 2**20
SLOTS: Final = 32
"""Enough for eight peers at a time; no memory is taken before a slot is used."""
STAGING_BYTES: Final = SLOTS * SLOT_BYTES
GATHER_BELOW_BYTES: Final = 64 * 2**10
"""Stretches of this size and above travel as fast from where they lie."""


class StagingSlot(NamedTuple):
    """Where the pages of one handle are packed."""

    address: int
    memory: Bytes


class Staging:
    """The slots that are free; the one given back last is the next to be taken."""

    def __init__(self, address: int) -> None:
        """``address`` is that of ``STAGING_BYTES`` of memory."""
        memory = np.ctypeslib.as_array((ctypes.c_ubyte * STAGING_BYTES).from_address(address))
        starts = range(0, STAGING_BYTES, SLOT_BYTES)
        self.free = [
            StagingSlot(address + at, memory[at : at + SLOT_BYTES]) for at in reversed(starts)
        ]


class Band(NamedTuple):
    """What is packed of each page at a time, in ``page_bytes``: all of it, or some layers."""

    gather: Gather
    page_bytes: int


class Packing:
    """The pieces of one post, and how to pack those of one handle.

    First come the handles of the first band of all pages, then those of the next.
    """

    def __init__(self, pages: Pages, bands: list[Band]) -> None:
        """One page of each of the bands fits into a slot."""
        self._ids = np.frombuffer(pages, "<i4")
        self._bands = bands
        # By the largest band: a handle has as many pages in each of them.
        self.handle_pages = SLOT_BYTES // max(band.page_bytes for band in bands)

    def fill(self, handle: int, memory: Bytes) -> None:
        """Pack the pages of this handle, one after the other, from the start of ``memory``."""
        band, at = divmod(handle, -(-self._ids.size // self.handle_pages))
        gather, page_bytes = self._bands[band]
        low = at * self.handle_pages
        ids = self._ids[low : low + self.handle_pages]
        gather(ids, memory[: ids.size * page_bytes].reshape(ids.size, page_bytes))


def is_worth_packing(ours: RegionNote, theirs: RegionNote, split: int) -> bool:
    """Whether pieces of our pages are small and scattered while the peer's pages are whole."""
    if len(theirs.rows) > 1 or (split == 1 and len(ours.rows) == 1):
        return False
    if len(strips(theirs)) == 1:  # then a piece is one stretch, and touches the next one
        return False
    each_bytes = theirs.page_bytes // len(strips(theirs))
    return each_bytes < GATHER_BELOW_BYTES and theirs.page_bytes <= SLOT_BYTES


def is_worth_gathering(lying: Stretches, together: Stretches) -> bool:
    """Whether a window's pieces are small where they are ``lying``, and fewer ``together``."""
    n_bytes = int(together.size.sum())
    return len(together.size) < len(lying.size) and n_bytes < GATHER_BELOW_BYTES * len(lying.size)
