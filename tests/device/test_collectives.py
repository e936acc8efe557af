"""Gathers between real ranks over gloo: bit for bit the batch in logical order."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import pytest

from kvd.device.sequence import Split, shard
from tests.device.ranks import Ranks

if TYPE_CHECKING:
    from pathlib import Path

    from tests.device.ranks import Told

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


def test_tensors_come_as_engines_have_them(four: Ranks) -> None:
    answers = four.run("gather_shapes", 2)

    assert [one.error for one in answers] == ["", ""]
    for one in answers:
        assert all(one.found.values()), one.found


def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(four: Ranks) -> None:
    said = [one.found for one in four.run("gather_refused", 4)]

    assert said[1] == [
        "rank 1 of 4 has 4 rows on cpu, but the tensor is (3, 2) on cpu",
        "out is (15, 2) torch.float32 on cpu, strides (2, 1); the result needs (16, 2) "
        "torch.float32 on cpu, contiguous",
        "out is (16, 2) torch.float64 on cpu, strides (2, 1); the result needs (16, 2) "
        "torch.float32 on cpu, contiguous",
        "out is (16, 2) torch.float32 on cpu, strides (1, 16); the result needs (16, 2) "
        "torch.float32 on cpu, contiguous",
        "a sharding for 5 ranks in a group of 4",
    ]


def test_ranks_take_the_same_way_when_a_window_is_too_small(four: Ranks) -> None:
    """scenario F10: by sizes alone, blocks at the same places, counted, the results the same."""
    answers = four.run("gather_in_window", 4)

    row, largest = 128, shard(Split.ZIGZAG, [400], 4).max_len
    assert [one.error for one in answers] == [""] * 4
    assert answers[0].found[:4] == [4, 2, 5 * largest * row, 2]
    assert all(one.found == answers[0].found for one in answers)


@pytest.mark.parametrize("window_bytes", [0, 2**20, 2**22], ids=["plain", "small", "window"])
def test_a_warm_up_with_the_largest_batch_allocates_all_that_comes_later(
    four: Ranks, window_bytes: int
) -> None:
    """Then the arena allocates nothing, and no call of torch returns memory it was not given.

    A gather without ``out`` has its result made, and nothing else. (The order of the rows, 8 bytes
    each, is made once for each batch, by numpy.)
    """
    answers = four.run("gather_after_warm_up", 2, window_bytes=window_bytes)

    assert [one.error for one in answers] == ["", ""]
    assert [one.found for one in answers] == [[0, 0, ["empty"]]] * 2


def test_a_gather_sends_from_its_window_and_pads_with_zeros(four: Ranks) -> None:
    """scenario F6: 12 rows of which two are padding; nothing of another request goes with them.

    Both buffers are in the window: with one of them alone NCCL has no symmetric kernel to run.
    """
    for one in four.run("gather_traces", 4):
        assert one.error == ""
        assert all(one.found.values()), one.found


def test_no_page_of_padding_is_sent(four: Ranks) -> None:
    """scenario F12: 33 tokens on 4 ranks gather 36 rows; of 9 pages of 4 the last has one token."""
    answers = four.run("gather_for_sending", 4, tokens=33, page_size=4)

    assert [one.found for one in answers] == [
        [[0, 3], True, True],
        [[3, 5], True, True],
        [[5, 7], True, True],
        [[7, 9], True, True],
    ]


def test_a_gather_is_started_before_the_others_have_come(four: Ranks) -> None:
    """Rank 0 goes on with its work: what it started ends when rank 1 starts it too."""
    four.tell([0], "start_only", 2, tokens=40)
    assert four.hear(0).error == ""

    four.tell([1], "start_only", 2, tokens=40)
    assert four.hear(1).error == ""

    assert_same(four.run("wait_for_it", 2))


def test_a_rank_that_is_gone_is_told_to_the_others(tmp_path: Path) -> None:
    """The survivors are told at once, by gathers and by comparisons, and none hangs."""
    three = Ranks(3, tmp_path)
    try:
        three.run("is_ready", 3)
        three.kill(2)
        arguments = {"split": "zigzag", "lengths": [60], "shape": MHA, "dtype": "uint8", "seed": 1}
        three.tell([0], "gather_one", 3, **arguments)
        three.tell([1], "gather_one", 3, **arguments)
        said = [three.hear(rank).error for rank in (0, 1)]
    finally:
        three.stop()

    for rank, error in enumerate(said):
        assert error.startswith(f"GatherFailed: rank {rank} of 3: a gather did not end (")
