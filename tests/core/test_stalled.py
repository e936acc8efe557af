"""Posts that move too slowly: who notices, what is said, and when nothing is said."""

from __future__ import annotations

from kvd.core import inputs
from kvd.core.handoff.protocol import Prefill
from kvd.errors import Code
from kvd.wire import client
from tests.core.engines import PROMPT, PageTotals, Sender, totals
from tests.core.sentences import sentence_of
from tests.core.world import World

EVENT = bytes([1]) * 64


def posting(**more: object) -> tuple[World, Sender]:
    """A handoff whose only post is under way and does not move by itself."""
    world = World(stall_s=2.0, **more)
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()
    return world, sender


def test_a_post_that_does_not_move_ends_its_handoff_as_stalled_on_both_sides():
    world, sender = posting()

    world.pass_time(2.1)

    failed = world.d.take()
    assert not any(isinstance(one, client.ReceiveFailed) for one in failed), "bytes are in doubt"
    told = world.p.answer(sender.finish_call)
    assert isinstance(told, client.Finished)
    assert told.failure is not None
    assert told.failure.code is Code.STALLED
    assert told.failure.message == sentence_of(
        "a post that does not move ends its handoff as stalled on both sides"
    )
    assert totals(world.d).held == 7

    world.pass_time(5.1)

    (said,) = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert said.refusal.code is Code.STALLED
    assert totals(world.d) == PageTotals(free=63)


def test_a_post_that_moves_fast_enough_is_left_alone():
    world, sender = posting(min_bytes_per_s=100)
    (part,) = world.p.node.prefiller.rooms.by_room.values()

    for moved in range(1, 6):
        world.p.feed(inputs.PostMoved(world.now_s, 1, 200 * moved))
        world.pass_time(1.9)
        assert part.state is Prefill.FLUSHING
    world.land_posts()

    assert world.p.answer(sender.finish_call).failure is None


def two_rooms() -> tuple[World, Sender, Sender]:
    """Two handoffs to one peer, each with a post under way that does not move by itself."""
    world, first = posting(min_bytes_per_s=100)
    other = bytes(reversed(PROMPT))
    second = Sender(world, other, room=8)
    world.d.call(client.ReceiveRequest, other, room=8, source=("p",))
    second.finish()
    return world, first, second


def test_a_handoff_that_waits_its_turn_behind_another_is_not_stalled():
    world, first, second = two_rooms()

    # A slow link, all of it for the first: four windows pass before a byte of the second leaves.
    for moved in range(1, 5):
        world.p.feed(inputs.PostMoved(world.now_s, 1, 210 * moved))
        world.pass_time(2.1)

    rooms = world.p.node.prefiller.rooms.by_room
    assert [rooms[room].state for room in (7, 8)] == [Prefill.FLUSHING] * 2
    world.land_posts()
    assert world.p.answer(first.finish_call).failure is None
    assert world.p.answer(second.finish_call).failure is None


def test_where_the_link_stands_still_all_behind_it_are_stalled():
    world, first, second = two_rooms()
    world.p.feed(inputs.PostMoved(world.now_s, 1, 199))

    world.pass_time(2.1)

    for sender in (first, second):
        failure = world.p.answer(sender.finish_call).failure
        assert failure.code is Code.STALLED
        assert failure.numbers["moved_bytes"] == 199


def test_what_moves_to_one_peer_excuses_nothing_that_goes_to_another():
    world = World(stall_s=2.0, min_bytes_per_s=100, names=("d", "e"))
    world.hold_posts = True
    first = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    first.finish()
    second = Sender(world, room=8)
    world.sides["e"].call(client.ReceiveRequest, PROMPT, room=8, source=("p",))
    second.finish()

    world.p.feed(inputs.PostMoved(world.now_s, 1, 500))
    world.pass_time(2.1)

    rooms = world.p.node.prefiller.rooms.by_room
    assert rooms[7].state is Prefill.FLUSHING
    assert world.p.answer(second.finish_call).failure.code is Code.STALLED


def test_a_post_that_misses_its_turns_is_stalled_though_the_link_moves():
    """One post before it and four handles in flight, 16 MiB each: a round of turns is 80 MiB."""
    world, first, second = two_rooms()

    for moved in (159, 161):
        assert world.p.answer(second.finish_call) is None
        world.p.feed(inputs.PostMoved(world.now_s, 1, moved * 2**20))
        world.pass_time(2.1)

    failure = world.p.answer(second.finish_call).failure
    assert failure.code is Code.STALLED
    assert failure.numbers["moved_bytes"] == 0
    assert world.p.answer(first.finish_call) is None


def test_an_event_that_does_not_come_is_a_stall_though_the_link_moves():
    world, first = posting(min_bytes_per_s=100)
    other = bytes(reversed(PROMPT))
    second = Sender(world, other, room=8)
    world.d.call(client.ReceiveRequest, other, room=8, source=("p",))
    second.finish(after=EVENT)

    world.p.feed(inputs.PostMoved(world.now_s, 1, 500))
    world.pass_time(2.1)

    failure = world.p.answer(second.finish_call).failure
    assert failure.code is Code.STALLED
    assert failure.numbers["moved_bytes"] == 0
    assert world.p.answer(first.finish_call) is None


def test_with_its_event_a_post_takes_its_turn_as_any_other():
    world, _first = posting(min_bytes_per_s=100)
    other = bytes(reversed(PROMPT))
    second = Sender(world, other, room=8)
    world.d.call(client.ReceiveRequest, other, room=8, source=("p",))
    second.finish(after=EVENT)

    # Nothing of it has moved: its event has come, and it waits. It was not in the line before.
    world.p.feed(inputs.PostMoved(world.now_s, 1, 2**30))
    world.p.feed(inputs.PostMoved(world.now_s, 2, 0))
    for moved in range(1, 4):
        world.p.feed(inputs.PostMoved(world.now_s, 1, 2**30 + 210 * moved))
        world.pass_time(2.1)

    assert world.p.node.prefiller.rooms.by_room[8].state is Prefill.FLUSHING


def test_an_engine_that_computes_is_no_stall():
    """Nothing is under way while the next chunk is computed."""
    world = World(stall_s=2.0)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)

    world.pass_time(20)
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)


def test_the_window_begins_with_the_post_and_not_with_the_send():
    world = World(stall_s=2.0)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.pass_time(10)
    world.hold_posts = True
    sender.finish()

    world.pass_time(1.8)

    (part,) = world.p.node.prefiller.rooms.by_room.values()
    assert part.state is Prefill.FLUSHING
