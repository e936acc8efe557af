"""Components laid out in memory, and where an engine finds the slots of their pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.layout.geometry import Geometry, geometry
from kvd.core.layout.spec import DTYPE_BYTES, Component, Layout, PageOrder
from kvd.transfer.metadata import RegionNote
from kvd.types import Pages, pack_ids

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


def shaped(
    layout: Layout, page_size: int, pages: int, order: PageOrder, layers: int = 3
) -> Geometry:
    """A component of this layout."""
    return geometry(Component("kv", layers, layout, page_size), pages=pages, order=order)


def note(shape: Geometry, address: int = 0, name: str = "kv") -> RegionNote:
    """That memory as its process tells of it."""
    return RegionNote(
        name,
        address,
        shape.total_bytes,
        shape.pages,
        shape.page_bytes,
        shape.rows,
        shape.page_tokens,
        shape.strips,
        shape.layers,
        shape.heads,
    )


def ids(pages: Iterable[int]) -> Pages:
    """Page ids as they travel."""
    return Pages(pack_ids(list(pages)))


def slots(memory: NDArray[np.uint8], shape: Geometry) -> list[NDArray[np.uint8]]:
    """Of each tensor, the bytes of each slot of each page, found as an engine finds them."""
    found = []
    for place in shape.tensors:
        size = int(np.prod(place.page_shape[1:])) * DTYPE_BYTES[place.dtype]
        grid = (shape.pages, place.page_shape[0], size)
        steps = (place.page_stride_bytes, size, 1)
        start = memory[place.offset_bytes :]
        found.append(np.lib.stride_tricks.as_strided(start, grid, steps))
    return found
