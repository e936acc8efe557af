"""Attention over a pool's pages by block table, and over K and V that lie in no pages.

Two calls: ``decode``, in which every sequence has as many new tokens, and ``prefill``, in which
they have any number. Both take the pages as ``pool.layer(i)`` gives them, page first or layer
first, and none of the pool is copied but by a kernel's own block of work:

    decode(q, BatchPages(k, v, block_table, lengths), rule)  the next token or two of a batch
    prefill(q, BatchPages(...), rule, starts)                new tokens behind a cached prefix
    prefill(q, Packed(k, v, starts), rule, starts)           whole texts, K and V of the batch

What a token sees is counted from the end: the last of a sequence's new tokens is the last of its
K and V, as in flash-attn ("bottom right"), so a chunk behind a prefix needs no offset:

    lengths 6, 3 new tokens        token     0 1 2 3 4 5
                                   query 0   x x x x
                                   query 1   x x x x x
                                   query 2     x x x x x   with a window of 5

Of a latent (MLA) K is the latent and the rotated part, V the latent alone, which is a view of K's
first elements: one KV head, ``v_dim < k_dim``. A query must then be in the latent's space.

The kernel is chosen once for all calls alike, by ``kernels.choose``; ``chosen`` says which, and why
no better one. Those of CUDA, in ``flash``, were not exercised on hardware. The one that runs
anywhere is in ``blocks``.

Invariants: ``ceil(length / page_size) <= max_pages``; entries of a block table are looked at only
as far as the window reaches, so those before it may be anything, 0 as a rule.
"""

from __future__ import annotations

import functools

import torch

from kvd.device import blocks, flash
from kvd.device.batch import AttentionRule, BatchPages, Packed, is_latent
from kvd.device.kernels import Choice, Kernel, Need, choose, machine

__all__ = [
    "AttentionRule",
    "BatchPages",
    "Choice",
    "Kernel",
    "Packed",
    "chosen",
    "decode",
    "is_latent",
    "need",
    "prefill",
]


def need(q: torch.Tensor, kv: BatchPages | Packed, rule: AttentionRule) -> Need:
    """What a kernel must be able to do for these arguments; for ``kernels.choose``."""
    return Need(
        dtype=str(q.dtype).removeprefix("torch."),
        k_dim=kv.k.shape[-1],
        v_dim=kv.v.shape[-1],
        page_size=kv.page_size if isinstance(kv, BatchPages) else 0,
        is_latent=is_latent(kv),
        has_sinks=rule.sinks is not None,
        has_softcap=rule.softcap is not None,
    )


def chosen(q: torch.Tensor, kv: BatchPages | Packed, rule: AttentionRule) -> Choice:
    """The kernel for these arguments, and the reason against each better one."""
    return _chosen(q.device, need(q, kv, rule))


@functools.cache
def _chosen(device: torch.device, what: Need) -> Choice:
    """The computer is looked at once for each need."""
    return choose(machine(device), what)


def decode(
    q: torch.Tensor, pages: BatchPages, rule: AttentionRule, *, kernel: Kernel | None = None
) -> torch.Tensor:
    """Attention of the last ``new_tokens`` tokens of every sequence.

    Args:
        q: (batch, new_tokens, heads, k_dim); heads is a multiple of kv_heads.
        pages: where K and V are, of the new tokens too.
        rule: what a token sees.
        kernel: another than the chosen one.

    Returns:
        (batch, new_tokens, heads, v_dim) in the dtype of ``q``; zeros for a token that sees none.

    Raises:
        ValueError: shapes do not fit together; the message has both.
    """
    _check(q.shape[-2], q.shape[-1], pages, rule)
    batch, new_tokens = q.shape[:2]
    _same("sequences", batch, pages.block_table.shape[0], pages.lengths.shape[0])
    packed = q.flatten(0, 1)
    kernel = kernel or chosen(q, pages, rule).kernel
    if kernel is Kernel.TORCH:
        starts = [number * new_tokens for number in range(batch + 1)]
        done = blocks.attend(packed, starts, pages, rule)
    else:
        ends = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * new_tokens
        done = flash.attend(kernel, flash.Queries(packed, ends, new_tokens), pages, rule)
    return done.view(batch, new_tokens, *done.shape[1:])


def prefill(
    q: torch.Tensor,
    kv: BatchPages | Packed,
    rule: AttentionRule,
    starts: torch.Tensor,
    *,
    kernel: Kernel | None = None,
) -> torch.Tensor:
    """Attention of new tokens, any number in each sequence.

    Args:
        q: (tokens, heads, k_dim), one sequence behind the other.
        kv: where K and V are: in pages, behind those of a cached prefix, or in none.
        rule: what a token sees.
        starts: (batch + 1,) int32, where the new tokens of each sequence begin: cu_seqlens.
        kernel: another than the chosen one.

    Returns:
        (tokens, heads, v_dim) in the dtype of ``q``; zeros for a token that sees none.

    Raises:
        ValueError: shapes do not fit together; the message has both.
    """
    _check(q.shape[-2], q.shape[-1], kv, rule)
    batch = starts.shape[0] - 1
    if isinstance(kv, BatchPages):
        _same("sequences", batch, kv.block_table.shape[0], kv.lengths.shape[0])
    else:
        _same("sequences", batch, kv.starts.shape[0] - 1)
    kernel = kernel or chosen(q, kv, rule).kernel
    if kernel is Kernel.TORCH:
        return blocks.attend(q, starts.tolist(), kv, rule)
    return flash.attend(kernel, flash.Queries(q, starts, flash.longest(starts)), kv, rule)


def _check(heads: int, k_dim: int, kv: BatchPages | Packed, rule: AttentionRule) -> None:
    """Refuse what no kernel could make sense of."""
    _same("elements of a key", k_dim, kv.k.shape[-1])
    _same("KV heads", kv.k.shape[-2], kv.v.shape[-2])
    if heads % kv.k.shape[-2]:
        raise ValueError(f"{heads} heads cannot share {kv.k.shape[-2]} KV heads evenly")
    if rule.window is not None and not (rule.is_causal and rule.window > 0):
        raise ValueError(
            f"a window of {rule.window} tokens: it has at least one, and ends at the token itself, "
            "so the rule must be causal"
        )


def _same(what: str, *counts: int) -> None:
    """Refuse arguments that differ in a number they must share."""
    if len(set(counts)) != 1:
        raise ValueError(f"the arguments differ in their number of {what}: {counts}")
