"""Where the bytes of a page lie: offsets and strides, never assumptions.

Page-first puts all layers of a page in one block, K then V per layer::

    page 0 | L0 K | L0 V | L1 K | L1 V | ... | page 1 | L0 K | ...

so one page is one contiguous piece and a run of pages is one descriptor. Layer-first keeps each
layer's K together over all pages, so a page is ``2 x layers`` pieces::

    L0 K: page 0 | page 1 | ...   L0 V: page 0 | page 1 | ...   L1 K: ...

Invariant: the pieces of all pages tile ``[0, total_bytes)`` exactly.
"""

from __future__ import annotations

import msgspec

from kvd.core.spec import DTYPE_BYTES, Component, Mha, Mla, Order, Raw, page_bytes
from kvd.wire.memory import TensorPlace


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Piece ``i`` is ``[offset_bytes + i * stride_bytes, + piece_bytes)``: one piece of page i."""

    offset_bytes: int
    stride_bytes: int
    piece_bytes: int


class Geometry(msgspec.Struct, frozen=True):
    """The bytes of one component of one pool: ``pages`` pages, null page included."""

    pages: int
    page_bytes: int
    rows: tuple[Row, ...]
    tensors: tuple[TensorPlace, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole component."""
        return self.pages * self.page_bytes


def geometry(component: Component, *, pages: int, order: Order) -> Geometry:
    """Lay out ``pages`` pages of ``component`` in ``order``."""
    block = page_bytes(component)
    tensors: list[TensorPlace] = []
    inside = 0
    for layer in range(component.layers):
        for part, dtype, shape, size in _parts(component):
            if order is Order.PAGE_FIRST:
                offset, stride = inside, block
            else:
                offset, stride = inside * pages, size
            tensors.append(TensorPlace(layer, part, dtype, offset, stride, shape))
            inside += size
    rows: tuple[Row, ...]
    if order is Order.PAGE_FIRST:
        rows = (Row(0, block, block),)
    else:
        rows = tuple(
            Row(place.offset_bytes, place.page_stride_bytes, place.page_stride_bytes)
            for place in tensors
        )
    return Geometry(pages=pages, page_bytes=block, rows=rows, tensors=tuple(tensors))


def _parts(component: Component) -> list[tuple[str, str, tuple[int, ...], int]]:
    """Name, dtype, page shape and page bytes of each tensor of one layer."""
    size = component.page_size
    match component.layout:
        case Mha(heads, k_dim, v_dim, dtype):
            width = DTYPE_BYTES[dtype]
            return [
                ("k", dtype, (size, heads, k_dim), size * heads * k_dim * width),
                ("v", dtype, (size, heads, v_dim), size * heads * v_dim * width),
            ]
        case Mla(latent_dim, rope_dim, dtype):
            dim = latent_dim + rope_dim
            return [("latent", dtype, (size, 1, dim), size * dim * DTYPE_BYTES[dtype])]
        case Raw(raw_bytes):
            return [("raw", "uint8", (raw_bytes,), raw_bytes)]
