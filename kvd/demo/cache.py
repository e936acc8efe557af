"""A Hugging Face KV cache whose bytes live only in a pool of kvd: the example for engines.

What an engine holds of a sequence is a **block table**: the page ids of its lease, in token order.
Token ``t`` lies in page ``pages[t // page_size]``, slot ``t % page_size``. The views of one layer
are ``(pages, page_size, kv_heads, head_dim)``: strided in a page-first pool, contiguous in a
layer-first one. Indexing by page and slot works alike on both, so nothing here knows the order.

    lease.pages          [ 7 | 8 | 3 | 9 ]        four pages of 4 slots, 14 tokens written
                           |           |
    k[7] ----------------- t0..t3      t12 t13 - - -------- k[9]: a partial last page

``transformers`` calls ``update`` once per layer and forward pass with the K and V of the new
tokens. They are stored in the pages and handed through; the attention that follows reads all K and
V from the pages (see ``paged``), by a block table that ``seen`` gives it. So nothing is gathered.

A layer with a **window** looks back only so far. Its block table has the null page (0) wherever the
lease has no window page, and no token before the window is read:

    lease.pages_of("swa") [ 0 | 0 | 5 | 2 ]       a window of 6: token 14 looks back to token 9

Models of latents (MLA) store ``(latent, rotated key)`` instead of K and V; both are slices of the
one tensor that the pool has for a layer. That tensor is K, its latents are V.

Two lengths belong to a sequence, and mixing them up corrupts other people's cache:

- ``written_tokens``: how many tokens have KV. Positions and masks follow from it.
- ``shared_tokens``: how many tokens lie in pages of the daemon's prefix tree, which others read at
  this moment. They are never written. After a full hit the last token must be computed once more
  to get its logits (``written_tokens = shared_tokens - 1``); its KV is there and stays untouched.

Invariant: written <= capacity = len(pages) * page_size; no slot below shared is ever written; the
null page is neither read nor written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvd.demo.paged import Seen
from kvd.device.attention import BatchPages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

LayerViews = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, each (pages, page_size, kv_heads, head_dim), as ``pool.layer(i)`` gives; of
latents, all of it, (pages, page_size, 1, latent_dim + rope_dim), and its first latent_dim."""


class BlockTable:
    """The page ids of one part of a lease, which all its layers share."""

    def __init__(self, row: Sequence[int] | NDArray[np.int32]) -> None:
        self.replace(row)

    def replace(self, row: Sequence[int] | NDArray[np.int32]) -> None:
        """The lease has other pages now: it slid."""
        # Copied: a row of a lease is read-only, and a commit may replace it meanwhile.
        self.pages = torch.tensor(row, dtype=torch.int32)

    def require(self, first: int, end: int, page_size: int) -> None:
        """Refuse to compute when one of the tokens ``[first, end)`` has no page.

        Raises:
            IndexError: the first, or last, that has none.
        """
        if end > len(self.pages) * page_size:
            raise IndexError(
                f"token {end - 1} has no page: the lease covers {len(self.pages)} pages of "
                f"{page_size} tokens; extend it before computing further"
            )
        start = first // page_size
        missing = (self.pages[start : -(-end // page_size)] == 0).nonzero()
        if len(missing):
            token = max(first, (start + int(missing[0])) * page_size)
            raise IndexError(
                f"token {token} has no window page: the lease has none so far back, or must "
                "slide before computing so far ahead"
            )


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of one sequence that looks at every token.

    ``written_tokens``: tokens whose KV is in the pages already; the model computes from there.
    ``shared_tokens``: tokens in pages of the prefix tree, never written: ``lease.prefix_len``
    before a prefill, the prompt's length after a handoff, which committed its whole pages.
    """

    is_sliding = False

    def __init__(
        self, views: LayerViews, table: BlockTable, *, written_tokens: int, shared_tokens: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._k, self._v = views
        self._table = table
        self._page_size = self._k.shape[1]
        self._written_tokens = written_tokens
        self._shared_tokens = shared_tokens
        self._new_tokens = 0
        self.is_initialized = True

    @override
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is the daemon's and exists."""

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> LayerViews:
        """Store the KV of the next tokens, which ``seen`` then has.

        Args:
            key_states: (1, kv_heads, new_tokens, head_dim).
            value_states: the same shape.

        Returns:
            The same, of the new tokens alone.

        Raises:
            IndexError: the lease has no page for one of these tokens.
        """
        first = self._written_tokens
        total = first + key_states.shape[2]
        self._table.require(self._first_seen(), total, self._page_size)
        start = max(first, self._shared_tokens)
        if start < total:
            new = torch.arange(start, total)
            where = self._table.pages[new // self._page_size], new % self._page_size
            key, value = (
                one[0, :, start - first :].transpose(0, 1) for one in (key_states, value_states)
            )
            self._write(where, key, value)
        self._written_tokens, self._new_tokens = total, total - first
        return key_states, value_states

    def _write(
        self, where: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Store (tokens, kv_heads, head_dim) in these pages and slots."""
        self._k[where], self._v[where] = key, value

    def seen(self) -> Seen:
        """As ``paged.Paged.seen``."""
        lengths = torch.tensor([self._written_tokens], dtype=torch.int32)
        starts = torch.tensor([0, self._new_tokens], dtype=torch.int32)
        return Seen(BatchPages(self._k, self._v, self._table.pages[None], lengths), starts)

    def _first_seen(self) -> int:
        """The first token that the next one looks at."""
        return 0

    @override
    def get_seq_length(self) -> int:
        """Tokens that have KV: where the next position starts."""
        return self._written_tokens

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length of K while ``query_length`` new tokens are computed, and its offset."""
        offset = self._first_seen()
        return self._written_tokens + query_length - offset, offset

    @override
    def get_max_length(self) -> int:
        """Tokens that the pages can hold."""
        return len(self._table.pages) * self._page_size


class WindowLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """One layer that looks at a token and the ``window_tokens - 1`` before it."""

    is_sliding = True

    def __init__(
        self,
        views: LayerViews,
        table: BlockTable,
        *,
        written_tokens: int,
        shared_tokens: int,
        window_tokens: int,
    ) -> None:
        super().__init__(views, table, written_tokens=written_tokens, shared_tokens=shared_tokens)
        self._window_tokens = window_tokens

    @override
    def _first_seen(self) -> int:
        return max(0, self._written_tokens - self._window_tokens + 1)


class LatentLayer(PagedLayer):  # type: ignore[no-untyped-call]
    """One layer whose K is a latent and a rotated key, beside each other, and V the latent."""

    @override
    def _write(
        self, where: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor, value: torch.Tensor
    ) -> None:
        self._k[where] = torch.cat([key, value], dim=-1)
