"""Windows of pages, and the pieces of other pages that fill them: which bytes correspond.

A window is some layers and some heads of a page. Its bytes have one order wherever they lie: layer
by layer, in each of them tensor by tensor (K, then V), slot by slot, head by head. Where all heads
are in it, a tensor is one stretch of memory; otherwise each slot of a tensor is one. Of pages whose
heads have their tokens together a tensor is a single slot, so its heads are one stretch too::

    a page of 2 layers      [L0 K: s0 h0h1 | s1 h0h1][L0 V: ...][L1 K: ...][L1 V: ...]
    window of layer 1       [L1 K][L1 V]                      neighbours here: one stretch
    window of head 1        s0 h1, s1 h1 of L0 K, then of L0 V, ...     a stretch for each slot

A piece is a window of our pages that goes over a window of the peer's. Neighbouring stretches are
joined where they touch on both sides, so whole layers of page-first memory are one again.

Invariant: the stretches of a piece, one after the other, are the bytes of its window in their
order, on either side.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from kvd.core.layout.geometry import PieceRow
from kvd.core.layout.shards import PageWindow, Piece, Pieced
from kvd.transfer.metadata import strips
from kvd.transfer.page_split import matched

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvd.transfer.metadata import RegionNote, Rows

    Words = NDArray[np.uint64]


SHAPES: Final = 256
"""Pairs of regions and windows that are remembered: every post between the same shards is alike,
and to work out the thousand stretches of one takes longer than to write a page."""


class WindowSource(NamedTuple):
    """A piece, and the region of ours that its pages lie in."""

    note: RegionNote
    piece: Piece


class Stretches(NamedTuple):
    """Memory that corresponds, stretch by stretch: an array each, one entry for each stretch.

    ``at`` and ``to``: the address of page 0's, here and there; ``at_step``, ``to_step``: how far it
    is to the next page's; ``size``: its bytes in one page of the peer.
    """

    at: Words
    at_step: Words
    to: Words
    to_step: Words
    size: Words


class _Places(NamedTuple):
    """One side of them."""

    start: Words
    step: Words
    size: Words


def whole(note: RegionNote) -> PageWindow:
    """All of a page of the region."""
    return PageWindow(first_layer=0, end_layer=note.layers, first_head=0, end_head=note.heads)


def tensors(note: RegionNote) -> int:
    """How many strips each layer of a page has."""
    return len(note.strips) // note.layers


def window_strips(note: RegionNote, window: PageWindow) -> tuple[int, ...]:
    """Bytes of each tensor of a page that are in the window."""
    each = tensors(note)
    heads = window.end_head - window.first_head
    sizes = note.strips[window.first_layer * each : window.end_layer * each]
    return tuple(size // note.heads * heads for size in sizes)


def beyond(window: PageWindow, note: RegionNote, where: str) -> str:
    """Why there is no such window in pages of the region, which is ``where``; or nothing."""
    if not note.heads:
        return (
            f"pages of region {note.name!r} {where} are not laid out by layers and heads, "
            "so only whole ones can be sent"
        )
    is_inside = (
        0 <= window.first_layer < window.end_layer <= note.layers
        and 0 <= window.first_head < window.end_head <= note.heads
    )
    if is_inside:
        return ""
    return (
        f"{_said(window)} are no part of a page of region {note.name!r} {where}, which has "
        f"{note.layers} layers of {note.heads} heads"
    )


def untiled(window: PageWindow, pieces: Sequence[Piece]) -> str:
    """Why the pieces do not fill the window, each of its heads of each layer once; or nothing."""
    for piece in pieces:
        ours, theirs = piece.ours, piece.theirs
        if _extent(ours) != _extent(theirs):
            return f"{_said(ours)} of shard {piece.shard} here cannot be {_said(theirs)} there"
        if not _is_within(theirs, window):
            return f"{_said(theirs)} of a piece are not within {_said(window)}, which it is to fill"
    for at, piece in enumerate(pieces):
        for other in pieces[:at]:
            if _overlap(piece.theirs, other.theirs):
                return f"two pieces go over {_said(piece.theirs)} and {_said(other.theirs)}"
    filled = sum(piece.theirs.cells for piece in pieces)
    if filled != window.cells:
        return f"pieces fill {filled} of the {window.cells} heads in {_said(window)}"
    return ""


def unlike(one: RegionNote, here: str, other: RegionNote, there: str) -> str:
    """Why heads of pages of two regions are not the same bytes, or nothing."""
    found = [(note.page_tokens, _head(note)) for note in (one, other)]
    if found[0] == found[1]:
        return ""
    texts = [f"{slots} slots of {head} bytes" for slots, head in found]
    return (
        f"a head of a layer has {texts[0]} in region {one.name!r} {here} and {texts[1]} in "
        f"{other.name!r} {there}; lay both out alike"
    )


def unmade(window: PageWindow, sources: Sequence[WindowSource]) -> str:
    """Why no such window can be made of these pieces of ours, or nothing."""
    return next((why for why in _unmade(window, sources) if why), "")


def misfit(window: PageWindow, sources: Sequence[WindowSource], theirs: RegionNote) -> str:
    """Why the pieces must not go over that window of the peer's pages, or nothing."""
    return (
        beyond(window, theirs, "there")
        or unmade(window, sources)
        or unlike(sources[0].note, "here", theirs, "there")
    )


def _unmade(window: PageWindow, sources: Sequence[WindowSource]) -> Iterator[str]:
    yield from (beyond(piece.ours, note, "here") for note, piece in sources)
    yield untiled(window, [piece for _, piece in sources])
    first = sources[0].note
    yield from (unlike(first, "here", note, "here") for note, _ in sources[1:])


def _head(note: RegionNote) -> list[int]:
    """Bytes of one head of each tensor of a layer, in one slot."""
    parts = note.heads * note.page_tokens
    return [size // parts for size in note.strips[: tensors(note)]]


def straight(ours: RegionNote, theirs: RegionNote, split: int = 1) -> Stretches:
    """Whole pages of the peer, pages of ours or ``split`` of them in one.

    ``page_split.mismatch`` must have found nothing.
    """
    here, there = matched(ours, theirs, split)
    at, to = _rows(here, ours.address), _rows(there, theirs.address)
    return Stretches(at.start, at.step, to.start, to.step, to.size)


@lru_cache(SHAPES)
def pieced(sources: tuple[WindowSource, ...], theirs: RegionNote) -> Stretches:
    """The pieces of one window of the peer's pages; nothing may speak against them."""
    found = [_piece(source, theirs) for source in sources]
    return Stretches(*(np.concatenate(columns) for columns in zip(*found, strict=True)))


@lru_cache(SHAPES)
def packed(theirs: RegionNote, window: PageWindow | None) -> Stretches:
    """A window of the peer's pages, or all of it, from where it is packed from address 0 on."""
    if window is None:
        to = _rows(theirs.rows, theirs.address)
    else:
        to = _places(theirs, window, is_sliced=_is_sliced(theirs, window))
    ends = np.cumsum(to.size, dtype=np.uint64)
    step = np.repeat(ends[-1:], to.size.size)
    return _joined(Stretches(ends - to.size, step, to.start, to.step, to.size))


def window_rows(note: RegionNote, window: PageWindow) -> Rows:
    """Where a window of all heads lies: row i is the i-th of its stretches."""
    places = _places(note, window, is_sliced=False)
    columns = _joined(Stretches(places.start, places.step, *places))
    base = note.address
    return tuple(
        PieceRow(at - base, step, size)
        for at, step, size in zip(
            columns.at.tolist(), columns.at_step.tolist(), columns.size.tolist(), strict=True
        )
    )


def bands(window: PageWindow, pieces: Sequence[Piece], layers: int) -> list[Pieced]:
    """The window, so many layers at a time, and what each piece has of them."""
    firsts = range(window.first_layer, window.end_layer, layers)
    cuts = [
        msgspec.structs.replace(
            window, first_layer=first, end_layer=min(first + layers, window.end_layer)
        )
        for first in firsts
    ]
    return [Pieced(cut, tuple(_clipped(cut, pieces))) for cut in cuts]


def _clipped(band: PageWindow, pieces: Sequence[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        ours, theirs = piece.ours, piece.theirs
        first = max(theirs.first_layer, band.first_layer)
        end = min(theirs.end_layer, band.end_layer)
        # A piece that has none of these layers has no part in the band.
        if first < end:
            back = ours.first_layer - theirs.first_layer
            yield Piece(
                piece.shard,
                msgspec.structs.replace(ours, first_layer=first + back, end_layer=end + back),
                msgspec.structs.replace(theirs, first_layer=first, end_layer=end),
            )


def _piece(source: WindowSource, theirs: RegionNote) -> Stretches:
    ours, piece = source
    # If one side goes slot by slot the other must: stretches correspond one to one.
    is_sliced = _is_sliced(ours, piece.ours) or _is_sliced(theirs, piece.theirs)
    at = _places(ours, piece.ours, is_sliced=is_sliced)
    to = _places(theirs, piece.theirs, is_sliced=is_sliced)
    return _joined(Stretches(at.start, at.step, to.start, to.step, to.size))


def _places(note: RegionNote, window: PageWindow, *, is_sliced: bool) -> _Places:
    """Where the tensors of a window lie, or their slots."""
    each = tensors(note)
    rows = strips(note)[window.first_layer * each : window.end_layer * each]
    start, step, size = _rows(rows, note.address)
    if not is_sliced:
        return _Places(start, step, size)
    slots = note.page_tokens
    slot = size // np.uint64(slots)
    head = slot // np.uint64(note.heads)
    first = start + head * np.uint64(window.first_head)
    token: Words = np.arange(slots).astype(np.uint64)
    starts = first[:, np.newaxis] + slot[:, np.newaxis] * token
    wide = head * np.uint64(window.end_head - window.first_head)
    return _Places(starts.ravel(), step.repeat(slots), wide.repeat(slots))


def _rows(rows: Sequence[PieceRow], address: int) -> _Places:
    columns = np.array([(r.offset_bytes, r.stride_bytes, r.piece_bytes) for r in rows], np.uint64)
    start, step, size = columns.T
    return _Places(start + np.uint64(address), step, size)


def _joined(found: Stretches) -> Stretches:
    """Neighbours that touch on both sides as one."""
    at, at_step, to, to_step, size = found
    # In the next page too, not in page 0 alone: that is what equal steps say.
    touches = (
        (at[:-1] + size[:-1] == at[1:])
        & (to[:-1] + size[:-1] == to[1:])
        & (at_step[:-1] == at_step[1:])
        & (to_step[:-1] == to_step[1:])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~touches)))
    sizes = np.add.reduceat(size, firsts)
    return Stretches(at[firsts], at_step[firsts], to[firsts], to_step[firsts], sizes)


def _is_sliced(note: RegionNote, window: PageWindow) -> bool:
    """Whether some heads of the region's pages are not in the window."""
    return window.end_head - window.first_head < note.heads


def _is_within(part: PageWindow, window: PageWindow) -> bool:
    return (
        window.first_layer <= part.first_layer < part.end_layer <= window.end_layer
        and window.first_head <= part.first_head < part.end_head <= window.end_head
    )


def _overlap(one: PageWindow, other: PageWindow) -> bool:
    return (max(one.first_layer, other.first_layer) < min(one.end_layer, other.end_layer)) and max(
        one.first_head, other.first_head
    ) < min(one.end_head, other.end_head)


def _extent(window: PageWindow) -> tuple[int, int]:
    return window.end_layer - window.first_layer, window.end_head - window.first_head


def _said(window: PageWindow) -> str:
    return (
        f"layers {window.first_layer} to {window.end_layer} and heads {window.first_head} to "
        f"{window.end_head}"
    )
