"""Deadlines, repetitions, silence, and what is remembered for how long."""

from __future__ import annotations

import os

import pytest

from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.peers.peer import Agent, Life
from kvd.errors import Code
from kvd.wire import client
from kvd.wire.peer import Abort, Accept, Closed, Message, Offer, Ping, ReceiveOutcome, Settled
from tests.core.sentences import sentence_of
from tests.core.world import Side, World, tokens

PROMPT = tokens((1, 100))
HANDOFFS = int(os.environ.get("KVD_HANDOFFS", "200"))


def sending(world: World, room: int, toks: bytes = PROMPT, **fields: object) -> int:
    """A prefill engine has written a prompt and opened the room; the send's id."""
    lease = world.p.lease(toks)
    world.p.write(lease.pages, toks)
    send = world.p.call(client.SendRequest, toks, room=room, lease=lease.lease, **fields)
    assert isinstance(send, client.Sending)
    world.p.call(client.ReleaseLease, lease=lease.lease)
    return send.send


def sent(world: World, side: Side, seconds: float, kind: type[Message]) -> list[float]:
    """When ``side`` sends messages of this type from now on, while everything else is lost."""
    world.hold_wire = True
    world.wire.clear()
    start_s, times = world.now_s, []
    while world.now_s < start_s + seconds:
        world.pass_time(0.125, tick_s=0.125)
        mine = [one for one in world.held(kind) if one.sender is side]
        times += [world.now_s - start_s for _ in mine]
        world.wire.clear()
    world.hold_wire = False
    return times


def test_an_offer_is_repeated_with_growing_pauses_until_it_is_settled():
    world = World(lost_s=100.0, resend_s=0.25)
    world.lost = {Offer}
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.lost = set()

    assert sent(world, world.d, 4.5, Offer) == [0.25, 0.75, 1.75, 2.75, 3.75]

    send = sending(world, 7)
    world.pass_time(1.0)
    assert world.d.node.decoder.open.parts[1].state is Decode.RECEIVING
    assert len(sent(world, world.d, 3.0, Offer)) == 3, "a Settled may be lost while receiving"

    world.p.call(client.Finish, send=send, aux=b"x")
    assert sent(world, world.d, 3.0, Offer) == []


def test_abort_is_repeated_until_settled():
    world = World(lost_s=100.0, resend_s=0.25)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.lost = {Abort}
    world.d.call(client.CancelReceive, receive=1)
    world.lost = set()

    assert sent(world, world.d, 2.5, Abort) == [0.25, 0.75, 1.75]
    assert world.d.node.decoder.open.parts[1].state is Decode.DRAINING

    world.pass_time(1.1)
    assert world.d.node.decoder.open.parts == {}
    assert world.d.node.leases.leases == {}


def test_settled_is_repeated_until_closed():
    world = World(lost_s=100.0, resend_s=0.25)
    send = sending(world, 7)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.lost = {Settled}
    world.p.call(client.Finish, send=send, aux=b"x")
    world.lost = set()

    assert sent(world, world.p, 2.5, Settled) == [0.25, 0.75, 1.75]

    world.pass_time(1.1)
    assert world.p.answer(world.p.calls) == client.Finished(4, None, 0, 7, 896)
    assert sent(world, world.p, 2.0, Settled) == []


def unanswered(world: World) -> None:
    """All is sent, and no Closed comes."""
    send = sending(world, 7)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.lost = {Closed}
    world.p.call(client.Finish, send=send, aux=b"x")


def test_a_decode_side_that_is_silent_is_waited_for_until_linger():
    world = World(linger_s=5.0, lost_s=100.0)
    unanswered(world)
    world.cut = {"d"}
    world.pass_time(4.9)
    assert world.p.answer(4) is None

    world.pass_time(0.2)

    finished = world.p.answer(4)
    assert isinstance(finished, client.Finished)
    assert finished.failure is not None
    assert finished.failure.code is Code.UNKNOWN_OUTCOME
    assert finished.failure.message == sentence_of(
        "a decode side that is silent is waited for until linger"
    )
    assert world.p.node.leases.leases == {}


def test_lost_messages_cost_no_outcome_while_the_decode_side_is_heard():
    """Whatever is lost: it answers as soon as a Settled and its Closed arrive."""
    world = World(linger_s=3.0)
    unanswered(world)
    world.pass_time(8.0)
    assert world.p.answer(4) is None

    world.lost = set()
    world.pass_time(1.1)

    finished = world.p.answer(4)
    assert isinstance(finished, client.Finished)
    assert finished.failure is None


def test_a_decode_side_that_is_heard_and_never_says_closed_is_not_asked_for_ever():
    world = World(linger_s=3.0)
    unanswered(world)
    world.pass_time(11.9)
    assert world.p.answer(4) is None

    world.pass_time(0.2)

    finished = world.p.answer(4)
    assert isinstance(finished, client.Finished)
    assert finished.failure is not None
    assert finished.failure.message == sentence_of(
        "a decode side that is heard and never says closed is not asked for ever"
    )
    assert sent(world, world.p, 2.0, Settled) == []


def test_a_silence_before_the_end_is_no_silence_after_it():
    """It counts from when it was heard last, and not from Settled: it is back in time."""
    world = World(linger_s=3.0, lost_s=100.0)
    unanswered(world)
    world.cut = {"d"}
    world.pass_time(2.5)
    world.cut = set()
    world.pass_time(1.0)
    world.cut = {"d"}
    world.pass_time(2.0)
    assert world.p.answer(4) is None

    world.pass_time(1.6)

    assert isinstance(world.p.answer(4), client.Finished)


@pytest.mark.parametrize(("deadline_s", "told"), [(0.5, "0.5"), (2.0, "2.0")])
def test_a_room_without_an_engine_ends_at_the_deadline_of_the_offer(deadline_s, told):
    """scenario G8: measured from the receive, whatever the other side does."""
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=deadline_s)

    world.pass_time(deadline_s + 0.1)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.DEADLINE
    assert failed.refusal.message in {
        f"room 7 was open for {told} s: no engine here called send() for it",
        f"room 7 from p took longer than {told} s: the prefill side never accepted the offer: "
        "has its engine called send() for this room?",
    }
    assert world.d.node.leases.leases == {}
    assert world.p.node.prefiller.rooms.by_room == {}


def test_a_send_without_an_offer_ends_at_its_deadline():
    """scenario G8: measured from send, even if no decode side ever comes."""
    world = World()
    send = sending(world, 7, deadline_s=0.5)

    world.pass_time(0.6)

    failed = world.p.take()[-1]
    assert isinstance(failed, client.SendFailed)
    assert (failed.send, failed.refusal.code) == (send, Code.DEADLINE)
    assert failed.refusal.message == sentence_of("a send without an offer ends at its deadline")
    assert world.p.node.leases.leases == {}


def test_the_drain_deadline_destroys_the_sending_agent_so_that_the_pages_come_back():
    world = World(drain_s=2.0)
    world.hold_posts = True
    send = sending(world, 7)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.p.call(client.Advance, send=send, upto_tokens=64)
    world.p.call(client.AbortSend, send=send, reason="failed")
    (part,) = world.p.node.prefiller.rooms.by_room.values()
    assert (part.state, len(part.outstanding)) == (Prefill.DRAINING, 1)
    assert world.d.node.decoder.open.parts[1].state is Decode.RECEIVING

    world.pass_time(1.9)
    assert world.p.node.peers.by_name["d"].agent is Agent.LOADED
    world.pass_time(0.2)

    assert world.p.node.prefiller.rooms.by_room == {}
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.message == sentence_of(
        "the drain deadline destroys the sending agent so that the pages come back"
    )
    assert world.d.node.leases.leases == {}
    assert world.p.node.peers.by_name["d"].agent is Agent.LOADED, "made anew"


def test_a_silent_peer_is_suspect_then_lost_within_three_seconds():
    """scenario G5: its rooms drain at once, and the engine is told why."""
    world = World()
    send = sending(world, 7)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.pass_time(0.5)
    world.cut = {"p"}
    peer = world.d.node.peers.by_name["p"]

    world.pass_time(0.9)
    assert peer.life is Life.UP
    world.pass_time(0.7)
    assert peer.life is Life.SUSPECT
    assert world.d.node.decoder.open.parts[1].state is Decode.RECEIVING
    world.pass_time(1.4)

    assert peer.life is Life.LOST
    assert world.d.node.decoder.open.parts[1].state is Decode.DRAINING
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.PEER_LOST
    assert failed.refusal.message.startswith("p has been silent for 2.5 s (limit 2.5 s)")
    (lease,) = world.d.node.leases.leases.values()
    assert lease.quarantine is not None
    assert lease.quarantine.writers[0].incarnation == world.p.incarnation
    assert world.p.node.prefiller.failed[send].refusal.code is Code.PEER_LOST


def test_a_false_suspicion_drains_the_room_and_the_next_one_works():
    """A silence is no proof: the pages come back by Settled, not by the clock."""
    world = World()
    sending(world, 7)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.cut = {"p"}
    world.pass_time(20)
    (lease,) = world.d.node.leases.leases.values()
    assert lease.quarantine is not None, "no clock frees it"

    world.cut = set()
    world.pass_time(2)

    assert world.d.node.leases.leases == {}
    assert world.d.node.peers.by_name["p"].life is Life.UP
    second = sending(world, 8)
    world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",))
    world.p.call(client.Finish, send=second, aux=b"x")
    assert isinstance(world.d.take()[-1], client.Received)


def test_a_receive_that_waits_for_a_lost_peer_goes_on_when_it_is_heard_again():
    world = World()
    world.cut = {"p"}
    world.pass_time(4)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    assert world.d.node.decoder.open.parts[1].state is Decode.QUEUED
    world.cut = set()

    world.inject(world.d, Ping(world.p.incarnation, world.d.incarnation, 99, 0, 0, 0))

    assert world.d.node.decoder.open.parts[1].state is Decode.OFFERED


def test_an_outcome_is_kept_until_the_prefill_side_has_heard_it():
    """Handoff 1 is offered late, after 2 is over: a floor must not pass what was never met."""
    world = World(lost_s=100.0, resend_s=0.25)
    early = tokens((5000, 20))
    world.lost = {Offer}
    world.d.call(client.ReceiveRequest, early, room=1, source=("p",))
    world.lost = set()
    second = sending(world, 2)
    world.d.call(client.ReceiveRequest, PROMPT, room=2, source=("p",))
    world.p.call(client.Finish, send=second, aux=b"2")
    world.lost = {Offer}
    world.pass_time(1.5)
    first = sending(world, 1, early)
    world.p.call(client.Finish, send=first, aux=b"1")
    world.lost = {Closed}
    world.pass_time(3)
    assert world.p.answer(world.p.calls) is None

    world.lost = set()
    world.pass_time(1.1)

    finished = world.p.answer(world.p.calls)
    assert isinstance(finished, client.Finished)
    assert finished.failure is None


def test_what_is_remembered_is_bounded_after_many_handoffs():
    """Tombstones and outcomes are folded by the floors in the pings."""
    world = World()
    largest = 0
    for k in range(HANDOFFS):
        toks = tokens((k * 100, 20))
        send = sending(world, k + 1, toks)
        world.d.call(client.ReceiveRequest, toks, room=k + 1, source=("p",))
        if k % 3:
            world.p.call(client.Finish, send=send, aux=b"x")
            got = world.d.answers[-1]
            assert isinstance(got, client.Received)
            world.d.call(client.ReleaseLease, lease=got.lease)
        else:
            world.d.call(client.CancelReceive, receive=k + 1)
        world.d.take()
        world.p.take()
        if not k % 5:
            world.pass_time(0.1)
        largest = max(
            largest,
            len(world.d.node.decoder.outcomes.kept),
            world.p.node.prefiller.settled_sends.n_records,
        )
    world.pass_time(1.2)

    assert largest < 60, "two heartbeats of 25 handoffs"
    for side in (world.p, world.d):
        node = side.node
        assert node.decoder.outcomes.kept == {}
        assert node.prefiller.settled_sends.records == {}
        assert node.prefiller.settled_sends.settled == {}
        assert node.prefiller.rooms.by_room == {}
        assert node.prefiller.posts.parts == {}
        assert node.decoder.open.parts == {}
        assert node.decoder.open.ready == {}
        assert node.leases.leases == {}


def test_a_repeated_settled_is_answered_and_changes_nothing():
    """scenario A26: a late or repeated Settled frees nothing twice."""
    world = World()
    send = sending(world, 7)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.p.call(client.Finish, send=send, aux=b"x")
    free = world.d.node.leases.pool.free_pages
    world.hold_wire = True
    for outcome in (ReceiveOutcome.DELIVERED, ReceiveOutcome.FAILED, ReceiveOutcome.ABORTED):
        world.inject(world.d, Settled(world.p.incarnation, world.d.incarnation, 1, outcome))

    answers = [letter.message for letter in world.held(Closed)]

    assert (
        answers
        == [Closed(world.d.incarnation, world.p.incarnation, 1, ReceiveOutcome.COMMITTED)] * 3
    )
    assert world.d.node.leases.pool.free_pages == free
    assert list(world.d.node.decoder.open.ready) == [1]


def test_an_abort_of_an_unknown_handoff_is_settled_and_the_room_keeps_waiting():
    world = World()
    sending(world, 7)
    world.hold_wire = True
    world.inject(world.p, Abort(world.d.incarnation, world.p.incarnation, 9, 7, "never mind"))

    (settled,) = [letter.message for letter in world.held(Settled)]

    assert isinstance(settled, Settled)
    assert (settled.handoff, settled.outcome) == (9, ReceiveOutcome.ABORTED)
    assert world.p.node.prefiller.rooms.by_room[7].state is Prefill.AWAIT_OFFER


def test_ids_below_the_floor_are_answered_and_leave_no_trace():
    world = World()
    d, p = world.d.incarnation, world.p.incarnation
    world.inject(world.p, Ping(d, p, 1, 0, 100, 0))
    world.hold_wire = True
    world.wire.clear()

    world.inject(world.p, Abort(d, p, 9, 7, "late duplicate"))

    (settled,) = [letter.message for letter in world.held(Settled)]
    assert isinstance(settled, Settled)
    assert (settled.handoff, settled.outcome) == (9, ReceiveOutcome.ABORTED)
    assert world.p.node.prefiller.settled_sends.records == {}
    assert world.held(Accept) == []
