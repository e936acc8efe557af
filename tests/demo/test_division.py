"""How engines are divided: heads, layers, and what each daemon must send."""

from __future__ import annotations

import msgspec
import pytest

from kvd.demo.division import (
    ALONE,
    Division,
    DivisionWay,
    Heads,
    SentPages,
    due_of_each,
    heads_of,
    need_divisible,
    pool_settings,
    stage_of,
)
from kvd.demo.layout import PoolPart
from kvd.demo.models import ARCHITECTURES

LLAMA, QWEN, DEEPSEEK = (ARCHITECTURES[name].shape for name in ("llama", "qwen", "deepseek"))
POOLS = {
    name: ARCHITECTURES[name].pool_layout(dtype="float32", page_size=None, order="page_first")
    for name in ("llama", "qwen", "deepseek")
}
PAGE = 4 * 2 * 16 * 2 * 32 * 4
"""Bytes of a page of all heads and layers of llama."""


def test_ranks_have_the_kv_of_the_queries_that_they_have() -> None:
    for shape in (LLAMA, QWEN):
        group = shape.heads // shape.kv_heads
        for ranks in (1, 2, 4, 8):
            every = [heads_of(shape, rank, ranks) for rank in range(ranks)]
            assert [one.first_query for one in every[1:]] == [one.end_query for one in every[:-1]]
            assert every[0].first_query == 0
            assert every[-1].end_query == shape.heads
            for own in every:
                needed = {query // group for query in range(own.first_query, own.end_query)}
                assert needed == set(range(own.first_kv, own.end_kv))


def test_more_ranks_than_heads_of_kv_share_them_and_a_latent_is_on_all() -> None:
    assert [heads_of(LLAMA, rank, 4) for rank in range(4)] == [
        Heads(0, 2, 0, 1),
        Heads(2, 4, 0, 1),
        Heads(4, 6, 1, 2),
        Heads(6, 8, 1, 2),
    ]
    assert [heads_of(DEEPSEEK, rank, 2) for rank in range(2)] == [
        Heads(0, 4, 0, 1),
        Heads(4, 8, 0, 1),
    ]


@pytest.mark.parametrize(
    ("shape", "division", "why"),
    [
        (LLAMA, Division(DivisionWay.TENSOR, 3), "8 query heads cannot be divided among 3 ranks"),
        (
            msgspec.structs.replace(LLAMA, heads=9, kv_heads=2),
            Division(DivisionWay.TENSOR, 3),
            "2 heads on 3 ranks: one number must divide the other",
        ),
        (LLAMA, Division(DivisionWay.PIPELINE, 5), "4 layers are too few for 5 stages"),
    ],
)
def test_refuses_what_does_not_come_out_even(shape, division, why) -> None:
    with pytest.raises(ValueError, match=why):
        need_divisible(shape, (PoolPart.KV,), division)


def test_refuses_layers_that_keep_something_else_than_kv_of_tokens() -> None:
    with pytest.raises(ValueError, match="only KV of layers that look at every token"):
        need_divisible(LLAMA, (PoolPart.KV, PoolPart.WINDOW), Division(DivisionWay.CONTEXT, 2))
    need_divisible(LLAMA, (PoolPart.KV, PoolPart.WINDOW), ALONE)


def test_daemons_are_told_what_of_the_model_they_keep() -> None:
    assert pool_settings(LLAMA, Division(DivisionWay.TENSOR, 2), 0) == {"pool.tp_size": "2"}
    assert [pool_settings(LLAMA, Division(DivisionWay.PIPELINE, 2), one) for one in range(2)] == [
        {"pool.stage": "0:2"},
        {"pool.stage": "2:4"},
    ]
    assert (
        pool_settings(LLAMA, Division(DivisionWay.CONTEXT, 2), 1)
        == pool_settings(LLAMA, ALONE, 0)
        == {}
    )
    assert [stage_of(5, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize(
    ("name", "prefill", "decode", "due"),
    [
        ("llama", ALONE, ALONE, [(7, 7 * PAGE)]),
        ("llama", ALONE, Division(DivisionWay.TENSOR, 2), [(7, 7 * PAGE)]),
        # The decode side keeps each of two heads on two ranks.
        (
            "llama",
            Division(DivisionWay.TENSOR, 2),
            Division(DivisionWay.TENSOR, 4),
            [(7, 14 * PAGE)],
        ),
        (
            "llama",
            Division(DivisionWay.TENSOR, 4),
            Division(DivisionWay.TENSOR, 2),
            [(7, 7 * PAGE)],
        ),
        (
            "qwen",
            Division(DivisionWay.TENSOR, 2),
            Division(DivisionWay.TENSOR, 4),
            [(7, 14 * PAGE)],
        ),
        ("deepseek", ALONE, Division(DivisionWay.TENSOR, 2), [(7, 7 * 2 * 4 * 16 * 80 * 4)]),
        (
            "llama",
            Division(DivisionWay.CONTEXT, 4),
            ALONE,
            [(2, 2 * PAGE), (2, 2 * PAGE), (2, 2 * PAGE), (1, PAGE)],
        ),
        (
            "llama",
            Division(DivisionWay.PIPELINE, 2),
            ALONE,
            [(7, 7 * PAGE // 2), (7, 7 * PAGE // 2)],
        ),
    ],
)
def test_each_daemon_must_send_its_share(name, prefill, decode, due) -> None:
    found = due_of_each(POOLS[name], {PoolPart.KV: 7}, prefill, decode)

    assert found == tuple(SentPages(*one) for one in due)


def test_a_share_of_too_few_pages_is_empty() -> None:
    four = Division(DivisionWay.CONTEXT, 4)

    assert [one.pages for one in due_of_each(POOLS["llama"], {PoolPart.KV: 3}, four, ALONE)] == [
        1,
        1,
        1,
        0,
    ]
    nothing = due_of_each(POOLS["llama"], {PoolPart.KV: 0}, four, ALONE)
    assert nothing == (SentPages(0, 0),) * 4
