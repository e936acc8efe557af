"""From a post to what is written: the regions it names, what speaks against it, its descriptors.

A post names a component. Whole pages come from one shard of ours; a window of the peer's pages from
one or several. Where the pieces are small and those of the window itself are fewer, they are packed
first (see ``staging``); from memory that the processor cannot read they go as they lie, always.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvd.core.layout.shards import Pieced, Straight
from kvd.core.layout.spec import shard_region
from kvd.transfer.assembly import Assembly
from kvd.transfer.descriptors import (
    COARSE,
    FINE,
    Grain,
    Writes,
    objection,
    one_after_another,
    packed_writes,
    stretch_writes,
    window_objection,
    writes,
)
from kvd.transfer.metadata import MemoryKind
from kvd.transfer.nixl import Sides
from kvd.transfer.staging import (
    SLOT_BYTES,
    Band,
    Packing,
    is_worth_gathering,
    is_worth_packing,
)
from kvd.transfer.window_layout import SHAPES, WindowSource, bands, packed, pieced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from numpy.typing import NDArray

    from kvd.core.effects import Post
    from kvd.core.layout.shards import PageWindow, Piece
    from kvd.transfer.copies import Area, Bytes
    from kvd.transfer.descriptors import Words
    from kvd.transfer.metadata import RegionNote


class FoundRegions(NamedTuple):
    """The regions of a post: of whole pages one of ours, otherwise one for each piece."""

    ours: tuple[Area, ...]
    theirs: RegionNote


class PostPlan(NamedTuple):
    """What a post writes, how its pages are packed before, if they are, and the kinds of memory."""

    writes: Writes
    packing: Packing | None
    sides: Sides


def found(
    order: Post, ours: Mapping[str, Area], theirs: Mapping[str, RegionNote]
) -> FoundRegions | str:
    """The regions of a post against which nothing speaks, or what does."""
    making = order.making
    shards = (
        [making.shard] if isinstance(making, Straight) else [piece.shard for piece in making.pieces]
    )
    names = [shard_region(order.component, shard) for shard in shards]
    missing = [name for name in names if name not in ours]
    if missing:
        return f"this node has no region {missing[0]!r}"
    there = theirs.get(shard_region(order.component, order.peer_shard))
    if there is None:
        name = shard_region(order.component, order.peer_shard)
        return f"peer {order.incarnation} has no region {name!r}"
    areas = tuple(ours[name] for name in names)
    return _objection(order, areas, there) or FoundRegions(areas, there)


def direct(order: Post, regions: FoundRegions, grain: Grain = FINE) -> Writes:
    """The descriptors that write a post from where its pages lie."""
    match order.making:
        case Straight():
            (area,) = regions.ours
            notes = area.note, regions.theirs
            return writes(order.source, order.destination, *notes, order.split, grain)
        case Pieced(_, pieces):
            stretches = pieced(_sources(regions, pieces), regions.theirs)
            return stretch_writes(order.source, order.destination, stretches, grain=grain)


def plan(
    order: Post, regions: FoundRegions, is_direct: Callable[[Sides], bool] | None = None
) -> PostPlan:
    """How a post is written; ``is_direct`` says whether devices copy it among themselves."""
    made = None
    # Packing is copying by the processor, which a device's memory is out of reach for.
    if all(area.is_readable for area in regions.ours):
        made = _packed(order, regions)
    if made is None:
        kinds = Sides(regions.ours[0].note.place.kind, regions.theirs.place.kind)
        grain = COARSE if is_direct is not None and is_direct(kinds) else FINE
        made = PostPlan(direct(order, regions, grain), None, kinds)
        for area in regions.ours:
            _lie_on(made.writes.source, area.note)
    # Behind both ways of planning: the peer's memory is where it is, however ours gets there.
    _lie_on(made.writes.destination, regions.theirs)
    return made


def _lie_on(rows: Words, note: RegionNote) -> None:
    """Name the device of those descriptors that are of this region; no two share an address."""
    if note.place.device:
        begin = np.uint64(note.address)
        is_inside = (rows[:, 0] >= begin) & (rows[:, 0] - begin < np.uint64(note.region_bytes))
        rows[is_inside, 2] = note.place.device


def _packed(order: Post, regions: FoundRegions) -> PostPlan | None:
    """What is written of a post when its pages are packed, where that is faster."""
    theirs, split = regions.theirs, order.split
    match order.making:
        case Straight():
            (area,) = regions.ours
            if not is_worth_packing(area.note, theirs, split):
                return None
            band = Band(partial(_gather, area, split), theirs.page_bytes)
            packing = Packing((area.note.name,), order.source, [band])
            made = packed_writes(order.destination, theirs, packing.handle_pages)
            return PostPlan(made, packing, Sides(MemoryKind.DRAM, theirs.place.kind))
        case Pieced() as making:
            found = _assembled(regions, making)
            return None if found is None else _in_bands(order, regions, found)


class _Band(NamedTuple):
    """Some layers of a window, and how they are brought together."""

    window: PageWindow
    assembly: Assembly


@lru_cache(SHAPES)
def _assembled(regions: FoundRegions, making: Pieced) -> list[_Band] | None:
    """As many layers at a time as fit into a slot; None where the pieces go as they lie."""
    window, pieces = making.window, making.pieces
    lying = pieced(_sources(regions, pieces), regions.theirs)
    together = packed(regions.theirs, window)
    layers = window.end_layer - window.first_layer
    fitting = SLOT_BYTES * layers // int(together.size.sum())
    # Not even one layer of a page fits into a slot.
    if not fitting or not is_worth_gathering(lying, together):
        return None
    areas = dict(zip((piece.shard for piece in pieces), regions.ours, strict=True))
    return [
        _Band(
            part.window,
            Assembly(part.window, [(areas[piece.shard], piece) for piece in part.pieces]),
        )
        for part in bands(window, pieces, fitting)
    ]


def _gather(
    area: Area, split: int, ids: NDArray[np.int32], into: Bytes, _step_bytes: int
) -> Iterator[None]:
    """Whole pages or pieces of them, in one step."""
    area.gather(split, ids, into)
    yield


def _in_bands(order: Post, regions: FoundRegions, found: list[_Band]) -> PostPlan:
    """The first of these layers of all pages, then the next."""
    wanted = [Band(band.assembly.steps, band.assembly.page_bytes) for band in found]
    names = tuple(area.note.name for area in regions.ours)
    packing = Packing(names, order.source, wanted)
    made = [
        packed_writes(order.destination, regions.theirs, packing.handle_pages, band.window)
        for band in found
    ]
    sides = Sides(MemoryKind.DRAM, regions.theirs.place.kind)
    return PostPlan(one_after_another(made), packing, sides)


def _objection(order: Post, areas: tuple[Area, ...], theirs: RegionNote) -> str:
    making, split = order.making, order.split
    if split != 1 and (making != Straight() or order.peer_shard):
        return (
            f"pages of region {order.component!r} cannot be cut into {split} pieces on their way "
            f"between shards, here to shard {order.peer_shard} of the peer; use pages of one size "
            "on both sides"
        )
    match making:
        case Straight():
            return objection(order.source, order.destination, areas[0].note, theirs, split)
        case Pieced(window, pieces):
            sources = [
                WindowSource(area.note, piece) for area, piece in zip(areas, pieces, strict=True)
            ]
            return window_objection(order.source, order.destination, window, sources, theirs)


def _sources(regions: FoundRegions, pieces: tuple[Piece, ...]) -> tuple[WindowSource, ...]:
    return tuple(
        WindowSource(area.note, piece) for area, piece in zip(regions.ours, pieces, strict=True)
    )
