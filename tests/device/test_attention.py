"""Attention over pages and over packed K and V, against an oracle in float64."""

from __future__ import annotations

import msgspec
import pytest
import torch

from kvd.device import attention
from kvd.device.attention import (
    AttentionRule,
    BatchPages,
    Packed,
    decode,
    prefill,
    why_not_flash,
)
from tests.device.oracle import Pool, Shape, over, starts_of

TOLERANCE = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
"""Largest difference of an element of the output, whose size is about 1."""

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))
ORDERS = pytest.mark.parametrize("order", ["page", "layer"])
MLA = Shape(page_size=16, kv_heads=1, group=8, k_dim=576, v_dim=512, latent=True)
HEADS = {
    "mha": Shape(page_size=16, kv_heads=4, group=1, k_dim=16, v_dim=16),
    "gqa": Shape(page_size=16, kv_heads=2, group=4, k_dim=32, v_dim=32),
    "mqa": Shape(page_size=16, kv_heads=1, group=7, k_dim=32, v_dim=32),
    "mla": MLA,
    "other-v": Shape(page_size=16, kv_heads=2, group=2, k_dim=48, v_dim=32),
}
ANYHOW = msgspec.structs.replace


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks, many pieces of queries: borders everywhere, without long sequences."""
    torch.set_num_threads(1)
    monkeypatch.setattr(attention, "BLOCK_TOKENS", 64)
    monkeypatch.setattr(attention, "QUERY_TOKENS", 16)


def room(lengths: list[int], page_size: int) -> int:
    """BatchPages for so many tokens, and some that are nobody's."""
    return sum(-(-length // page_size) for length in lengths) + 5


def close(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    """Within the tolerance of the type."""
    assert found.shape == expected.shape
    assert found.dtype == getattr(torch, dtype)
    assert not found.isnan().any()
    worst = (found.double() - expected).abs().max().item() if found.numel() else 0.0
    assert worst <= TOLERANCE[dtype], worst


def decoded(
    pool: Pool, pages: BatchPages, rule: AttentionRule, new: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """What comes out, and what should."""
    q = pool.queries(*[new] * len(pages.lengths))
    return decode(torch.stack(q), pages, rule).flatten(0, 1), over(q, pages, rule)


@DTYPES
@ORDERS
@pytest.mark.parametrize("page_size", [1, 2, 16, 24, 64, 100, 256])
def test_decode_of_a_ragged_batch_over_pages_of_any_size(
    dtype: str, order: str, page_size: int
) -> None:
    """Lengths around borders of pages and blocks, an empty sequence; junk is NaN, so never read."""
    lengths = [1, 63, 0, 64, 65, 200, page_size, 2 * page_size + 1]
    pool = Pool(Shape(page_size, order=order, dtype=dtype), room(lengths, page_size), seed=1)
    pages = pool.pages(lengths)

    found, expected = decoded(pool, pages, pool.rule())

    close(found, expected, dtype)
    assert found[2].abs().max() == 0


@DTYPES
@pytest.mark.parametrize("heads", sorted(HEADS))
@pytest.mark.parametrize("new", [1, 3])
def test_decode_for_every_kind_of_heads(dtype: str, heads: str, new: int) -> None:
    pool = Pool(ANYHOW(HEADS[heads], dtype=dtype), pages=60, seed=2)
    pages = pool.pages([190, 3, 129])

    close(*decoded(pool, pages, pool.rule(), new), dtype)


@pytest.mark.parametrize("heads", ["mha", "gqa", "other-v"])
def test_pages_that_lie_head_by_head_are_read_turned(heads: str) -> None:
    """As the views of a pool whose interior is hnd are, after ``transpose(1, 2)``."""
    pool = Pool(HEADS[heads], pages=60, seed=2)
    by_token = pool.pages([190, 3, 129])
    k, v = (part.transpose(1, 2).contiguous().transpose(1, 2) for part in (by_token.k, by_token.v))
    by_head = msgspec.structs.replace(by_token, k=k, v=v)

    assert k.stride() != by_token.k.stride()
    close(*decoded(pool, by_head, pool.rule()), HEADS[heads].dtype)


@ORDERS
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 64, 100, 1000])
@pytest.mark.parametrize("new", [1, 2, 5])
def test_decode_with_a_window_reads_no_page_before_it(order: str, window: int, new: int) -> None:
    """Entries before the window are 0, and slots before it are NaN."""
    pool = Pool(Shape(16, order=order), pages=60, seed=3)
    pages = pool.pages([190, 5, 128, 81, 165], window=window, new=new)

    close(*decoded(pool, pages, pool.rule(window=window), new), "float32")


@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("heads", ["gqa", "mla"])
def test_prefill_behind_a_cached_prefix(page_size: int, window: int | None, heads: str) -> None:
    """New tokens of any number, causal from where they are; one sequence computes nothing."""
    lengths = [200, 64, 17, 130, 90]
    pool = Pool(ANYHOW(HEADS[heads], page_size=page_size), room(lengths, page_size), seed=4)
    pages = pool.pages(lengths)
    counts = [70, 64, 1, 0, 33]
    q = pool.queries(*counts)
    rule = pool.rule(window=window)

    found = prefill(torch.cat(q), pages, rule, starts_of(counts))

    close(found, over(q, pages, rule), "float32")


@DTYPES
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("heads", sorted(HEADS))
def test_prefill_of_whole_texts_in_no_pages(dtype: str, is_causal: bool, heads: str) -> None:
    shape = ANYHOW(HEADS[heads], dtype=dtype)
    pool = Pool(shape, pages=2, seed=5)
    counts = [100, 1, 0, 64, 65]
    k = pool.random(sum(counts), shape.kv_heads, shape.k_dim)
    v = k[..., : shape.v_dim] if shape.latent else pool.random(*k.shape[:2], shape.v_dim)
    kv = Packed(k, v, starts_of(counts))
    q = pool.queries(*counts)
    rule = pool.rule(is_causal=is_causal)

    close(prefill(torch.cat(q), kv, rule, kv.starts), over(q, kv, rule), dtype)


@pytest.mark.parametrize("window", [1, 7, 64, 65])
def test_prefill_of_whole_texts_with_a_window(window: int) -> None:
    pool = Pool(Shape(16), pages=2, seed=6)
    counts = [150, 3]
    kv = Packed(pool.random(153, 2, 32), pool.random(153, 2, 32), starts_of(counts))
    q = pool.queries(*counts)
    rule = pool.rule(window=window)

    close(prefill(torch.cat(q), kv, rule, kv.starts), over(q, kv, rule), "float32")


@pytest.mark.parametrize("new", [1, 40])
def test_sinks_and_softcap(new: int) -> None:
    pool = Pool(Shape(16), pages=60, seed=7)
    pages = pool.pages([190, 40, 100])
    sinks = pool.random(8) * 3

    for rule in (
        pool.rule(sinks=sinks),
        pool.rule(softcap=2.0),
        pool.rule(sinks=sinks, softcap=5.0, window=30),
    ):
        close(*decoded(pool, pages, rule, new), "float32")
    with_none = decoded(Pool(Shape(16), 60, 7), pages, pool.rule(), new)[0]
    assert (with_none - decoded(Pool(Shape(16), 60, 7), pages, rule, new)[0]).abs().max() > 0.05


def test_tokens_that_see_nothing_are_zero() -> None:
    """More new tokens than there are: bottom right, so the first of them stand before the text."""
    pool = Pool(Shape(16), pages=10, seed=8)
    pages = pool.pages([3, 0])

    found, expected = decoded(pool, pages, pool.rule(), 5)

    close(found, expected, "float32")
    assert found[:2].abs().max() == 0
    assert found[2].abs().max() > 0


def test_large_scores_do_not_overflow() -> None:
    """Scores of hundreds: only a running maximum keeps their exponentials finite."""
    pool = Pool(Shape(16, dtype="float64"), pages=60, seed=9)
    pages = pool.pages([200])
    pool.k[pages.block_table[0].long()] *= 1000

    close(*decoded(pool, pages, pool.rule()), "float64")


def test_two_pages_that_change_places_change_the_output() -> None:
    """The negative control. Of 20 new tokens, 16 see only a part of the sixth page."""
    pool = Pool(Shape(16), pages=60, seed=10)
    pages = pool.pages([100])
    q = torch.stack(pool.queries(20))
    right = decode(q, pages, pool.rule())
    swapped = pages.block_table.clone()
    swapped[0, [1, 5]] = swapped[0, [5, 1]]

    wrong = decode(q, msgspec.structs.replace(pages, block_table=swapped), pool.rule())

    assert (right - wrong).abs().max().item() > 0.1


def test_a_chunked_prefill_is_the_same_as_one() -> None:
    pool = Pool(Shape(16), pages=60, seed=11)
    pages = pool.pages([180])
    (q,) = pool.queries(180)
    whole = prefill(q, pages, pool.rule(), starts_of([180]))

    for first, end in ((0, 50), (50, 51), (51, 180)):
        upto = msgspec.structs.replace(pages, lengths=torch.tensor([end], dtype=torch.int32))
        piece = prefill(q[first:end], upto, pool.rule(), starts_of([end - first]))
        assert (piece - whole[first:end]).abs().max().item() <= 2e-6


def test_arguments_that_do_not_fit_are_refused_with_both_numbers() -> None:
    pool = Pool(Shape(16), pages=30, seed=12)
    pages = pool.pages([20, 30])
    rule = pool.rule()

    with pytest.raises(ValueError, match=r"number of sequences: \(3, 2, 2\)"):
        decode(torch.zeros(3, 1, 8, 32), pages, rule)
    with pytest.raises(ValueError, match=r"number of sequences: \(1, 2, 2\)"):
        prefill(torch.zeros(3, 8, 32), pages, rule, starts_of([3]))
    with pytest.raises(ValueError, match=r"elements of a key: \(16, 32\)"):
        decode(torch.zeros(2, 1, 8, 16), pages, rule)
    with pytest.raises(ValueError, match="7 heads cannot share 2 KV heads evenly"):
        decode(torch.zeros(2, 1, 7, 32), pages, rule)
    with pytest.raises(ValueError, match="a window of 0 tokens"):
        decode(torch.zeros(2, 1, 8, 32), pages, pool.rule(window=0))
    with pytest.raises(ValueError, match="the rule must be causal"):
        decode(torch.zeros(2, 1, 8, 32), pages, pool.rule(window=4, is_causal=False))


def test_on_this_computer_the_reason_against_flash_attn_is_told() -> None:
    pool = Pool(ANYHOW(MLA, dtype="bfloat16"), pages=30, seed=13)
    pages = pool.pages([20])
    q = torch.stack(pool.queries(1))

    assert why_not_flash(q, pages, pool.rule()) == "it needs a CUDA device, this is cpu"
