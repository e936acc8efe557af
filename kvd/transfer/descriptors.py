"""From page ids to the descriptors of a write, and from those to handles.

Each row of a region gives one piece per page. Where neighbours in the list are neighbours in
memory on both sides, their pieces are one segment; segments are cut into descriptors of at most
512 KiB, and descriptors are dealt into handles of about 16 MiB::

    pages        7  8  9 | 3      (source and destination both step by +1 inside a run)
    segments     [7  8  9] [3]
    descriptors  512K 512K 512K ... | ...
    handles      as many descriptors as make about 16 MiB

Measured: writes of 512 KiB are the fastest over TCP (2 MiB ones lose 40 %) and as fast as any on
one host; a handle is what other posts wait for, so it is as small as throughput allows.

Invariant: the descriptors of a post cover each addressed page exactly once, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.types import NULL_PAGE, count

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvd.core.geometry import Row
    from kvd.transfer.metadata import RegionNote
    from kvd.types import Pages

    Words = NDArray[np.uint64]

CUT_BYTES = 512 * 2**10
DESCRIPTOR_COST_BYTES = 16 * 2**10
"""What one descriptor costs beyond its bytes, in bytes: 2 to 9 us at 2 to 10 GB/s."""
HANDLE_COST_BYTES = 32 * (CUT_BYTES + DESCRIPTOR_COST_BYTES)
"""16 MiB: a handle twice as large is 2 to 3 % faster end to end than 8, and a turn still ends in a
few milliseconds."""


class Writes(msgspec.Struct, frozen=True):
    """The descriptors of one post: rows of (address, bytes, device 0), and how handles divide them.

    Handle ``h`` is rows ``[bounds[h], bounds[h + 1])`` of both sides, ``sizes[h]`` bytes.
    """

    source: Words
    destination: Words
    bounds: list[int]
    sizes: list[int]

    @property
    def handles(self) -> int:
        """How many handles the post takes."""
        return len(self.bounds) - 1


def objection(source: Pages, destination: Pages, ours: RegionNote, theirs: RegionNote) -> str:
    """Why these pages must not be written, or an empty string."""
    if len(source) != len(destination) or len(source) % 4:
        return (
            f"{count(source)} source pages for {count(destination)} destination pages; "
            "a post needs as many of one as of the other"
        )
    for side, pages, region in (("source", source, ours), ("destination", destination, theirs)):
        ids = np.frombuffer(pages, dtype="<i4")
        if ids.size and (ids.min() <= NULL_PAGE or ids.max() >= region.pages):
            wrong = ids[(ids <= NULL_PAGE) | (ids >= region.pages)][0]
            return (
                f"{side} page {wrong} is not a page of region {region.name!r}, "
                f"whose pages are 1 to {region.pages - 1}"
            )
    if [row.piece_bytes for row in ours.rows] != [row.piece_bytes for row in theirs.rows]:
        return (
            f"region {ours.name!r} has {len(ours.rows)} pieces of {ours.page_bytes} bytes a page "
            f"here and {len(theirs.rows)} of {theirs.page_bytes} there; lay both out alike"
        )
    return ""


def writes(source: Pages, destination: Pages, ours: RegionNote, theirs: RegionNote) -> Writes:
    """The descriptors that write ``source`` of ``ours`` over ``destination`` of ``theirs``.

    ``objection`` must have found nothing.
    """
    from_ids = np.frombuffer(source, dtype="<i4").astype(np.uint64)
    to_ids = np.frombuffer(destination, dtype="<i4").astype(np.uint64)
    parts = [
        _segments(pair, dense=dense, ids=(from_ids, to_ids), bases=(ours.address, theirs.address))
        for dense, pair in _by_density(ours.rows, theirs.rows)
    ]
    at = np.concatenate([part[0] for part in parts])
    to = np.concatenate([part[1] for part in parts])
    length = np.concatenate([part[2] for part in parts])
    pieces = ((length + np.uint64(CUT_BYTES - 1)) // np.uint64(CUT_BYTES)).astype(np.int64)
    ends = pieces.cumsum()
    whole = np.arange(pieces.size).repeat(pieces)
    skip = (np.arange(whole.size) - (ends - pieces)[whole]).astype(np.uint64) * np.uint64(CUT_BYTES)
    size = np.minimum(np.uint64(CUT_BYTES), length[whole] - skip)
    bounds = _bounds(size)
    return Writes(
        source=_rows(at[whole] + skip, size),
        destination=_rows(to[whole] + skip, size),
        bounds=bounds,
        sizes=np.add.reduceat(size, bounds[:-1]).tolist() if size.size else [],
    )


def _rows(address: Words, size: Words) -> Words:
    """(address, bytes, device 0) for each descriptor."""
    rows = np.zeros((size.size, 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = size
    return rows


def _by_density(
    ours: tuple[Row, ...], theirs: tuple[Row, ...]
) -> list[tuple[bool, list[tuple[Row, Row]]]]:
    """The row pairs whose neighbouring pages touch on both sides, and the others."""
    groups: dict[bool, list[tuple[Row, Row]]] = {}
    for a, b in zip(ours, theirs, strict=True):
        dense = a.stride_bytes == a.piece_bytes and b.stride_bytes == b.piece_bytes
        groups.setdefault(dense, []).append((a, b))
    return list(groups.items())


def _segments(
    pairs: list[tuple[Row, Row]],
    *,
    dense: bool,
    ids: tuple[Words, Words],
    bases: tuple[int, int],
) -> tuple[Words, Words, Words]:
    """Source address, destination address and bytes of each segment of these rows."""
    from_ids, to_ids = ids
    starts = np.arange(from_ids.size)
    if dense:
        one = np.uint64(1)
        breaks = (np.diff(from_ids) != one) | (np.diff(to_ids) != one)
        starts = np.concatenate(([0], np.flatnonzero(breaks) + 1)) if from_ids.size else starts
    lengths = np.diff(np.append(starts, from_ids.size)).astype(np.uint64)
    sides = []
    for side, pages in enumerate((from_ids[starts], to_ids[starts])):
        offset = np.array([pair[side].offset_bytes + bases[side] for pair in pairs], np.uint64)
        stride = np.array([pair[side].stride_bytes for pair in pairs], np.uint64)
        sides.append((offset[:, None] + stride[:, None] * pages[None, :]).ravel())
    piece = np.array([pair[0].piece_bytes for pair in pairs], np.uint64)
    return sides[0], sides[1], (piece[:, None] * lengths[None, :]).ravel()


def _bounds(size: Words) -> list[int]:
    """Deal descriptors into handles of about 16 MiB, fewer bytes where pieces are small."""
    if not size.size:
        return [0]
    cost = size + np.uint64(DESCRIPTOR_COST_BYTES)
    handle = (np.cumsum(cost) - cost) // np.uint64(HANDLE_COST_BYTES)
    cuts = np.flatnonzero(np.diff(handle)) + 1
    out: list[int] = [0, *cuts.tolist(), int(size.size)]
    return out
