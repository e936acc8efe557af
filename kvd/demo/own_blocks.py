"""An engine whose KV cache is its own: blocks on its device, copied to and from pages of a lease.

``OwnBlocks`` are its tensors. ``BlockLease`` is one lease seen as blocks: where the lease has a
page, it has a block for the same tokens, and the model computes there. What is cached is loaded
before, and what was computed is saved while the next tokens are::

    lease.pages_of("kv")   [ 7 | 8 | 3 | 9 ]    pages of the pool, in host memory
                             | load    ^ save
    pages_of("kv")         [ 1 | 2 | 4 | 6 ]    blocks of the engine, on cuda:0

``PoolLease`` is the same of an engine that computes in the pages themselves: nothing is copied.

Invariants: a block is of one lease, until no copy of it is under way; block 0 is nobody's, as the
null page is; no page of the prefix that the lease began with is saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from kvd.demo.layout import PoolPart, places
from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from kvd.client import SyncLease, SyncNode
    from kvd.client.mover.blocks import EngineBlocks
    from kvd.client.mover.pending_copy import PendingCopy
    from kvd.demo.layout import ModelShape


class SeenLease(Protocol):
    """Where a model computes, of one lease."""

    @property
    def saved_tokens(self) -> int:
        """The KV of the tokens below is in the pages of the lease."""
        ...

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """Where tokens lie, by page; 0 for those that lie nowhere."""
        ...

    def slide(self, upto_tokens: int) -> object:
        """Window pages before the window of this token go back, those ahead of it come."""
        ...

    def load(self, upto_tokens: int) -> int:
        """Have here what the pages hold of the tokens below; how many bytes that took."""
        ...

    def save(self, upto_tokens: int) -> None:
        """The tokens below are computed: let them go to the pages, and wait for nothing."""
        ...

    def close(self) -> int:
        """Wait for what is under way, and let go; how many bytes were saved."""
        ...


class PoolLease:
    """A lease whose pages the model computes in."""

    def __init__(self, lease: SyncLease) -> None:
        self._lease = lease
        self.saved_tokens = 0

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """Those of the lease."""
        return self._lease.pages_of(component)

    def slide(self, upto_tokens: int) -> object:
        """As the lease does."""
        return self._lease.slide(upto_tokens)

    def load(self, upto_tokens: int) -> int:
        """They are there."""
        return 0

    def save(self, upto_tokens: int) -> None:
        """They are there."""
        self.saved_tokens = upto_tokens

    def close(self) -> int:
        """Nothing is under way."""
        return 0


class PageRuns(NamedTuple):
    """By component, blocks and pages that follow each other in a lease's row, and from where on."""

    blocks: dict[str, NDArray[np.int32]]
    pages: dict[str, NDArray[np.int32]]
    first_page: dict[str, int]


class OwnBlocks:
    """The blocks of an engine: of each part of a pool as many as that has pages."""

    def __init__(
        self,
        page_size: int,
        tensors: Mapping[tuple[str, int], Mapping[str, torch.Tensor]],
        copied: EngineBlocks,
    ) -> None:
        """Use ``own_blocks``. ``copied`` moves them; ``tensors``: by component and layer."""
        self.page_size = page_size
        self.copied = copied
        self._tensors = tensors
        self._free: dict[str, list[int]] = {}
        for (component, _), parts in tensors.items():
            self._free[component] = list(range(1, min(len(tensor) for tensor in parts.values())))

    def tensors(self, component: str, *, layer: int, shard: int = 0) -> Mapping[str, torch.Tensor]:
        """As ``Pool.tensors``."""
        assert not shard, "the pools of the demo have one"
        return self._tensors[component, layer]

    def take(self, component: str) -> int:
        """A block that nobody has: there are as many as pages, and one prompt at a time."""
        return self._free[component].pop()

    def give_back(self, component: str, blocks: NDArray[np.int32]) -> None:
        """No copy of these is under way."""
        self._free[component] += blocks[blocks != 0].tolist()


class BlockLease:
    """One lease, seen as blocks: where it has a page, this has a block."""

    def __init__(self, own: OwnBlocks, lease: SyncLease, *, kept_tokens: int) -> None:
        """``kept_tokens``: their whole pages are in the prefix tree, and not saved again."""
        self._own = own
        self._lease = lease
        self._rows: dict[str, NDArray[np.int32]] = {}
        self._computed_tokens = kept_tokens
        self._saves: list[PendingCopy] = []
        self.saved_tokens = 0
        self._saved_bytes = 0

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """The blocks, by page of the lease; those of pages that it has no more are given back."""
        pages = self._lease.pages_of(component)
        row = self._rows.setdefault(component, np.zeros_like(pages))
        gone = (pages == 0) & (row != 0)
        self._own.give_back(component, row[gone])
        row[gone] = 0
        for place in np.flatnonzero((pages != 0) & (row == 0)):
            row[place] = self._own.take(component)
        return row

    def slide(self, upto_tokens: int) -> object:
        """Pages that go back must not be written any more."""
        self._settle()
        return self._lease.slide(upto_tokens)

    def load(self, upto_tokens: int) -> int:
        """Copy the pages of the tokens below into blocks."""
        runs = self._runs(0, upto_tokens)
        if not runs.blocks:
            return 0
        load = self._own.copied.begin_load(
            self._lease.key, runs.blocks, pages=runs.pages, first_page=runs.first_page
        )
        load.result()
        return load.n_bytes

    def save(self, upto_tokens: int) -> None:
        """Begin to copy the blocks of what was computed since into pages."""
        runs = self._runs(self._computed_tokens, upto_tokens)
        self._computed_tokens = upto_tokens
        while self._saves and self._saves[0].poll():
            self._end(self._saves.pop(0))
        if runs.blocks:
            # Behind a mark that is set now: what the model has begun on the device is done first.
            save = self._own.copied.begin_save(
                self._lease.key,
                runs.blocks,
                pages=runs.pages,
                first_page=runs.first_page,
                upto_tokens=upto_tokens,
            )
            self._saves.append(save)

    def close(self) -> int:
        """Wait for the saves, and give all blocks back."""
        self._settle()
        for component, row in self._rows.items():
            self._own.give_back(component, row)
        self._rows.clear()
        return self._saved_bytes

    def _settle(self) -> None:
        for save in self._saves:
            save.result()
            self._end(save)
        self._saves.clear()

    def _end(self, save: PendingCopy) -> None:
        self._saved_bytes += save.n_bytes
        self.saved_tokens = save.upto_tokens

    def _runs(self, from_token: int, upto_tokens: int) -> PageRuns:
        """The pages of these tokens that the lease has."""
        size = self._own.page_size
        found = PageRuns({}, {}, {})
        for component in self._rows:
            pages = self._lease.pages_of(component)
            first, end = from_token // size, -(-upto_tokens // size)
            there = first + np.flatnonzero(pages[first:end])
            if there.size:
                run = slice(there[0], there[-1] + 1)
                found.blocks[component] = self._rows[component][run].copy()
                found.pages[component] = pages[run]
                found.first_page[component] = int(there[0])
        return found


def own_blocks(shape: ModelShape, node: SyncNode, device: str) -> OwnBlocks:
    """Tensors on the device, one for each that the pool has of a layer.

    Raises:
        KvdError: ``not-supported`` for a model with states; what ``node.blocks`` refuses.
    """
    pool = node.pool("main")
    tensors: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    caches: dict[str, dict[int, tuple[torch.Tensor, ...]]] = {}
    for place in places(shape):
        if place.part is PoolPart.STATE:
            why = "states change in place with every token: the demo computes them in the pool"
            raise KvdError(Refusal(Code.NOT_SUPPORTED, why, side="client"))
        component = place.part.value
        tensors[component, place.layer] = made = {
            part: torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
            for part, tensor in pool.tensors(component, layer=place.layer).items()
        }
        caches.setdefault(component, {})[place.layer] = tuple(made.values())
    return OwnBlocks(pool.page_size, tensors, node.blocks(caches, block_size=pool.page_size))
