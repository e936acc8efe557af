"""Where the shards of a model lie, and what goes from one node's to another's."""

from __future__ import annotations

import itertools

import pytest

from kvd.core.shards import Lane, Pieced, Shard, Straight, Window, lanes, page_share, tp_shards

LAYERS = 4


def ranks(heads: int, size: int) -> tuple[Shard, ...]:
    return tp_shards(heads, size, (0, size), (0, LAYERS))


def test_equal_nodes_send_whole_pages_shard_by_shard() -> None:
    both = ranks(8, 2)

    assert lanes(both, both) == (
        Lane(0, None, (Straight(0),)),
        Lane(1, None, (Straight(1),)),
    )


def test_one_rank_sends_half_its_heads_to_each_of_two() -> None:
    (first, second) = lanes(ranks(8, 1), ranks(8, 2))

    for lane, heads in ((first, (0, 4)), (second, (4, 8))):
        (making,) = lane.copies
        assert lane.window is None
        assert isinstance(making, Pieced)
        assert [(piece.shard, piece.ours) for piece in making.pieces] == [
            (0, Window(0, LAYERS, *heads))
        ]
        assert making.window == making.pieces[0].theirs == Window(0, LAYERS, 0, 4)


def test_more_ranks_than_heads_share_them_by_integer_division() -> None:
    assert [shard.first_head for shard in ranks(2, 8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads on 4 ranks"):
        ranks(6, 4)


def test_a_pipeline_stage_fills_its_layers_of_the_page() -> None:
    (lane,) = lanes(tp_shards(8, 1, (0, 1), (2, 4)), ranks(8, 1))

    assert lane.window == Window(2, 4, 0, 8)


def test_pages_are_cut_among_ranks_without_gap_or_overlap() -> None:
    for pages, n_ranks in itertools.product(range(20), range(1, 6)):
        cuts = [page_share(3, 3 + pages, rank, n_ranks) for rank in range(n_ranks)]

        assert cuts[0][0] == 3
        assert cuts[-1][1] == 3 + pages
        assert all(before[1] == after[0] for before, after in itertools.pairwise(cuts))
        sizes = [end - first for first, end in cuts]
        assert max(sizes) - min(sizes) <= 1


def test_seven_pages_of_four_ranks_and_three() -> None:
    assert [page_share(0, 7, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 7)]
    assert page_share(0, 3, 3, 4) == (3, 3)
