"""Pools of one model, sharded in one way or another, and its KV element by element."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

from kvd.core.geometry import Geometry, geometry
from kvd.core.shards import Shard
from kvd.core.spec import DTYPE_BYTES, Component, Layout, Mha, Mla, Order

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray


class Model(NamedTuple):
    """What is cut into shards."""

    layers: int
    layout: Layout
    page_tokens: int

    @property
    def heads(self) -> int:
        """A latent is one."""
        return self.layout.heads if isinstance(self.layout, Mha) else 1

    @property
    def all(self) -> Shard:
        return Shard(0, self.layers, 0, self.heads)


MHA = Model(4, Mha(4, 6, 2, "bfloat16"), 4)
LATENT = Model(4, Mla(5, 2, "uint8"), 4)


def memory_of(model: Model, shard: Shard, pages: int, order: Order) -> Geometry:
    """What a shard keeps of it."""
    layout = model.layout
    if isinstance(layout, Mha):
        layout = msgspec.structs.replace(layout, heads=shard.end_head - shard.first_head)
    layers = shard.end_layer - shard.first_layer
    return geometry(Component("kv", layers, layout, model.page_tokens), pages=pages, order=order)


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
        tokens, heads, dim = place.page_shape
        width = dim * DTYPE_BYTES[place.dtype]
        grid = (shape.pages, tokens, heads, width)
        steps = (place.page_stride_bytes, heads * width, width, 1)
        tensor = np.lib.stride_tricks.as_strided(memory[place.offset_bytes :], grid, steps)
        for token in range(tokens):
            for head in range(heads):
                yield Element(
                    shard.first_layer + place.layer,
                    place.part,
                    token,
                    shard.first_head + head,
                    tensor[:, token, head],
                )


def fill(memory: NDArray[np.uint8], shape: Geometry, shard: Shard, seed: int) -> None:
    """Give each element of each page bytes of its own, in every shard that has it the same."""
    for one in elements(memory, shape, shard):
        number = [seed, one.layer, ord(one.part[0]), one.token, one.head]
        one.pages[:] = np.random.default_rng(number).integers(0, 256, one.pages.shape, "u1")


def has(shard: Shard, one: Element) -> bool:
    """Whether the element is one of the shard's."""
    return (
        shard.first_layer <= one.layer < shard.end_layer
        and shard.first_head <= one.head < shard.end_head
    )
