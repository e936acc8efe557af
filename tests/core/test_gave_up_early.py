"""A side that gives up before the two have met: the other hears it at once, not at its deadline."""

from __future__ import annotations

import pytest

from kvd.core.handoff.rooms import LATE_S, MAX_EXPIRED_ROOMS
from kvd.errors import Code
from kvd.wire import client
from kvd.wire.peer import Withdrawn
from tests.core.engines import PROMPT, PageTotals, Sender, totals
from tests.core.sentences import sentence_of
from tests.core.world import World, tokens


def aborted_send(world: World, room: int = 7) -> None:
    sender = Sender(world, room=room)
    world.p.call(client.AbortSend, send=sender.send, reason="out of memory")


def test_a_receive_hears_at_once_that_its_prefill_engine_gave_up_before():
    world = World()
    aborted_send(world)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.ABORTED
    assert failed.refusal.message == sentence_of(
        "a receive hears at once that its prefill engine gave up before"
    )
    assert totals(world.d) == PageTotals(free=63)


def test_a_dead_prefill_engine_is_told_to_a_later_offer():
    world = World()
    Sender(world)
    world.p.hang_up()

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.CLIENT_GONE


@pytest.mark.parametrize("fields", [{"reserve_tokens": -1}, {"tier": "device"}])
def test_a_prefill_engine_hears_at_once_that_the_receive_was_refused(fields):
    world = World()
    sender = Sender(world)
    world.p.take()

    reply = world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), **fields)

    assert isinstance(reply, client.Failed)
    (failed,) = world.p.take()
    assert isinstance(failed, client.SendFailed)
    assert (failed.send, failed.refusal.code, failed.refusal.side) == (
        sender.send,
        Code.ABORTED,
        "d",
    )
    assert reply.refusal.code.value in failed.refusal.message


def test_a_refused_receive_does_not_end_another_one_of_its_room():
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender = Sender(world)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), reserve_tokens=-1)
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)


def test_a_second_attempt_of_the_prefill_engine_is_a_new_room():
    world = World()
    aborted_send(world)
    sender = Sender(world)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)


def test_a_retry_may_ask_the_decode_side_first_when_the_send_passed_its_deadline():
    """The same room, either side first: what ended before it was asked for is another matter."""
    world = World()
    Sender(world, deadline_s=1.0)
    world.pass_time(1.1)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    Sender(world).finish()

    assert isinstance(world.d.take()[-1], client.Received)


def test_a_retry_may_ask_the_decode_side_first_some_time_after_its_engine_failed():
    world = World()
    aborted_send(world)
    world.pass_time(LATE_S + 0.1)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    Sender(world).finish()

    assert isinstance(world.d.take()[-1], client.Received)


def test_a_receive_that_waited_for_room_while_its_send_ended_hears_it_with_its_offer():
    """However long ago that was: it was asked for before."""
    world = World(d_pages=9)
    holder = world.d.lease(tokens((5000, 100)))
    assert world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",)) is None
    Sender(world, deadline_s=1.0)
    world.pass_time(5.0)
    world.d.take()

    world.d.call(client.ReleaseLease, lease=holder.lease)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.DEADLINE
    assert failed.refusal.message == sentence_of(
        "a receive that waited for room while its send ended hears it with its offer"
    )


def test_a_room_that_lapsed_is_forgotten_when_nobody_can_wait_for_it_any_more():
    world = World(max_deadline_s=2.0)
    aborted_send(world)
    world.pass_time(2.1)

    assert isinstance(
        world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",)), client.Receiving
    )
    assert world.p.node.prefiller.expired_rooms.by_room == {}


def test_lapsed_rooms_are_bounded_and_the_oldest_goes_first():
    world = World()
    lapsed = world.p.node.prefiller.expired_rooms
    aborted_send(world)
    why = lapsed.refusal(7, world.now_s)
    assert why is not None
    for room in range(10, 10 + MAX_EXPIRED_ROOMS):
        lapsed.remember(room, why, world.now_s)
    assert len(lapsed.by_room) == MAX_EXPIRED_ROOMS
    assert lapsed.refusal(7, world.now_s) is None


@pytest.mark.parametrize("by", ["cancel", "deadline", "death"])
def test_a_prefill_engine_hears_at_once_that_the_receive_was_given_up_in_the_queue(by: str):
    world = World(d_pages=9)
    world.d.attach()
    world.d.lease(tokens((5000, 100)), session=2)
    sender = Sender(world)
    receive = {"room": 7, "source": ("p",), "deadline_s": 1.0}
    assert world.d.call(client.ReceiveRequest, PROMPT, **receive) is None
    call = world.d.calls

    if by == "cancel":
        world.d.call(client.CancelCall, of=call)
    elif by == "deadline":
        world.pass_time(1.1)
    else:
        world.d.hang_up()
        world.run()

    failed = [one for one in world.p.take() if isinstance(one, client.SendFailed)]
    code = {"cancel": "cancelled", "deadline": "deadline", "death": "client-gone"}[by]
    assert [one.refusal.message for one in failed] == [f"d gave up before it offered pages: {code}"]
    assert failed[0].refusal.code is Code.ABORTED
    assert sender.send == failed[0].send


def test_a_send_waits_on_for_the_second_receive_of_its_room_when_the_first_is_given_up():
    world = World(d_pages=9)
    holder = world.d.lease(tokens((5000, 100)))
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=1.0)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=10.0)
    world.pass_time(1.1)

    world.d.call(client.ReleaseLease, lease=holder.lease)
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)


def test_a_withdrawn_room_can_be_asked_for_again():
    """The decode side gave up, not this engine: a later attempt is not refused for it."""
    world = World()
    Sender(world)
    world.inject(
        world.p, Withdrawn(world.d.incarnation, world.p.incarnation, 7, "deadline"), world.d
    )
    sender = Sender(world)

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)


def test_a_withdrawal_touches_no_room_that_has_met_its_offer():
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    world.inject(
        world.p, Withdrawn(world.d.incarnation, world.p.incarnation, 7, "deadline"), world.d
    )
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)
