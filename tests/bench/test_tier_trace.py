"""The tree that a replayed load is compared with."""

from __future__ import annotations

import pytest

from benchmarks.tier_trace import TURNS, BlockTree, made_trace, reuse_of
from kvd.trace import TraceRequest


def test_a_block_is_found_behind_all_before_it():
    tree = BlockTree(100)

    assert [tree.serve(path) for path in ([1, 2, 3], [1, 2, 4], [2, 3], [1, 2, 3])] == [0, 2, 0, 3]


def test_of_what_was_used_longest_ago_the_end_leaves_first():
    tree = BlockTree(4)
    tree.serve([1, 2, 3])
    tree.serve([7, 8])

    assert tree.serve([1, 2, 3]) == 2


def test_a_last_block_that_is_not_full_is_nobodys():
    """Of 3 blocks and a half the three whole ones are found again."""
    request = TraceRequest(0, 3 * 512 + 256, 1, [1, 2, 3, 4])

    assert reuse_of([request, request], 100) == pytest.approx(3 * 512 / (2 * request.input_length))


def test_a_load_that_is_made_goes_on_where_it_was_and_is_the_same_again():
    requests = made_trace(100, seed=7)

    assert requests == made_trace(100, seed=7)
    assert len(requests) == 100
    reuse = reuse_of(requests, 10_000)
    assert (TURNS - 2) / (TURNS + 1) < reuse < 1, reuse
    assert reuse_of(requests, 1) < 0.1 < reuse
