"""Posts that move too slowly: who notices, what is said, and when nothing is said."""

from __future__ import annotations

from kvd.core import inputs
from kvd.core.handoff.protocol import Prefill
from kvd.errors import Code
from kvd.wire import client
from tests.core.engines import PROMPT, PageTotals, Sender, totals
from tests.core.sentences import sentence_of
from tests.core.world import World

PAGE_BYTES = 512


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
