"""Which bytes of the engine are which bytes of the pool: addresses and sizes, as columns.

    tensors of a layer | parts of a page -> stretches, joined where both go on -> columns of pieces

A block and a page are the same tokens, or a page is several blocks, or a block several pages: the
smaller one of the two is a **unit**. A piece is the part of one unit in one stretch; its addresses
are sums of two vectors, so a piece costs no Python.

Layers may be in groups that have blocks of their own for the same tokens: then blocks are rows, one
for each group, and a page is one block of each. Of tokens for which a group has no block, no piece
of its layers is.

Invariant: no piece leaves the block or the page that it is of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np

from kvd.client.mapping import bytes_per_page
from kvd.client.mover.engine_memory import unfit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kvd.client.mover.engine_memory import BlockLayout
    from kvd.wire.memory import ComponentMemory, TensorPlace

    Words = NDArray[np.uint64]
    Grid = NDArray[np.uint64]
    Numbers = NDArray[np.int64]

NO_BLOCK: Final = -1
"""In place of a block: this group of layers has none for these tokens, and nothing is copied."""

PIECES_AT_ONCE: Final = 2048
"""Of one order in one call: whoever is behind it waits for no more."""


class PieceColumns(NamedTuple):
    """Row by row: where in the engine's memory, where in the pool's, and how many bytes."""

    engine: Words
    pool: Words
    sizes: Words


class PieceUnits(NamedTuple):
    """Units ``[first, end)`` of an order."""

    first: int
    end: int


class PoolPlace(NamedTuple):
    """Of each page ``size`` bytes, ``stride`` apart, the first at ``offset``."""

    offset: int
    stride: int
    size: int


class PoolBytes(NamedTuple):
    """The memory of one component in this process, and how its pages lie in it."""

    memory: NDArray[np.uint8]
    places: tuple[PoolPlace, ...]

    @property
    def address(self) -> int:
        """Where it begins."""
        return self.memory.ctypes.data

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.memory.nbytes


def pool_bytes(component: ComponentMemory, memory: NDArray[np.uint8]) -> PoolBytes:
    """How the pages of a component lie in its memory."""
    places = [
        PoolPlace(
            offset=place.offset_bytes,
            stride=place.page_stride_bytes,
            size=bytes_per_page(place),
        )
        for place in component.tensors
    ]
    return PoolBytes(memory, tuple(places))


class _PieceStretch(msgspec.Struct):
    """Bytes of a unit that are one piece on both sides; steps lead to the next one of its kind.

    ``group``: whose row of blocks it goes by.
    """

    group: int
    engine: int
    block_step: int
    engine_unit_step: int
    pool: int
    page_step: int
    pool_unit_step: int
    size: int


class PieceTable:
    """How the blocks of some layers lie beside the pages of one component.

    Args:
        component: of the pool.
        groups: of each group of layers, by layer of the pool, the tensors of the engine, in the
            order of the pool's parts. Layers of the pool are counted through all groups.
        block_size: tokens of a block.
        interior: as ``Pool.interior``.
        address: where the component's memory begins in this process.
    """

    def __init__(
        self,
        component: ComponentMemory,
        groups: Sequence[Sequence[Sequence[BlockLayout]]],
        *,
        block_size: int,
        interior: str,
        address: int,
    ) -> None:
        self.component = component.name
        page_size = self.page_size = component.page_size
        if block_size < 1 or (page_size % block_size and block_size % page_size):
            raise unfit(
                f"blocks of {block_size} tokens and pages of {page_size}: one must be a multiple "
                "of the other"
            )
        self.blocks_per_page = max(1, page_size // block_size)
        self.pages_per_block = max(1, block_size // page_size)
        self.unit_tokens = min(page_size, block_size)
        self.n_pages = component.pages
        self.n_groups = len(groups)
        if self.n_groups > 1 and not self.is_even:
            raise unfit(
                f"blocks of {block_size} tokens and pages of {page_size}: of layers in "
                f"{self.n_groups} groups a page is one block of each"
            )
        layers = [(number, layer) for number, group in enumerate(groups) for layer in group]
        stretches = list(_stretches(self, component, layers, interior, address))
        self._group_bytes = [
            sum(stretch.size for stretch in stretches if stretch.group == group)
            for group in range(self.n_groups)
        ]
        self.unit_bytes = sum(self._group_bytes)
        """Of one unit, all layers."""
        self._take(_joined(stretches) if self.is_even else stretches)
        self.units_at_once = max(1, PIECES_AT_ONCE // len(self._sizes))

    @property
    def is_even(self) -> bool:
        """Whether a page is one block."""
        return self.blocks_per_page == self.pages_per_block == 1

    def _take(self, stretches: Sequence[_PieceStretch]) -> None:
        columns = zip(*(msgspec.structs.astuple(stretch) for stretch in stretches), strict=True)
        arrays = [np.array(column, np.uint64)[:, np.newaxis] for column in columns]
        self._group = arrays[0][:, 0].astype(np.int64)
        self._engine, self._block_step, self._engine_unit_step = arrays[1:4]
        self._pool, self._page_step, self._pool_unit_step = arrays[4:7]
        self._sizes = arrays[7][:, 0]
        goes_on = (self._block_step == arrays[7]) & (self._page_step == arrays[7])
        self._is_by_page = self.is_even and not goes_on.any()
        """No piece goes on in the next page: so a page is written from its beginning to its end."""

    def units(self, n_blocks: int, n_pages: int) -> int:
        """What so many blocks and pages have in common; the last one of either may go further."""
        return min(n_blocks * self.pages_per_block, n_pages * self.blocks_per_page)

    def bytes_of(self, blocks: Numbers, units: int) -> int:
        """What an order of these blocks copies."""
        if blocks.ndim == 1:
            return units * self.unit_bytes
        counts = (blocks != NO_BLOCK).sum(axis=1).tolist()
        return sum(n * size for n, size in zip(counts, self._group_bytes, strict=True))

    def pieces(self, blocks: Numbers, pages: Numbers, units: PieceUnits) -> PieceColumns:
        """Those of some units: what follows in both memories, or else in the pool, follows here.

        Args:
            blocks: their numbers; a row for each group of layers, where there are several.
            pages: of the same tokens.
            units: which of them.
        """
        if blocks.ndim > 1:
            return self._pieces_of_groups(blocks, pages, units)
        if self.is_even:
            chosen = slice(units.first, units.end)
            engine = self._engine + self._block_step * blocks[chosen].astype(np.uint64)
            pool = self._pool + self._page_step * pages[chosen].astype(np.uint64)
        else:
            numbers = np.arange(units.first, units.end)
            block, inside = np.divmod(numbers, self.pages_per_block)
            engine = self._engine + self._block_step * blocks[block].astype(np.uint64)
            engine += self._engine_unit_step * inside.astype(np.uint64)
            page, inside = np.divmod(numbers, self.blocks_per_page)
            pool = self._pool + self._page_step * pages[page].astype(np.uint64)
            pool += self._pool_unit_step * inside.astype(np.uint64)
        return self._in_order(engine, pool)

    def _in_order(self, engine: Grid, pool: Grid) -> PieceColumns:
        """Pieces of a grid, one row of it for each stretch and one column for each unit."""
        n_units = engine.shape[1]
        if n_units == 1:
            return PieceColumns(engine[:, 0], pool[:, 0], self._sizes)
        if self._is_by_page:
            sizes = np.tile(self._sizes, n_units)
            return PieceColumns(engine.T.reshape(-1), pool.T.reshape(-1), sizes)
        sizes = np.repeat(self._sizes, n_units)
        return PieceColumns(engine.reshape(-1), pool.reshape(-1), sizes)

    def _pieces_of_groups(self, blocks: Numbers, pages: Numbers, units: PieceUnits) -> PieceColumns:
        chosen = slice(units.first, units.end)
        of_stretch = blocks[self._group, chosen]
        engine = self._engine + self._block_step * of_stretch.astype(np.uint64)
        pool = self._pool + self._page_step * pages[chosen].astype(np.uint64)
        columns = self._in_order(engine, pool)
        there = of_stretch != NO_BLOCK
        is_there = (there.T if self._is_by_page else there).reshape(-1)
        if is_there.all():
            return columns
        return PieceColumns(*(column[is_there] for column in columns))


def _stretches(
    table: PieceTable,
    component: ComponentMemory,
    layers: Sequence[tuple[int, Sequence[BlockLayout]]],
    interior: str,
    address: int,
) -> Iterator[_PieceStretch]:
    by_layer: dict[int, list[TensorPlace]] = {}
    for place in component.tensors:
        by_layer.setdefault(place.layer, []).append(place)
    if table.is_even and _are_bytes(component, layers):
        yield from _of_bytes(component.tensors, layers, address)
        return
    if len(by_layer) != len(layers):
        raise unfit(
            f"{len(layers)} layers of the engine, and {len(by_layer)} of {component.name} in the "
            "pool: give those that this pool, or this shard of it, has"
        )
    for places, (group, tensors) in zip(by_layer.values(), layers, strict=True):
        layer = places[0].layer
        if len(places) != len(tensors):
            parts = ", ".join(place.part for place in places)
            raise unfit(
                f"{len(tensors)} tensors for layer {layer} of {component.name}, which has {parts}: "
                "give one for each, in this order"
            )
        for place, layout in zip(places, tensors, strict=True):
            for stretch in _of_part(table, place, layout, interior, address):
                stretch.group = group
                yield stretch


def _are_bytes(
    component: ComponentMemory, layers: Sequence[tuple[int, Sequence[BlockLayout]]]
) -> bool:
    """Whether a page is bytes that nobody tells apart, as many as the engine's layers have."""
    tensors = [tensor for _, tensors in layers for tensor in tensors]
    pages = sum(map(bytes_per_page, component.tensors))
    return all(place.part == "raw" for place in component.tensors) and (
        sum(tensor.block_bytes for tensor in tensors) == pages
    )


def _of_bytes(
    places: Sequence[TensorPlace],
    layers: Sequence[tuple[int, Sequence[BlockLayout]]],
    address: int,
) -> Iterator[_PieceStretch]:
    """Byte after byte, whatever the layers of either side have of it: cut where one of them ends.

    So layers of unlike sizes need no layers of the pool that are like them.
    """
    left = [(place, bytes_per_page(place)) for place in reversed(places)]
    done = 0  # of the last place
    for group, tensors in layers:
        for layout in tensors:
            begun = 0
            while begun < layout.block_bytes:
                place, page_bytes = left[-1]
                size = min(layout.block_bytes - begun, page_bytes - done)
                yield _PieceStretch(
                    group=group,
                    engine=layout.address + begun,
                    block_step=layout.step_bytes,
                    engine_unit_step=size,
                    pool=address + place.offset_bytes + done,
                    page_step=place.page_stride_bytes,
                    pool_unit_step=size,
                    size=size,
                )
                begun, done = begun + size, done + size
                if done == page_bytes:
                    left.pop()
                    done = 0


def _of_part(
    table: PieceTable, place: TensorPlace, layout: BlockLayout, interior: str, address: int
) -> Iterator[_PieceStretch]:
    """One stretch of a unit, or one for each head where tokens lie inside of heads."""
    page_bytes = bytes_per_page(place)
    per_page, per_block = table.blocks_per_page, table.pages_per_block
    what = f"layer {place.layer} {place.part} of {table.component}"
    if layout.block_bytes * per_page != page_bytes * per_block:
        raise unfit(
            f"{what} has {page_bytes} bytes a page, and the engine {layout.block_bytes} a block, "
            f"where {per_block} pages are {per_page} blocks: other heads, layers or another dtype"
        )
    if max(per_page, per_block) > 1 and (interior == "opaque" or place.part == "raw"):
        raise unfit(
            f"{what} is bytes that only the engine tells apart, so a page of it is one block: give "
            "blocks of the pool's page size, or a pool with pages of the block's"
        )
    rows = place.page_shape[0] if max(per_page, per_block) > 1 and interior == "hnd" else 1
    unit = min(page_bytes, layout.block_bytes) // rows
    for row in range(rows):
        yield _PieceStretch(
            group=0,
            engine=layout.address + row * (layout.block_bytes // rows),
            block_step=layout.step_bytes,
            engine_unit_step=unit,
            pool=address + place.offset_bytes + row * (page_bytes // rows),
            page_step=place.page_stride_bytes,
            pool_unit_step=unit,
            size=unit,
        )


def _joined(stretches: list[_PieceStretch]) -> list[_PieceStretch]:
    """Fewer: those that go on where the one before ends, on both sides and in every block."""
    found: list[_PieceStretch] = []
    for stretch in sorted(stretches, key=lambda stretch: stretch.pool):
        last = found[-1] if found else None
        if (
            last is not None
            and last.engine + last.size == stretch.engine
            and last.pool + last.size == stretch.pool
            and (last.group, last.block_step, last.page_step)
            == (stretch.group, stretch.block_step, stretch.page_step)
        ):
            last.size += stretch.size
        else:
            found.append(stretch)
    return found


def merged_pieces(columns: PieceColumns) -> PieceColumns:
    """As few rows: those that go on where the one before ends, in both memories."""
    engine, pool, sizes = columns
    goes_on = engine[:-1] + sizes[:-1] == engine[1:]
    if not goes_on.any():
        return columns
    goes_on &= pool[:-1] + sizes[:-1] == pool[1:]
    first = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    return PieceColumns(engine[first], pool[first], np.add.reduceat(sizes, first))


def cut_pieces(columns: PieceColumns, limit_bytes: int) -> list[PieceColumns]:
    """The same bytes in parts of so many each, but for the last; a piece may be cut."""
    ends = np.cumsum(columns.sizes)
    total = int(ends[-1])
    found = []
    for begin in range(0, total, limit_bytes):
        end = min(begin + limit_bytes, total)
        first = int(np.searchsorted(ends, np.uint64(begin), "right"))
        last = int(np.searchsorted(ends, np.uint64(end), "left"))
        engine, pool, sizes = (column[first : last + 1].copy() for column in columns)
        skip = np.uint64(begin - (int(ends[first]) - int(sizes[0])))
        sizes[-1] -= np.uint64(int(ends[last]) - end)
        sizes[0] -= skip
        engine[0] += skip
        pool[0] += skip
        found.append(PieceColumns(engine, pool, sizes))
    return found
