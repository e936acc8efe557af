"""Where the bytes of a page lie: offsets and strides, never assumptions.

Page-first puts all layers of a page in one block, K then V per layer::

    page 0 | L0 K | L0 V | L1 K | L1 V | ... | page 1 | L0 K | ...

so one page is one contiguous piece and a run of pages is one descriptor. Layer-first keeps each
layer's K together over all pages, so a page is ``2 x layers`` pieces::

    L0 K: page 0 | page 1 | ...   L0 V: page 0 | page 1 | ...   L1 K: ...

Invariant: the pieces of all pages tile ``[0, total_bytes)`` exactly.
"""

from __future__ import annotations

import math

import msgspec

from kvd.core.layout.spec import (
    DTYPE_BYTES,
    Component,
    Mha,
    Mla,
    PageOrder,
    PoolSpec,
    Raw,
    State,
    page_bytes,
)
from kvd.wire.memory import ShardPlace, TensorPlace


class PieceRow(msgspec.Struct, frozen=True, array_like=True):
    """Piece ``i`` is ``[offset_bytes + i * stride_bytes, + piece_bytes)``: one piece of page i."""

    offset_bytes: int
    stride_bytes: int
    piece_bytes: int


class Geometry(msgspec.Struct, frozen=True):
    """The bytes of one component of one pool: ``pages`` pages, null page included."""

    pages: int
    page_bytes: int
    rows: tuple[PieceRow, ...]
    tensors: tuple[TensorPlace, ...]
    page_tokens: int = 0
    """Slots along the first axis of each tensor's page; 0: they are not slots, or unknown."""

    @property
    def strips(self) -> tuple[int, ...]:
        """Bytes of each tensor in one page, in the order in which they follow each other in it."""
        return tuple(
            math.prod(place.page_shape) * DTYPE_BYTES[place.dtype] for place in self.tensors
        )

    @property
    def heads(self) -> int:
        """Equal parts of each slot of each tensor; 0: its slots have no parts, or unknown ones."""
        found = {place.page_shape[1] for place in self.tensors} if self.page_tokens else set()
        return found.pop() if len(found) == 1 else 0

    @property
    def layers(self) -> int:
        """Layers whose tensors follow each other in a page; 0 where ``heads`` is."""
        return len({place.layer for place in self.tensors}) if self.heads else 0

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole component."""
        return self.pages * self.page_bytes


def geometry(component: Component, *, pages: int, order: PageOrder) -> Geometry:
    """Lay out ``pages`` pages of ``component`` in ``order``.

    A component without a byte has no rows and no tensors.
    """
    block = page_bytes(component)
    tensors: list[TensorPlace] = []
    inside = 0
    for layer in range(component.layers):
        for part, dtype, shape, size in _parts(component):
            if order is PageOrder.PAGE_FIRST:
                offset, stride = inside, block
            else:
                offset, stride = inside * pages, size
            tensors.append(
                TensorPlace(
                    layer=layer,
                    part=part,
                    dtype=dtype,
                    offset_bytes=offset,
                    page_stride_bytes=stride,
                    page_shape=shape,
                )
            )
            inside += size
    rows: tuple[PieceRow, ...]
    if order is PageOrder.PAGE_FIRST:
        rows = (PieceRow(0, block, block),) if block else ()
    else:
        rows = tuple(
            PieceRow(place.offset_bytes, place.page_stride_bytes, place.page_stride_bytes)
            for place in tensors
        )
    return Geometry(
        pages=pages,
        page_bytes=block,
        rows=rows,
        tensors=tuple(tensors),
        page_tokens=_page_tokens(component),
    )


def shard_places(spec: PoolSpec) -> tuple[ShardPlace, ...]:
    """What of the model each shard has; none where one has all of it."""
    if spec.held is None:
        return ()
    return tuple(ShardPlace(*msgspec.structs.astuple(one)) for one in spec.held.shards)


def _page_tokens(component: Component) -> int:
    """The slots of a page where every tensor has them along its first axis, otherwise 0."""
    match component.layout:
        case Mha() | Mla():
            return component.page_size
        case Raw() | State():
            return 0


def misplaced(component: Component) -> TensorPlace | None:
    """The first tensor that no program could read in place: off a multiple of its element's bytes.

    Only a state can have one: its tensors differ in type. None when all are well.
    """
    for order in PageOrder:
        for place in geometry(component, pages=2, order=order).tensors:
            width = DTYPE_BYTES[place.dtype]
            if place.offset_bytes % width or place.page_stride_bytes % width:
                return place
    return None


def _parts(component: Component) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype, page shape and page bytes of each tensor of one layer; none is empty."""
    size = component.page_size
    shapes: list[tuple[str, str, tuple[int, ...]]]
    match component.layout:
        case Mha(heads, k_dim, v_dim, dtype):
            shapes = [("k", dtype, (size, heads, k_dim)), ("v", dtype, (size, heads, v_dim))]
        case Mla(latent_dim, rope_dim, dtype):
            shapes = [("latent", dtype, (size, 1, latent_dim + rope_dim))]
        case Raw(raw_bytes):
            shapes = [("raw", "uint8", (raw_bytes,))]
        case State(tensors):
            shapes = [(one.name, one.dtype, one.shape) for one in tensors]
    sizes = [math.prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in shapes]
    return [(*one, n_bytes) for one, n_bytes in zip(shapes, sizes, strict=True) if n_bytes]
