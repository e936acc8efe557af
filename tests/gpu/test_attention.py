"""Attention by flash-attn and in torch, on a GPU, against the oracle in float64.

What flash-attn does not serve is skipped with its reason.
"""

from __future__ import annotations

import msgspec
import pytest
import torch

from kvd.device.attention import (
    AttentionRule,
    BatchPages,
    Packed,
    decode,
    prefill,
    why_not_flash,
)
from tests.device.oracle import Pool, Shape, over, starts_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

TOLERANCE = {"bfloat16": 2e-2, "float16": 4e-3}
"""Of an element of size 1. Weights are rounded to 16 bits before they meet the values."""

KERNELS = pytest.mark.parametrize("by_flash", [True, False], ids=["flash-attn", "torch"])
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))
JUNK = 7.0
"""Kernels may read what they weigh with zero, so it must be finite; whoever weighs it shows it."""


def there(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU, with the same strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
    return made.copy_(tensor)


def moved(kv: BatchPages | Packed, *, latent: bool) -> BatchPages | Packed:
    """The same on the GPU."""
    k = there(kv.k)
    v = k[..., : kv.v.shape[-1]] if latent else there(kv.v)
    if isinstance(kv, Packed):
        return Packed(k, v, kv.starts.cuda())
    return BatchPages(k, v, kv.block_table.cuda(), kv.lengths.cuda())


def skip_unless_it_serves(
    by_flash: bool, q: torch.Tensor, kv: BatchPages | Packed, rule: AttentionRule
) -> None:
    reason = why_not_flash(q, kv, rule)
    if by_flash and reason is not None:
        pytest.skip(f"flash-attn: {reason}")


def close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """Within the tolerance, and not a number nowhere."""
    worst = (found.cpu().double() - expected).abs().max().item()
    assert worst <= TOLERANCE[dtype], worst


@KERNELS
@DTYPES
@pytest.mark.parametrize("order", ["page", "layer"])
@pytest.mark.parametrize("page_size", [16, 64, 256])
@pytest.mark.parametrize("window", [None, 100])
def test_decode(by_flash: bool, dtype: str, order: str, page_size: int, window: int | None) -> None:
    shape = Shape(page_size, kv_heads=2, group=4, k_dim=128, v_dim=128, order=order, dtype=dtype)
    pool = Pool(shape, pages=200, seed=1, junk=JUNK)
    here = pool.pages([700, 1, 257, 64], window=window)
    q, rule = pool.queries(1, 1, 1, 1), pool.rule(window=window)
    pages, queries = moved(here, latent=False), torch.stack(q).cuda()
    skip_unless_it_serves(by_flash, queries, pages, rule)

    close(decode(queries, pages, rule, by_flash=by_flash).flatten(0, 1), over(q, here, rule), dtype)


@KERNELS
@DTYPES
@pytest.mark.parametrize("page_size", [64, 256])
def test_prefill_behind_a_prefix(by_flash: bool, dtype: str, page_size: int) -> None:
    shape = Shape(page_size, kv_heads=2, group=4, k_dim=64, v_dim=64, dtype=dtype)
    pool = Pool(shape, pages=60, seed=2, junk=JUNK)
    here = pool.pages([700, 257, 64])
    q, rule, starts = pool.queries(300, 1, 64), pool.rule(), starts_of([300, 1, 64])
    pages, queries = moved(here, latent=False), torch.cat(q).cuda()
    skip_unless_it_serves(by_flash, queries, pages, rule)

    found = prefill(queries, pages, rule, starts.cuda(), by_flash=by_flash)

    close(found, over(q, here, rule), dtype)


@KERNELS
@DTYPES
@pytest.mark.parametrize("is_causal", [True, False])
def test_prefill_of_whole_texts(by_flash: bool, dtype: str, *, is_causal: bool) -> None:
    pool = Pool(Shape(16, kv_heads=2, group=4, k_dim=64, v_dim=64, dtype=dtype), 2, seed=3)
    starts = starts_of([300, 1, 64])
    here = Packed(pool.random(365, 2, 64), pool.random(365, 2, 64), starts)
    q, rule = pool.queries(300, 1, 64), pool.rule(is_causal=is_causal)
    kv, queries = moved(here, latent=False), torch.cat(q).cuda()
    skip_unless_it_serves(by_flash, queries, kv, rule)

    found = prefill(queries, kv, rule, starts.cuda(), by_flash=by_flash)

    close(found, over(q, here, rule), dtype)


@KERNELS
@DTYPES
def test_latents(by_flash: bool, dtype: str) -> None:
    shape = Shape(64, kv_heads=1, group=16, k_dim=576, v_dim=512, latent=True, dtype=dtype)
    pool = Pool(shape, pages=30, seed=4, junk=JUNK)
    here = pool.pages([700, 65])
    q, rule = pool.queries(1, 1), pool.rule()
    pages, queries = moved(here, latent=True), torch.stack(q).cuda()
    skip_unless_it_serves(by_flash, queries, pages, rule)

    close(decode(queries, pages, rule, by_flash=by_flash).flatten(0, 1), over(q, here, rule), dtype)


@KERNELS
def test_two_pages_that_change_places_change_the_output(by_flash: bool) -> None:
    """The negative control, on the GPU."""
    shape = Shape(256, kv_heads=2, group=4, k_dim=128, v_dim=128, dtype="bfloat16")
    pool = Pool(shape, pages=10, seed=5, junk=JUNK)
    pages = moved(pool.pages([1000]), latent=False)
    queries, rule = torch.stack(pool.queries(300)).cuda(), pool.rule()
    skip_unless_it_serves(by_flash, queries, pages, rule)
    right = decode(queries, pages, rule, by_flash=by_flash)
    swapped = msgspec.structs.replace(pages, block_table=pages.block_table[:, [0, 3, 2, 1]])

    wrong = decode(queries, swapped, rule, by_flash=by_flash)

    assert (right - wrong).abs().max().item() > 0.1
