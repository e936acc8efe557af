"""From page ids to the descriptors of a write, and from those to handles.

Each row of a region gives one piece per page (``strips`` says which rows correspond; where the
peer's page is a part of ours, a page here is a piece of one of ours). Where neighbours in the list
are neighbours in memory on both sides, their pieces are one segment; segments are cut into
descriptors of at most 512 KiB, and descriptors are dealt into handles of about 16 MiB::

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

from kvd.core.geometry import Row
from kvd.transfer.strips import matched, mismatch
from kvd.types import NULL_PAGE, count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvd.transfer.metadata import RegionNote
    from kvd.types import Pages

    Words = NDArray[np.uint64]
    Ids = NDArray[np.int64]

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


def objection(
    source: Pages, destination: Pages, ours: RegionNote, theirs: RegionNote, split: int = 1
) -> str:
    """Why these pages must not be written, or an empty string."""
    if len(source) != len(destination) or len(source) % 4:
        return (
            f"{count(source)} source pages for {count(destination)} destination pages; "
            "a post needs as many of one as of the other"
        )
    why = mismatch(ours, theirs, split)
    if why:
        return why
    for side, pages, region, cut in (
        ("source", source, ours, split),
        ("destination", destination, theirs, 1),
    ):
        wrong = strays(pages, region, cut)
        if wrong.size:
            last = region.pages * cut - 1
            return (
                f"{side} page {wrong[0]} is not a page of region {region.name!r}, "
                f"whose pages{f', cut into {cut},' if cut > 1 else ''} are {cut} to {last}"
            )
    return ""


def strays(pages: Pages, region: RegionNote, split: int = 1) -> NDArray[np.int32]:
    """Those that are no pages of the region, or pieces of its null page."""
    ids = np.frombuffer(pages, dtype="<i4")
    if not ids.size or (ids.min() // split > NULL_PAGE and ids.max() // split < region.pages):
        return ids[:0]
    return ids[(ids // split <= NULL_PAGE) | (ids // split >= region.pages)]


def writes(
    source: Pages, destination: Pages, ours: RegionNote, theirs: RegionNote, split: int = 1
) -> Writes:
    """The descriptors that write ``source`` of ``ours`` over ``destination`` of ``theirs``.

    ``objection`` must have found nothing.
    """
    from_ids = np.frombuffer(source, dtype="<i4").astype(np.uint64)
    to_ids = np.frombuffer(destination, dtype="<i4").astype(np.uint64)
    parts = [
        _segments(pairs, starts, (from_ids, to_ids), (ours.address, theirs.address), split)
        for pairs, starts in _groups(*matched(ours, theirs, split), (from_ids, to_ids), split)
    ]
    at = np.concatenate([part[0] for part in parts])
    to = np.concatenate([part[1] for part in parts])
    rows = _cut(at, to, np.concatenate([part[2] for part in parts]))
    return _dealt(*rows, _by_cost(rows[0][:, 1]))


def packed_writes(destination: Pages, theirs: RegionNote, handle_pages: int) -> Writes:
    """The descriptors that write whole pages, packed ``handle_pages`` at a time, each from byte 0.

    Source addresses count from where the pages of their handle are packed. ``theirs`` has one row.
    """
    to_ids = np.frombuffer(destination, dtype="<i4").astype(np.uint64)
    from_ids = np.arange(to_ids.size, dtype=np.uint64) % np.uint64(handle_pages)
    size = theirs.page_bytes
    ((pairs, starts),) = _groups((Row(0, size, size),), theirs.rows, (from_ids, to_ids), 1)
    rows = _cut(*_segments(pairs, starts, (from_ids, to_ids), (0, theirs.address), 1))
    ends = np.cumsum(rows[0][:, 1])
    return _dealt(*rows, (ends - np.uint64(1)) // np.uint64(handle_pages * size))


def _dealt(source: Words, destination: Words, handle: Words) -> Writes:
    """Descriptors and the handle that each belongs to, ascending."""
    bounds = [0]
    if handle.size:
        bounds += (np.flatnonzero(np.diff(handle)) + 1).tolist()
        bounds.append(int(handle.size))
    size = source[:, 1]
    sizes = np.add.reduceat(size, bounds[:-1]).tolist() if size.size else []
    return Writes(source=source, destination=destination, bounds=bounds, sizes=sizes)


def _cut(at: Words, to: Words, length: Words) -> tuple[Words, Words]:
    """Segments as descriptors of both sides."""
    pieces = ((length + np.uint64(CUT_BYTES - 1)) // np.uint64(CUT_BYTES)).astype(np.int64)
    ends = pieces.cumsum()
    whole = np.arange(pieces.size).repeat(pieces)
    skip = (np.arange(whole.size) - (ends - pieces)[whole]).astype(np.uint64) * np.uint64(CUT_BYTES)
    size = np.minimum(np.uint64(CUT_BYTES), length[whole] - skip)
    return _rows(at[whole] + skip, size), _rows(to[whole] + skip, size)


def _rows(address: Words, size: Words) -> Words:
    """(address, bytes, device 0) for each descriptor."""
    rows = np.zeros((size.size, 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = size
    return rows


def _groups(
    ours: tuple[Row, ...], theirs: tuple[Row, ...], ids: tuple[Words, Words], split: int
) -> Iterator[tuple[list[tuple[Row, Row]], Ids]]:
    """The row pairs whose pages touch in the same places, and where in the list segments begin.

    Pages of a row touch if nothing lies between them, pieces of one page always. Segments go on
    where both sides step by one and what they step over touches on both.
    """
    groups: dict[tuple[bool, bool], list[tuple[Row, Row]]] = {}
    for a, b in zip(ours, theirs, strict=True):
        dense = (a.stride_bytes == a.piece_bytes, b.stride_bytes == b.piece_bytes)
        groups.setdefault(dense, []).append((a, b))
    from_ids, to_ids = ids
    one = np.uint64(1)
    steps = (np.diff(from_ids) == one) & (np.diff(to_ids) == one)
    is_inside = from_ids[1:] % np.uint64(split) != 0
    for (is_dense_here, is_dense_there), pairs in groups.items():
        goes_on = steps & (is_dense_here | is_inside) & is_dense_there
        first = np.ones(min(1, from_ids.size), np.bool_)
        yield pairs, np.flatnonzero(np.concatenate((first, ~goes_on)))


def _segments(
    pairs: list[tuple[Row, Row]],
    starts: Ids,
    ids: tuple[Words, Words],
    bases: tuple[int, int],
    split: int,
) -> tuple[Words, Words, Words]:
    """Source address, destination address and bytes of each segment of these rows."""
    lengths = np.diff(np.append(starts, ids[0].size)).astype(np.uint64)
    whole, part = np.divmod(ids[0][starts], np.uint64(split))
    piece = np.array([[theirs.piece_bytes] for _, theirs in pairs], np.uint64)
    at = _addresses([ours for ours, _ in pairs], whole, bases[0]) + piece * part
    to = _addresses([theirs for _, theirs in pairs], ids[1][starts], bases[1])
    return at.ravel(), to.ravel(), (piece * lengths).ravel()


def _addresses(rows: list[Row], pages: Words, base: int) -> Words:
    """Where the pieces of these pages begin, a line for each row."""
    offset = np.array([[row.offset_bytes + base] for row in rows], np.uint64)
    stride = np.array([[row.stride_bytes] for row in rows], np.uint64)
    return offset + stride * pages


def _by_cost(size: Words) -> Words:
    """The handle of each descriptor: about 16 MiB in each, fewer bytes where pieces are small."""
    cost = size + np.uint64(DESCRIPTOR_COST_BYTES)
    handle: Words = (np.cumsum(cost) - cost) // np.uint64(HANDLE_COST_BYTES)
    return handle
