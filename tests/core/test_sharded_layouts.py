"""Two pools of one model exchange, whatever shards of it they hold."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.layout.shards import MAX_SHARDS, Shard, lanes, tp_shards
from kvd.core.layout.spec import (
    Component,
    HeldShards,
    Mha,
    PageOrder,
    PoolSpec,
    fingerprint,
    read_shards,
    shard_of,
)
from kvd.core.peers.compatibility import WHOLE, LayoutMatch, layout_match
from kvd.errors import Code
from tests.core.sentences import sentence_of

LAYERS, HEADS = 4, 8
WHOLE_SHARD = Shard(0, LAYERS, 0, HEADS)
OF_MODEL = Component("kv", LAYERS, Mha(HEADS, 16, 16, "bfloat16"), 16)


def pool(*shards: Shard, component: Component = OF_MODEL, order: PageOrder = PageOrder.PAGE_FIRST):
    held = None
    if shards:
        held = HeldShards(component.layers, component.layout.heads, shards)
        component = shard_of(component, shards[0])
    return PoolSpec("main", "mha", order, (component,), (8,), held=held)


def ranks(size: int, *, stage: tuple[int, int] = (0, LAYERS)) -> tuple[Shard, ...]:
    return tp_shards(HEADS, size, (0, size), stage)


def match(ours: PoolSpec, theirs: PoolSpec | str) -> LayoutMatch:
    text = theirs if isinstance(theirs, str) else fingerprint(theirs)
    return layout_match(ours, text, "d", "p")


def test_the_text_of_an_unsharded_pool_is_as_it_always_was() -> None:
    assert fingerprint(pool()) == (
        '["page_first",[{"name":"kv","layers":4,"layout":{"type":"mha","heads":8,"k_dim":16,'
        '"v_dim":16,"dtype":"bfloat16"},"page_size":16,"extent":{"type":"whole"}}]]'
    )


def test_a_sharded_pool_tells_its_model_and_then_its_shards() -> None:
    text = fingerprint(pool(*ranks(2)))

    assert text == fingerprint(pool())[:-1] + ",[[0,4,0,4],[0,4,4,8]]]"
    assert read_shards(text) == (fingerprint(pool()), ranks(2))
    assert read_shards(fingerprint(pool())) == (fingerprint(pool()), ())


def test_unsharded_pools_have_one_lane_for_whole_pages() -> None:
    assert match(pool(), pool()) == LayoutMatch(None, None, (), "", (WHOLE_SHARD,), WHOLE, WHOLE)


@pytest.mark.parametrize("ours", [(), ranks(2), ranks(8), ranks(4) * 2, ranks(16)])
@pytest.mark.parametrize("theirs", [(), ranks(2), ranks(4), ranks(16), ranks(1, stage=(2, 4))])
def test_pools_of_one_model_exchange_along_lanes(
    ours: tuple[Shard, ...], theirs: tuple[Shard, ...]
) -> None:
    found = match(pool(*ours), pool(*theirs))

    mine, other = ours or (WHOLE_SHARD,), theirs or (WHOLE_SHARD,)
    assert found == LayoutMatch(None, None, (), "", other, lanes(mine, other), lanes(other, mine))


def test_a_peer_of_which_we_hold_nothing_is_no_stranger() -> None:
    """It may be one of several sources."""
    found = match(pool(*ranks(1, stage=(0, 2))), pool(*ranks(1, stage=(2, 4))))

    assert found.sending is found.receiving is None
    assert found.outgoing == found.incoming == ()


@pytest.mark.parametrize("ours", [(), ranks(2)])
def test_another_model_is_refused_in_words_of_the_model(ours: tuple[Shard, ...]) -> None:
    narrow = Component("kv", LAYERS, Mha(4, 16, 16, "bfloat16"), 16)
    theirs = pool(*tp_shards(4, 2, (0, 2), (0, LAYERS)), component=narrow)

    found = match(pool(*ours), theirs)

    assert found.difference == sentence_of("another model is refused in words of the model")
    assert found.sending == found.receiving
    assert found.sending.code is Code.LAYOUT_MISMATCH


def test_pages_of_another_size_are_not_cut_between_shards() -> None:
    larger = msgspec.structs.replace(OF_MODEL, page_size=64)

    found = match(pool(*ranks(2), component=larger), pool())

    assert found.sending is not None
    assert found.receiving is not None
    assert found.difference == sentence_of("pages of another size are not cut between shards")


def test_the_order_in_memory_must_be_the_same() -> None:
    found = match(pool(*ranks(2)), pool(*ranks(2), order=PageOrder.LAYER_FIRST))

    assert found.difference == sentence_of("the order in memory must be the same")


def test_shards_with_a_hole_between_them_can_be_filled_but_not_sent_from() -> None:
    gap = (Shard(0, 4, 0, 2), Shard(0, 4, 4, 6))

    found = match(pool(*gap), pool())

    assert found.receiving is None
    assert len(found.incoming) == 2
    assert found.sending is not None
    assert found.sending.message == sentence_of(
        "shards with a hole between them can be filled but not sent from"
    )


@pytest.mark.parametrize(
    ("shards", "why"),
    [
        ([[0, 5, 0, 8]], "a shard of layers 0-4 of heads 0-7, of a model with 4 layers of 8 heads"),
        ([[0, 4, 0, 4], [0, 4, 0, 8]], "shards of different sizes, like layers 0-3 of heads 0-3"),
        ([[0, 4, 0, 8]] * (MAX_SHARDS + 1), "129 shards, of which 128 are read at most"),
    ],
)
def test_shards_that_cannot_be_are_refused(shards: list[list[int]], why: str) -> None:
    text = fingerprint(pool())[:-1] + f",{msgspec.json.encode(shards).decode()}]"

    found = match(pool(*ranks(2)), text)

    assert found.sending == found.receiving
    assert found.sending is not None
    assert found.sending.message.startswith(f"p tells d of {why}")
    assert found.outgoing == found.incoming == ()


@pytest.mark.parametrize("last", ["[[0,4]]", "[[0,4,0,8.5]]", '"all"', "{}", "[[0,4,0,8]],[]"])
def test_what_is_no_list_of_shards_is_another_layout(last: str) -> None:
    found = match(pool(), fingerprint(pool())[:-1] + f",{last}]")

    assert found.sending is not None
    assert found.receiving is not None
    assert found.difference
