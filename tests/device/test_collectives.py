"""Gathers between real ranks over gloo: bit for bit the batch in logical order."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.device.ranks import Ranks, Told

MHA = [8, 16]
MLA = [1, 576]
FIRST = time.time_ns() % 10**6
SEEDS = range(*map(int, os.environ.get("KVD_SEEDS", f"{FIRST}:{FIRST + 3}").split(":")))
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "uint8"]


def assert_same(answers: list[Told]) -> None:
    assert [(one.found, one.error) for one in answers] == [("", "")] * len(answers)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [MHA, MLA], ids=["mha", "mla"])
@pytest.mark.parametrize("split", ["zigzag", "interleaved", "contiguous"])
def test_every_bit_of_the_batch_arrives_in_logical_order(
    four: Ranks, split: str, shape: list[int], dtype: str, ranks: int
) -> None:
    assert_same(
        four.run(
            "gather_one", ranks, split=split, lengths=[41, 8, 9], shape=shape, dtype=dtype, seed=1
        )
    )


@pytest.mark.parametrize("window_bytes", [0, 100_000], ids=["plain", "window"])
@pytest.mark.parametrize(
    ("split", "lengths", "ranks"),
    [
        ("zigzag", [10], 4),
        ("interleaved", [10], 4),
        ("zigzag", [7], 4),
        ("zigzag", [8], 4),
        ("zigzag", [9, 9], 4),
        ("zigzag", [0, 2, 1], 4),
        ("interleaved", [1], 3),
        ("contiguous", [0], 2),
        ("zigzag", [], 2),
    ],
)
def test_named_batches_arrive_whole(
    four: Ranks, split: str, lengths: list[int], ranks: int, window_bytes: int
) -> None:
    """scenarios F6, F8, F8b: padded ranks, sequences too short for zigzag, 9 and 9 tokens.

    The memory of the gather is full of junk before, so neither it nor padding can be taken for KV.
    """
    assert_same(
        four.run(
            *("gather_one", ranks),
            split=split,
            lengths=lengths,
            shape=MHA,
            dtype="bfloat16",
            seed=2,
            window_bytes=window_bytes,
        )
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_random_batches_arrive_whole(four: Ranks, ranks: int) -> None:
    """Any lengths, any type, up to three at once, in windows that are too small at times."""
    for seed in SEEDS:
        try:
            assert_same(four.run("gather_random", ranks, seed=seed, rounds=30))
        except AssertionError as error:
            error.add_note(
                f"seed {seed}: KVD_SEEDS={seed}:{seed + 1} python -m pytest -q {__file__}"
            )
            raise


@pytest.mark.parametrize("to", [0, 2])
@pytest.mark.parametrize("window_bytes", [0, 100_000], ids=["plain", "window"])
def test_one_rank_alone_gets_the_batch_that_it_will_send(
    four: Ranks, to: int, window_bytes: int
) -> None:
    assert_same(
        four.run(
            *("gather_one", 3),
            split="zigzag",
            lengths=[20, 13],
            shape=MLA,
            dtype="float8_e4m3fn",
            seed=5,
            window_bytes=window_bytes,
            to=to,
        )
    )


def test_a_wrong_order_is_seen(four: Ranks) -> None:
    """Two rows that change places are other bits: what these tests compare can fail."""
    assert [one.found for one in four.run("gather_misread", 4)] == [True] * 4


def test_one_rank_alone_gets_its_own_tensor_back(four: Ranks) -> None:
    """scenario F11: no copy, no memory, no collective."""
    assert four.run("gather_alone", 1)[0].found == [True] * 4


def test_ranks_that_agree_go_on(four: Ranks) -> None:
    assert [one.found for one in four.run("agree_on", 4, values=[64] * 4)] == [64] * 4
    assert four.run("agree_on", 1, values=[64])[0].found == 64


def test_a_disagreement_is_raised_on_all_ranks_alike(four: Ranks) -> None:
    answers = four.run("agree_on", 3, values=[64, 0, 64])

    said = (
        "the ranks disagree on decode_prefix_len: rank 0: 64, rank 1: 0, rank 2: 64; "
        "all of them must have the same"
    )
    assert [one.found for one in answers] == [
        {"values": {"0": 64, "1": 0, "2": 64}, "is": said}
    ] * 3
