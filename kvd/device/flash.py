"""Attention by kernels for CUDA: how their arguments are put together, and nothing else.

**Not exercised on hardware.** Written from the signatures of flash-attn 2.8.3, of 3, of 4.0.0b36
and of torch 2.13. Without a GPU the arguments are tested against stand-ins of these signatures
that compute in torch; ``tests/gpu/test_attention.py`` compares with an oracle whatever a machine
has of them.

They may read what they weigh with zero, such as the null page before a window, so that must be
finite; ``blocks`` never reads it.

What they share: queries are packed, causal is bottom right, a window is (tokens before, tokens
after), starts, lengths and block tables are int32 on the device. Over pages nothing here waits for
the device, because the longest sequence is taken to be what a block table can hold.

A latent goes by ``qv``: the rotated parts of query and key are ``q`` and ``k``, the latent part of
the query is ``qv`` and is multiplied with the values, which are the latents.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
import torch

from kvd.device.batch import AttentionRule, BatchPages, Packed, is_latent
from kvd.device.kernels import Kernel


class Queries(msgspec.Struct, frozen=True, eq=False):
    """The new tokens of a batch.

    ``packed``: (tokens, heads, k_dim). ``starts``: (batch + 1,) int32. ``longest``: new tokens of
    one sequence, at most.
    """

    packed: torch.Tensor
    starts: torch.Tensor
    longest: int


def attend(
    kernel: Kernel, queries: Queries, kv: BatchPages | Packed, rule: AttentionRule
) -> torch.Tensor:
    """Attention of packed queries by a kernel other than ``Kernel.TORCH``.

    Returns:
        (tokens, heads, v_dim).
    """
    match kernel:
        case Kernel.FLASH_4:
            return _flash_4(queries, kv, rule)
        case Kernel.FLASH_3:
            return _flash_3(queries, kv, rule)
        case Kernel.FLASH_2:
            return _flash_2(queries, kv, rule)
        case Kernel.VARLEN:
            return _varlen(queries, kv, rule)
        case Kernel.TORCH:
            raise AssertionError("this one is no kernel for CUDA")
        case _:
            assert_never(kernel)


def _flash_4(queries: Queries, kv: BatchPages | Packed, rule: AttentionRule) -> torch.Tensor:
    """By ``flash_attn.cute``, compiled when it is first called."""
    from flash_attn.cute import flash_attn_varlen_func  # noqa: PLC0415 - optional

    sinks = None if rule.sinks is None else rule.sinks.to(torch.bfloat16)
    where = (
        {"seqused_k": kv.lengths, "page_table": kv.block_table}
        if isinstance(kv, BatchPages)
        else {"cu_seqlens_k": kv.starts}
    )
    return _first(
        flash_attn_varlen_func(
            **_operands(queries.packed, kv),
            **where,
            cu_seqlens_q=queries.starts,
            max_seqlen_q=queries.longest,
            max_seqlen_k=_longest(kv),
            softmax_scale=rule.scale,
            causal=rule.is_causal,
            window_size=(None, None) if rule.window is None else (rule.window - 1, 0),
            softcap=rule.softcap or 0.0,
            learnable_sink=sinks,
        )
    )


def _flash_3(queries: Queries, kv: BatchPages | Packed, rule: AttentionRule) -> torch.Tensor:
    """By ``flash_attn_interface``; only its call for caches takes a page table."""
    import flash_attn_interface  # noqa: PLC0415 - optional

    operands = _operands(queries.packed, kv)
    how = {
        "max_seqlen_q": queries.longest,
        "softmax_scale": rule.scale,
        "causal": rule.is_causal,
        "window_size": _window(rule),
        "softcap": rule.softcap or 0.0,
    }
    if isinstance(kv, Packed):
        return _first(
            flash_attn_interface.flash_attn_varlen_func(
                **operands,
                **how,
                cu_seqlens_q=queries.starts,
                cu_seqlens_k=kv.starts,
                max_seqlen_k=_longest(kv),
            )
        )
    caches = {"k_cache": operands.pop("k"), "v_cache": operands.pop("v")}
    return _first(
        flash_attn_interface.flash_attn_with_kvcache(
            **operands,
            **caches,
            **how,
            cu_seqlens_q=queries.starts,
            cache_seqlens=kv.lengths,
            page_table=kv.block_table,
        )
    )


def _flash_2(queries: Queries, kv: BatchPages | Packed, rule: AttentionRule) -> torch.Tensor:
    """By ``flash_attn``, which wants the ends of sequences in pages as a running sum."""
    from flash_attn import flash_attn_varlen_func  # noqa: PLC0415 - optional

    ends, table = (
        (_running(kv.lengths), kv.block_table) if isinstance(kv, BatchPages) else (kv.starts, None)
    )
    return _first(
        flash_attn_varlen_func(
            queries.packed,
            kv.k,
            kv.v,
            queries.starts,
            ends,
            queries.longest,
            _longest(kv),
            softmax_scale=rule.scale,
            causal=rule.is_causal,
            window_size=_window(rule),
            softcap=rule.softcap or 0.0,
            block_table=table,
        )
    )


def _varlen(queries: Queries, kv: BatchPages | Packed, rule: AttentionRule) -> torch.Tensor:
    """By the flash-attn that torch was built with; causal is a window without an end before."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - torch since 2.10 has it

    starts, lengths, table = (
        (None, kv.lengths, kv.block_table)
        if isinstance(kv, BatchPages)
        else (kv.starts, None, None)
    )
    return _first(
        varlen_attn(
            queries.packed,
            kv.k,
            kv.v,
            queries.starts,
            starts,
            queries.longest,
            _longest(kv),
            scale=rule.scale,
            window_size=(-1, 0) if rule.is_causal and rule.window is None else _window(rule),
            enable_gqa=queries.packed.shape[1] != kv.k.shape[-2],
            seqused_k=lengths,
            block_table=table,
        )
    )


def _operands(q: torch.Tensor, kv: BatchPages | Packed) -> dict[str, torch.Tensor]:
    """``q``, ``k``, ``v``, and of latents ``qv``."""
    if not is_latent(kv):
        return {"q": q, "k": kv.k, "v": kv.v}
    latent_dim = kv.v.shape[-1]
    return {
        "q": q[..., latent_dim:],
        "k": kv.k[..., latent_dim:],
        "v": kv.v,
        "qv": q[..., :latent_dim],
    }


def _window(rule: AttentionRule) -> tuple[int, int]:
    """As flash-attn 2 and 3 and torch give it: -1 is no end."""
    return (-1, -1) if rule.window is None else (rule.window - 1, 0)


def _longest(kv: BatchPages | Packed) -> int:
    """Tokens of K and V of one sequence, at most; of packed ones the device is asked."""
    if isinstance(kv, BatchPages):
        return kv.block_table.shape[1] * kv.page_size
    return longest(kv.starts)


def longest(starts: torch.Tensor) -> int:
    """Tokens of the longest sequence; asks the device."""
    return int(starts.diff().max()) if len(starts) > 1 else 0


def _running(lengths: torch.Tensor) -> torch.Tensor:
    """(batch + 1,) int32: where each sequence would begin if they lay one behind the other."""
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _first(result: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The output; some versions give the logarithms of sums beside it."""
    return result[0] if isinstance(result, tuple) else result
