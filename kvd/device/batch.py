"""What attention is computed over: K and V of a batch, in pages or in none, and the rule of sight.

Shapes alone; the calls are in ``attention``.
"""

from __future__ import annotations

import msgspec
import torch


class BatchPages(msgspec.Struct, frozen=True, eq=False):
    """K and V of a batch in the pages of a pool.

    ``k``: (pages, page_size, kv_heads, k_dim), ``v``: (pages, page_size, kv_heads, v_dim), with any
    strides but 1 in the last dimension. ``block_table``: (batch, max_pages) int32, page ids in the
    order of tokens. ``lengths``: (batch,) int32, tokens that have KV, the new ones included.
    """

    k: torch.Tensor
    v: torch.Tensor
    block_table: torch.Tensor
    lengths: torch.Tensor

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.k.shape[1]


class Packed(msgspec.Struct, frozen=True, eq=False):
    """K and V of a batch, one sequence behind the other, in no pages.

    ``k``: (tokens, kv_heads, k_dim), ``v``: (tokens, kv_heads, v_dim). ``starts``: (batch + 1,)
    int32, where each sequence begins, and the end of the last: cu_seqlens.
    """

    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor


class AttentionRule(msgspec.Struct, frozen=True, eq=False):
    """What a token sees of the others, and how it weighs them.

    ``scale``: of the product of a query and a key. ``window``: how many tokens are seen, the
    token itself among them; None: all. ``softcap``: scores s become c * tanh(s / c); None: they
    stay. ``sinks``: (heads,) one more score for each head, whose value is zero.
    """

    scale: float
    is_causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


def is_latent(kv: BatchPages | Packed) -> bool:
    """Whether V is a view of the first elements of K."""
    return (
        kv.k.data_ptr() == kv.v.data_ptr()
        and kv.k.stride() == kv.v.stride()
        and kv.v.shape[-1] < kv.k.shape[-1]
    )
