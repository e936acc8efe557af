"""Where the shards of a model lie, and what goes from one node's to another's."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from kvd.core.layout.shards import (
    PageWindow,
    Pieced,
    Shard,
    ShardRoute,
    Straight,
    flaw,
    lacking,
    lanes,
    listed,
    page_share,
    tp_shards,
)
from tests.core.sentences import sentence_of

LAYERS = 4

SIZES = [1, 2, 4, 8]
HEADS = [1, 2, 4]

Cell = tuple[int, int]
"""Layer and head: of the model, or within a shard."""


def ranks(heads: int, size: int) -> tuple[Shard, ...]:
    return tp_shards(heads, size, (0, size), (0, LAYERS))


def cells(part: Shard | PageWindow) -> list[Cell]:
    """Row by row, as both sides of a piece go through them."""
    return list(
        itertools.product(
            range(part.first_layer, part.end_layer), range(part.first_head, part.end_head)
        )
    )


def of_model(shard: Shard, window: PageWindow | None) -> list[Cell]:
    """The cells of the model that a window of a shard shows."""
    inside = cells(window) if window is not None else None
    whole = cells(shard)
    if inside is None:
        return whole
    return [(shard.first_layer + layer, shard.first_head + head) for layer, head in inside]


def written(ours: tuple[Shard, ...], their: Shard, lane: ShardRoute, copy: int) -> Counter[Cell]:
    """Cells of the peer's shard that a copy of the lane writes; each must get what it is."""
    making = lane.copies[copy]
    if isinstance(making, Straight):
        assert ours[making.shard] == their
        assert lane.window is None
        return Counter(cells(their))
    found: Counter[Cell] = Counter()
    for piece in making.pieces:
        read = of_model(ours[piece.shard], piece.ours)
        put = of_model(their, piece.theirs)
        assert read == put, "a piece carries cells to where they do not belong"
        assert set(read) <= set(cells(ours[piece.shard]))
        found.update(put)
    assert making.window == (lane.window or PageWindow(0, *_size(their)))
    return found


def _size(shard: Shard) -> tuple[int, int, int]:
    return (
        shard.end_layer - shard.first_layer,
        0,
        shard.end_head - shard.first_head,
    )


def check(ours: tuple[Shard, ...], theirs: tuple[Shard, ...]) -> None:
    """Each cell of each of their shards that we have is written once by each copy, no other is."""
    here = {cell for shard in ours for cell in cells(shard)}
    made = lanes(ours, theirs)

    assert [lane.peer_shard for lane in made] == sorted({lane.peer_shard for lane in made})
    by_shard = {lane.peer_shard: lane for lane in made}
    for number, their in enumerate(theirs):
        wanted = Counter(cell for cell in cells(their) if cell in here)
        lane = by_shard.get(number)
        if lane is None:
            assert not wanted
            continue
        assert sorted(of_model(their, lane.window)) == sorted(wanted)
        assert lane.copies
        for copy in range(len(lane.copies)):
            assert written(ours, their, lane, copy) == wanted
        assert len({_sources(making) for making in lane.copies}) == len(lane.copies)


def _sources(making: Straight | Pieced) -> tuple[int, ...]:
    if isinstance(making, Straight):
        return (making.shard,)
    return tuple(piece.shard for piece in making.pieces)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", SIZES)
def test_every_cell_that_we_have_is_written_once_by_each_copy(
    heads: int, source: int, target: int
) -> None:
    """Both sides with any neighbouring ranks, of any stage, in any number of copies."""
    stages = [(0, LAYERS), (0, 2), (1, 4)]
    halves = [(0, 1.0), (0, 0.5), (0.5, 1.0), (0.25, 0.75)]

    def some(size: int, part: tuple[float, float]) -> tuple[int, int]:
        first = int(size * part[0])
        return first, max(first + 1, int(size * part[1]))

    n_cases = 0
    for mine, other, here, there in itertools.product(halves, halves, stages, stages):
        ours = tp_shards(heads, source, some(source, mine), here)
        theirs = tp_shards(heads, target, some(target, other), there)
        for copies in (1, 3):
            check(ours * copies, theirs)
            check(ours, theirs * copies)
            n_cases += 2
    assert n_cases == 16 * 9 * 4


@pytest.mark.parametrize("heads", [8, 4, 3, 1])
def test_replicas_make_as_many_copies_as_every_part_has(heads: int) -> None:
    size = 2 * heads

    for lane in lanes(ranks(heads, size) * 3, ranks(heads, 1)):
        assert len(lane.copies) == 2 * 3
    for lane in lanes(ranks(heads, size), ranks(heads, size)):
        assert len(lane.copies) == 2
    for lane in lanes(ranks(heads, 1), ranks(heads, size)):
        assert len(lane.copies) == 1


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("target", SIZES)
def test_rank_by_rank_the_heads_are_those_that_engines_slice(
    heads: int, source: int, target: int
) -> None:
    """The formulas by which the ranks of inference engines slice heads for one another.

    A rank with more heads than the other sends a part of its own, at an offset that counts the
    other's ranks without their replicas; one with fewer writes all it has at such an offset.
    """
    ours, theirs = ranks(heads, source), ranks(heads, target)
    src, dst = max(1, heads // source), max(1, heads // target)
    for p, d in itertools.product(range(source), range(target)):
        made = lanes((ours[p],), (theirs[d],))
        if source > target:
            replicas = max(1, source // heads)
            reads, n_heads = 0, src
            writes = ((p // replicas) * src) % dst
            is_pair = p // (source // target) == d
        else:
            replicas = max(1, target // heads)
            reads, n_heads = ((d // replicas) * dst) % src, dst
            writes = 0
            is_pair = d // (target // source) == p
        if not is_pair:
            continue
        (lane,) = made
        (making,) = lane.copies
        if isinstance(making, Straight):
            assert (reads, writes, n_heads) == (0, 0, src)
            continue
        (piece,) = making.pieces
        assert piece.ours == PageWindow(0, LAYERS, reads, reads + n_heads)
        assert piece.theirs == PageWindow(0, LAYERS, writes, writes + n_heads)


def test_equal_nodes_send_whole_pages_shard_by_shard() -> None:
    both = ranks(8, 2)

    assert lanes(both, both) == (
        ShardRoute(0, None, (Straight(0),)),
        ShardRoute(1, None, (Straight(1),)),
    )


def test_one_rank_sends_half_its_heads_to_each_of_two() -> None:
    (first, second) = lanes(ranks(8, 1), ranks(8, 2))

    for lane, heads in ((first, (0, 4)), (second, (4, 8))):
        (making,) = lane.copies
        assert lane.window is None
        assert isinstance(making, Pieced)
        assert [(piece.shard, piece.ours) for piece in making.pieces] == [
            (0, PageWindow(0, LAYERS, *heads))
        ]
        assert making.window == making.pieces[0].theirs == PageWindow(0, LAYERS, 0, 4)


def test_more_ranks_than_heads_share_them_by_integer_division() -> None:
    assert [shard.first_head for shard in ranks(2, 8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 heads on 4 ranks"):
        ranks(6, 4)


def test_a_pipeline_stage_fills_its_layers_of_the_page() -> None:
    (lane,) = lanes(tp_shards(8, 1, (0, 1), (2, 4)), ranks(8, 1))

    assert lane.window == PageWindow(2, 4, 0, 8)


@pytest.mark.parametrize(
    "ours",
    [
        (Shard(0, 4, 0, 1), Shard(0, 4, 2, 3)),  # a hole between them
        (Shard(0, 2, 0, 4), Shard(2, 4, 0, 2)),  # a corner is missing
        (Shard(0, 4, 0, 2), Shard(0, 4, 1, 3)),  # they overlap
    ],
)
def test_what_is_no_rectangle_is_refused(ours: tuple[Shard, ...]) -> None:
    with pytest.raises(ValueError, match=r"have of layers 0-3 of heads 0-3 is no rectangle"):
        lanes(ours, (Shard(0, 4, 0, 4),))


def test_holes_that_nobody_asks_for_are_no_reason_to_refuse() -> None:
    (lane,) = lanes((Shard(0, 4, 0, 1), Shard(0, 4, 2, 3)), (Shard(0, 4, 2, 4),))

    assert lane.window == PageWindow(0, 4, 0, 1)


# ---- what is missing ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "missing"),
    [
        ([Shard(0, 4, 0, 8)], []),
        ([Shard(0, 4, 0, 4), Shard(0, 4, 4, 8)], []),
        ([], [Shard(0, 4, 0, 8)]),
        ([Shard(0, 2, 0, 8)], [Shard(2, 4, 0, 8)]),
        ([Shard(1, 2, 0, 2), Shard(1, 2, 2, 8)], [Shard(0, 1, 0, 8), Shard(2, 4, 0, 8)]),
        ([Shard(0, 4, 2, 4)], [Shard(0, 4, 0, 2), Shard(0, 4, 4, 8)]),
        ([Shard(0, 2, 0, 4)], [Shard(0, 2, 4, 8), Shard(2, 4, 0, 8)]),
    ],
)
def test_what_is_missing_is_told_as_layers_and_heads(
    found: list[Shard], missing: list[Shard]
) -> None:
    assert lacking((Shard(0, 4, 0, 8),), tuple(found)) == tuple(missing)


def test_what_is_missing_and_what_is_there_make_the_whole_for_any_shards() -> None:
    kinds = [(size, rank) for size in (1, 2, 4) for rank in range(size)]
    for (size, rank), stage, (other, at) in itertools.product(
        kinds, [(0, 4), (0, 2), (1, 3)], kinds
    ):
        wanted = tp_shards(4, size, (rank, rank + 1), (0, 4))
        found = tp_shards(4, other, (at, at + 1), stage)
        missing = lacking(wanted, found)
        there = {cell for shard in found for cell in cells(shard)}

        told = Counter(cell for shard in missing for cell in cells(shard))
        assert told == Counter(cell for cell in cells(wanted[0]) if cell not in there)


def test_shards_in_a_sentence() -> None:
    assert listed((Shard(0, 1, 0, 8), Shard(0, 1, 0, 8), Shard(2, 4, 3, 4))) == sentence_of(
        "shards in a sentence"
    )
    assert listed(ranks(8, 8)).endswith("of head 3 and 4 more")


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([Shard(0, 4, 0, 4), Shard(0, 4, 4, 8)], ""),
        ([Shard(0, 5, 0, 4)], "a shard of layers 0-4 of heads 0-3, of a model with 4 layers of 8"),
        ([Shard(-1, 2, 0, 4)], "a shard of layers -1-1 of heads 0-3, of a model with 4 layers of"),
        ([Shard(0, 4, 2, 2)], "a shard of layers 0-3 of heads 2-1, of a model with 4 layers of"),
        ([Shard(0, 4, 0, 4), Shard(0, 2, 0, 4)], "shards of different sizes, like layers 0-3 of"),
    ],
)
def test_shards_that_no_node_has_are_named(shards: list[Shard], why: str) -> None:
    assert flaw(tuple(shards), 4, 8).startswith(why)
    assert bool(flaw(tuple(shards), 4, 8)) == bool(why)


# ---- pages of replicas -------------------------------------------------------------------------


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
