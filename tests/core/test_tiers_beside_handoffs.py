"""What is written to a tier makes way for handoffs, and starves by none of it."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.handoff.receive import MOVING_S
from kvd.core.inspect.snapshot import snapshot
from kvd.core.tiers.demotion import LATE
from kvd.wire import admin, client
from tests.core.engines import PROMPT, Sender
from tests.core.tiered import PAGE, TieredSide, TieredWorld, cached, disk, fill, tokens

SHARE = 0.25
DEADLINE_S = 8.0


def world_of(share: float = SHARE, **more: object) -> TieredWorld:
    """Posts stay under way; the decode side writes, and the storage process does not answer."""
    tier = disk(200, share_beside_handoffs=share, deadline_s=DEADLINE_S, **more)
    world = TieredWorld(d_pages=33, tier=tier)
    world.hold_posts = True
    write(world.d)
    return world


def write(side: TieredSide, first: int = 5_000) -> None:
    """So much is cached that some of it is being written."""
    side.hold_storage = True
    for number in range(side.node.leases.pool.free_pages - 4):
        cached(side, tokens((first + number * PAGE, PAGE)))
    side.world.pass_time(0.1)
    assert any(isinstance(order, effects.Demote) for order in side.orders)


def handed(world: TieredWorld, room: int = 7) -> Sender:
    """A handoff whose bytes are on their way."""
    sender = Sender(world, room=room)
    world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
    sender.finish()
    assert world.p.flights
    return sender


def test_what_is_written_makes_way_while_bytes_move_and_goes_on_at_the_next_tick():
    world = world_of()
    d = world.d
    assert not d.shares, "nothing moves"

    handed(world)
    world.pass_time(0.2)
    assert d.shares == [SHARE], "told once"
    world.land_posts()
    assert not d.node.decoder.open.parts
    assert d.shares == [SHARE], "the next handoff may follow at once"
    world.pass_time(0.1)

    assert d.shares == [SHARE, 1.0]


def test_what_is_ordered_while_bytes_move_makes_way_too():
    world = world_of()
    d = world.d
    d.hold_storage = False
    world.run()
    handed(world)
    assert not d.shares, "nothing is being written"

    cached(d, tokens((9_000, 4 * PAGE)))
    d.hold_storage = True
    world.pass_time(0.1)

    assert d.shares == [SHARE]


def test_the_sending_side_makes_way_too():
    world = world_of()
    p = world.p
    write(p)
    handed(world)
    assert p.shares == [SHARE]
    world.land_posts()
    world.pass_time(0.1)
    assert p.shares == [SHARE, 1.0]


def test_a_receive_whose_writer_computes_is_made_way_for_only_behind_its_word():
    world = world_of()
    d = world.d
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    assert d.shares == [SHARE], "it has said that it begins"

    world.pass_time(MOVING_S + 0.2)
    assert d.node.decoder.open.parts
    assert d.shares == [SHARE, 1.0], "and computes"
    sender.advance(64)
    world.land_posts()

    assert d.shares == [SHARE, 1.0, SHARE], "pages have come"


def test_a_post_that_waits_for_its_event_moves_nothing():
    world = world_of()
    p = world.p
    write(p)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.promise(64, after=b"e" * 64)
    assert p.node.prefiller.posts.parts
    assert not p.shares


def test_rooms_without_end_starve_no_order():
    """The oldest is late against its deadline, and goes on; the next one makes way again."""
    world = world_of()
    p = world.p
    write(p)
    handed(world)
    began_s = world.now_s
    while p.shares == [SHARE]:
        world.pass_time(0.1)
    assert p.flights, "it moves still"
    assert p.shares == [SHARE, 1.0]
    assert world.now_s - began_s == pytest.approx(DEADLINE_S / LATE, abs=0.2)
    world.pass_time(0.5)
    assert p.shares == [SHARE, 1.0], "until it is answered"

    late = len(p.orders)
    for _ in range(late):
        p.carry_out()
    world.pass_time(0.1)

    assert any(isinstance(order, effects.Demote) for order in p.orders), "more to write"
    assert p.shares == [SHARE, 1.0, SHARE]
    assert not p.restarted


def test_what_a_request_waits_for_makes_no_way():
    world = TieredWorld(d_pages=33, tier=disk(200, share_beside_handoffs=SHARE))
    d = world.d
    wanted = tokens((90_000, 4 * PAGE))
    cached(d, wanted)
    fill(world, d)
    world.hold_posts = d.hold_storage = True
    cached(d, tokens((5_000, 4 * PAGE)))
    world.pass_time(0.1)
    handed(world)
    assert d.shares == [SHARE]

    d.call(client.OpenLease, wanted, deadline_s=10.0)

    assert any(isinstance(order, effects.Promote) for order in d.orders), "ordered at once"


def test_a_stop_writes_what_is_left_as_fast_as_it_can():
    world = world_of(stop_s=10.0)
    d = world.d
    handed(world)
    assert d.shares == [SHARE]
    d.feed(inputs.StopAsked(world.now_s, "SIGTERM", 20.0))
    world.land_posts()
    world.pass_time(0.5)

    assert d.node.tiers.at_stop
    assert d.shares == [SHARE, 1.0]


def test_a_storage_process_makes_way_for_nobody_until_it_is_told():
    world = world_of()
    d = world.d
    handed(world)
    d.stop_storage()
    assert snapshot(d.node).tiers[0].gives_way_s is None
    d.start_storage(2)
    world.pass_time(0.1)
    assert d.shares == [SHARE, SHARE], "the next one, when it writes"


def test_who_gives_all_of_the_time_is_told_nothing():
    world = world_of(share=1.0)
    handed(world)
    world.pass_time(0.2)
    assert not world.d.shares


def test_it_is_seen_for_how_long_it_makes_way():
    world = world_of()
    d = world.d
    handed(world)
    world.now_s += 0.2
    world.p.feed(inputs.Tick(world.now_s))
    lease = next(one for one in d.node.leases.leases.values() if "demotion" in one.holders)
    d.feed(inputs.Tick(world.now_s))

    (tier,) = snapshot(d.node).tiers
    assert tier.gives_way_s == pytest.approx(0.2)
    assert tier.gave_way_s == pytest.approx(0.2)
    told = d.ask(admin.Why(call=1, kind="lease", id=lease.id))
    assert "writing makes way for handoffs, for 0.2 s now" in str(told)

    world.land_posts()
    world.pass_time(0.1)
    (tier,) = snapshot(d.node).tiers
    assert tier.gives_way_s is None
    assert tier.gave_way_s == pytest.approx(0.3)
