"""Pools with KV in host memory: both budgets admit, the tree caches host pages, all ends once."""

from __future__ import annotations

import pytest

from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Host,
    Mha,
    Mla,
    PageOrder,
    PoolSpec,
    companion_pages,
)
from kvd.errors import Code
from kvd.types import Pages, count, pack_ids, page_ids
from kvd.wire import client
from tests.core.engines import PageTotals, Sender, cached, offered, totals
from tests.core.sentences import sentence_of
from tests.core.test_fetch import HISPARSE, Decode, buffers
from tests.core.world import World, tokens

INDEX_EACH = 4
"""Pages of the index for one of kv."""


def pool(page: int, pages: int, *, buffer_tokens: int, buffer_pages: int) -> PoolSpec:
    """``pages`` and ``buffer_pages`` are without the null pages."""
    layout = Mla(8, 4, "float32")
    index_page = page // INDEX_EACH
    return PoolSpec(
        "main",
        "hisparse",
        PageOrder.PAGE_FIRST,
        (
            Component("kv", 1, layout, page, tier=Host()),
            Component("index", 1, Mha(1, 2, 0, "float32"), index_page),
            Component("buffer", 1, layout, page, Buffer(buffer_tokens)),
        ),
        (pages + 1, (pages + 1) * INDEX_EACH, buffer_pages + 1),
    )


def receive(world: World, toks: bytes, room: int, **fields: object) -> client.Reply | None:
    return world.d.call(client.ReceiveRequest, toks, room=room, source=("p",), **fields)


def waiting(world: World) -> list[tuple[int, str, int, int]]:
    """Room, budget, pages needed and pages missing of each that was looked at and waits."""
    return [
        (one.room, one.budget, one.needed_pages, one.missing_pages)
        for one in snapshot(world.d.node).waiting
        if one.needed_pages
    ]


def open_rooms(world: World) -> list[int]:
    """Those that hold pages."""
    parts = world.d.node.decoder.open.parts.values()
    return [part.room for part in parts if part.lease is not None]


def cancel(world: World, number: int) -> None:
    world.d.call(client.CancelReceive, receive=number)
    world.run()


# ---- both budgets --------------------------------------------------------------------------------

LENGTHS = (46_000, 49_000, 52_000, 55_000, 58_000, 61_000, 63_000)


def test_seven_long_requests_queue_for_the_host_pool_and_none_fails() -> None:
    """384,000 tokens against 245,760 of host memory, buffers for all seven."""
    world = World(spec=pool(64, 3840, buffer_tokens=4096, buffer_pages=7 * 64))
    for room, n_tokens in enumerate(LENGTHS, 1):
        receive(world, tokens((room * 100_000, n_tokens)), room)

    assert not [one for one in world.d.answers if isinstance(one, client.Failed)]
    assert open_rooms(world) == [1, 2, 3, 4]
    assert waiting(world) == [(5, "kv", 907, 225)]
    cancel(world, 1)
    assert open_rooms(world) == [2, 3, 4, 5]
    assert waiting(world) == [(6, "kv", 954, 460)]
    cancel(world, 2)
    assert open_rooms(world) == [3, 4, 5, 6]
    assert waiting(world) == [(7, "kv", 985, 679)]
    cancel(world, 3)
    assert open_rooms(world) == [4, 5, 6, 7]
    assert waiting(world) == []
    for room in (4, 5, 6, 7):
        cancel(world, room)
    assert totals(world.d).free == 3840
    assert buffers(world).pool.free_pages == 7 * 64


def test_a_request_waits_for_the_device_buffer_alone_and_touches_nothing() -> None:
    world = World(spec=pool(64, 3840, buffer_tokens=4096, buffer_pages=130))
    for room in (1, 2, 3):
        receive(world, tokens((room * 100_000, 10_000)), room)

    assert open_rooms(world) == [1, 2]
    assert waiting(world) == [(3, "buffer", 64, 62)]
    (state,) = snapshot(world.d.node).waiting
    assert state.why == sentence_of(
        "a request waits for the device buffer alone and touches nothing"
    )
    assert (totals(world.d).free, totals(world.d).held) == (3840 - 2 * 157, 2 * 157)
    assert buffers(world).pool.free_pages == 2
    cancel(world, 1)
    assert open_rooms(world) == [2, 3]


def test_a_short_prompt_takes_as_much_of_the_buffer_as_it_can_use() -> None:
    world = World(spec=pool(64, 3840, buffer_tokens=4096, buffer_pages=64))

    receive(world, tokens((1, 1000)), 1, reserve_tokens=200)

    assert buffers(world).pool.free_pages == 64 - 19


def test_nothing_of_a_new_lease_is_on_the_device() -> None:
    """scenario E5: 100 tokens take 7 host pages, and no slot of the buffer has any of them."""
    world = World(spec=HISPARSE)

    leased = world.d.lease(tokens((1, 100)))

    assert totals(world.d).held == count(Pages(leased.pages)) == 7
    assert buffers(world).resident[leased.lease].slots == {}


# ---- the tree ------------------------------------------------------------------------------------

PROMPT = tokens((1, 1000))
"""15 pages of 64 tokens, and one of 40."""


@pytest.fixture
def world() -> World:
    return World(spec=pool(64, 40, buffer_tokens=256, buffer_pages=16))


def test_the_tree_caches_host_pages_and_the_next_request_is_sent_the_rest(world: World) -> None:
    """scenario E11."""
    receive(world, PROMPT, 7)
    Sender(world, PROMPT, room=7).finish()
    longer = PROMPT + tokens((5000, 100))

    reply = receive(world, longer, 8)

    assert isinstance(reply, client.Receiving)
    assert reply.prefix_tokens == 960
    kv, index = offered(world).grants
    assert [(one.start_tokens, one.end_tokens) for one in (kv, index)] == [(960, 1100)] * 2
    assert (count(Pages(kv.pages)), count(Pages(index.pages))) == (3, 9)


def test_companions_of_an_evicted_page_are_those_of_who_has_it_next(world: World) -> None:
    cached(world.d, PROMPT)
    mine = set(page_ids(next(iter(world.d.node.leases.tree.nodes())).pages))

    receive(world, tokens((20_000, 38 * 64)), 8)

    kv, index = offered(world).grants
    assert mine <= set(page_ids(Pages(kv.pages)))
    assert index.pages == companion_pages(Pages(kv.pages), INDEX_EACH)
    assert not set(page_ids(Pages(index.pages))) & set(range(INDEX_EACH))


# ---- the end -------------------------------------------------------------------------------------


def test_the_end_clears_the_mapping_and_frees_every_page_once() -> None:
    """scenario E8."""
    world = World(spec=HISPARSE)
    engine = Decode(world)
    engine.fetched(0, 1, 6)
    before = totals(world.d), buffers(world).pool.free_pages
    assert before == ((56, 1, 6, 0, 0), 4)

    world.d.call(client.ReleaseLease, lease=engine.lease)
    after = totals(world.d), buffers(world).pool.free_pages
    again = world.d.call(client.ReleaseLease, lease=engine.lease)
    late = engine.fetch(0)

    assert after == ((57, 0, 6, 0, 6), 8)
    assert buffers(world).resident == buffers(world).held == {}
    for reply in (again, late):
        assert isinstance(reply, client.Failed)
        assert reply.refusal.code is Code.UNKNOWN_LEASE
    assert (totals(world.d), buffers(world).pool.free_pages) == after


@pytest.mark.parametrize("tier", ["host", "device"])
def test_host_pages_under_a_write_stay_in_quarantine_whatever_the_time(tier: str) -> None:
    """scenario E13: the buffer is free at once, for no remote ever writes it."""
    world = World(spec=HISPARSE)
    world.hold_posts = True
    receive(world, tokens((1, 60)), 7, tier=tier)
    sender = Sender(world, tokens((1, 60)), room=7)
    sender.advance(48)
    world.cut = {"p"}

    world.d.call(client.CancelReceive, receive=1)
    world.pass_time(90)

    (lease,) = snapshot(world.d.node).leases
    assert (lease.state, lease.quarantined_pages) == ("quarantined", 4)
    assert totals(world.d) == PageTotals(free=59, quarantined=4)
    assert buffers(world).pool.free_pages == 8
    world.cut = set()
    world.hold_posts = False
    world.pass_time(10)
    assert totals(world.d) == PageTotals(free=63)


def test_a_lease_that_is_extended_has_more_slots() -> None:
    engine = Decode(World(spec=HISPARSE), tokens((1, 20)))
    engine.fetched(0, 1)

    row = engine.side.call(client.ExtendLease, lease=engine.lease, n_tokens=40)

    assert isinstance(row, client.PageTable)
    engine.row, engine.slots = engine.row + row.pages, row.beside[0]
    assert engine.resident.n_slots == 4
    engine.side.write(engine.row, engine.toks + tokens((21, 40)))
    engine.commit(tokens((21, 40)))
    reply = engine.fetched(0, 1, 2, 3)
    assert (reply.hits, reply.misses) == (1, 3)
    assert reply.pages == pack_ids(page_ids(engine.slots))
