"""A Hugging Face KV cache whose bytes live only in a pool of kvd: the example for engines.

What an engine holds of a sequence is a **block table**: the page ids of its lease, in token order.
Token ``t`` lies in page ``pages[t // page_size]``, slot ``t % page_size``. The views of one layer
are ``(pages, page_size, kv_heads, head_dim)``: strided in a page-first pool, contiguous in a
layer-first one. Indexing by page and slot works alike on both, so nothing here knows the order.

    lease.pages          [ 7 | 8 | 3 | 9 ]        four pages of 4 slots, 14 tokens written
                           |           |
    k[7] ----------------- t0..t3      t12 t13 - - -------- k[9]: a partial last page

``transformers`` calls ``update`` once per layer and forward pass with the K and V of the new
tokens. It must store them and return K and V of *all* tokens. A kernel that takes a block table
(flash-attn, FlashInfer) would get ``k``, ``v`` and the table instead of the copy gathered here.

Two lengths belong to a sequence, and mixing them up corrupts other people's cache:

- ``written_tokens``: how many tokens have KV. Positions and masks follow from it.
- ``shared_tokens``: how many tokens lie in pages of the daemon's prefix tree, which others read at
  this moment. They are never written. After a full hit the last token must be computed once more
  to get its logits (``written_tokens = shared_tokens - 1``); its KV is there and stays untouched.

Invariant: written <= capacity = len(pages) * page_size; no slot below shared is ever written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvd.client import Pool

LayerViews = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, each (pages, page_size, kv_heads, head_dim), as ``pool.layer(i)`` gives."""


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of one sequence. ``pages``: (n,) int64, the block table."""

    is_sliding = False

    def __init__(
        self, views: LayerViews, pages: torch.Tensor, *, written_tokens: int, shared_tokens: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._k, self._v = views
        self._pages = pages
        self._page_size = self._k.shape[1]
        self._written_tokens = written_tokens
        self._shared_tokens = shared_tokens
        self.is_initialized = True

    @override
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is the daemon's and exists."""

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> LayerViews:
        """Store the KV of the next tokens and return that of all tokens.

        Args:
            key_states: (1, kv_heads, new_tokens, head_dim).
            value_states: the same shape.

        Returns:
            K and V, each (1, kv_heads, all_tokens, head_dim), copied out of the pages.

        Raises:
            IndexError: the lease has no page for the last of these tokens.
        """
        first = self._written_tokens
        total = first + key_states.shape[2]
        if total > len(self._pages) * self._page_size:
            raise IndexError(
                f"token {total - 1} has no page: the lease covers {len(self._pages)} pages of "
                f"{self._page_size} tokens; extend it before computing further"
            )
        start = max(first, self._shared_tokens)
        if start < total:
            positions = torch.arange(start, total)
            page, slot = self._pages[positions // self._page_size], positions % self._page_size
            self._k[page, slot] = key_states[0, :, start - first :].transpose(0, 1)
            self._v[page, slot] = value_states[0, :, start - first :].transpose(0, 1)
        self._written_tokens = total
        return self._gather(self._k, total), self._gather(self._v, total)

    def _gather(self, view: torch.Tensor, tokens: int) -> torch.Tensor:
        """(1, kv_heads, tokens, head_dim) of the first ``tokens`` tokens."""
        used = self._pages[: -(-tokens // self._page_size)]
        return view[used].flatten(0, 1)[:tokens].transpose(0, 1).unsqueeze(0)

    @override
    def get_seq_length(self) -> int:
        """Tokens that have KV: where the next position starts."""
        return self._written_tokens

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of K while ``query_length`` new tokens are computed, and its offset."""
        return self._written_tokens + query_length, 0

    @override
    def get_max_length(self) -> int:
        """Tokens that the pages can hold."""
        return len(self._pages) * self._page_size


def layer_views(pool: Pool, layers: int) -> list[LayerViews]:
    """K and V of every layer, mapped once and kept: a view costs nothing to hold."""
    views: list[LayerViews] = []
    for layer in range(layers):
        k, v = pool.layer(layer)
        views.append((k, v))
    return views


def paged_cache(
    layers: Sequence[LayerViews],
    pages: Sequence[int] | NDArray[np.int32],
    *,
    written_tokens: int,
    shared_tokens: int,
) -> Cache:
    """What to hand to a model as ``past_key_values``, over the pages of one lease.

    Args:
        layers: ``layer_views`` of the pool.
        pages: the page ids of the lease, in token order.
        written_tokens: tokens whose KV is in the pages already; the model computes from there.
        shared_tokens: tokens in pages of the prefix tree, never written: ``lease.prefix_len``
            before a prefill, the prompt's length after a handoff, which committed its whole pages.
    """
    # Copied: lease.pages is read-only, and a commit may replace it while this cache lives.
    table = torch.tensor(pages, dtype=torch.int64)
    return Cache(
        layers=[
            PagedLayer(views, table, written_tokens=written_tokens, shared_tokens=shared_tokens)
            for views in layers
        ]
    )
