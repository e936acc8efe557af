"""What the kernels for CUDA are given, without any: stand-ins with their signatures and checks.

A stand-in computes from its arguments alone, so an argument in the wrong place, of the wrong type
or meaning comes out as a wrong number. That the kernels themselves do so is not shown here.
"""

from __future__ import annotations

import sys
from types import ModuleType

import msgspec
import pytest
import torch

from kvd.device.attention import AttentionRule, BatchPages, Kernel, Packed, decode, prefill
from tests.device.oracle import Pool, Shape, attention, over, starts_of

PLAIN = Shape(256, kv_heads=2, group=4, k_dim=32, v_dim=32)
LATENT = Shape(64, kv_heads=1, group=4, k_dim=80, v_dim=64, latent=True)
FLASH = [Kernel.FLASH_4, Kernel.FLASH_3, Kernel.FLASH_2]


class Call(msgspec.Struct, frozen=True):
    """What a kernel was asked, in one form for all of them; lengths and starts are int32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    longest: tuple[int, int]
    rule: AttentionRule
    table: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    k_starts: torch.Tensor | None = None
    qv: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        """(tokens, heads, v_dim)."""
        assert self.q.ndim == 3
        q, k = self.q, self.k
        if self.qv is not None:  # its product with the values is one more part of the scores
            q, k = torch.cat([self.qv, q], -1), torch.cat([self.v, k], -1)
        for one in (self.starts, self.table, self.lengths, self.k_starts):
            assert one is None or (one.dtype == torch.int32 and one.stride(-1) == 1)
        queries = list(q.tensor_split(self.starts[1:-1].long()))
        assert max(map(len, queries)) <= self.longest[0]
        if self.table is None:
            assert self.k_starts is not None
            assert int(self.k_starts.diff().max()) <= self.longest[1]
            return over(queries, Packed(k, self.v, self.k_starts), self.rule)
        assert self.lengths is not None
        assert int(self.lengths.max()) <= self.longest[1]
        return over(queries, BatchPages(k, self.v, self.table, self.lengths), self.rule)


def seen(causal: bool, window: tuple[int | None, int | None], **how: object) -> AttentionRule:
    """A rule as these kernels are told it."""
    before, after = (None if one in (None, -1) else one for one in window)
    assert after in (None, 0)
    is_causal = causal or after == 0
    return AttentionRule(
        how.pop("scale"),  # type: ignore[arg-type]
        is_causal=is_causal,
        window=None if before is None else before + 1,
        softcap=how.pop("softcap") or None,  # type: ignore[arg-type]
        sinks=how.pop("sinks", None),  # type: ignore[arg-type]
    )


def flash_2(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """``flash_attn.flash_attn_varlen_func`` of 2.8.3."""
    rule = seen(causal, window_size, scale=softmax_scale, softcap=softcap)
    longest = (max_seqlen_q, max_seqlen_k)
    if block_table is None:
        return Call(q, k, v, cu_seqlens_q, longest, rule, k_starts=cu_seqlens_k).compute()
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert cu_seqlens_k.dtype == torch.int32
    lengths = cu_seqlens_k.diff()
    return Call(q, k, v, cu_seqlens_q, longest, rule, block_table, lengths).compute()


def flash_3_packed(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None,
    seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
    v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
    pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    """``flash_attn_interface.flash_attn_varlen_func`` of 3."""
    rule = seen(causal, window_size, scale=softmax_scale, softcap=softcap)
    longest = (max_seqlen_q, max_seqlen_k)
    return Call(q, k, v, cu_seqlens_q, longest, rule, k_starts=cu_seqlens_k, qv=qv).compute()


def flash_3_paged(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None,
    cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None,
    cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """``flash_attn_interface.flash_attn_with_kvcache`` of 3."""
    assert k is None, "new keys would be appended to the cache"
    rule = seen(causal, window_size, scale=softmax_scale, softcap=softcap)
    longest = (max_seqlen_q, page_table.shape[1] * k_cache.shape[1])
    return Call(
        q, k_cache, v_cache, cu_seqlens_q, longest, rule, page_table, cache_seqlens, qv=qv
    ).compute()


def flash_4(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None,
    causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
):  # fmt: skip
    """``flash_attn.cute.flash_attn_varlen_func`` of 4; gives sums of weights beside the output."""
    assert page_table is None or cu_seqlens_k is None, "page_table is not supported with them"
    assert learnable_sink is None or learnable_sink.dtype == torch.bfloat16
    assert -1 not in window_size
    rule = seen(causal, window_size, scale=softmax_scale, softcap=softcap, sinks=learnable_sink)
    longest = (max_seqlen_q, max_seqlen_k)
    call = Call(q, k, v, cu_seqlens_q, longest, rule, page_table, seqused_k, cu_seqlens_k, qv)
    return call.compute(), None


def varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):  # fmt: skip
    """``torch.nn.attention.varlen.varlen_attn`` of torch 2.13."""
    assert enable_gqa or query.shape[1] == key.shape[-2]
    rule = seen(False, window_size, scale=scale, softcap=0.0)
    longest = (max_q, max_k)
    return Call(
        query, key, value, cu_seq_q, longest, rule, block_table, seqused_k, cu_seq_k
    ).compute()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages of these names, for the time of a test."""
    second, third, fourth = map(ModuleType, ("flash_attn", "flash_attn_interface", "cute"))
    second.flash_attn_varlen_func = flash_2
    third.flash_attn_varlen_func = flash_3_packed
    third.flash_attn_with_kvcache = flash_3_paged
    fourth.flash_attn_varlen_func = flash_4
    monkeypatch.setitem(sys.modules, "flash_attn", second)
    monkeypatch.setitem(sys.modules, "flash_attn.cute", fourth)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", third)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    torch.set_num_threads(1)


def rules(pool: Pool, kernel: Kernel) -> list[AttentionRule]:
    """What the kernel takes."""
    found = [pool.rule(), pool.rule(window=70)]
    if kernel is not Kernel.VARLEN:
        found.append(pool.rule(softcap=3.0))
    if kernel is Kernel.FLASH_4:
        found.append(pool.rule(sinks=pool.random(pool.shape.kv_heads * pool.shape.group)))
    return found


def check(found: torch.Tensor, expected: torch.Tensor, rule: AttentionRule) -> None:
    """Equal, but for sinks that were rounded to 16 bits."""
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= (1e-9 if rule.sinks is None else 1e-2)


CASES = pytest.mark.parametrize(
    ("kernel", "shape"),
    [
        *((kernel, PLAIN) for kernel in (*FLASH, Kernel.VARLEN)),
        *((kernel, LATENT) for kernel in (Kernel.FLASH_4, Kernel.FLASH_3)),
    ],
)


@CASES
@pytest.mark.parametrize("new", [1, 3])
def test_decode_over_pages(kernel: Kernel, shape: Shape, new: int) -> None:
    pool = Pool(shape, pages=20, seed=1)
    pages = pool.pages([300, 5, 64])
    for rule in rules(pool, kernel):
        q = pool.queries(new, new, new)

        found = decode(torch.stack(q), pages, rule, kernel=kernel)

        check(found.flatten(0, 1), over(q, pages, rule), rule)


@CASES
def test_prefill_over_pages(kernel: Kernel, shape: Shape) -> None:
    pool = Pool(shape, pages=20, seed=2)
    pages = pool.pages([300, 5, 64])
    for rule in rules(pool, kernel):
        q = pool.queries(100, 5, 1)

        found = prefill(torch.cat(q), pages, rule, starts_of([100, 5, 1]), kernel=kernel)

        check(found, over(q, pages, rule), rule)


@CASES
def test_prefill_of_whole_texts(kernel: Kernel, shape: Shape) -> None:
    pool = Pool(shape, pages=2, seed=3)
    k = pool.random(200, shape.kv_heads, shape.k_dim)
    v = k[..., : shape.v_dim] if shape.latent else pool.random(*k.shape[:2], shape.v_dim)
    kv = Packed(k, v, starts_of([120, 1, 79]))
    for rule in [*rules(pool, kernel), pool.rule(is_causal=False)]:
        q = pool.queries(120, 1, 79)

        found = prefill(torch.cat(q), kv, rule, kv.starts, kernel=kernel)

        check(found, over(q, kv, rule), rule)


def test_a_kernel_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not ask ``choose`` hears of it from the import."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    pool = Pool(PLAIN, pages=20, seed=4)
    pages = pool.pages([5])

    with pytest.raises(ImportError, match="flash_attn"):
        decode(torch.stack(pool.queries(1)), pages, pool.rule(), kernel=Kernel.FLASH_2)


def test_the_stand_ins_would_show_a_wrong_window() -> None:
    """The negative control."""
    pool = Pool(PLAIN, pages=20, seed=5)
    k, v = pool.random(50, 2, 32), pool.random(50, 2, 32)
    (q,) = pool.queries(50)
    right = attention(q, k, v, pool.rule(window=10))

    wrong = flash_2(
        q, k, v, starts_of([50]), starts_of([50]), 50, 50, softmax_scale=pool.rule().scale,
        causal=True, window_size=(10, 0),
    )  # fmt: skip

    assert (right - wrong).abs().max().item() > 0.01
