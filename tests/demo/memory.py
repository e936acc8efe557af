"""Pools and leases for the tests of the demo's caches: the real layouts over plain tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from kvd.config import Config, load
from kvd.config.pool import components
from kvd.core.layout.geometry import geometry
from kvd.core.layout.spec import PageOrder
from kvd.demo.cache import BlockTable, Lengths
from kvd.demo.layout import PoolPart
from kvd.demo.leased import PoolViews, leased_cache

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import Cache

    from kvd.demo.models import Architecture

PAGE = 16
PAGES = 64
JUNK = 1e9


class Memory:
    """The memory of a pool as an engine sees it, full of junk."""

    def __init__(
        self,
        architecture: Architecture,
        *,
        order: PageOrder = PageOrder.PAGE_FIRST,
        dtype: str = "float32",
    ) -> None:
        layout = msgspec.structs.replace(architecture.pool, dtype=dtype, order=order.value)
        settings = layout.settings(dict.fromkeys(PoolPart, PAGES))
        config = load(None, {}, [f"{key}={value}" for key, value in settings.items()])
        assert isinstance(config, Config), config
        self.page_size = layout.page_size
        self._tensors: dict[tuple[str, int, str], torch.Tensor] = {}
        for part in components(config.pool):
            where = geometry(part, pages=PAGES, order=order)
            element = getattr(torch, dtype)
            memory = torch.full((where.total_bytes // element.itemsize,), JUNK, dtype=element)
            for place in where.tensors:
                shape = place.page_shape
                inner = [int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
                self._tensors[part.name, place.layer, place.part] = memory.as_strided(
                    (PAGES, *shape),
                    (place.page_stride_bytes // element.itemsize, *inner),
                    place.offset_bytes // element.itemsize,
                )

    def tensors(self, component: str, *, layer: int, shard: int = 0) -> dict[str, torch.Tensor]:
        """As ``Pool.tensors``, of a pool that has but one shard."""
        return {
            part: tensor
            for (name, number, part), tensor in self._tensors.items()
            if (name, number) == (component, layer)
        }

    def page(self, part: PoolPart, page: int) -> list[torch.Tensor]:
        return [
            tensor[page].clone()
            for (name, _, _), tensor in self._tensors.items()
            if name == part.value
        ]

    def pages(self, rows: dict[PoolPart, list[int]]) -> list[torch.Tensor]:
        """A copy of what is in all these pages."""
        return [
            tensor for part, row in rows.items() for page in row for tensor in self.page(part, page)
        ]


def pool(architecture: Architecture, **how: object) -> tuple[Memory, PoolViews]:
    """Memory and its views."""
    memory = Memory(architecture, **how)  # type: ignore[arg-type]
    return memory, PoolViews(architecture.shape, memory)


def scattered(count: int, seed: int = 3) -> list[int]:
    """Page ids in no order, without the null page."""
    order = torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return order[:count].tolist()


def cache_over(
    views: PoolViews, rows: dict[PoolPart, list[int]], *, written: int = 0, shared: int = 0
) -> Cache:
    """The cache of a sequence with these pages."""
    tables = {part: BlockTable(rows[part]) for part in views.parts}
    return leased_cache(views, tables, Lengths(written, shared))


def rows_for(tokens: int) -> dict[PoolPart, list[int]]:
    """Pages for every part of a sequence of ``tokens``, all of its window too."""
    count = -(-tokens // PAGE)
    return {
        PoolPart.KV: scattered(count),
        PoolPart.WINDOW: scattered(count, 4),
        PoolPart.STATE: [0, 5],
    }


class SlidingLease:
    """A lease whose window pages turn along the sequence: a few pages, used over and over.

    Those before ``from_token`` are none. What a slide takes away is overwritten with junk, as if
    someone else had got the page.
    """

    def __init__(
        self, memory: Memory, *, tokens: int, step: int, window: int, from_token: int = 0
    ) -> None:
        self._memory = memory
        self._kv = scattered(-(-tokens // PAGE))
        self._window = window
        self._step = step
        self._free = scattered(PAGES - 1, 4)
        self._row = [0] * len(self._kv)
        self._map(from_token // PAGE, from_token)
        self.slid: list[int] = []

    def pages_of(self, component: str) -> NDArray[np.int32]:
        rows = {"kv": self._kv, "swa": self._row, "state": [0, 5]}
        return np.array(rows[component], dtype=np.int32)

    def slide(self, upto_tokens: int) -> None:
        """Give back what is behind the window, map what is ahead."""
        self.slid.append(upto_tokens)
        first = max(0, upto_tokens - self._window + 1) // PAGE
        for index in range(first):
            if self._row[index]:
                self._free.append(self._row[index])
                for layer in range(PAGES):
                    for tensor in self._memory.tensors("swa", layer=layer).values():
                        tensor[self._row[index]] = JUNK
                self._row[index] = 0
        self._map(first, upto_tokens)

    def _map(self, first: int, upto_tokens: int) -> None:
        top = min(len(self._row), -(-(upto_tokens + self._step) // PAGE))
        for index in range(first, top):
            if not self._row[index]:
                self._row[index] = self._free.pop(0)
