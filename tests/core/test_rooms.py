"""Whose messages act on a room: of the node that the engine names, or of the first that fits."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.handoff.protocol import Prefill
from kvd.core.handoff.rooms import MAX_WAITING
from kvd.core.inspect.snapshot import snapshot
from kvd.core.replay.freeze import freeze
from kvd.core.replay.thaw import thaw
from kvd.errors import Code
from kvd.wire import admin, client, events
from kvd.wire.peer import Abort, Offer, ReceiveOutcome, Reject, Settled, Withdrawn
from tests.core.engines import PROMPT, PageTotals, Sender, totals
from tests.core.sentences import sentence_of
from tests.core.world import Side, World, tokens
from tests.support.compiled import replaces_methods

OTHER = tokens((1, 99), (7, 1))


def three() -> tuple[World, Side, Side]:
    """A prefill side with an honest decode side ``d`` and a stranger ``e``."""
    world = World(names=("d", "e"))
    return world, world.d, world.sides["e"]


def receive(side: Side, toks: bytes = PROMPT, room: int = 7) -> None:
    reply = side.call(client.ReceiveRequest, toks, room=room, source=("p",))
    assert isinstance(reply, client.Receiving)


def failure(side: Side) -> client.ReceiveFailed:
    (failed,) = [one for one in side.take() if isinstance(one, client.ReceiveFailed)]
    return failed


def withdraw(world: World, side: Side) -> None:
    world.inject(world.p, Withdrawn(side.incarnation, world.p.incarnation, 7, "deadline"), side)


def send_failures(world: World) -> list[client.SendFailed]:
    return [one for one in world.p.take() if isinstance(one, client.SendFailed)]


# ---- a room that names its peer ------------------------------------------------------------------


@pytest.mark.parametrize("first", ["engine", "stranger"])
def test_an_offer_of_another_node_than_the_named_one_is_refused_alone(first):
    """With the right prompt too: who knows it is still not who was meant."""
    world, d, e = three()
    if first == "stranger":
        receive(e)
    sender = Sender(world, peer="d")
    if first == "engine":
        receive(e)

    refusal = failure(e).refusal
    assert (refusal.code, refusal.message, refusal.side) == (
        Code.DUPLICATE_ROOM,
        "room 7 is open here for d, not for e: receive it there, or send it with to='e'",
        "p",
    )
    receive(d)
    sender.finish()
    assert isinstance(d.take()[-1], client.Received)
    assert totals(e) == PageTotals(free=63)


def test_a_named_room_is_not_withdrawn_by_another_node():
    world, d, e = three()
    sender = Sender(world, peer="d")
    world.lost = {Reject}

    withdraw(world, e)

    (told,) = [
        one.message
        for one in world.p.effects
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Reject)
    ]
    assert isinstance(told, Reject)
    assert told.refusal.message == sentence_of("a named room is not withdrawn by another node")
    assert send_failures(world) == []
    receive(d)
    sender.finish()
    assert isinstance(d.take()[-1], client.Received)


def test_a_named_room_is_withdrawn_by_its_node_at_once():
    """However many others there are."""
    world, d, _ = three()
    Sender(world, peer="d")

    withdraw(world, d)

    (failed,) = send_failures(world)
    assert failed.refusal.message == sentence_of("a named room is withdrawn by its node at once")


def test_a_room_may_be_named_by_the_address_of_its_node():
    world = World()
    world.p.feed(inputs.LinkDialed(world.now_s, "out:d", "d", "tcp://10.0.0.1:7402"))
    Sender(world, peer="tcp://10.0.0.1:7402")
    assert world.p.node.prefiller.rooms.by_room[7].awaited.destination == "d"


def test_the_engine_is_refused_at_once_where_its_named_node_has_another_prompt():
    world, d, e = three()
    receive(e)
    receive(d, OTHER)
    lease = world.p.lease(PROMPT)

    reply = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, peer="d")

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.PROMPT_MISMATCH
    assert failure(d).refusal.code is Code.PROMPT_MISMATCH
    assert [one.peer for one in world.p.node.prefiller.rooms.parts_of(7)] == ["e"]


def test_a_deadline_names_the_node_that_did_not_come():
    world = World()
    Sender(world, peer="elsewhere", deadline_s=1.0)
    world.pass_time(1.1)
    (failed,) = send_failures(world)
    assert failed.refusal.message == sentence_of("a deadline names the node that did not come")


# ---- a room that names nobody --------------------------------------------------------------------


def test_a_stranger_cannot_take_a_room_before_its_engine_comes():
    """Its Offer waits beside the honest one, and is refused for its prompt alone."""
    world, d, e = three()
    receive(e, OTHER)
    receive(d)

    sender = Sender(world)
    sender.finish()

    assert isinstance(d.take()[-1], client.Received)
    refusal = failure(e).refusal
    assert refusal.code is Code.PROMPT_MISMATCH
    assert totals(e) == PageTotals(free=63)


def test_a_stranger_with_another_prompt_leaves_the_room_waiting():
    world, d, e = three()
    receive(e, OTHER)

    sender = Sender(world)

    assert failure(e).refusal.code is Code.PROMPT_MISMATCH
    part = world.p.node.prefiller.rooms.by_room[7]
    assert part.state is Prefill.AWAIT_OFFER
    (room,) = snapshot(world.p.node).rooms
    assert "the Offer of e was refused: both prompts have 100 tokens" in room.waiting_for
    receive(d)
    sender.finish()
    assert isinstance(d.take()[-1], client.Received)


def test_of_two_offers_with_the_prompt_the_first_has_the_room_and_the_other_is_told():
    world, d, e = three()
    receive(d)
    receive(e)

    sender = Sender(world)

    assert failure(e).refusal.message == sentence_of(
        "of two offers with the prompt the first has the room and the other is told"
    )
    moved = [one for one in world.p.events if isinstance(one, events.Moved)]
    assert ("streaming", "d") in [(one.after, one.peer) for one in moved]
    sender.finish()
    assert isinstance(d.take()[-1], client.Received)


def test_the_deadline_of_a_room_tells_whose_offer_was_refused():
    world = World()
    Sender(world, deadline_s=1.0)
    receive(world.d, OTHER)
    world.pass_time(1.1)
    (failed,) = send_failures(world)
    assert failed.refusal.message.startswith(
        "room 7 was open for 1.0 s: no decode side offered pages that fit: the Offer of d was "
        "refused: both prompts have 100 tokens, but the digests differ ("
    )


def test_an_offer_that_is_given_up_makes_way_for_the_next():
    world, d, e = three()
    receive(e)
    receive(d)
    e.call(client.CancelReceive, receive=1)

    assert [one.peer for one in world.p.node.prefiller.rooms.parts_of(7)] == ["d"]
    Sender(world).finish()
    assert isinstance(d.take()[-1], client.Received)
    world.pass_time(3)
    assert world.p.node.prefiller.rooms.behind == world.p.node.prefiller.rooms.by_room == {}


def test_a_node_has_one_offer_for_a_room_at_a_time():
    world, d, e = three()
    receive(d)
    receive(e)
    receive(e)
    assert failure(e).refusal.message == sentence_of("a node has one offer for a room at a time")
    assert [one.peer for one in world.p.node.prefiller.rooms.parts_of(7)] == ["d", "e"]


def test_offers_that_wait_for_one_room_are_bounded(monkeypatch):
    monkeypatch.setattr("kvd.core.handoff.rooms.MAX_WAITING", 2)
    assert MAX_WAITING > 2
    world = World(names=("d", "e", "f"))
    for name in ("e", "f", "d"):
        receive(world.sides[name], OTHER)
    assert failure(world.d).refusal.code is Code.DUPLICATE_ROOM
    assert [one.peer for one in world.p.node.prefiller.rooms.parts_of(7)] == ["e", "f"]


def test_offers_behind_are_drained_with_the_rest_and_shown():
    world, d, e = three()
    receive(e)
    receive(d)
    told = world.p.ask(admin.AbortRoom(1, 7, "by hand"))
    assert isinstance(told, admin.Report)
    assert told.changed["sends"] == 2
    assert failure(d).refusal.code is failure(e).refusal.code is Code.ABORTED


def test_offers_that_wait_are_frozen_and_go_on():
    world, d, e = three()
    receive(e, OTHER)
    receive(d)
    frozen = freeze(world.p.node)

    world.p.node = thaw(frozen)

    assert freeze(world.p.node) == frozen
    Sender(world).finish()
    assert failure(e).refusal.code is Code.PROMPT_MISMATCH
    assert isinstance(d.take()[-1], client.Received)


def test_a_restart_or_the_silence_of_one_leaves_the_offer_of_the_other():
    world, d, e = three()
    receive(e)
    receive(d)
    world.restart(e)
    assert [one.peer for one in world.p.node.prefiller.rooms.parts_of(7)] == ["d"]


def test_an_unnamed_room_is_not_ended_by_one_of_several_that_withdraws():
    """A stranger's word is noted, and told to who asks."""
    world, d, e = three()
    sender = Sender(world)

    withdraw(world, e)

    assert send_failures(world) == []
    (room,) = snapshot(world.p.node).rooms
    assert room.waiting_for == sentence_of(
        "an unnamed room is not ended by one of several that withdraws"
    )
    assert any("e gave up before it offered pages: deadline; d may" in one for one in room.story)
    receive(d)
    sender.finish()
    assert isinstance(d.take()[-1], client.Received)


def test_an_unnamed_room_ends_when_all_that_could_come_have_withdrawn():
    world, d, e = three()
    Sender(world)
    withdraw(world, e)
    withdraw(world, d)
    (failed,) = send_failures(world)
    assert failed.refusal.message == sentence_of(
        "an unnamed room ends when all that could come have withdrawn"
    )


def test_who_withdrew_may_offer_after_all():
    """What it says last counts."""
    world, d, _ = three()
    sender = Sender(world)
    withdraw(world, d)
    receive(d)
    sender.finish()
    assert isinstance(d.take()[-1], client.Received)


def test_an_abort_of_a_stranger_for_the_room_leaves_it_as_it_is():
    world, d, e = three()
    sender = Sender(world)
    world.inject(world.p, Abort(e.incarnation, world.p.incarnation, 9, 7, "why"), e)
    receive(d)
    world.inject(world.p, Abort(e.incarnation, world.p.incarnation, 1, 7, "why"), e)
    sender.finish()
    assert isinstance(d.take()[-1], client.Received)


def test_an_offer_hears_that_its_engine_gave_up_though_a_stranger_waits_for_the_next():
    """Who waits in the room does not stand between the two."""
    world, d, e = three()
    sender = Sender(world)
    world.p.call(client.AbortSend, send=sender.send, reason="out of memory")
    world.hold_wire = True
    d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    late = world.held(Offer)
    world.wire.clear()
    world.hold_wire = False
    world.pass_time(1.2)
    receive(e, OTHER)

    offer = late[0].message
    assert isinstance(offer, Offer)
    world.deliver(late[0]._replace(message=msgspec.structs.replace(offer, waited_s=1.2)))
    world.run()

    assert failure(d).refusal.code is Code.ABORTED
    assert [one.peer for one in world.p.node.prefiller.rooms.parts_of(7)] == ["e"]


# ---- an Offer that comes again -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code", "what"),
    [
        ({"pages": True}, Code.BAD_PAGES, "other destination pages (7, accepted were 7)"),
        ({"digest": b"x" * 16}, Code.PROMPT_MISMATCH, "another digest than the one"),
        ({"prompt_tokens": 99}, Code.PROMPT_MISMATCH, "prompt_tokens=99, accepted was 100"),
        ({"generation": 2}, Code.POST_FAILED, "generation=2, accepted was 1"),
        ({"room": 8}, Code.BAD_ROOM, "room=8, accepted was 7"),
        ({"decode_prefix_len": 16}, Code.BAD_PREFIX, "decode_prefix_len=16, accepted was 0"),
        ({"integrity": "full"}, Code.BAD_REQUEST, "another integrity than the one"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
@pytest.mark.parametrize("when", ["before the engine", "streaming"])
def test_an_offer_repeated_as_another_one_is_refused_for_what_changed(changes, code, what, when):
    world = World()
    world.hold_posts = True
    sender = Sender(world) if when == "streaming" else None
    receive(world.d)
    offer = world.d.node.decoder.open.parts[1].unanswered or next(
        one.message
        for one in world.d.effects
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Offer)
    )
    assert isinstance(offer, Offer)
    if "pages" in changes:
        (grant,) = offer.grants
        other = grant.pages[:-4] + (40).to_bytes(4, "little")
        changes = {"grants": (msgspec.structs.replace(grant, pages=other),)}
    if "integrity" in changes:
        changes = {"integrity": type(offer.integrity)("full")}
    world.lost = {Reject}
    world.p.effects.clear()

    world.inject(world.p, msgspec.structs.replace(offer, **changes), world.d)

    (sent,) = [one for one in world.p.effects if isinstance(one, effects.SendToPeer)]
    assert isinstance(sent.message, Reject)
    assert sent.message.refusal.code is code
    assert sent.message.refusal.message.startswith(f"handoff 1 of d is offered again with {what}")
    world.hold_posts = False
    (sender or Sender(world)).finish()
    assert isinstance(world.d.take()[-1], client.Received)


# ---- an Offer of an older generation -------------------------------------------------------------


def delayed_offer(world: World) -> None:
    """An Offer on its way while the receiving transfer process is replaced; the Hello is faster."""
    sender = Sender(world)
    sender.advance(96)
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=2.0)
    (letter,) = world.held(Offer)
    world.wire.clear()
    world.hold_wire = False
    world.d.restart_transfer("killed")
    world.run()
    world.deliver(letter)


def test_an_offer_of_an_older_generation_is_refused_before_anything_is_posted():
    world = World()

    delayed_offer(world)

    (settled,) = [
        one.message
        for one in world.p.effects
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Settled)
    ]
    assert isinstance(settled, Settled)
    assert settled.outcome is ReceiveOutcome.REFUSED
    assert settled.reason is not None
    assert settled.reason.message == sentence_of(
        "an offer of an older generation is refused before anything is posted"
    )
    assert not [one for one in world.p.effects if isinstance(one, effects.Post)]
    world.run()
    assert totals(world.d) == PageTotals(free=63)
    assert world.p.node.prefiller.rooms.by_room[7].state is Prefill.AWAIT_OFFER


@replaces_methods
def test_an_offer_of_an_older_generation_leaves_nothing_stuck_even_if_it_were_taken(monkeypatch):
    """Its agent is destroyed already: a post through that would never be over."""
    monkeypatch.setattr("kvd.core.handoff.offered.outdated", lambda *_: None)
    world = World()

    delayed_offer(world)
    world.pass_time(4.0)

    assert not [one for one in world.p.effects if isinstance(one, effects.Post)]
    assert totals(world.d) == PageTotals(free=63)
    assert world.p.node.prefiller.rooms.by_room == {}
