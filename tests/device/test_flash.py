"""What flash-attn is given, without it: a stand-in with its signature and checks.

The stand-in computes from its arguments alone, so an argument in the wrong place, of the wrong type
or meaning comes out as a wrong number. That the kernel itself does so is not shown here.
"""

from __future__ import annotations

import sys
from types import ModuleType

import msgspec
import pytest
import torch

from kvd.device.attention import (
    AttentionRule,
    BatchPages,
    FlashDevice,
    Packed,
    decode,
    prefill,
    why_not_flash,
)
from tests.device.oracle import Pool, Shape, attention, over, starts_of

PLAIN = Shape(256, kv_heads=2, group=4, k_dim=32, v_dim=32)
WITH = msgspec.structs.replace


class Call(msgspec.Struct, frozen=True):
    """What the kernel was asked; lengths and starts are int32."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    longest: tuple[int, int]
    rule: AttentionRule
    table: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    k_starts: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        """(tokens, heads, v_dim)."""
        assert self.q.ndim == 3
        q, k = self.q, self.k
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
    """A rule as this kernel is told it."""
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


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of this name, for the time of a test."""
    second = ModuleType("flash_attn")
    second.flash_attn_varlen_func = flash_2
    monkeypatch.setitem(sys.modules, "flash_attn", second)
    torch.set_num_threads(1)


def rules(pool: Pool) -> list[AttentionRule]:
    """What the kernel takes."""
    return [pool.rule(), pool.rule(window=70), pool.rule(softcap=3.0)]


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() <= 1e-9


@pytest.mark.parametrize("new", [1, 3])
def test_decode_over_pages(new: int) -> None:
    pool = Pool(PLAIN, pages=20, seed=1)
    pages = pool.pages([300, 5, 64])
    for rule in rules(pool):
        q = pool.queries(new, new, new)

        found = decode(torch.stack(q), pages, rule, by_flash=True)

        check(found.flatten(0, 1), over(q, pages, rule))


def test_prefill_over_pages() -> None:
    pool = Pool(PLAIN, pages=20, seed=2)
    pages = pool.pages([300, 5, 64])
    for rule in rules(pool):
        q = pool.queries(100, 5, 1)

        found = prefill(torch.cat(q), pages, rule, starts_of([100, 5, 1]), by_flash=True)

        check(found, over(q, pages, rule))


def test_prefill_of_whole_texts() -> None:
    pool = Pool(PLAIN, pages=2, seed=3)
    kv = Packed(pool.random(200, 2, 32), pool.random(200, 2, 32), starts_of([120, 1, 79]))
    for rule in [*rules(pool), pool.rule(is_causal=False)]:
        q = pool.queries(120, 1, 79)

        found = prefill(torch.cat(q), kv, rule, kv.starts, by_flash=True)

        check(found, over(q, kv, rule))


def test_flash_attn_without_the_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not ask ``why_not_flash`` hears of it from the import."""
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    pool = Pool(PLAIN, pages=20, seed=4)
    pages = pool.pages([5])

    with pytest.raises(ImportError, match="flash_attn"):
        decode(torch.stack(pool.queries(1)), pages, pool.rule(), by_flash=True)


def test_the_stand_in_would_show_a_wrong_window() -> None:
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


A100 = FlashDevice("cuda", (8, 0), is_installed=True)
LATENT = Shape(256, kv_heads=1, group=4, k_dim=80, v_dim=64, latent=True, dtype="bfloat16")
LLAMA = Shape(256, k_dim=128, v_dim=128, dtype="bfloat16")


@pytest.mark.parametrize(
    ("device", "shape", "how", "why"),
    [
        (A100, LLAMA, {}, None),
        (A100, WITH(LLAMA, dtype="float16"), {"softcap": 2.0, "window": 7}, None),
        (WITH(A100, capability=(12, 0)), WITH(LLAMA, page_size=512), {}, None),
        (FlashDevice("cpu"), LLAMA, {}, "it needs a CUDA device, this is cpu"),
        (A100, WITH(LLAMA, dtype="float32"), {}, "it computes float16 and bfloat16, not float32"),
        (WITH(A100, is_installed=False), LLAMA, {}, "flash-attn is not installed"),
        (WITH(A100, capability=(7, 5)), LLAMA, {}, "it needs capability 8.0, this is 7.5"),
        (A100, LLAMA, {"sinks": torch.zeros(8)}, "it knows no sinks"),
        (A100, LATENT, {}, "K and V must have one head_dim, these 80 and 64"),
        (A100, WITH(LLAMA, k_dim=260, v_dim=260), {}, "head_dim 260 is above 256 or no multiple"),
        (A100, WITH(LLAMA, k_dim=60, v_dim=60), {}, "head_dim 60 is above 256 or no multiple of 8"),
        (A100, WITH(LLAMA, page_size=16), {}, "page_size 16 is no multiple of 256"),
    ],
)
def test_flash_attn_serves_or_the_reason_is_told(
    device: FlashDevice, shape: Shape, how: dict[str, object], why: str | None
) -> None:
    pool = Pool(shape, pages=4, seed=6)
    q, rule = pool.queries(1)[0], pool.rule(**how)

    found = why_not_flash(q, pool.pages([5]), rule, device)

    assert found is None if why is None else found.startswith(why)


def test_pages_of_any_size_are_no_reason_where_there_are_none() -> None:
    pool = Pool(WITH(LLAMA, page_size=16), pages=4, seed=7)
    kv = Packed(pool.random(5, 2, 128), pool.random(5, 2, 128), starts_of([5]))

    assert why_not_flash(pool.queries(5)[0], kv, pool.rule(), A100) is None
