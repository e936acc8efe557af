"""What a peer says counts for its own part alone: of another's it is refused, and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import faults
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.errors import Code
from kvd.types import ID_BYTES, Tokens
from kvd.wire import client, events
from kvd.wire.peer import (
    Abort,
    Accept,
    Closed,
    Hello,
    Message,
    PrefixFound,
    Progress,
    ReceiveOutcome,
    Reject,
    Settled,
    Withdrawn,
)
from tests.core.engines import PROMPT, Sender
from tests.core.world import PAGE, World

if TYPE_CHECKING:
    from tests.core.side import Side

WHOLE = Tokens(PROMPT[: len(PROMPT) // ID_BYTES // PAGE * PAGE * ID_BYTES])
COMMITTED = ReceiveOutcome.COMMITTED


def three(**more: object) -> tuple[World, Side, Side]:
    """``d`` and ``e`` receive from ``p``, and know each other."""
    world = World(names=("d", "e"), **more)
    d, e = world.d, world.sides["e"]
    hello = next(one.message for one in e.log if isinstance(one, inputs.FromPeer))
    assert isinstance(hello, Hello)
    known = msgspec.structs.replace(hello, source=e.incarnation, target=d.incarnation, node="e")
    world.inject(d, known, e)
    return world, d, e


def says(world: World, who: Side, to: Side, kind: type[Message], **fields: object) -> None:
    world.inject(to, kind(source=who.incarnation, target=to.incarnation, **fields), who)


def refused(side: Side) -> list[events.MessageRefused]:
    return [one for one in side.events if isinstance(one, events.MessageRefused)]


def receive(side: Side, **fields: object) -> client.Reply | None:
    return side.call(client.ReceiveRequest, PROMPT, **{"room": 7, "source": ("p",), **fields})


def cached(side: Side, prompt: bytes = WHOLE) -> None:
    lease = side.lease(Tokens(prompt))
    side.write(lease.pages, Tokens(prompt))
    side.call(client.CommitAndRelease, lease=lease.lease)


# ---- the prefill side ----------------------------------------------------------------------------


@pytest.mark.parametrize("opened", ["nobody", "an engine", "a kept room"])
def test_who_aborts_and_then_says_that_it_has_committed_has_had_no_room(opened):
    world, d, e = three()
    if opened != "nobody":
        Sender(world, takers=int(opened == "a kept room"))
    world.lost = {Settled}  # which the honest half of ``e`` would answer
    says(world, e, world.p, Abort, handoff=3, room=7, reason="")

    says(world, e, world.p, Closed, handoff=3, outcome=COMMITTED)
    world.lost = set()

    node = world.p.node
    assert node.prefiller.served_rooms.by_room == {}
    assert node.prefiller.settled_sends.delivered == 0
    assert [one.code for one in refused(world.p)] == [Code.WRONG_STATE.value]
    if opened == "nobody":
        Sender(world, takers=0)
    receive(d)
    (part,) = [one for one in node.prefiller.known() if one.peer == "d"]
    assert part.state is Prefill.STREAMING
    assert not faults(node)


def test_who_was_refused_and_says_that_it_has_committed_has_had_no_room():
    world, _d, e = three()
    Sender(world, peer="d")
    world.lost = {Closed}
    receive(e)
    world.lost = set()
    (part,) = [one for one in world.p.node.prefiller.known() if one.peer == "e"]
    assert (part.state, part.outcome) == (Prefill.SETTLED, ReceiveOutcome.REFUSED)

    says(world, e, world.p, Closed, handoff=part.handoff, outcome=COMMITTED)

    assert world.p.node.prefiller.served_rooms.by_room == {}
    assert part.state is Prefill.CLOSED
    assert part.ended is not None
    assert part.ended.code is Code.DUPLICATE_ROOM


def test_a_taker_that_aborts_and_says_that_it_has_committed_takes_no_place():
    world, d, e = three()
    sender = Sender(world, takers=1)
    says_room = {"handoff": 1, "room": 7}
    world.lost = {Abort, Closed}
    receive(e, deadline_s=20.0)
    (taker,) = [one for one in world.p.node.prefiller.known() if one.peer == "e"]
    assert taker.state is Prefill.STREAMING
    world.lost = {Settled}
    says(world, e, world.p, Abort, reason="", **says_room)
    says(world, e, world.p, Closed, handoff=1, outcome=COMMITTED)
    world.lost = set()

    keeper = world.p.node.prefiller.rooms.by_room[7]
    assert keeper.keeping is not None
    assert keeper.keeping.takers == 0
    sender.finish()
    receive(d)
    assert [one for one in d.take() if isinstance(one, client.Received)]


@pytest.mark.parametrize("takers", [0, 1])
def test_a_peer_that_the_engine_did_not_name_withdraws_nothing(takers):
    world, _d, e = three()
    Sender(world, peer="d", takers=takers)

    says(world, e, world.p, Withdrawn, room=7, reason="")

    (part,) = world.p.node.prefiller.known()
    assert part.state is Prefill.AWAIT_OFFER
    assert part.awaited.withdrawn == {}
    assert len(refused(world.p)) == 1


def test_another_peer_does_not_withdraw_a_pull_nor_take_it():
    world, d, e = three()
    cached(world.p)
    world.hold_wire = True
    d.call(client.ReceiveRequest, WHOLE, room=0, source=("p",))
    world.hold_wire = False
    world.lost = {PrefixFound}
    world.flow()
    world.run()
    (part,) = world.p.node.prefiller.known()
    assert part.state is Prefill.AWAIT_OFFER

    says(world, e, world.p, Withdrawn, room=part.room, reason="")
    e.call(client.ReceiveRequest, WHOLE, room=part.room, source=("p",))

    assert part.state is Prefill.AWAIT_OFFER
    (told,) = [one for one in e.take() if isinstance(one, client.ReceiveFailed)]
    assert told.refusal.code is Code.DUPLICATE_ROOM


# ---- the decode side -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Accept, Progress, Settled])
def test_another_peer_says_nothing_of_a_receive(kind):
    world, d, e = three()
    receive(d)
    (part,) = d.node.decoder.open.parts.values()
    fields = {
        Accept: {"decode_prefix_len": 64},
        Progress: {"moved_bytes": 10**6},
        Settled: {"outcome": ReceiveOutcome.DELIVERED, "aux": b"x"},
    }[kind]
    said: list[Message] = []
    world.deliver, deliver = (lambda one: (said.append(one.message), deliver(one))), world.deliver

    says(world, e, d, kind, handoff=part.handoff, **fields)

    assert (part.state, part.moved_bytes, part.ended) == (Decode.OFFERED, 0, None)
    assert [one.code for one in refused(d)] == [Code.UNKNOWN_HANDOFF.value]
    # No Closed either: whoever it is of, its end is not told to another.
    assert {type(one) for one in said} == {Reject}


def asked(world: World, prompt: Tokens = WHOLE) -> None:
    """A pull whose source is silent."""
    world.lost = {PrefixFound}
    world.d.call(client.ReceiveRequest, prompt, room=0, source=("p",), deadline_s=20.0)
    world.lost = set()


@pytest.mark.parametrize("room", [0, 7])
def test_another_peer_does_not_answer_an_ask(room):
    world, d, e = three()
    asked(world)

    says(world, e, d, PrefixFound, ask=1, room=room, n_tokens=PAGE)

    assert list(d.node.pulls.asks.by_id) == [1]
    assert not d.node.decoder.open.parts
    assert not d.take()
    assert len(refused(d)) == 1


@pytest.mark.parametrize("n_tokens", [len(WHOLE) // ID_BYTES + PAGE, PAGE + 1, 2**31 - 1])
def test_a_source_that_sends_what_it_was_not_asked_for_is_refused(n_tokens):
    world, d, _e = three()
    asked(world)
    held: list[Message] = []
    deliver = world.deliver
    world.deliver = lambda one: (held.append(one.message), deliver(one))

    says(world, world.p, d, PrefixFound, ask=1, room=7, n_tokens=n_tokens)

    (told,) = d.take()
    assert isinstance(told, client.Failed)
    assert told.refusal.code is Code.BAD_PREFIX
    assert told.refusal.numbers["n_tokens"] == n_tokens
    assert not d.node.leases.leases
    assert [one.room for one in held if isinstance(one, Withdrawn)] == [7]


@pytest.mark.parametrize("outcome", [COMMITTED, ReceiveOutcome.CORRUPT])
def test_a_source_does_not_say_what_the_receiver_alone_knows(outcome):
    world, d, _ = three()
    receive(d)
    (part,) = d.node.decoder.open.parts.values()
    says(world, world.p, d, Settled, handoff=part.handoff, outcome=outcome)
    (told,) = [one for one in d.answers if isinstance(one, client.ReceiveFailed)]
    assert f"ended it as '{outcome.value}', which it cannot know" in told.refusal.message
    (ended,) = [one for one in d.events if isinstance(one, events.HandoffEnded)]
    assert ended.outcome == "failed"
    sent = [one.message for one in d.effects if isinstance(one, effects.SendToPeer)]
    closed = [one for one in sent if isinstance(one, Closed)]
    assert [one.outcome for one in closed] == [ReceiveOutcome.FAILED]
