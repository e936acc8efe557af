"""A Hugging Face KV cache whose bytes live only in a pool of kvd: the example for engines.

What an engine holds of a sequence is a **block table**: the page ids of its lease, in token order.
Token ``t`` lies in page ``pages[t // page_size]``, slot ``t % page_size``. The views of one layer
are ``(pages, page_size, kv_heads, head_dim)``: strided in a page-first pool, contiguous in a
layer-first one. Indexing by page and slot works alike on both, so nothing here knows the order.

    lease.pages          [ 7 | 8 | 3 | 9 ]        four pages of 4 slots, 14 tokens written
                           |           |
    k[7] ----------------- t0..t3      t12 t13 - - -------- k[9]: a partial last page

``transformers`` calls ``update`` once per layer and forward pass with the K and V of the new
tokens, which are stored in the pages, and then the attention. The one here takes the place of the
model's own: ``seen`` tells it the block table, and it reads the K and V of all tokens from the
pages. So nobody makes a mask, and nothing is gathered. A cache without pages is left to the model's
own attention.

A layer with a **window** looks back only so far. Its block table has the null page (0) wherever the
lease has no window page, and no token before the window is read:

    lease.pages_of("swa") [ 0 | 0 | 5 | 2 ]       a window of 6: token 14 looks back to token 9

Two lengths belong to a sequence, and mixing them up corrupts other people's cache:

- ``written_tokens``: how many tokens have KV. Positions and masks follow from it.
- ``shared_tokens``: how many tokens lie in pages of the daemon's prefix tree, which others read at
  this moment. They are never written. After a full hit the last token must be computed once more
  to get its logits (``written_tokens = shared_tokens - 1``); its KV is there and stays untouched.

Invariant: written <= capacity = len(pages) * page_size; no slot below shared is ever written; the
null page is neither read nor written.

A layer of **latents** (MLA) keeps the latent of a token, from which each head would make its K and
V. Instead its queries are taken into the space of latents, and what they find back out of it; so
every head looks at the latents themselves. The one tensor that the pool has for a layer, ``(latent,
rotated key)``, is K, its latents are V:

    q (W c) = (q W) c        sum of weights * (W c) = W (sum of weights * c)

**States.** A recurrent layer keeps one state per sequence: what its convolution last saw, and what
its scan has summed up. A state stands for all tokens before one point and cannot be rolled back. So
a lease names two pages, and the engine copies on write:

    lease.pages_of("state")   [ the state after prefix_len tokens, or 0 | the lease's own ]
                                read, never written                       written

``transformers`` updates states in place, so it is given the own page itself: whatever was computed
last lies in the pool at any moment, ready to be sent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from typing_extensions import override

from kvd.connectors.transformers.layout import cache_argument
from kvd.device.attention import AttentionRule, BatchPages, is_latent, prefill

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray
    from transformers import Cache, PreTrainedModel


ATTENTION = "kvd-pages"


class Seen(msgspec.Struct, frozen=True, eq=False):
    """What the new tokens of a sequence look at.

    They are runs of tokens that follow each other, one as a rule; each run is a sequence of
    ``pages``, up to its last token. ``starts``: (runs + 1,) int32, where each begins among them.
    """

    pages: BatchPages
    starts: torch.Tensor


def forward(model: PreTrainedModel, cache: Cache, **inputs: object) -> Any:
    """Call ``model`` over ``cache``, whether that has pages or not; what the model gives."""
    argument = cache_argument(model)
    if not any(isinstance(layer, PagedLayer) for layer in cache.layers):
        return model(**{argument: cache}, **inputs)
    own = model.config._attn_implementation  # noqa: SLF001 - there is no public name for it
    model.set_attn_implementation(ATTENTION)
    try:
        return model(**{argument: cache}, kvd_layers=cache.layers, **inputs)
    finally:
        model.set_attn_implementation(own)


def attend(  # noqa: PLR0913 - as transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    kvd_layers: list[PagedLayer],
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: (1, new_tokens, heads, head_dim of V).

    ``query`` is (1, heads, new_tokens, head_dim); ``key`` and ``value`` of the new tokens are in
    the pages already. The number of ``module`` among the layers tells which pages. ``s_aux`` are
    (heads,) sinks.
    """
    assert attention_mask is None, "who sees whom follows from the lengths"
    layer = module.layer_idx
    assert isinstance(layer, int)
    seen = kvd_layers[layer].seen()
    rule = AttentionRule(scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    packed = query[0].transpose(0, 1)
    if is_latent(seen.pages):
        weight = module.get_parameter("kv_b_proj.weight")
        return _attend_latents(weight, packed, seen, rule)[None], None
    return prefill(packed, seen.pages, rule, seen.starts)[None], None


AttentionInterface.register(ATTENTION, attend)


def _attend_latents(
    weight: torch.Tensor, query: torch.Tensor, seen: Seen, rule: AttentionRule
) -> torch.Tensor:
    """(tokens, heads, v_dim): attention over latents, of queries that know K and V.

    ``weight`` is (heads * (plain + v_dim), latent_dim), which makes K and V of a latent; ``query``
    is (tokens, heads, plain + rotated).
    """
    _, heads, dim = query.shape
    latent_dim = seen.pages.v.shape[-1]
    rotated_dim = seen.pages.k.shape[-1] - latent_dim
    plain, rotated = query.tensor_split([dim - rotated_dim], dim=-1)
    to_k, to_v = weight.view(heads, -1, latent_dim).tensor_split([dim - rotated_dim], dim=1)
    latent = torch.cat([torch.einsum("thd,hdl->thl", plain, to_k), rotated], dim=-1)
    found = prefill(latent, seen.pages, rule, seen.starts)
    return torch.einsum("thl,hvl->thv", found, to_v)


class StateViews(NamedTuple):
    """The states of one layer in all pages.

    ``conv``: (pages, channels, tokens); ``scan``: (pages, heads, head_dim, state_dim).
    """

    conv: torch.Tensor
    scan: torch.Tensor


class StateLayer(LinearAttentionLayer):
    """One recurrent layer of one sequence.

    Invariant: only ``own_page`` is written, and it is not the null page.
    """

    def __init__(
        self, views: StateViews, *, source_page: int, own_page: int, written_tokens: int
    ) -> None:
        """A layer that goes on after ``written_tokens``.

        ``source_page`` has the state after those tokens; 0: it is in ``own_page`` already, or
        nowhere, when there were none.
        """
        assert own_page, "the null page is nobody's state"
        super().__init__()
        conv, scan = views.conv[own_page : own_page + 1], views.scan[own_page : own_page + 1]
        if source_page:
            conv.copy_(views.conv[source_page : source_page + 1])
            scan.copy_(views.scan[source_page : source_page + 1])
        self.conv_states[0], self.recurrent_states[0] = conv, scan
        self.is_conv_states_initialized[0] = True
        self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = written_tokens > 0
        self.conv_kernel_size[0] = conv.shape[-1]


LayerViews = tuple[torch.Tensor, torch.Tensor]
"""K and V of one layer, each (pages, page_size, kv_heads, head_dim), as ``pool.layer(i)`` gives; of
latents, all of it, (pages, page_size, 1, latent_dim + rope_dim), and its first latent_dim."""


class BlockTable:
    """The page ids of one part of a lease, which all its layers share."""

    def __init__(
        self, row: Sequence[int] | NDArray[np.int32], device: torch.device | str = "cpu"
    ) -> None:
        self._device = device
        self.replace(row)

    def replace(self, row: Sequence[int] | NDArray[np.int32]) -> None:
        """The lease has other pages now: it slid."""
        # Copied: a row of a lease is read-only, and a commit may replace it meanwhile.
        self.row = torch.tensor(row, dtype=torch.int32)
        # What is asked is asked of ``row``: a device would have to be waited for.
        self.pages = self.row.to(self._device)

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
        missing = (self.row[start : -(-end // page_size)] == 0).nonzero()
        if len(missing):
            token = max(first, (start + int(missing[0])) * page_size)
            raise IndexError(
                f"token {token} has no window page: the lease has none so far back, or must "
                "slide before computing so far ahead"
            )


class Lengths(msgspec.Struct, frozen=True):
    """How far a sequence is.

    ``written_tokens``: tokens whose KV is in the pages already; the model computes from there.
    ``shared_tokens``: tokens in pages of the prefix tree, never written: ``lease.prefix_len``
    before a prefill, the prompt's length after a handoff, which committed its whole pages.
    """

    written_tokens: int
    shared_tokens: int


class PagedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer of one sequence that looks at every token."""

    is_sliding = False

    def __init__(self, views: LayerViews, table: BlockTable, lengths: Lengths) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._k, self._v = views
        self._table = table
        self._page_size = self._k.shape[1]
        self._written_tokens = lengths.written_tokens
        self._shared_tokens = lengths.shared_tokens
        self._new_tokens = 0
        self.is_initialized = True

    @override
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is the daemon's and exists."""

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> LayerViews:
        """Store the KV of the next tokens, (1, kv_heads, new_tokens, head_dim), and return it.

        Raises:
            IndexError: the lease has no page for one of these tokens.
        """
        first = self._written_tokens
        total = first + key_states.shape[2]
        self._table.require(self._first_seen(), total, self._page_size)
        start = max(first, self._shared_tokens)
        if start < total:
            new = torch.arange(start, total, device=self._k.device)
            where = self._table.pages[new // self._page_size], new % self._page_size
            key, value = (
                states[0, :, start - first :].transpose(0, 1)
                for states in (key_states, value_states)
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
        """What the tokens that were written last look at."""
        device = self._k.device
        lengths = torch.tensor([self._written_tokens], dtype=torch.int32, device=device)
        starts = torch.tensor([0, self._new_tokens], dtype=torch.int32, device=device)
        return Seen(
            BatchPages(k=self._k, v=self._v, block_table=self._table.pages[None], lengths=lengths),
            starts,
        )

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
        self, views: LayerViews, table: BlockTable, lengths: Lengths, *, window_tokens: int
    ) -> None:
        super().__init__(views, table, lengths)
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
