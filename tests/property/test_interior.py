"""Pages by head and pages by token are cut into the same KV: a permutation is all between them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.core.layout.shards import Pieced, Shard, lanes, tp_shards
from kvd.core.layout.spec import Interior, Mha, PageOrder
from kvd.transfer.plans import direct, found, plan
from tests.transfer.sharded import Model, Side, post
from tests.transfer.test_window_layout import write

LARGE = 2**16
FAR = 100 * LARGE
LIMITS = settings(deadline=None, max_examples=60)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Model, tuple[Shard, ...], tuple[Shard, ...]]:
    """A model by token, and the shards of two nodes that exchange it."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    layers = draw(st.integers(1, 3))
    layout = Mha(heads, draw(st.integers(1, 5)), draw(st.integers(0, 5)), "bfloat16")
    sizes = [size for size in (1, 2, 3, 4, 6, 12) if not (heads % size and size % heads)]
    first = draw(st.integers(0, layers - 1))
    stages = [(0, layers), (first, layers)]
    ours, theirs = (
        tp_shards(heads, size, (0, size), draw(st.sampled_from(stages)))
        for size in (draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes)))
    )
    return Model(layers, layout, draw(st.integers(1, 5))), ours, theirs


def received(
    model: Model,
    shards: tuple[tuple[Shard, ...], tuple[Shard, ...]],
    orders: tuple[PageOrder, PageOrder],
) -> list[dict[tuple[int, str, int, int], bytes]]:
    """By shard of the receiver: each head of each slot of each tensor, over all its pages."""
    here = Side(model, shards[0], 6, orders[0], LARGE, LARGE)
    there = Side(model, shards[1], 7, orders[1], FAR, LARGE)
    here.fill(1)
    for lane in lanes(*shards):
        order = post(lane.copies[-1], lane.peer_shard)
        regions = found(order, here.areas, there.notes)
        assert not isinstance(regions, str), regions
        often = write(direct(order, regions), here, there)
        assert often.max() == 1
        assert plan(order, regions).writes.sizes
    return [
        {one[:4]: one.pages.tobytes() for one in there.elements(index)}
        for index in range(len(shards[1]))
    ]


@LIMITS
@given(cuts(), st.sampled_from(list(PageOrder)), st.sampled_from(list(PageOrder)))
def test_a_cut_of_pages_by_head_is_the_cut_of_pages_by_token(cut, ours, theirs) -> None:
    model, *shards = cut
    by_token = received(model, tuple(shards), (ours, theirs))
    by_head = received(model._replace(interior=Interior.HND), tuple(shards), (ours, theirs))

    assert by_head == by_token
    if lanes(*shards):
        assert any(any(content) for shard in by_head for content in shard.values())


@LIMITS
@given(cuts())
def test_opaque_pages_are_never_cut_by_who_would_try(cut) -> None:
    """Peers are refused at their Hello; the transfer process knows nothing to cut by either."""
    model, ours, theirs = cut
    model = model._replace(interior=Interior.OPAQUE)
    here = Side(model, ours, 6, PageOrder.PAGE_FIRST, LARGE, LARGE)
    there = Side(model, theirs, 7, PageOrder.PAGE_FIRST, FAR, LARGE)
    for lane in lanes(ours, theirs):
        for copy in lane.copies:
            answer = found(post(copy, lane.peer_shard), here.areas, there.notes)

            if isinstance(copy, Pieced):
                assert isinstance(answer, str)
                assert "only whole ones can be sent" in answer
            else:
                assert not isinstance(answer, str), answer
