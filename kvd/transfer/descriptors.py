"""From page ids to the descriptors of a write, and from those to handles.

Each stretch gives one piece of memory per page (``page_split`` says which correspond; where the
peer's page is a part of ours, a page here is a piece of one of ours). Where neighbours in the list
are neighbours in memory on both sides, their stretches are one segment; segments are cut into
descriptors of at most 512 KiB, and descriptors are dealt into handles of about 16 MiB, between
devices that copy by themselves larger ones::

    pages        7  8  9 | 3      (source and destination both step by +1 inside a run)
    segments     [7  8  9] [3]
    descriptors  512K 512K 512K ... | ...
    handles      as many descriptors as make about 16 MiB

Measured: writes of 512 KiB are the fastest over TCP (2 MiB ones lose 40 %) and as fast as any on
one host; a handle is what other posts wait for, so it is as small as throughput allows.

Invariant: the descriptors of a post cover each addressed page exactly once, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kvd.transfer.page_split import mismatch
from kvd.transfer.window_layout import Stretches, misfit, packed, straight
from kvd.types import NULL_PAGE, count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvd.core.layout.shards import PageWindow
    from kvd.transfer.metadata import RegionNote
    from kvd.transfer.window_layout import WindowSource
    from kvd.types import Pages

    Words = NDArray[np.uint64]
    Ids = NDArray[np.int64]

CUT_BYTES = 512 * 2**10
DESCRIPTOR_COST_BYTES = 16 * 2**10
"""What one descriptor costs beyond its bytes, in bytes: 2 to 9 us at 2 to 10 GB/s."""
HANDLE_COST_BYTES = 32 * (CUT_BYTES + DESCRIPTOR_COST_BYTES)
"""16 MiB: a handle twice as large is 2 to 3 % faster end to end than 8, and a turn still ends in a
few milliseconds."""


class Grain(NamedTuple):
    """Of which size descriptors are at most, and what a handle costs that is made of them."""

    cut_bytes: int
    handle_cost_bytes: int


FINE = Grain(CUT_BYTES, HANDLE_COST_BYTES)
COARSE = Grain(64 * 2**20, 256 * 2**20)
"""From device to device of one host, by the devices: 94 GB/s in pieces of 512 KiB, 369 in such of
2 MiB, and a handle of this is done in a millisecond."""


class Writes(msgspec.Struct, frozen=True):
    """The descriptors of one post: rows of (address, bytes, device 0), and how handles divide them.

    Handle ``h`` is rows ``[bounds[h], bounds[h + 1])`` of both sides, ``sizes[h]`` bytes.
    ``whole_pages``: so many pages are written together, one such group after the other, and of each
    page as many bytes; 0: pages are whole when all are.
    """

    source: Words
    destination: Words
    bounds: list[int]
    sizes: list[int]
    whole_pages: int = 0

    @property
    def handles(self) -> int:
        """How many handles the post takes."""
        return len(self.bounds) - 1

    def rows(self, handle: int) -> tuple[Words, Words]:
        """The descriptors of one handle, of both sides."""
        low, high = self.bounds[handle], self.bounds[handle + 1]
        return self.source[low:high], self.destination[low:high]


def objection(
    source: Pages, destination: Pages, ours: RegionNote, theirs: RegionNote, split: int = 1
) -> str:
    """Why these pages must not be written, or an empty string."""
    return (
        _uneven(source, destination)
        or mismatch(ours, theirs, split)
        or _stray("source", source, ours, split)
        or _stray("destination", destination, theirs)
    )


def window_objection(
    source: Pages,
    destination: Pages,
    window: PageWindow,
    sources: Sequence[WindowSource],
    theirs: RegionNote,
) -> str:
    """Why these pieces of pages must not be written over that window, or an empty string."""
    why = _uneven(source, destination) or misfit(window, sources, theirs)
    strays_here = (_stray("source", source, note) for note, _ in sources)
    return why or next(filter(None, strays_here), "") or _stray("destination", destination, theirs)


def _uneven(source: Pages, destination: Pages) -> str:
    if len(source) == len(destination) and not len(source) % 4:
        return ""
    return (
        f"{count(source)} source pages for {count(destination)} destination pages; "
        "a post needs as many of one as of the other"
    )


def _stray(side: str, pages: Pages, region: RegionNote, cut: int = 1) -> str:
    wrong = strays(pages, region, cut)
    if not wrong.size:
        return ""
    return (
        f"{side} page {wrong[0]} is not a page of region {region.name!r}, whose "
        f"pages{f', cut into {cut},' if cut > 1 else ''} are {cut} to {region.pages * cut - 1}"
    )


def strays(pages: Pages, region: RegionNote, split: int = 1) -> NDArray[np.int32]:
    """Those that are no pages of the region, or pieces of its null page."""
    ids = np.frombuffer(pages, dtype="<i4")
    # Mostly none is: known by two passes that make no array.
    if not ids.size or (ids.min() // split > NULL_PAGE and ids.max() // split < region.pages):
        return ids[:0]
    return ids[(ids // split <= NULL_PAGE) | (ids // split >= region.pages)]


def writes(
    source: Pages,
    destination: Pages,
    ours: RegionNote,
    theirs: RegionNote,
    split: int = 1,
    grain: Grain = FINE,
) -> Writes:
    """The descriptors that write ``source`` of ``ours`` over ``destination`` of ``theirs``.

    ``objection`` must have found nothing.
    """
    return stretch_writes(source, destination, straight(ours, theirs, split), split, grain)


def stretch_writes(
    source: Pages,
    destination: Pages,
    stretches: Stretches,
    split: int = 1,
    grain: Grain = FINE,
) -> Writes:
    """The descriptors that write these stretches of ``source`` over those of ``destination``."""
    # Stretch by stretch, pages would be whole at the end only. Group by group they are before, and
    # no descriptor is the smaller for it: a group has as many pages as one goes over.
    group = _group_pages(stretches.size, grain)
    found = _segments(_ids(source), _ids(destination), stretches, split, group)
    rows = _cut(found.at, found.to, found.size, grain.cut_bytes)
    if stretches.size.size == 1:
        handle = _by_cost(rows.source[:, 1], grain)
        return _dealt(rows.source, rows.destination, handle, whole_pages=1)
    group_of = (found.first // group)[rows.segment]
    order = np.argsort(group_of, kind="stable")
    rows = _Cut(rows.source[order], rows.destination[order], rows.segment[order])
    handle = _by_cost(rows.source[:, 1], grain, group_of[order])
    return _dealt(rows.source, rows.destination, handle, whole_pages=group)


def _group_pages(size: Words, grain: Grain) -> int:
    """Pages that are written together: their stretches fill descriptors, and all of it a handle."""
    if size.size == 1:
        return 1
    pages = max(1, grain.cut_bytes // int(size.max()))
    return pages * max(1, grain.handle_cost_bytes // (pages * int(size.sum())))


def packed_writes(
    destination: Pages, theirs: RegionNote, handle_pages: int, window: PageWindow | None = None
) -> Writes:
    """The descriptors that write ``window`` of pages, packed ``handle_pages`` at a time.

    Source addresses count from where the pages of their handle are packed.
    """
    stretches = packed(theirs, window)
    to_ids = _ids(destination)
    from_ids = np.arange(to_ids.size, dtype=np.uint64) % np.uint64(handle_pages)
    found = _segments(from_ids, to_ids, stretches, 1)
    rows = _cut(found.at, found.to, found.size)
    handle = (found.first // handle_pages)[rows.segment]
    # They come stretch by stretch, and a handle wants all stretches of its own pages.
    if stretches.size.size > 1:
        order = np.argsort(handle, kind="stable")
        rows = _Cut(rows.source[order], rows.destination[order], rows.segment[order])
        handle = handle[order]
    return _dealt(rows.source, rows.destination, handle, whole_pages=1)


def one_after_another(plans: list[Writes]) -> Writes:
    """The handles of all of them."""
    bounds, sizes = [0], []
    for plan in plans:
        bounds += [bounds[-1] + bound for bound in plan.bounds[1:]]
        sizes += plan.sizes
    source = np.concatenate([plan.source for plan in plans])
    destination = np.concatenate([plan.destination for plan in plans])
    return Writes(
        source=source,
        destination=destination,
        bounds=bounds,
        sizes=sizes,
        whole_pages=plans[0].whole_pages if len(plans) == 1 else 0,
    )


def _dealt(source: Words, destination: Words, handle: NDArray[Any], *, whole_pages: int) -> Writes:
    """Descriptors and the handle that each belongs to, ascending."""
    bounds = [0]
    if handle.size:
        bounds += (np.flatnonzero(np.diff(handle)) + 1).tolist()
        bounds.append(int(handle.size))
    size = source[:, 1]
    sizes = np.add.reduceat(size, bounds[:-1]).tolist() if size.size else []
    return Writes(
        source=source,
        destination=destination,
        bounds=bounds,
        sizes=sizes,
        whole_pages=whole_pages,
    )


class _Cut(NamedTuple):
    """Descriptors of both sides, and which segment each is of."""

    source: Words
    destination: Words
    segment: Ids


def _cut(at: Words, to: Words, length: Words, cut_bytes: int = CUT_BYTES) -> _Cut:
    """Segments as descriptors."""
    most = np.uint64(cut_bytes)
    pieces = ((length + most - np.uint64(1)) // most).astype(np.int64)
    ends = pieces.cumsum()
    whole = np.arange(pieces.size).repeat(pieces)
    skip = (np.arange(whole.size) - (ends - pieces)[whole]).astype(np.uint64) * most
    size = np.minimum(most, length[whole] - skip)
    return _Cut(_rows(at[whole] + skip, size), _rows(to[whole] + skip, size), whole)


def _rows(address: Words, size: Words) -> Words:
    """(address, bytes, device 0) for each descriptor."""
    rows = np.zeros((size.size, 3), np.uint64)
    rows[:, 0] = address
    rows[:, 1] = size
    return rows


class _Segments(NamedTuple):
    """Runs of pages of one stretch that are in one piece on both sides.

    ``first``: where in the list of pages each begins.
    """

    at: Words
    to: Words
    size: Words
    first: Ids


def _segments(
    from_ids: Words, to_ids: Words, stretches: Stretches, split: int, group: int = 1
) -> _Segments:
    """The segments of all stretches, of several within one ``group`` of pages each.

    Stretches of neighbouring pages touch if nothing lies between them, pieces of one page always.
    Segments go on where both sides step by one and what they step over touches on both.
    """
    # By kind, because where a segment ends is the same for all stretches that touch alike.
    dense_here = stretches.at_step == stretches.size * np.uint64(split)
    dense_there = stretches.to_step == stretches.size
    kinds = dense_here * 2 + dense_there
    found = set(kinds.tolist())
    if len(found) == 1:
        firsts = _firsts(from_ids, to_ids, split, found.pop(), group)
        return _segments_of(from_ids, to_ids, stretches, firsts, split)
    parts = []
    for kind in sorted(found):
        alike = Stretches(*(column[kinds == kind] for column in stretches))
        firsts = _firsts(from_ids, to_ids, split, kind, group)
        parts.append(_segments_of(from_ids, to_ids, alike, firsts, split))
    return _Segments(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _firsts(from_ids: Words, to_ids: Words, split: int, kind: int, group: int) -> Ids:
    """Where segments begin: ``kind`` is 1 where pages touch over there, and 2 more where here."""
    is_first = np.ones(from_ids.size, np.bool_)
    if kind & 1:
        one = np.uint64(1)
        is_first[1:] = (from_ids[1:] - from_ids[:-1] != one) | (to_ids[1:] - to_ids[:-1] != one)
    # Pieces of one page touch always.
    if kind == 1:
        is_first[1:] |= from_ids[1:] % np.uint64(split) == 0
    if group > 1:
        is_first[::group] = True
    return np.flatnonzero(is_first)


def _segments_of(
    from_ids: Words, to_ids: Words, stretches: Stretches, firsts: Ids, split: int
) -> _Segments:
    """The segments of stretches that all begin anew at the same places of the list."""
    lengths = np.empty(firsts.size, np.uint64)
    lengths[:-1] = firsts[1:] - firsts[:-1]
    lengths[-1:] = from_ids.size - firsts[-1:]
    page, part = np.divmod(from_ids[firsts], np.uint64(split))
    at, at_step, to, to_step, size = (column[:, np.newaxis] for column in stretches)
    starts = at + at_step * page + size * part
    ends = to + to_step * to_ids[firsts]
    return _Segments(
        starts.ravel(),
        ends.ravel(),
        (size * lengths).ravel(),
        np.broadcast_to(firsts, starts.shape).ravel(),
    )


def _ids(pages: Pages) -> Words:
    return np.frombuffer(pages, dtype="<i4").astype(np.uint64)


def _by_cost(size: Words, grain: Grain, group_of: Ids | None = None) -> Words:
    """The handle of each descriptor: about 16 MiB in each, fewer bytes where pieces are small.

    With groups, which come one after the other, each begins with a handle of its own.
    """
    cost = size + np.uint64(DESCRIPTOR_COST_BYTES)
    before = np.cumsum(cost) - cost
    handle: Words
    if group_of is None or not size.size:
        handle = before // np.uint64(grain.handle_cost_bytes)
        return handle
    firsts = np.flatnonzero(np.diff(group_of, prepend=-1))
    counts = np.diff(firsts, append=size.size)
    inside = (before - before[firsts].repeat(counts)) // np.uint64(grain.handle_cost_bytes)
    # Ascending and different wherever either is.
    handle = group_of.astype(np.uint64) * (inside.max() + np.uint64(1)) + inside
    return handle
