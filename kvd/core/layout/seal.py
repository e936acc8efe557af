"""Sums of pages that are bound to what the pages are and where they belong.

Both daemons work out the same seal for a handoff, from what they both know, and one sum per page::

    key  = xxh3_128(component, decode incarnation, handoff id, digest of the prompt)   16 bytes
    sum  = xxh3_64(key, logical page as a little-endian uint64, the page's bytes)       8 bytes

The digest covers namespace, epoch and every token. A page's logical number counts from the start of
the prompt. Its bytes are taken tensor by tensor (each layer's K, then its V), in each slot by slot:
the order of the geometry's rows, whether there is one for all tensors (page-first) or one for each
(layer-first). Pages are the receiver's: a writer whose pages are larger takes from every tensor the
slots that the receiver's page has, and comes to the same sum.

So a page that is swapped with another, shifted, torn, flipped, left as it was, or another
handoff's, has another sum. Both daemons are trusted: this finds accidents, not malice.

``full`` sums every page of the delta. ``sampled`` sums the first, the last, and those whose number
the key picks, about one in ``SAMPLE_ONE_IN``; what moves every page is found for certain, what
damages a single one only by luck. The cached prefix is in neither side's sums.

Where nodes have shards, each lane has sums of its own, over the window of the receiver's page that
it fills: layer by layer, tensor by tensor, slot by slot, head by head, whichever of the sender's
shards the bytes are read from.

A sum covers the whole page, also of the last, partial one. So an engine must leave a page alone
from when it has advanced beyond it (for the last page: finished) until the handoff is over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvd.wire.peer import Offer

SUM_BYTES = 8
"""Bytes of one page's sum, little-endian."""

SAMPLE_ONE_IN = 16
"""Of the pages between the first and the last; a power of two."""

_NUMBER_BYTES = 8


class Seal(msgspec.Struct, frozen=True, array_like=True):
    """What the page sums of one handoff are bound to: logical pages ``[first, end)``."""

    integrity: Integrity
    key: bytes
    first: int
    end: int

    @property
    def is_open(self) -> bool:
        """Whether nothing is summed: it is off, or there are no pages."""
        return self.integrity is Integrity.OFF or self.first >= self.end


UNSEALED = Seal(integrity=Integrity.OFF, key=b"", first=0, end=0)


def seal_of(offer: Offer, component: str, units: tuple[int, int]) -> Seal:
    """The seal of one component of the handoff that ``offer`` opens; the same on both sides.

    Where the decode side has shards, ``component`` is the region of the one that it is about.
    ``units``: the logical pages ``[first, end)`` of it that are sent, in pages of the receiver.
    """
    import xxhash  # noqa: PLC0415 - a configuration is read without it: sizes are asked here too

    head = f"{component}\0{offer.source}\0{offer.handoff}\0".encode()
    first, end = units
    return Seal(
        integrity=offer.integrity,
        key=xxhash.xxh3_128_digest(head + offer.digest),
        first=first,
        end=end,
    )


def chosen(seal: Seal, start: int, stop: int) -> NDArray[np.int64]:
    """The logical pages of ``[start, stop)`` that are summed, ascending."""
    pages = np.arange(max(start, seal.first), min(stop, seal.end))
    match seal.integrity:
        case Integrity.OFF:
            return pages[:0]
        case Integrity.FULL:
            return pages
        case Integrity.SAMPLED:
            is_end = (pages == seal.first) | (pages == seal.end - 1)
            sampled: NDArray[np.int64] = pages[is_end | _is_picked(seal.key, pages)]
            return sampled


def n_chosen(seal: Seal) -> int:
    """How many of its pages are summed."""
    if seal.integrity is Integrity.SAMPLED:
        return chosen(seal, seal.first, seal.end).size
    return 0 if seal.is_open else seal.end - seal.first


def most_chosen(integrity: Integrity, n_pages: int) -> int:
    """How many of so many pages are summed at most, whatever the key.

    Sampled pages are drawn: twice the root of their number is eight standard deviations.
    """
    match integrity:
        case Integrity.OFF:
            return 0
        case Integrity.FULL:
            return n_pages
        case Integrity.SAMPLED:
            return min(n_pages, n_pages // SAMPLE_ONE_IN + 2 * math.isqrt(n_pages) + 2)


def page_sum(seal: Seal, page: int, pieces: Iterable[Buffer]) -> int:
    """The sum of one logical page, whose bytes are ``pieces`` in the order of the rows."""
    import xxhash  # noqa: PLC0415 - as above

    state = xxhash.xxh3_64(seal.key + page.to_bytes(_NUMBER_BYTES, "little"))
    for piece in pieces:
        state.update(piece)
    return state.intdigest()


def _is_picked(key: bytes, pages: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One page in ``SAMPLE_ONE_IN``, other ones for every key (splitmix64, for whole arrays)."""
    mixed = pages.astype(np.uint64) + np.frombuffer(key, "<u8", count=1)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    picked: NDArray[np.bool_] = (mixed >> np.uint64(31)) % np.uint64(SAMPLE_ONE_IN) == 0
    return picked
