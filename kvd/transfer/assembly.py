"""How bytes of pages are read in the order of the peer's page: in place, or brought together.

A merge of two shards of one node, page-first, both copied into a row of memory of their own::

    shard 0, page 7   [L0 K: s0 h0, s1 h0][L0 V: s0 h0, s1 h0]
    shard 1, page 7   [L0 K: s0 h1, s1 h1][L0 V: s0 h1, s1 h1]
    together          [L0 K: s0 h0 h1, s1 h0 h1][L0 V: s0 h0 h1, s1 h0 h1]

One assignment moves a tensor of some layers of a run of pages; numpy lets go of the interpreter
meanwhile. Some layers, because what lies between the heads of one piece are those of another: what
is brought together for two in turns is read from memory once, and from the cache by the second.

What is summed of a page is read in place, where that is a few stretches in the order of the sum:
whole pages, and windows of all heads. Slots or heads of a page are many small ones: they are
gathered, some pages at a time, into memory that stays in the cache.

Pages that the processor cannot read come by the copy engine into registered memory of the thread
that reads them, in the order of their bytes, a few megabytes at a time, the next while these are
summed (see ``device_streams``). For windows they are laid down in memory of their own, where they
are pieces like any others.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from kvd.core.layout.geometry import PieceRow
from kvd.core.layout.shards import PageWindow
from kvd.transfer.copies import Area
from kvd.transfer.metadata import HOST, RegionNote, strips
from kvd.transfer.window_layout import tensors, window_strips

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from typing_extensions import Buffer

    from kvd.core.layout.shards import Piece
    from kvd.transfer.copies import Bytes
    from kvd.transfer.metadata import Rows
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
        # One room for all: what is summed must still be in the processor's cache.
        room = np.empty((min(stride, ids.size), self.page_bytes), np.uint8)
        for low in range(0, ids.size, stride):
            some = ids[low : low + stride]
            self._gather(some, room[: some.size])
            for row in room[: some.size]:
                yield (row,)


class Brought:
    """Whole pages, or pieces of them, of memory that the processor cannot read."""

    def __init__(self, area: Area, split: int) -> None:
        self._area = area
        self._split = split
        self.page_bytes: int = area.note.page_bytes // split

    def pages(self, ids: Ids) -> Iterator[Iterable[Buffer]]:
        """What is summed of each page; to be used, to its end, before the next is asked for."""
        stretches = self._area.stretches(self._split, ids)
        rest = np.zeros(0, np.uint8)
        for _ in range(ids.size):
            if not rest.size:
                rest = next(stretches)
            if rest.size >= self.page_bytes:
                page, rest = rest[: self.page_bytes], rest[self.page_bytes :]
                yield (page.data,)
            else:  # it is larger than a stretch: each part has to be summed before the next comes
                yield self._parts(rest, stretches)
                rest = rest[:0]

    def _parts(self, first: Bytes, stretches: Iterator[Bytes]) -> Iterator[Buffer]:
        """A page in several stretches, of which none is of another page too."""
        yield first.data
        left = self.page_bytes - first.size
        while left:
            part = next(stretches)
            yield part.data
            left -= part.size


Reading = InPlace | Gathered | Brought


class _Grid(NamedTuple):
    """A window of one tensor of all pages: an array ``(pages, layers, slots, bytes)``.

    Or of all tensors where they follow one another like layers of one: ``layers`` are theirs.
    """

    offset: int
    shape: tuple[int, int, int]
    steps: tuple[int, int, int, int]


class _Move(NamedTuple):
    """What one assignment brings to its place."""

    read: Bytes
    store: _Grid


class Assembly:
    """A window of the peer's pages, made of pages of ours."""

    def __init__(self, window: PageWindow, pieces: Sequence[tuple[Area, Piece]]) -> None:
        """``pieces`` tile the window."""
        made = _packed_note(window, pieces)
        self.page_bytes = made.page_bytes
        sides = [
            (_Tensors(area.note, piece.ours), _Tensors(made, _from(window, piece)))
            for area, piece in pieces
        ]
        # As one where both sides allow it: memory is read in one sweep, not tensor by tensor.
        is_even = all(tensors.is_even for side in sides for tensors in side)
        self._moves = [
            _Move(area.array(read.offset, read.shape, read.steps), store)
            for (area, _), side in zip(pieces, sides, strict=True)
            for read, store in zip(
                *(tensors.grids(is_even=is_even) for tensors in side), strict=True
            )
        ]
        self._layers = max(store.shape[0] for _, store in self._moves)

    def gather(self, ids: Ids, into: Bytes) -> None:
        """The window of each page becomes a row of ``into``, in the order of the window's bytes."""
        for _ in self.steps(ids, into, into.size):
            pass

    def steps(self, ids: Ids, into: Bytes, step_bytes: int) -> Iterator[None]:
        """As ``gather``, at each step as many pages or layers as have so many bytes."""
        stores = [
            np.ndarray((ids.size, *grid.shape), np.uint8, into.data, grid.offset, grid.steps)
            for _, grid in self._moves
        ]
        pages = max(1, step_bytes // self.page_bytes)
        layers = max(1, step_bytes * self._layers // self.page_bytes)
        # Run by run: an assignment of many pages costs little more than one of a single page.
        cuts = np.flatnonzero(np.diff(ids) != 1) + 1
        for first, end in pairwise([0, *cuts.tolist(), ids.size]):
            for low in range(first, end, pages):
                high, page = min(low + pages, end), int(ids[low])
                for layer in range(0, self._layers, layers):
                    some = slice(layer, layer + layers)
                    for (read, _), store in zip(self._moves, stores, strict=True):
                        store[low:high, some] = read[page : page + high - low, some]
                    yield


class FetchedWindows:
    """A window of the peer's pages, made of pages of ours that lie on devices."""

    def __init__(self, window: PageWindow, pieces: Sequence[tuple[Area, Piece]]) -> None:
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
    # Of none only the shape is asked for.
    if ids.size:
        area.gather(1, ids, room)
    rows = (PieceRow(0, size, size),)
    sizes = tuple(row.piece_bytes for row in strips(note))
    fetched = msgspec.structs.replace(
        note,
        name="fetched",
        address=0,
        region_bytes=room.size,
        pages=ids.size,
        rows=rows,
        strips=sizes,
        place=HOST,
    )
    return Area(fetched, room.ravel())


def _packed_note(window: PageWindow, pieces: Sequence[tuple[Area, Piece]]) -> RegionNote:
    """One page that is nothing but the window, as if it were a region.

    All layers are alike, so those of the first piece tell of all.
    """
    area, piece = pieces[0]
    note, ours = area.note, piece.ours
    heads, layers = window.end_head - window.first_head, window.end_layer - window.first_layer
    part_heads = ours.end_head - ours.first_head
    layer = window_strips(note, ours)[: tensors(note)]
    sizes = tuple(size // part_heads * heads for size in layer) * layers
    total = sum(sizes)
    return RegionNote(
        name="packed",
        address=0,
        region_bytes=total,
        pages=1,
        page_bytes=total,
        rows=(PieceRow(0, total, total),),
        page_tokens=note.page_tokens,
        strips=sizes,
        layers=layers,
        heads=heads,
    )


def _from(window: PageWindow, piece: Piece) -> PageWindow:
    """What the piece goes over, counted from the window's beginning."""
    theirs = piece.theirs
    return PageWindow(
        first_layer=theirs.first_layer - window.first_layer,
        end_layer=theirs.end_layer - window.first_layer,
        first_head=theirs.first_head - window.first_head,
        end_head=theirs.end_head - window.first_head,
    )


class _Tensors:
    """Where the tensors of a window lie, layer by layer."""

    def __init__(self, note: RegionNote, window: PageWindow) -> None:
        self._note = note
        self._window = window
        self._each = tensors(note)
        self._rows = strips(note)[window.first_layer * self._each : window.end_layer * self._each]

    @property
    def is_even(self) -> bool:
        """Whether all are alike, and each is as far from the one before it as all others."""
        alike = {(row.stride_bytes, row.piece_bytes) for row in self._rows}
        steps = {after.offset_bytes - row.offset_bytes for row, after in pairwise(self._rows)}
        return len(alike) == 1 and len(steps) <= 1

    def grids(self, *, is_even: bool) -> list[_Grid]:
        """A grid of all of them, or one of each tensor."""
        each = 1 if is_even else self._each
        return [self._grid(self._rows[tensor::each]) for tensor in range(each)]

    def _grid(self, rows: Rows) -> _Grid:
        window, slots = self._window, self._note.page_tokens
        first = rows[0]
        step = rows[-1].offset_bytes - rows[-2].offset_bytes if len(rows) > 1 else 0
        slot = first.piece_bytes // slots
        head = slot // self._note.heads
        return _Grid(
            first.offset_bytes + window.first_head * head,
            (len(rows), slots, (window.end_head - window.first_head) * head),
            (first.stride_bytes, step, slot, 1),
        )
