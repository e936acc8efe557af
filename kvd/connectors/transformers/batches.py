"""Continuous batching: what the node has of a prompt of ``generate_batch`` is not computed.

transformers computes these prompts in blocks of one tensor of its own. Before the first step of a
prompt, in the thread that steps, its allocator looks which blocks hold the prompt's beginning, as
earlier prompts of this process have left them. ``NodeBlocks`` looks into the node too: it copies
what is there into free blocks, which are found from then on as if they had been computed here. When
a request ends, its whole blocks are copied to pages of the node. No other moment is taken: a block
is filled before anybody has it, and read when nobody writes it any more.

The allocator is private to transformers; so only versions that were run are served. Requests share
blocks there by a digest of 64 bits, and so does what is saved of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

import numpy as np
import torch
from transformers.generation.continuous_batching import cache as paged
from transformers.generation.continuous_batching.cache_allocators import (
    FULL_ATTENTION,
    CacheAllocator,
    FullAttentionCacheAllocator,
)
from transformers.generation.continuous_batching.cache_allocators.cache_allocator import (
    compute_block_hash,
)
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    from kvd.client import SyncLease
    from kvd.connectors.transformers.cache_link import AnswerCounts, CacheLink
    from kvd.connectors.transformers.copies import PageCopies
    from kvd.connectors.transformers.weights import NamedWeights

logger = logging.getLogger("kvd.connectors.transformers")

ASKED_S: Final = 60.0
"""A prompt that waits for its first step is looked up once, and again if transformers has not come
to it for so long. It comes with each step mostly."""


class ServedBatches:
    """The batches of one model, between ``begin`` and ``end``.

    Args:
        model: whose ``generate_batch`` it is.
        link: to the daemon.
        named: whose KV the model computes now; or why it shares none.
        counts: what became of its prompts.
        saves: whether what was computed is cached.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        link: CacheLink,
        *,
        named: Callable[[], tuple[str, NamedWeights | None]],
        counts: AnswerCounts,
        saves: bool,
    ) -> None:
        self.model, self.link, self.named = model, link, named
        self.counts, self.saves = counts, saves
        self.is_open = False
        self._managers: WeakSet[ContinuousBatchingManager] = WeakSet()

    def begin(self) -> None:
        """Allocators that are made for it from now on ask the node."""
        with _LOCK:
            self.is_open = True
            _SERVED.append(self)
            _ALLOCATORS[FULL_ATTENTION] = NodeBlocks

    def serve(self, manager: ContinuousBatchingManager) -> None:
        """Have its allocators be made for this model.

        They are told a configuration alone, which several models may have.
        """
        if manager in self._managers:
            return
        if manager.batch_processor is not None:
            self.goes_without("a batch in blocks of before the node was entered")
            return
        self._managers.add(manager)
        plain = manager._create_batch_processor  # noqa: SLF001 - nothing else is its model's own

        def create() -> object:
            before = _MADE_FOR.set(self)
            try:
                return plain()
            finally:
                _MADE_FOR.reset(before)

        vars(manager)["_create_batch_processor"] = create

    def end(self) -> None:
        """Those that were made ask it no more; repeatable."""
        with _LOCK:
            if not self.is_open:
                return
            self.is_open = False
            _SERVED.remove(self)
            if not _SERVED:
                _ALLOCATORS[FULL_ATTENTION] = FullAttentionCacheAllocator

    def goes_without(self, why: str) -> None:
        """A batch is computed as without kvd."""
        logger.info("kvd: a generate_batch goes without it: %s", why)
        self.counts.alone[why.partition(":")[0]] += 1

    def why_not(self, blocks: FullAttentionCacheAllocator) -> str:
        """Why such blocks are not served; empty: they are."""
        if self.model.training:
            return "the model is in training mode"
        if self.model.device.type != "cpu":
            return f"a batch on {self.model.device.type}: that was not run"
        if not blocks.use_block_sharing:
            return "allow_block_sharing is off for a batch"
        of_layers = {(layer.kv, bool(layer.window_tokens)) for layer in self.link.shape.layers}
        if len(of_layers) != 1 or blocks.pages_per_block != len(self.link.shape.layers):
            return "a batch of a model whose layers are not all alike"
        ((kv, has_window),) = of_layers
        dtype = str(blocks.cache_dtype).removeprefix("torch.")
        mine = (blocks.num_key_value_heads, blocks.head_dim, blocks.head_dim, dtype)
        if has_window or kv is None or mine != (kv.heads, kv.k_dim, kv.v_dim, kv.dtype):
            return f"a batch whose blocks are unlike the model's own cache: {mine}"
        return ""


_ALLOCATORS: dict[str, type[CacheAllocator]] = paged.ATTN_TYPE_TO_ALLOCATOR  # type: ignore[assignment]
_LOCK = threading.Lock()
_SERVED: list[ServedBatches] = []


_MADE_FOR: ContextVar[ServedBatches | None] = ContextVar("kvd_made_for", default=None)


class _AskedPrompt:
    """One that waits for its first step. It is held, so that no other has its ``id`` meanwhile."""

    __slots__ = ("is_counted", "is_looked_up", "met_s", "prompt_ids")

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_ids, self.met_s = prompt_ids, 0.0
        self.is_counted = self.is_looked_up = False


class NodeBlocks(FullAttentionCacheAllocator):
    """Blocks of a batch, which are looked for in the node too, if its model is served.

    For one thread, that of the batch. From the first change of the weights on it asks the node no
    more: blocks of before and of after are not told apart here.
    """

    def __init__(self, *, config: PreTrainedConfig, **how: Any) -> None:
        super().__init__(config=config, **how)
        self._served, self._whose = _MADE_FOR.get(), None
        if self._served is not None:
            why = self._served.why_not(self)
            if not why:
                why, self._whose = self._served.named()
            if why:
                self._served.goes_without(why)
        self._asked: OrderedDict[int, _AskedPrompt] = OrderedDict()
        self._tokens: dict[str, list[int]] = {}
        """Of each request whose blocks are marked."""

    def _asks(self) -> tuple[ServedBatches, str] | None:
        """Whom to ask the node by, and in which namespace, while that may be."""
        served = self._served
        if served is None or self._whose is None or not served.is_open:
            return None
        why, named = served.named()
        if named is None or named != self._whose:
            self._whose = None
            why = why or "the weights changed"
            logger.warning("kvd: a batch goes on without kvd: %s", why)
            return None
        return served, named.namespace

    # ---- before the first step of a prompt -------------------------------------------------------

    @override
    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """As it is; and behind what is here, what the node has."""
        found: list[int] = super().match_prefix_blocks(prompt_ids)
        # One that waits comes here with each step, and to ask looks at all weights.
        asked = self._met(prompt_ids)
        # The last token is computed in any case, for what comes behind it.
        most = (len(prompt_ids) - 1) // self.tokens_per_page
        lacks = len(found) < most and self._has_room(len(prompt_ids), len(found))
        if (asked.is_counted and not lacks) or asked.is_looked_up:
            return found
        asks = self._asks()
        if asks is None:
            return found
        served, namespace = asks
        served.counts.prompts += not asked.is_counted
        served.counts.prompt_tokens += 0 if asked.is_counted else len(prompt_ids)
        asked.is_counted, asked.is_looked_up = True, lacks
        if not lacks:
            return found
        return [*found, *self._loaded(served, namespace, prompt_ids, found, most)]

    def _met(self, prompt_ids: list[int]) -> _AskedPrompt:
        """What became of it; of one that is gone nothing is kept for long."""
        now_s = time.monotonic()
        asked = self._asked.get(id(prompt_ids)) or _AskedPrompt(prompt_ids)
        asked.met_s = now_s
        self._asked[id(prompt_ids)] = asked
        self._asked.move_to_end(id(prompt_ids))
        while next(iter(self._asked.values())).met_s < now_s - ASKED_S:
            self._asked.popitem(last=False)
        return asked

    def _has_room(self, prompt_tokens: int, found: int) -> bool:
        """Whether all of a prompt has room, and a token behind it: else nothing is taken."""
        free = self.pool.count_free_blocks(self.index)
        free += self.pool.num_free_sectors * self.blocks_per_sector
        return free >= -(-(prompt_tokens + 1) // self.tokens_per_page) - found

    def _loaded(
        self,
        served: ServedBatches,
        namespace: str,
        prompt_ids: list[int],
        found: Sequence[int],
        most: int,
    ) -> list[int]:
        """Blocks with what the node has behind those that are found."""

        def filled(copies: PageCopies, lease: SyncLease) -> list[int]:
            n_blocks = min(lease.prefix_len // self.tokens_per_page, most) - len(found)
            if n_blocks <= 0:
                return []
            blocks = self._taken(n_blocks)
            try:
                self._fill(copies, lease, blocks, len(found))
            except BaseException:
                self.pool.free_blocks(self.index, blocks)
                raise
            return blocks

        tokens = np.asarray(prompt_ids, np.int64)
        blocks = served.link.read(tokens, namespace, filled) or []
        served.counts.hit_tokens += len(blocks) * self.tokens_per_page
        return self._named(prompt_ids, found, blocks)

    def _taken(self, n_blocks: int) -> list[int]:
        while self.pool.count_free_blocks(self.index) < n_blocks:
            self.pool.allocate_sector(self.index)
        taken: list[int] = self.pool.get_free_blocks(self.index, n_blocks)
        return taken

    def _fill(self, copies: PageCopies, lease: SyncLease, blocks: list[int], first: int) -> None:
        start = first * self.tokens_per_page
        stop = start + len(blocks) * self.tokens_per_page
        pages = self._pages_of(blocks)
        for number, layer in enumerate(self.layer_indices):
            loaded = copies.tokens_of(lease, number, start, stop)
            for view, states in zip(self.get_cache_for_block_table(layer), loaded, strict=True):
                view[pages] = states.view(-1, self.tokens_per_page, *states.shape[1:])

    def _pages_of(self, blocks: Sequence[int]) -> torch.Tensor:
        """Where the first of a block's pages is, in the views of a layer."""
        return torch.tensor(blocks) * (self.block_physical_stride // self.tokens_per_page)

    def _named(self, prompt_ids: list[int], found: Sequence[int], blocks: list[int]) -> list[int]:
        """Found by their tokens from now on, and anybody's who finds them."""
        named, parent = [], self.ledger.block_to_hash[found[-1]] if found else None
        for index, block in enumerate(blocks, len(found)):
            start = index * self.tokens_per_page
            parent = compute_block_hash(parent, prompt_ids[start : start + self.tokens_per_page])
            same = self.ledger.register_new_hash(block, parent)
            if same is None:
                self.ledger.cached_blocks[block] = None
            else:
                self.pool.free_blocks(self.index, [block])
            named.append(block if same is None else same)
        return named

    # ---- when steps are over ---------------------------------------------------------------------

    @override
    def mark_complete_blocks(
        self, request_id: str, token_ids: list[int], new_new_blocks: int
    ) -> None:
        """As it is; and of which tokens they are is kept for the end of the request."""
        super().mark_complete_blocks(request_id, token_ids, new_new_blocks)
        self._tokens[request_id] = token_ids

    @override
    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """As it is; and what is whole of them is cached in the node before."""
        tokens = self._tokens.pop(request_id, [])
        blocks = self.block_table.get(request_id, [])
        n_whole = next(
            (n for n, block in enumerate(blocks) if block not in self.ledger.block_to_hash),
            len(blocks),
        )
        tokens, blocks = tokens[: n_whole * self.tokens_per_page], blocks[:n_whole]
        asks = self._asks() if tokens else None
        if asks is not None and asks[0].saves:
            self._save(*asks, tokens, blocks)
        super().free_blocks(request_id, no_cache)

    def _save(
        self, served: ServedBatches, namespace: str, tokens: list[int], blocks: list[int]
    ) -> None:
        def fill(copies: PageCopies, lease: SyncLease, n_tokens: int) -> None:
            first = lease.prefix_len // self.tokens_per_page
            pages, offset = self._pages_of(blocks[first:]), first * self.tokens_per_page
            for number, layer in enumerate(self.layer_indices):
                k, v = (
                    view[pages].flatten(0, 1)[lease.prefix_len - offset : n_tokens - offset]
                    for view in self.get_cache_for_block_table(layer)
                )
                copies.write_tokens(lease, number, n_tokens, k, v)

        saved = served.link.write(np.asarray(tokens, np.int64), namespace, fill)
        served.counts.saved_tokens += saved.new if saved is not None else 0
