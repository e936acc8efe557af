"""Where the bytes of a page lie: offsets and strides, never assumptions.

Page-first puts all layers of a page in one block, K then V per layer::

    page 0 | L0 K | L0 V | L1 K | L1 V | ... | page 1 | L0 K | ...

so one page is one contiguous piece and a run of pages is one descriptor. Layer-first keeps each
layer's K together over all pages, so a page is ``2 x layers`` pieces::

    L0 K: page 0 | page 1 | ...   L0 V: page 0 | page 1 | ...   L1 K: ...

Inside the page of one tensor the component's ``Interior`` says what lies where, which decides what
a page can be cut by. ``t`` is a token and ``h`` a head::

    nhd      t0 h0 | t0 h1 | t1 h0 | t1 h1      slots are tokens, in each of them all heads
    hnd      h0 t0 | h0 t1 | h1 t0 | h1 t1      one slot: a head is one piece, with all its tokens
    opaque   ?                                  bytes of a layer, its K and V not told apart

Invariant: the pieces of all pages tile ``[0, total_bytes)`` exactly.
"""

from __future__ import annotations

import math

import msgspec

from kvd.core.layout.spec import (
    DTYPE_BYTES,
    Component,
    Interior,
    Mha,
    Mla,
    PageOrder,
    PoolSpec,
    Raw,
    State,
    heads_of,
    layer_page_bytes,
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
    """Slots that each tensor's page is cut into by tokens: its tokens; or 1, where those of a head
    lie together; 0: they are not slots, or unknown."""
    heads: int = 0
    """Equal parts of each slot of each tensor; 0: its slots have no parts, or unknown ones."""

    @property
    def strips(self) -> tuple[int, ...]:
        """Bytes of each tensor in one page, in the order in which they follow each other in it."""
        return tuple(
            math.prod(place.page_shape) * DTYPE_BYTES[place.dtype] for place in self.tensors
        )

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
    slots = _slots(component)
    return Geometry(
        pages=pages,
        page_bytes=block,
        rows=rows,
        tensors=tuple(tensors),
        page_tokens=slots,
        heads=heads_of(component.layout) if slots and tensors else 0,
    )


def shard_places(spec: PoolSpec) -> tuple[ShardPlace, ...]:
    """What of the model each shard has; none where one has all of it."""
    if spec.held is None:
        return ()
    return tuple(ShardPlace(*msgspec.structs.astuple(shard)) for shard in spec.held.shards)


def _slots(component: Component) -> int:
    """The parts of each tensor's page that have a part of every head; 0 where nobody knows."""
    if isinstance(component.layout, Raw | State):
        return 0
    match component.interior:
        case Interior.NHD:
            return component.page_size
        case Interior.HND:
            return 1
        case Interior.OPAQUE:
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
    shapes: list[tuple[str, str, tuple[int, ...]]]
    match component.layout:
        case State(tensors):
            shapes = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
        case Mha(heads, k_dim, v_dim, dtype) if component.interior is not Interior.OPAQUE:
            grid = _grid(component, heads)
            shapes = [("k", dtype, (*grid, k_dim)), ("v", dtype, (*grid, v_dim))]
        case Mla(latent_dim, rope_dim, dtype) if component.interior is not Interior.OPAQUE:
            shapes = [("latent", dtype, (*_grid(component, 1), latent_dim + rope_dim))]
        case _:
            # Nothing in it is told apart, so it is one piece.
            shapes = [("raw", "uint8", (layer_page_bytes(component),))]
    sizes = [math.prod(shape) * DTYPE_BYTES[dtype] for _, dtype, shape in shapes]
    return [(*shape, n_bytes) for shape, n_bytes in zip(shapes, sizes, strict=True) if n_bytes]


def _grid(component: Component, heads: int) -> tuple[int, int]:
    """The first two axes of a page of one tensor."""
    if component.interior is Interior.HND:
        return heads, component.page_size
    return component.page_size, heads
