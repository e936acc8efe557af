"""Pages of shards: what lies in each layer and head of each of them, and what posts make of it.

A page of a shard is the pages of its cells, one (layer, head) after the other, each of marks as in
``slots``; the mark of a token differs from cell to cell, so that KV in the wrong head is found.
What a post makes of a page goes over the cells of its window, once for each handoff.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import xxhash
from typing_extensions import override

from kvd.core.layout.shards import PageWindow, Shard, Straight
from kvd.core.layout.spec import (
    Component,
    HeldShards,
    Mha,
    PageOrder,
    PoolSpec,
    page_bytes,
    shard_of,
    shard_region,
    shards_of,
)
from kvd.types import ID_BYTES, Pages, Tokens, count, page_ids
from tests.core.side import PAGE
from tests.property.slots import MARK, SlotSide, SlotWorld

if TYPE_CHECKING:
    from kvd.core import effects
    from tests.core.side import Grant

Cell = tuple[int, int]
"""Layer and head of the model."""


def cells_of(part: Shard | PageWindow) -> list[Cell]:
    """Layer by layer, head by head."""
    layers, heads = (part.first_layer, part.end_layer), (part.first_head, part.end_head)
    return list(itertools.product(range(*layers), range(*heads)))


class CellSide(SlotSide):
    """A side whose pool has shards."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        return shards_of(self.config.spec)

    @override
    def regions_of(self, component: Component) -> list[tuple[str, list[str]]]:
        return [
            (shard_region(component.name, number), [f"{a}{b}" for a, b in cells_of(shard)])
            for number, shard in enumerate(self.shards)
        ]

    @override
    def made_of(self, post: effects.Post, page: int, piece: int) -> str:
        if isinstance(post.making, Straight):
            region = shard_region(post.component, post.making.shard)
            return self.memory_of(region).get(page, "?")
        over: dict[Cell, str] = {}
        for one in post.making.pieces:
            inside = PageWindow(0, *self._size(one.shard))
            region = shard_region(post.component, one.shard)
            held = self._cut(self.memory_of(region).get(page), inside)
            for ours, theirs in zip(cells_of(one.ours), cells_of(one.theirs), strict=True):
                assert theirs not in over, f"cell {theirs} is made of two pieces"
                over[theirs] = held[ours]
        assert sorted(over) == cells_of(post.making.window), "pieces do not tile their window"
        return "".join(over[cell] for cell in cells_of(post.making.window))

    @override
    def put(self, post: effects.Post, page: int, what: str) -> None:
        memory = self.memory_of(shard_region(post.component, post.peer_shard))
        whole = PageWindow(0, *self._size(post.peer_shard))
        window = whole if isinstance(post.making, Straight) else post.making.window
        held = self._cut(memory.get(page), whole)
        new = self._cut(what, window)
        assert set(new) <= set(held), f"{window} is not of shard {post.peer_shard}"
        memory[page] = "".join((held | new).values())

    @override
    def receive_page(self, grant: Grant, page: int, what: str, post: effects.Post) -> None:
        landed = (grant, page, post.peer_shard)
        assert landed not in self.landed, f"written twice: {landed}"
        self.landed.add(landed)
        super().receive_page(grant, page, what, post)

    @override
    def seen(self, verify: effects.Verify, page: int) -> str:
        held = self.memory_of(shard_region(verify.component, verify.shard)).get(page, "?")
        if verify.window is None:
            return held
        parts = self._cut(held, PageWindow(0, *self._size(verify.shard)))
        return "".join(parts[cell] for cell in cells_of(verify.window))

    @override
    def bytes_of(self, post: effects.Post) -> int:
        component = self.config.spec.components[self.config.spec.index(post.component)]
        whole = page_bytes(component)
        if isinstance(post.making, Straight):
            return whole
        cells = len(cells_of(self.shards[0]))
        return whole * len(cells_of(post.making.window)) // cells

    def _size(self, shard: int) -> tuple[int, int, int]:
        one = self.shards[shard]
        return one.end_layer - one.first_layer, 0, one.end_head - one.first_head

    def _cut(self, held: str | None, window: PageWindow) -> dict[Cell, str]:
        """By cell; nothing was written yet where ``held`` is none, or not of this shape."""
        cells = cells_of(window)
        size = self.config.spec.components[0].page_size * MARK
        text = held or ""
        if len(text) != size * len(cells):
            text = "." * size * len(cells)
        return {cell: text[at * size : (at + 1) * size] for at, cell in enumerate(cells)}


class CellWorld(SlotWorld):
    side = CellSide


# ---- a prompt as one engine writes it, and another one finds it ----------------------------------


def sharded(layers: int, heads: int, shards: tuple[Shard, ...], pages: int = 64) -> PoolSpec:
    """A pool of these shards of a model."""
    kv = Component("kv", layers, Mha(heads, 1, 1, "float32"), PAGE)
    held = None if shards == (Shard(0, layers, 0, heads),) else HeldShards(layers, heads, shards)
    part = shard_of(kv, shards[0])
    return PoolSpec("main", "mha", PageOrder.PAGE_FIRST, (part,), (pages,), (13,), held=held)


def fill(side: CellSide, pages: bytes, toks: Tokens) -> None:
    """An engine writes each head of each layer to its place in its shard."""
    for region, cells in side.regions_of(side.config.spec.components[0]):
        for number, page in enumerate(page_ids(Pages(pages))[: -(-count(toks) // PAGE)]):
            side.memory_of(region)[page] = _page_of(cells, toks, number)


def check(side: CellSide, pages: bytes, toks: Tokens) -> None:
    """Every head of every layer of the prompt is in its place in every shard."""
    for region, cells in side.regions_of(side.config.spec.components[0]):
        for number, page in enumerate(page_ids(Pages(pages))[: -(-count(toks) // PAGE)]):
            held = side.memory_of(region).get(page)
            assert held == _page_of(cells, toks, number), (region, number)


def _page_of(cells: list[str], toks: Tokens, number: int) -> str:
    mark = xxhash.xxh32_hexdigest(toks[: (number + 1) * PAGE * ID_BYTES])[: MARK - 2]
    return "".join(mark + cell for cell in cells for _ in range(PAGE))
