"""Rooms that an engine keeps: who may take them, and who has had them.

A kept room stays open behind ``finish``: its part waits for Offers until its time is over, and
holds the pages all along. Each Offer that comes meanwhile is a taker: a part of its own behind it,
with its own ``decode_prefix_len``, its own hold of the pages and its own end. What a taker fails of
concerns nobody else; the room is over when its time is, or when so many receives as it was opened
for were committed. Who takes it then goes on to its end.

A room that is open for any number gives way once it was received: its pages stay while nobody needs
them (``GivingWay.let_give_way``). One that is open for so many keeps them for the last.

What must not live here: transitions (``send``), rooms that are over (``served``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.offer import disagreement
from kvd.core.handoff.parts import Keeping, TakenBy
from kvd.core.handoff.protocol import Prefill, PrefillTrigger
from kvd.core.handoff.rooms import not_for, takers_of, turned_away
from kvd.errors import Code, Refusal
from kvd.wire import client
from kvd.wire.peer import ReceiveOutcome

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.core.handoff.parts import SendPart
    from kvd.core.handoff.payload import Payload
    from kvd.core.handoff.rooms import Rooms
    from kvd.core.handoff.send import Prefiller
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings
    from kvd.wire.peer import Offer

P, T = Prefill, PrefillTrigger

MAX_TAKERS = 4096
"""Receives that a room can be opened for."""

MAX_TAKING = 64
"""Receives of one room at a time."""


def keeping_of(
    message: client.SendRequest | client.HandOver, side: str
) -> Keeping | Refusal | None:
    """How the room is to be kept, or why it cannot be so; None: its first receive ends it."""
    if not message.ttl_s and not message.takers:
        if type(message) is client.SendRequest and message.when_written:
            why = "a send that finishes by itself is of a room that is kept: say ttl_s or takers"
            return Refusal(Code.BAD_REQUEST, why, side=side)
        return None
    # A comparison that is false for NaN too.
    if message.ttl_s >= 0 and 0 <= message.takers <= MAX_TAKERS:
        return Keeping(message.ttl_s or message.deadline_s, message.takers)
    return Refusal(
        Code.BAD_REQUEST,
        f"a room kept for ttl_s={message.ttl_s:g} and takers={message.takers}: seconds from 0 on, "
        f"and 0 (any number) to {MAX_TAKERS} receives",
        side=side,
        numbers={"takers": message.takers},
    )


def no_place(
    keeper: SendPart, rooms: Rooms, settled: Iterable[SendPart], side: str
) -> Refusal | None:
    """Why one more receive of a kept room is not served now."""
    keeping = keeper.keeping
    assert keeping is not None
    taking = takers_of(keeper, rooms)
    if keeping.limit:
        # All is there, and its node is about to say whether it was committed: its place is taken.
        taking += [
            part
            for part in settled
            if part.kept_by is keeper and part.outcome is ReceiveOutcome.DELIVERED
        ]
    limit = min(keeping.limit - keeping.takers, MAX_TAKING) if keeping.limit else MAX_TAKING
    if len(taking) < limit:
        return None
    names = ", ".join(sorted({part.peer for part in taking})[:8])
    return Refusal(
        Code.DUPLICATE_ROOM,
        f"room {keeper.room} is being received by {names} ({len(taking)} at a time, {limit} are "
        "let in): receive it again when one of them has failed, or open it for more takers",
        side=side,
        numbers={"taking": len(taking), "limit": limit},
    )


def room_kept(call: int, left_s: float, part: SendPart, rooms: Rooms, now_s: float) -> client.Reply:
    """What the engine of a kept room is told of it."""
    keeping = part.keeping
    assert keeping is not None
    return client.RoomKept(
        call=call,
        left_s=left_s,
        takers=keeping.takers,
        taking=len(takers_of(part, rooms)),
        taken=tuple(
            client.TakenReceive(
                peer=taker.peer,
                decode_prefix_len=taker.decode_prefix_len,
                sent_pages=taker.sent_pages,
                sent_bytes=taker.sent_bytes,
                ago_s=now_s - taker.at_s,
            )
            for taker in keeping.taken
        ),
    )


def told_keeping(part: SendPart, keeping: Keeping) -> str:
    """What a kept room waits for, for who asks; who receives it now has a row of its own."""
    who = part.awaited.destination or "any decode side with the prompt"
    limit = f" of {keeping.limit}" if keeping.limit else ""
    by = ", ".join(dict.fromkeys(taker.peer for taker in keeping.taken))
    said = f"{who}, kept: received {keeping.takers}{limit} times" + (f" by {by}" if by else "")
    if keeping.over is not None:
        return f"{said}; over when its engine has written it: {keeping.over.message}"
    gives_way = keeping.takers and not keeping.limit
    return f"{said}; its pages go when an engine needs them" if gives_way else said


def note_taken(keeper: SendPart, part: SendPart, at_s: float) -> bool:
    """One receive more was committed; whether it was the last that the room is open for."""
    keeping = keeper.keeping
    assert keeping is not None
    keeping.takers += 1
    keeping.taken.append(TakenBy(part, at_s))
    return bool(keeping.limit) and keeping.takers >= keeping.limit


def is_taken_here(part: SendPart, message: client.KeepRoom) -> bool:
    """Whether another session of this node may end the room, as the one that it is kept for."""
    keeping = part.keeping
    is_for_one = keeping is not None and keeping.limit == 1
    return is_for_one and message.ttl_s == 0 and part.aux is not None


def follow_keeper(part: SendPart, keeper: SendPart) -> None:
    """One that takes the room has all that its engine has said so far."""
    part.cursor_tokens, part.after, part.aux = keeper.cursor_tokens, keeper.after, keeper.aux


@mypyc_attr(allow_interpreted_subclasses=True)
class KeptRooms:
    """The verbs of rooms that stay open: keep or end one, and let receives in."""

    def __init__(
        self,
        settings: Settings,
        payload: Payload,
        leases: LeaseTable,
        sends: Prefiller,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._payload = payload
        self._leases = leases
        self._sends = sends
        self._out = out

    def keep_room(self, session: int, message: client.KeepRoom) -> Refusal | None:
        """Its engine keeps a room for so long from now on, or ends it.

        An engine of this node that was to receive it needs no handoff: it says so by ending it.
        """
        side, now_s = self._settings.name, self._out.at_s
        part = self._sends.rooms.by_room.get(message.room)
        if (
            part is None
            or part.keeping is None
            or not (part.session == session or is_taken_here(part, message))
        ):
            served = self._sends.served_rooms.served(message.room, now_s)
            what = f"no room {message.room} is kept here for this session: it is over, or was "
            what += "opened without ttl_s and takers"
            return served or Refusal(Code.UNKNOWN_HANDOFF, what, side=side)
        if not message.ttl_s >= 0:  # not of a NaN either
            return Refusal(Code.BAD_REQUEST, f"keep for {message.ttl_s:g} s", side=side)
        part.keeping.ttl_s = message.ttl_s
        if message.ttl_s:
            until_s = self._sends.deadline_of(message.ttl_s)
            # While its engine still writes, the deadline of that counts too.
            part.deadline_s = until_s if part.aux is not None else max(part.deadline_s, until_s)
            left_s = part.deadline_s - now_s
            self._out.answer(
                session, room_kept(message.call, left_s, part, self._sends.rooms, now_s)
            )
            return None
        # Answered first: it tells who takes it now, and what ends with it comes behind.
        self._out.answer(session, room_kept(message.call, 0.0, part, self._sends.rooms, now_s))
        why = f"the prefill engine ended room {message.room}"
        if part.session != session:
            part.keeping.takers += 1
            why = f"session {session} of this node has what room {message.room} was kept for"
        self._sends.end_kept(part, Refusal(Code.ABORTED, why, side=side))
        return None

    def note_received(self, keeper: SendPart) -> None:
        """Somebody has had a room that is open for any number: who comes yet has no right to it.

        Its pages stay as long as nobody needs them.
        """
        keeping, engine = keeper.keeping, keeper.engine
        assert keeping is not None
        if not keeping.limit and engine is not None and keeping.takers == 1:
            self._leases.giving_way.let_give_way(engine.lease, f"send {keeper.id}")

    def answer_finish(self, part: SendPart) -> None:
        """``finish`` of a room that is kept returns at once, and its time begins.

        Where nobody is let in any more it hears why, whoever receives it still.
        """
        if part.keeping is not None:
            over = part.keeping.over
            part.deadline_s = self._sends.deadline_of(part.keeping.ttl_s)
            call, part.finish_call = part.finish_call, None
            if call is None:  # it has finished by itself
                return
            kept_s = part.deadline_s - self._out.at_s if over is None else 0.0
            self._out.answer(
                part.session,
                client.Finished(
                    call=call,
                    failure=over,
                    decode_prefix_len=0,
                    sent_pages=0,
                    sent_bytes=0,
                    kept_s=kept_s,
                ),
            )

    def serve_waiting(self, keeper: SendPart) -> None:
        """Offers that came before the engine of a room that is kept."""
        if keeper.keeping is None:
            return
        for part in self._sends.rooms.parts_of(keeper.room):
            offer = part.offer
            if offer is None or part.state is not P.AWAIT_ENGINE:
                continue
            refusal = self.not_for_taker(keeper, part.peer, offer)
            if refusal is None:
                self.take_room(keeper, part)
            else:
                self._sends.refuse_part(part, refusal)

    def not_for_taker(self, keeper: SendPart, peer: str, offer: Offer) -> Refusal | None:
        """Why the Offer of this peer is not let into a kept room."""
        side, engine = self._settings.name, keeper.engine
        assert engine is not None
        if not keeper.awaited.is_by(peer):
            return not_for(keeper.room, keeper.awaited.destination, peer, side)
        if keeper.keeping is not None and keeper.keeping.over is not None:
            return keeper.keeping.over
        refusal = disagreement(offer, peer, engine, self._payload, side)
        if refusal is not None:
            turned_away(keeper, peer, refusal, self._out.at_s)
        return refusal or no_place(
            keeper, self._sends.rooms, self._sends.settled_sends.settled.values(), side
        )

    def take_room(self, keeper: SendPart, part: SendPart) -> None:
        """One receive of a kept room begins: it has all that the engine has said so far."""
        engine = keeper.engine
        assert engine is not None
        part.kept_by = keeper
        part.engine, part.session, part.is_numbered = engine, keeper.session, False
        part.prompt_tokens = engine.prompt_tokens
        follow_keeper(part, keeper)
        self._leases.holders.hold_for_send(engine.lease, f"send {part.id}", engine.prompt_tokens)
        keeper.history.add_line(self._out.at_s, f"{part.peer} receives it (send {part.id})")
        self._sends.await_engine_or_await_offer_to_streaming(part, T.ENGINE_OPENED)
