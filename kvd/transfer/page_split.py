"""Which bytes of two regions correspond: rows where they are laid out alike, else their tensors.

The bytes of a page have one order, whatever its layout: tensor by tensor (each layer's K, then its
V), in each of them slot by slot. The rows of both layouts follow it::

    page-first   row 0: [L0 K][L0 V][L1 K][L1 V]                one row, four strips
    layer-first  row 0: [L0 K]  row 1: [L0 V]  row 2: [L1 K]    each row is a strip

Where the peer's page is a part of ours, a piece of our page is the same slots of every strip::

    our page 7, split in 2   [L0 K: 0 1 2 3][L0 V: 0 1 2 3]     pieces 14 (slots 0 1), 15 (2 3)

so a piece is as many stretches of memory as there are tensors. Invariant: the stretches of a piece,
one after the other, are exactly the bytes of the peer's page in its order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.layout.page_sizes import pages_in
from kvd.transfer.metadata import strips

if TYPE_CHECKING:
    from kvd.transfer.metadata import RegionNote, Rows


def uncut(note: RegionNote, split: int) -> str:
    """Why a page of the region cannot be cut into ``split`` pieces, or an empty string."""
    if split < 1:
        return f"a page cannot be cut into {split} pieces"
    if split == 1:
        return ""
    if not note.page_tokens:
        return (
            f"pages of region {note.name!r} cannot be cut into {split} pieces: what they hold is "
            "not laid out by slots"
        )
    if pages_in(note.page_tokens, split) is None:
        return (
            f"pages of region {note.name!r} have {note.page_tokens} slots, which do not make "
            f"{split} equal pieces"
        )
    return ""


def matched(ours: RegionNote, theirs: RegionNote, split: int) -> tuple[Rows, Rows]:
    """The rows of both sides that correspond one to one, each of ours ``split`` times as long.

    ``mismatch`` must have found nothing.
    """
    # Rows where they are alike: fewer and longer stretches than tensors.
    if split == 1 and _sizes(ours.rows) == _sizes(theirs.rows):
        return ours.rows, theirs.rows
    return strips(ours), strips(theirs)


def mismatch(ours: RegionNote, theirs: RegionNote, split: int) -> str:
    """Why pages of the two do not correspond, or an empty string."""
    why = uncut(ours, split)
    if why:
        return why
    if split > 1 and ours.page_tokens != split * theirs.page_tokens:
        return (
            f"pages of {ours.page_tokens} slots of region {ours.name!r} here, cut into {split}, "
            f"are not the pages of {theirs.page_tokens} slots there"
        )
    here, there = matched(ours, theirs, split)
    if _sizes(here) != [split * size for size in _sizes(there)]:
        return (
            f"region {ours.name!r} has {len(here)} pieces of {ours.page_bytes} bytes a page "
            f"here and {len(there)} of {theirs.page_bytes} there; lay both out alike"
        )
    return ""


def _sizes(rows: Rows) -> list[int]:
    return [row.piece_bytes for row in rows]
