"""Who computes which token: by hand for the named cases, by properties for all."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.device.sequence import Sharding, Split, is_applicable, shard

SPLITS = st.sampled_from(list(Split))
LENGTHS = st.lists(st.integers(0, 300), max_size=6)
RANKS = st.integers(1, 9)

PROPERTY = settings(deadline=None)  # a busy machine is no finding


def rows_of(sharding: Sharding) -> list[list[int]]:
    return [sharding.rows(rank).tolist() for rank in range(sharding.ranks)]


def gathered(sharding: Sharding) -> list[int | None]:
    """What a gather of the logical row numbers has, with None as padding."""
    found: list[int | None] = []
    for rows in rows_of(sharding):
        found += [*rows, *[None] * (sharding.max_len - len(rows))]
    return found


def in_order(sharding: Sharding) -> list[int | None]:
    buffer = gathered(sharding)
    return [buffer[at] for at in sharding.order()]


def test_f6_ten_tokens_over_four_ranks() -> None:
    """scenario F6: 3 3 2 2 rows either way, max_len 3, a buffer of 12 rows with 2 of padding."""
    interleaved = shard(Split.INTERLEAVED, [10], 4)
    zigzag = shard(Split.ZIGZAG, [10], 4)

    assert rows_of(interleaved) == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert rows_of(zigzag) == [[0, 1, 9], [2, 3, 8], [4, 7], [5, 6]]
    for sharding in (interleaved, zigzag):
        assert (sharding.counts, sharding.max_len) == ((3, 3, 2, 2), 3)
        assert len(gathered(sharding)) == 12
        assert in_order(sharding) == list(range(10))


def test_f8_zigzag_needs_two_tokens_of_each_sequence_for_each_rank() -> None:
    """scenario F8: 7 tokens on 4 ranks are not cut by zigzag, 8 are, a token a block."""
    assert shard(Split.ZIGZAG, [7], 4).split is Split.CONTIGUOUS
    assert shard(Split.ZIGZAG, [8], 4).split is Split.ZIGZAG
    assert rows_of(shard(Split.ZIGZAG, [8], 4)) == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_one_short_sequence_makes_the_whole_batch_contiguous() -> None:
    """scenario F8: long enough is said of every sequence, not of the batch."""
    assert shard(Split.ZIGZAG, [1000, 7], 4).split is Split.CONTIGUOUS
    assert shard(Split.INTERLEAVED, [1000, 3], 4).split is Split.CONTIGUOUS
    assert shard(Split.INTERLEAVED, [1000, 4], 4).split is Split.INTERLEAVED


def test_f8b_the_longest_rank_is_of_the_whole_batch() -> None:
    """scenario F8b: two sequences of 9 tokens are 6 4 4 4 rows: 6, where ceil(18 / 4) is 5."""
    sharding = shard(Split.ZIGZAG, [9, 9], 4)

    assert (sharding.counts, sharding.max_len) == ((6, 4, 4, 4), 6)
    assert rows_of(sharding)[0] == [0, 1, 8, 9, 10, 17]


def test_fewer_tokens_than_ranks_leave_ranks_without_rows() -> None:
    sharding = shard(Split.ZIGZAG, [0, 2, 1], 4)

    assert rows_of(sharding) == [[0], [1], [2], []]
    assert shard(Split.INTERLEAVED, [], 3).counts == (0, 0, 0)


@pytest.mark.parametrize(("lengths", "ranks"), [([3, -1], 2), ([3], 0)])
def test_impossible_batches_are_refused_with_their_numbers(lengths: list[int], ranks: int) -> None:
    with pytest.raises(ValueError, match=f"among {ranks} ranks"):
        shard(Split.ZIGZAG, lengths, ranks)


@PROPERTY
@given(SPLITS, LENGTHS, RANKS)
def test_every_token_is_on_exactly_one_rank(split: Split, lengths: list[int], ranks: int) -> None:
    sharding = shard(split, lengths, ranks)

    every = sorted(row for rows in rows_of(sharding) for row in rows)
    assert every == list(range(sum(lengths)))


@PROPERTY
@given(SPLITS, LENGTHS, RANKS)
def test_the_order_brings_back_the_batch_and_names_no_padding(
    split: Split, lengths: list[int], ranks: int
) -> None:
    """scenario F12: what is read after a gather is each token once and nothing else."""
    sharding = shard(split, lengths, ranks)

    assert in_order(sharding) == list(range(sum(lengths)))


@PROPERTY
@given(SPLITS, LENGTHS, RANKS)
def test_a_rank_has_as_many_rows_as_it_says_and_none_has_more_than_the_longest(
    split: Split, lengths: list[int], ranks: int
) -> None:
    sharding = shard(split, lengths, ranks)

    assert list(sharding.counts) == [len(rows) for rows in rows_of(sharding)]
    assert sharding.max_len == max(sharding.counts) >= -(-sum(lengths) // ranks)


@PROPERTY
@given(SPLITS, LENGTHS, RANKS)
def test_a_split_that_applies_gives_every_rank_some_of_every_sequence(
    split: Split, lengths: list[int], ranks: int
) -> None:
    sharding = shard(split, lengths, ranks)
    begins = np.cumsum([0, *lengths])

    if split is Split.CONTIGUOUS or not is_applicable(split, lengths, ranks):
        assert max(sharding.counts) - min(sharding.counts) <= 1
        return
    for rows in rows_of(sharding):
        for begin, end in itertools.pairwise(begins):
            assert any(begin <= row < end for row in rows)


@PROPERTY
@given(st.integers(1, 9), st.data())
def test_zigzag_shares_causal_work_evenly(ranks: int, data: st.DataObject) -> None:
    """The pairs that a rank attends differ by less than what a row or two sees."""
    length = data.draw(st.integers(2 * ranks, 300))
    sharding = shard(Split.ZIGZAG, [length], ranks)

    work = [sum(row + 1 for row in rows) for rows in rows_of(sharding)]
    assert max(work) - min(work) <= 2 * length
