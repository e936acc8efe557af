"""Pools of one model, sharded in one way or another, and its KV element by element."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvd.core.effects import Post
from kvd.core.layout.geometry import Geometry, geometry
from kvd.core.layout.shards import Shard, tp_shards
from kvd.core.layout.spec import (
    DTYPE_BYTES,
    Component,
    Interior,
    Layout,
    Mha,
    Mla,
    PageOrder,
    shard_region,
)
from kvd.transfer.copies import Area
from tests.transfer.layouts import ids, note

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class Model(NamedTuple):
    """What is cut into shards."""

    layers: int
    layout: Layout
    page_tokens: int
    interior: Interior = Interior.NHD

    @property
    def heads(self) -> int:
        return self.layout.heads if isinstance(self.layout, Mha) else 1

    @property
    def all(self) -> Shard:
        return Shard(0, self.layers, 0, self.heads)


MHA = Model(4, Mha(4, 6, 2, "bfloat16"), 4)
LATENT = Model(4, Mla(5, 2, "uint8"), 4)
BY_HEAD = MHA._replace(interior=Interior.HND)
TOGETHER = BY_HEAD._replace(layout=Mha(4, 6, 0, "bfloat16"))
"""K and V of a head are one: a tensor for each layer."""


def memory_of(model: Model, shard: Shard, pages: int, order: PageOrder) -> Geometry:
    layout = model.layout
    if isinstance(layout, Mha):
        layout = msgspec.structs.replace(layout, heads=shard.end_head - shard.first_head)
    layers = shard.end_layer - shard.first_layer
    component = Component("kv", layers, layout, model.page_tokens, interior=model.interior)
    return geometry(component, pages=pages, order=order)


class Element(NamedTuple):
    """One head of one slot of one tensor, in the model's numbers, and its bytes of every page."""

    layer: int
    part: str
    token: int
    head: int
    pages: NDArray[np.uint8]


def elements(memory: NDArray[np.uint8], shape: Geometry, shard: Shard) -> Iterator[Element]:
    """All of a shard's, in the order in which a page's bytes are summed."""
    for place in shape.tensors:
        first, second, dim = place.page_shape
        width = dim * DTYPE_BYTES[place.dtype]
        grid = (shape.pages, first, second, width)
        steps = (place.page_stride_bytes, second * width, width, 1)
        tensor = np.lib.stride_tricks.as_strided(memory[place.offset_bytes :], grid, steps)
        is_by_head = shape.page_tokens == 1 and first == shape.heads
        for outer, inner in product(range(first), range(second)):
            token, head = (inner, outer) if is_by_head else (outer, inner)
            yield Element(
                shard.first_layer + place.layer,
                place.part,
                token,
                shard.first_head + head,
                tensor[:, outer, inner],
            )


def fill(memory: NDArray[np.uint8], shape: Geometry, shard: Shard, seed: int) -> None:
    """Give each element of each page bytes of its own, in every shard that has it the same."""
    for one in elements(memory, shape, shard):
        number = [seed, one.layer, ord(one.part[0]), one.token, one.head]
        one.pages[:] = np.random.default_rng(number).integers(0, 256, one.pages.shape, "u1")


OURS, THEIRS = 6, 7
PAGES, ONTO = [4, 1, 2, 3, 5], [6, 2, 3, 4, 1]
SPACE = 2**20
"""Addresses from one region to the next."""


def tp(model: Model, size: int) -> tuple[Shard, ...] | None:
    try:
        return tp_shards(model.heads, size, (0, size), (0, model.layers))
    except ValueError:
        return None


def with_heads(heads: int) -> Model:
    return MHA._replace(layout=msgspec.structs.replace(MHA.layout, heads=heads))


STAGES = (Shard(0, 1, 0, 4), Shard(1, 4, 0, 4))
HALVES = (Shard(0, 4, 0, 2), Shard(0, 4, 2, 4))
CASES = {
    **{
        f"{model.heads} heads, {here} to {there}": (model, ours, theirs)
        for model in (*map(with_heads, (1, 2, 3, 4)), LATENT)
        for here, there in product((1, 2, 4), repeat=2)
        if (ours := tp(model, here)) and (theirs := tp(model, there))
    },
    **{
        f"{name}, {here} to {there}": (model, tp(model, here), tp(model, there))
        for name, model in (("by head", BY_HEAD), ("by head, K and V together", TOGETHER))
        for here, there in ((1, 1), (1, 2), (2, 1), (2, 4), (4, 2))
    },
    "by head, a stage": (BY_HEAD, STAGES[1:], (MHA.all,)),
    "by head, ranks of a stage": (BY_HEAD, (Shard(1, 4, 0, 2), Shard(1, 4, 2, 4)), (MHA.all,)),
    "latent, 4 to 2": (LATENT, (LATENT.all,) * 4, (LATENT.all,) * 2),
    "stage 0 of all": (MHA, STAGES[:1], (MHA.all,)),
    "stage 1 of all": (MHA, STAGES[1:], (MHA.all,)),
    "all to stages": (MHA, (MHA.all,), STAGES),
    "stages of one node": (MHA, STAGES, (MHA.all,)),
    "stages to other stages": (MHA, STAGES, (Shard(0, 3, 0, 4), Shard(3, 4, 0, 4))),
    "one rank of two": (MHA, HALVES[:1], (MHA.all,)),
    "the other rank": (MHA, HALVES[1:], (MHA.all,)),
    "two ranks of a stage": (MHA, (Shard(1, 4, 0, 2), Shard(1, 4, 2, 4)), (MHA.all,)),
    "heads to a stage": (MHA, HALVES, STAGES),
    "latent, a stage": (LATENT, (Shard(2, 4, 0, 1),), (LATENT.all,)),
    "a slot of one token": (MHA._replace(page_tokens=1), HALVES, (MHA.all,)),
    "one layer": (MHA._replace(layers=1), (Shard(0, 1, 0, 4),), tp_shards(4, 2, (0, 2), (0, 1))),
    "K without V": (MHA._replace(layout=Mha(4, 3, 0, "uint8")), HALVES, (MHA.all,)),
}


class Side:
    """The shards of one pool in memory of their own, at addresses of their own."""

    def __init__(self, model, shards, pages, order, first, space=SPACE):
        self.model, self.shards = model, shards
        self.shapes = [memory_of(model, shard, pages, order) for shard in shards]
        self.memory = np.zeros(space * len(shards), np.uint8)
        self.first, self.space = first, space
        self.areas = {}
        for index, shape in enumerate(self.shapes):
            name, at = shard_region("kv", index), index * space
            assert shape.total_bytes <= space
            told = note(shape, first + at, name)
            self.areas[name] = Area(told, self.memory[at : at + shape.total_bytes])

    @property
    def notes(self):
        return {name: area.note for name, area in self.areas.items()}

    def elements(self, index):
        at, shape = index * self.space, self.shapes[index]
        memory = self.memory[at : at + shape.total_bytes]
        return elements(memory, shape, self.shards[index])

    def fill(self, seed):
        for index, (shard, shape) in enumerate(zip(self.shards, self.shapes, strict=True)):
            fill(self.memory[index * self.space :], shape, shard, seed)


def sides(name, orders):
    model, ours, theirs = CASES[name]
    here = Side(model, ours, OURS, orders[0], SPACE)
    there = Side(model, theirs, THEIRS, orders[1], 100 * SPACE)
    here.fill(1)
    return here, there


def post(making, peer_shard=0, pages=PAGES, onto=ONTO, split=1):
    return Post(
        1,
        "decode-0",
        1,
        "kv",
        ids(pages),
        ids(onto),
        split=split,
        peer_shard=peer_shard,
        making=making,
    )


def delivered(here, there, lane):
    """What the peer's memory must be when the lane is done, and which bytes of it were written."""
    expected, written = np.zeros_like(there.memory), np.zeros_like(there.memory)
    have = {}
    for index in range(len(here.shards)):
        for one in here.elements(index):
            have[one[:4]] = one.pages
    for memory, is_mark in ((expected, False), (written, True)):
        at, shape = lane.peer_shard * there.space, there.shapes[lane.peer_shard]
        shard = there.shards[lane.peer_shard]
        for one in elements(memory[at : at + shape.total_bytes], shape, shard):
            if one[:4] in have:
                for page, onto in zip(PAGES, ONTO, strict=True):
                    one.pages[onto] = 1 if is_mark else have[one[:4]][page]
    return expected, written
