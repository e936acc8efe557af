"""A rehearsed verb says what it would do, who is in the way, and changes nothing."""

from __future__ import annotations

import pytest

from kvd.core.operators import rehearse
from kvd.core.replay.freeze import freeze
from kvd.errors import Code
from kvd.wire import admin, client
from tests.core.engines import Sender, cached
from tests.core.world import Side, World, tokens

PROMPT = tokens((1, 100))


def rehearsed(side: Side, verb: admin.Flush | admin.Evict | admin.AbortRoom | admin.Fence):
    """What the rehearsal says; the node is the same afterwards."""
    before = freeze(side.node)
    told = rehearse(side.node, admin.Rehearse(1, verb))
    assert freeze(side.node) == before
    return told


def test_a_rehearsed_eviction_names_whole_leaves_in_the_order_in_which_they_go():
    world = World()
    for first in (1, 1000, 2000):
        cached(world.d, tokens((first, 48)))
    nodes = {one.edge[:4]: one.id for one in world.d.node.leases.tree.nodes()}
    ids = [nodes[bytes(tokens((first, 1)))] for first in (1, 1000)]

    told = rehearsed(world.d, admin.Evict(1, 4))

    assert told == admin.Report(
        1,
        {"evicted_pages": 6},
        (),
        notes=tuple(f"node {one} goes, 3 pages, tokens to 48, last used 0.0 s ago" for one in ids),
    )


def test_a_rehearsed_eviction_says_what_is_locked_instead():
    world = World()
    cached(world.d, tokens((1, 48)))
    world.d.lease(tokens((1, 48), (9, 1)))
    cached(world.d, tokens((1000, 16)))

    told = rehearsed(world.d, admin.Evict(1, 4))

    assert told.changed == {"evicted_pages": 1}
    assert told.refused == ("3 of 4 pages: the rest of the cache is locked (3 pages)",)


def test_a_rehearsed_eviction_of_many_nodes_names_the_first_and_counts_the_others():
    world = World()
    for k in range(20):
        cached(world.d, tokens((1000 * k + 1, 16)))

    told = rehearsed(world.d, admin.Evict(1, 100))

    assert told.changed == {"evicted_pages": 20}
    assert len(told.notes) == 17
    assert told.notes[-1] == "and 4 more"


@pytest.mark.parametrize("mode", ["unlocked", "strict"])
def test_a_rehearsed_flush_counts_what_goes_and_names_who_keeps_the_rest(mode):
    world = World()
    cached(world.d, tokens((1, 48)))
    cached(world.d, tokens((1000, 16)))
    world.d.lease(tokens((1, 48), (9, 1)))

    told = rehearsed(world.d, admin.Flush(1, mode))

    figures = {"freed_pages": 0} if mode == "strict" else {"freed_pages": 1, "locked_pages": 3}
    assert told.changed == figures
    assert len(told.refused) == 1
    assert "kept, 3 pages: lease 3 of engine (pid 1001) for lease" in told.refused[0]


def test_a_rehearsed_flush_of_no_known_mode_is_refused_as_the_flush_is():
    world = World()

    reply = world.d.ask(admin.Rehearse(7, admin.Flush(1, "all")))

    assert isinstance(reply, admin.AdminFailed)
    assert (reply.call, reply.refusal.code) == (7, Code.BAD_REQUEST)


def test_a_rehearsed_abort_says_which_pages_wait_for_whom():
    world = World()
    cached(world.d, tokens((1, 64)))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)

    here, there = (rehearsed(side, admin.AbortRoom(1, 7, "slow")) for side in (world.d, world.p))

    assert here == admin.Report(
        1,
        {"receives": 1, "sends": 0, "freed_pages": 0, "quarantined_pages": 3},
        (),
        notes=(
            "receive 1, 3 pages of lease 2: in quarantine until p (70000000) settles or restarts, "
            "or a fence",
        ),
    )
    assert there == admin.Report(
        1,
        {"receives": 0, "sends": 1, "freed_pages": 0, "quarantined_pages": 0},
        (),
        notes=("send 1 to d: the pages of lease 1 stay until 1 posts that read them are over",),
    )


def test_a_rehearsed_abort_of_a_send_frees_what_its_engine_has_released():
    world = World()
    sender = Sender(world)
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)

    told = rehearsed(world.p, admin.AbortRoom(1, 7, "slow"))

    assert told.changed == {"receives": 0, "sends": 1, "freed_pages": 7, "quarantined_pages": 0}
    assert told.notes == ("send 1 to nobody yet: 7 pages of lease 1 are free",)


def test_a_rehearsed_abort_of_an_unknown_room_is_refused_as_the_abort_is():
    world = World()

    replies = [
        world.d.ask(request)
        for request in (
            admin.AbortRoom(1, 7, "slow"),
            admin.Rehearse(1, admin.AbortRoom(5, 7, "slow")),
        )
    ]

    assert replies[0] == replies[1]
    assert isinstance(replies[0], admin.AdminFailed)


def test_a_rehearsed_fence_counts_the_handoffs_that_it_cuts_on_either_side():
    world = World()
    world.hold_posts = True
    for room in (1, 2):
        sender = Sender(world, room=room)
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
        sender.advance(64)
    world.d.call(client.CancelReceive, receive=1)

    here, there = (rehearsed(side, admin.Fence(1)) for side in (world.d, world.p))

    assert here.changed == {
        "quarantined_leases": 1,
        "quarantined_pages": 7,
        "receives_cut": 1,
        "sends_cut": 0,
    }
    assert there.changed == {
        "quarantined_leases": 0,
        "quarantined_pages": 0,
        "receives_cut": 0,
        "sends_cut": 1,
    }
    assert there.notes == ("room 2: send 2 to d is cut, 1 posts under way",)
    assert world.restarts == []
