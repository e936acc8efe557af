"""Posts between nodes whose pools are sharded differently: bytes, sums, and what is refused.

Asked of the loopback and of real transfer processes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import pytest_asyncio

from kvd.core.effects import Verify
from kvd.core.inputs import PostDone, PostFailed, Verified
from kvd.core.layout.seal import Seal
from kvd.core.layout.shards import Shard, Straight, lanes, page_share, tp_shards
from kvd.core.layout.spec import Mha, PageOrder, shard_region
from kvd.wire.peer import Integrity
from tests.transfer.conftest import Rig
from tests.transfer.layouts import ids
from tests.transfer.sharded import BY_HEAD, LATENT, MHA, TOGETHER, Model, elements, fill, memory_of
from tests.transfer.test_contract import numbers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvd.core.layout.geometry import Geometry

pytestmark = pytest.mark.asyncio(loop_scope="module")

OURS, THEIRS = 7, 9
PAGES, ONTO = [6, 2, 3, 4, 1], [8, 5, 6, 7, 1]
FIRST = 3
WIDE = Model(8, Mha(8, 64, 32, "bfloat16"), 16)
"""A page is 192 KiB: some 11 to a slot."""
DEEP = Model(3, Mha(2, 2048, 2048, "float32"), 32)
"""A page is 3 MiB: two layers fill a slot."""


def tp(model: Model, size: int) -> tuple[Shard, ...]:
    return tp_shards(model.heads, size, (0, size), (0, model.layers))


CASES = {
    "1 to 1": (MHA, tp(MHA, 1), tp(MHA, 1)),
    "2 to 2": (MHA, tp(MHA, 2), tp(MHA, 2)),
    "1 to 2": (MHA, tp(MHA, 1), tp(MHA, 2)),
    "2 to 1": (MHA, tp(MHA, 2), tp(MHA, 1)),
    "2 to 4": (MHA, tp(MHA, 2), tp(MHA, 4)),
    "4 to 2": (MHA, tp(MHA, 4), tp(MHA, 2)),
    "a stage": (MHA, (Shard(1, 3, 0, 4),), (MHA.all,)),
    "a rank of two": (MHA, tp(MHA, 2)[1:], (MHA.all,)),
    "ranks of a stage": (MHA, (Shard(1, 3, 0, 2), Shard(1, 3, 2, 4)), (MHA.all,)),
    "latents": (LATENT, (LATENT.all,) * 4, (LATENT.all,) * 2),
    "by head, 2 to 1": (BY_HEAD, tp(BY_HEAD, 2), tp(BY_HEAD, 1)),
    "by head, 2 to 4": (TOGETHER, tp(TOGETHER, 2), tp(TOGETHER, 4)),
    "pages of bands": (DEEP, tp(DEEP, 2), tp(DEEP, 1)),
    "many handles": (WIDE, tp(WIDE, 2), tp(WIDE, 1)),
}
"""Components of one pair of nodes, each sharded in its own way."""
MANY = 61


def pages_of(name: str) -> tuple[list[int], list[int]]:
    """Pages of ours, and of the peer for them."""
    if name != "many handles":
        return PAGES, ONTO
    both = np.random.default_rng(5)
    return both.permutation(np.arange(1, MANY)).tolist(), both.permutation(
        np.arange(1, MANY)
    ).tolist()


def regions(order: PageOrder, side: int) -> dict[str, Geometry]:
    """Every shard of every component of one side."""
    found = {}
    for name, (model, *shards) in CASES.items():
        pages = MANY if name == "many handles" else (OURS, THEIRS)[side]
        for index, shard in enumerate(shards[side]):
            found[shard_region(name, index)] = memory_of(model, shard, pages, order)
    return found


PAIRS = [("loopback", here, there) for here in PageOrder for there in PageOrder] + [
    ("nixl", PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST),
    ("nixl", PageOrder.LAYER_FIRST, PageOrder.LAYER_FIRST),
    ("nixl", PageOrder.LAYER_FIRST, PageOrder.PAGE_FIRST),
]


@pytest_asyncio.fixture(
    loop_scope="module",
    scope="module",
    params=PAIRS,
    ids=lambda one: f"{one[0]}-{one[1].value}-{one[2].value}",
)
async def pools(request) -> AsyncIterator[tuple]:
    """A sender and a receiver of every component."""
    kind, *orders = request.param
    rig = Rig(kind)
    nodes = await asyncio.gather(
        *(rig.node(name, shapes=regions(orders[side], side)) for side, name in enumerate("ab"))
    )
    await nodes[0].load(nodes[1])
    yield nodes
    await rig.end()


def shards_of(node, name, side):
    """(shard, its memory) of one component."""
    return [
        (shard, node.memories[shard_region(name, index)])
        for index, shard in enumerate(CASES[name][1 + side])
    ]


def prepared(pools, name):
    """Fill both sides; what each shard of the receiver must be in the end."""
    have, pages, onto = {}, *pages_of(name)
    seed = next(numbers)
    for shard, memory in shards_of(pools[0], name, 0):
        fill(memory.bytes, memory.shape, shard, seed)
        have |= {one[:4]: one.pages for one in elements(memory.bytes, memory.shape, shard)}
    wanted = []
    for shard, memory in shards_of(pools[1], name, 1):
        memory.paint(next(numbers))
        expected = memory.bytes.copy()
        for one in elements(expected, memory.shape, shard):
            if one[:4] in have:
                one.pages[onto] = have[one[:4]][pages]
        wanted.append(expected)
    return wanted


def seal(name):
    return Seal(Integrity.FULL, b"s" * 16, FIRST, FIRST + len(pages_of(name)[0]))


async def sent(pools, name):
    """Send every lane, its copies a share of the pages each; the sums of each lane."""
    sender, receiver = pools
    pages, onto = pages_of(name)
    sums = []
    for lane in (found := lanes(*CASES[name][1:])):
        parts = []
        for copy, making in enumerate(lane.copies):
            low, high = page_share(0, len(pages), copy, len(lane.copies))
            post = next(numbers)
            sender.post(
                post,
                receiver,
                pages[low:high],
                onto[low:high],
                component=name,
                seal=seal(name),
                first_page=FIRST + low,
                peer_shard=lane.peer_shard,
                making=making,
            )
            parts.append(post)
        outcomes = [await sender.outcome(post) for post in parts]
        assert all(isinstance(one, PostDone) for one in outcomes), outcomes
        sums.append(b"".join(one.sums for one in outcomes))
    return list(zip(found, sums, strict=True))


async def verified(receiver, name, lane, sums):
    ticket = next(numbers)
    pages = ids(pages_of(name)[1])
    receiver.transport.order(
        Verify(ticket, name, seal(name), pages, sums, lane.peer_shard, lane.window)
    )
    return await receiver.hears(Verified, ticket=ticket)


@pytest.mark.parametrize("name", CASES)
async def test_all_shards_of_the_receiver_get_what_the_sender_has_and_nothing_else(pools, name):
    wanted = prepared(pools, name)

    for lane, sums in await sent(pools, name):
        found = await verified(pools[1], name, lane, sums)
        assert (found.bad_pages, found.why) == ((), "")

    for (_, memory), expected in zip(shards_of(pools[1], name, 1), wanted, strict=True):
        assert np.array_equal(memory.bytes, expected)


@pytest.mark.parametrize("name", CASES)
async def test_a_flipped_bit_is_found_in_its_shard_at_its_page(pools, name):
    prepared(pools, name)
    lane, sums = (await sent(pools, name))[-1]
    shard, memory = shards_of(pools[1], name, 1)[lane.peer_shard]
    window = lane.window
    inside = [
        one.pages
        for one in elements(memory.bytes, memory.shape, shard)
        if window is None
        or (
            window.first_layer <= one.layer - shard.first_layer < window.end_layer
            and window.first_head <= one.head - shard.first_head < window.end_head
        )
    ]

    inside[-1][pages_of(name)[1][2], -1] ^= 1

    assert (await verified(pools[1], name, lane, sums)).bad_pages == (FIRST + 2,)


@pytest.mark.parametrize(
    ("name", "change", "complaint"),
    [
        ("1 to 2", {"making": Straight(1)}, "this node has no region '1 to 2#1'"),
        ("1 to 2", {"peer_shard": 2}, "has no region '1 to 2#2'"),
        ("1 to 2", {"making": Straight()}, "lay both out alike"),
        ("2 to 2", {"peer_shard": 1, "split": 2}, "cannot be cut into 2 pieces on their way"),
        ("2 to 1", {"destination": [9]}, "destination page 9 is not a page of region '2 to 1'"),
        ("2 to 1", {"source": [7]}, "source page 7 is not a page of region '2 to 1'"),
    ],
)
async def test_a_post_that_does_not_fit_is_refused_and_others_go_on(pools, name, change, complaint):
    sender, receiver = pools
    wanted = prepared(pools, name)
    lane = lanes(*CASES[name][1:])[0]
    fields = {
        "source": [1],
        "destination": [1],
        "peer_shard": lane.peer_shard,
        "making": lane.copies[0],
        "seal": seal(name),
        "first_page": FIRST,
    } | change
    post = next(numbers)

    sender.post(
        post, receiver, fields.pop("source"), fields.pop("destination"), component=name, **fields
    )
    outcome = await sender.outcome(post)
    await sent(pools, name)

    assert isinstance(outcome, PostFailed)
    assert complaint in outcome.why
    for (_, memory), expected in zip(shards_of(receiver, name, 1), wanted, strict=True):
        assert np.array_equal(memory.bytes, expected)


async def test_shards_of_several_components_travel_side_by_side(pools):
    wanted = {name: prepared(pools, name) for name in CASES}

    await asyncio.gather(*(sent(pools, name) for name in CASES))

    for name, all_expected in wanted.items():
        for (_, memory), expected in zip(shards_of(pools[1], name, 1), all_expected, strict=True):
            assert np.array_equal(memory.bytes, expected), name
