"""The prefill side of handoffs: write what the decode side lacks, then never write again.

One ``SendPart`` joins two halves that come in any order: the engine's ``send`` and the decode
side's Offer. Its states and triggers are ``protocol.PREFILL``; what happens on the edge from
``flushing`` to ``settled`` is the method ``_flushing_to_settled``. Beside it: ``posts`` has the
pages under way, ``transfers`` what becomes of them, ``settled`` the end, from SETTLED on. The rules
that keep memory safe:

- pages go only through the transport generation that the Offer names;
- Settled is said when no post is outstanding. A failed post stays outstanding until its sending
  agent is destroyed: its bytes are in doubt until then;
- the source lease is held by the part while a post may read its pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import Claim, Shortage
from kvd.core.handoff.kept import (
    ServedRooms,
    bad_keeping,
    keeping_of,
    no_place,
    note_taken,
    room_kept,
    takers_of,
)
from kvd.core.handoff.message_sizes import page_bytes
from kvd.core.handoff.offer import (
    differs,
    disagreement,
    not_reached,
    outdated,
    prompt_digest,
    unacceptable,
)
from kvd.core.handoff.parts import FailedSend, SendingEngine, SendPart
from kvd.core.handoff.payload import Payload
from kvd.core.handoff.posts import Posts, no_event
from kvd.core.handoff.protocol import Prefill, PrefillTrigger, move_prefill
from kvd.core.handoff.pull import NO_ROOM, PULLER, PullTicket, PullTickets, unfit
from kvd.core.handoff.refusals import asked_again, long_aux, rank_gone, too_late
from kvd.core.handoff.rooms import (
    NO_OFFERS,
    ExpiredRooms,
    RoomMatch,
    Rooms,
    may_offer_still,
    not_for,
    taken,
)
from kvd.core.handoff.settled import SettledSends
from kvd.core.handoff.sources import accepted
from kvd.core.leases.written import promised_tokens, word_for_sends
from kvd.core.peers.peer import Agent, lost_because
from kvd.core.settings import CacheMode
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, MAX_ROOM, Tokens, short
from kvd.wire import client
from kvd.wire.bounds import MAX_REASON
from kvd.wire.codec import check_tokens
from kvd.wire.peer import (
    Abort,
    Accept,
    AskPrefix,
    Closed,
    Offer,
    PrefixFound,
    ReceiveOutcome,
    Withdrawn,
)

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import Keeping
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.types import Pages

P, T = Prefill, PrefillTrigger

LIVE = {P.AWAIT_ENGINE, P.AWAIT_OFFER, P.STREAMING, P.FLUSHING, P.DRAINING}
"""States that occupy the room."""

MAX_FAILED_SENDS = 4096
"""Kept for engines that never end what has failed; the oldest is forgotten first."""

WRITING = {P.STREAMING, P.FLUSHING}


@mypyc_attr(allow_interpreted_subclasses=True)
class Prefiller:
    """The parts of this node's prefill side that are not over."""

    def __init__(self, settings: Settings, leases: LeaseTable, peers: Peers, out: Outbox) -> None:
        self._payload = Payload(settings.spec, leases)
        self.rooms = Rooms(self._payload, settings.name)
        """Every part in a LIVE state."""
        self.by_send: dict[int, SendPart] = {}
        """Every part an engine has opened and neither finished nor heard to have failed."""
        self.handed_over: dict[tuple[int, int], SendPart] = {}
        """Of these, those whose engine knows no number of them, by session and call."""
        self.failed: dict[int, FailedSend] = {}
        """By send id: the engine was told, and has not said finish or abort yet."""
        self.expired_rooms = ExpiredRooms(settings)
        self.tickets = PullTickets()
        self.served_rooms = ServedRooms(settings)
        self.settled_sends = SettledSends(settings, leases, peers, out)
        self.posts = Posts(self._payload, leases, peers, out)
        self._settings = settings
        self._leases = leases
        self._peers = peers
        self._out = out
        self._last_part = 0
        self._last_pull_room = MAX_ROOM

    def known(self) -> list[SendPart]:
        """Every part that is not over: those that have a room, then those that wait for Closed."""
        return [*self.rooms.live(), *self.settled_sends.settled.values()]

    # ---- the engine --------------------------------------------------------------------------

    def open_send(self, message: client.SendRequest, engine: SendingEngine) -> Refusal | None:
        """The engine is here for a room; the caller has checked that the lease is its own."""
        part = self._enter_room(message, engine)
        if isinstance(part, Refusal):
            return part
        self._out.answer(engine.session, client.Sending(message.call, part.id))
        # After Sending, which names the send: Accepted and a failure speak of it by its number.
        if part.state is P.AWAIT_ENGINE:
            self._await_engine_or_await_offer_to_streaming(part, T.ENGINE_OPENED)
        self._serve_waiting(part)
        return None

    def hand_over(self, message: client.HandOver, engine: SendingEngine) -> Refusal | None:
        """As ``open_send``, by an engine that has finished already."""
        part = self._enter_room(message, engine)
        if isinstance(part, Refusal):
            return part
        part.is_numbered = False
        if part.keeping is None:  # of one that is kept the call is answered at once
            self.handed_over[part.session, message.call] = part
        self._note_finish(part, message.call, message.aux, message.after)
        if part.state is P.AWAIT_ENGINE:
            self._await_engine_or_await_offer_to_streaming(part, T.ENGINE_OPENED)
        else:
            self._move(part, T.FINISHED, "")
        self._answer_kept(part)
        self._serve_waiting(part)
        return None

    def asked_before(
        self, session: int, message: client.SendRequest | client.HandOver
    ) -> SendPart | Refusal | None:
        """The send that this session has opened with the same request id: the call is answered.

        A refusal: it was served. None: there is none, or it was opened by the other verb.
        """
        request = message.request_id
        if not request:
            return None
        hands_over = type(message) is client.HandOver
        found = [self.rooms.by_room.get(message.room), *self.settled_sends.settled.values()]
        for part in found:
            if part is None or (part.session, part.room) != (session, message.room):
                continue
            if part.request_id == request and part.is_numbered is not hands_over:
                self._answer_call_again(part, message)
                return part
        return self.served_rooms.served(message.room, self._out.at_s, request)

    def _answer_call_again(
        self, part: SendPart, message: client.SendRequest | client.HandOver
    ) -> None:
        if type(message) is not client.HandOver:
            self._out.answer(part.session, client.Sending(message.call, part.id))
            return
        # Its end is told once, to the call that came last.
        if part.finish_call is not None:
            earlier = asked_again(message, self._settings.name)
            self._out.answer(part.session, client.Failed(part.finish_call, earlier))
            if self.handed_over.pop((part.session, part.finish_call), None) is not None:
                self.handed_over[part.session, message.call] = part
        part.finish_call = message.call
        self._answer_kept(part)

    def _enter_room(
        self, message: client.SendRequest | client.HandOver, engine: SendingEngine
    ) -> SendPart | Refusal:
        """The part that the engine meets there, or waits with."""
        part = self.rooms.by_room.get(message.room)
        # A room has one engine; Offers that wait for one (AWAIT_ENGINE) are what it came to meet.
        if part is not None and part.state is not P.AWAIT_ENGINE:
            return taken(part, self._settings.name, f"send {part.id}")
        refusal = bad_keeping(message, self._settings.name)
        if refusal is not None:
            return refusal
        destination = self._destination(message.peer or "")
        if isinstance(destination, Refusal):
            return destination
        keeping = keeping_of(message)
        meeting = self._meet(message.room, destination, engine, keeping)
        # Also where the engine itself is refused: its word has decided about these Offers.
        for turned in meeting.turned:
            self._refuse(turned.part, turned.refusal)
        if meeting.refusal is not None:
            return meeting.refusal
        part = meeting.part or self._new_part(message.room, P.AWAIT_OFFER)
        if type(message) is client.HandOver:
            refusal = self._unfinishable(part, engine, len(message.aux), message.after)
            if refusal is not None:
                return refusal
        if meeting.part is None:
            self.rooms.open_room(part)
            part.history.add_line(self._out.at_s, f"opened by session {engine.session}")
            for turned in meeting.turned:
                self._turned_away(part, turned.part.peer, turned.refusal)
        part.awaited.destination = destination
        # A new attempt: an Offer that comes now is for it, and must not hear why the last one
        # failed.
        self.expired_rooms.forget(message.room)
        self.served_rooms.forget(message.room)
        part.keeping = keeping
        part.request_id = message.request_id
        part.engine = engine
        part.session = engine.session
        part.prompt_tokens = engine.prompt_tokens
        part.deadline_s = self._deadline(message.deadline_s)
        self.by_send[part.id] = part
        part.cursor_tokens, part.after = word_for_sends(engine.lease, engine.prompt_tokens)
        # Held by the send from here on: the engine may release its lease, or die, while posts read.
        self._leases.hold_for_send(engine.lease, f"send {part.id}", engine.prompt_tokens)
        return part

    def _destination(self, peer: str) -> str | Refusal:
        """Whom a send is for, by name: the engine may give an address, and Offers come from nodes.

        Empty: whoever asks. A name that nobody has said yet is one that may come.
        """
        found = self._peers.find(peer) if peer else ""
        if found is None and "://" in peer:
            # Who waits for the room already is met by name, now, and an address has none yet.
            if "@" not in peer:
                return Refusal(
                    Code.PEER_UNKNOWN,
                    f"a send to {peer}, which is no address of peers.connect: say whom it is for, "
                    f"as to='NAME@{peer}', or to='NAME' where that node dials this one",
                    side=self._settings.name,
                )
            refusal = self._peers.dial_address(peer)
            if refusal is not None:
                return refusal
            found = self._peers.find(peer)
        return peer if found is None else found

    def _meet(
        self, room: int, destination: str, engine: SendingEngine, keeping: Keeping | None
    ) -> RoomMatch:
        """The Offer that the engine finds there, or why it is refused."""
        named = self._peers.by_name.get(destination)
        # It could only come to nothing: nobody waits for that.
        if named is not None and named.refusal is not None:
            return RoomMatch(None, (), named.refusal)
        # Who waits for a room that is kept is served behind it, all that fit.
        if keeping is not None:
            return NO_OFFERS
        return self.rooms.match_engine(room, destination, engine)

    def advance_send(self, part: SendPart, upto_tokens: int, after: bytes = b"") -> Refusal | None:
        """KV below ``upto_tokens`` is written, or will be when the event behind ``after`` comes."""
        refusal = no_event(after, self._settings.name)
        if refusal is not None:
            return refusal
        # A cursor beyond the prompt would post pages that no Offer names.
        if not 0 <= upto_tokens <= part.prompt_tokens:
            return Refusal(
                Code.BAD_REQUEST,
                f"advance to {upto_tokens} of a prompt of {part.prompt_tokens} tokens",
                side=self._settings.name,
                numbers={"upto_tokens": upto_tokens, "prompt_tokens": part.prompt_tokens},
            )
        self._advance_part(part, upto_tokens, after)
        return None

    def _advance_part(self, part: SendPart, upto_tokens: int, after: bytes) -> None:
        # An engine may repeat itself, or be late after finish: the cursor never goes back.
        if part.aux is None and upto_tokens > part.cursor_tokens:
            part.cursor_tokens = upto_tokens
            part.after = after or part.after
            # Before the push: a trigger without a row must raise before a page has left.
            self._move(part, T.ADVANCED, "")
            self.posts.push_part(part)
            for taker in self._takers(part):
                if taker.state is P.STREAMING:
                    self._advance_part(taker, upto_tokens, after)

    def lease_written(self, lease: LeaseRecord) -> None:
        """Its engine, or one of its ranks, has said how far it is: its sends go on by that."""
        if len(lease.holders) == 1:  # as of most leases: nobody sends it
            return
        for part in [self.by_send.get(_send_of(holder)) for holder in sorted(lease.holders)]:
            if part is not None:
                upto_tokens, after = word_for_sends(lease, part.prompt_tokens)
                self._advance_part(part, upto_tokens, after)

    def rank_left(self, session: int, rank: int, ranks: int, why: str) -> int:
        """Nobody speaks for that rank any more: end the sends that it has not written; how many."""
        ended = 0
        for part in [one for one in self.by_send.values() if one.session == session]:
            lease = part.engine.lease if part.engine is not None else None
            # One that is finished is written by the word of its engine, for every rank.
            if part.aux is not None or lease is None or len(lease.said) != ranks or ranks == 1:
                continue
            upto = promised_tokens(lease)[rank]
            if upto >= part.prompt_tokens:
                continue
            ended += 1
            what = f"send {part.id} (room {part.room})"
            refusal = rank_gone(why, rank, upto, part.prompt_tokens, what)
            self.give_up_send(part, msgspec.structs.replace(refusal, side=self._settings.name))
        return ended

    def finish_send(
        self, part: SendPart, call: int, aux: bytes, after: bytes = b""
    ) -> Refusal | None:
        """All KV is written; ``call`` is answered when the decode side has spoken."""
        if part.aux is not None:
            what = f"send {part.id} is finished already"
            return Refusal(Code.WRONG_STATE, what, side=self._settings.name)
        refusal = self._unfinishable(part, part.engine, len(aux), after)
        if refusal is not None:
            return refusal
        self._note_finish(part, call, aux, after)
        if part.state is P.STREAMING:
            self._streaming_to_flushing(part)
        else:  # no Offer yet: it streams and flushes in one step when that comes
            self._move(part, T.FINISHED, "")
        self._answer_kept(part)
        for taker in self._takers(part):
            if taker.state is P.STREAMING:
                self._follow_keeper(taker, part)
                self._streaming_to_flushing(taker)
        return None

    def _unfinishable(
        self, part: SendPart, engine: SendingEngine | None, aux_bytes: int, after: bytes
    ) -> Refusal | None:
        """Why this cannot be the end of its prompt."""
        name, peer = self._settings.name, self._peers.by_incarnation.get(part.incarnation)
        # Refused while the engine can still finish with a shorter one: no Settled could carry this.
        refusal = long_aux(part, aux_bytes, peer, self._settings) or no_event(after, name)
        if refusal is None and engine is not None and part.share.is_authoritative:
            refusal = not_reached(engine, self._payload, name)
        return refusal

    def _note_finish(self, part: SendPart, call: int, aux: bytes, after: bytes) -> None:
        part.finish_call = call
        part.aux = aux
        part.after = after or part.after
        # Finish is the last advance too: an engine need not have said how far it was.
        part.cursor_tokens = part.prompt_tokens

    def reads_of(self, arena: LeaseRecord) -> list[tuple[str, Pages]]:
        """The sends that may still read pages of an arena, in words, and which pages those are."""
        return [
            (f"send {part.id} (room {part.room})", part.engine.pages)
            for part in self.rooms.live()
            if part.engine is not None and part.engine.lease is arena
        ]

    # ---- rooms that are kept -----------------------------------------------------------------

    def keep_room(self, session: int, message: client.KeepRoom) -> Refusal | None:
        """Its engine keeps a room for so long from now on, or ends it."""
        side, now_s = self._settings.name, self._out.at_s
        part = self.rooms.by_room.get(message.room)
        if part is None or part.keeping is None or part.session != session:
            served = self.served_rooms.served(message.room, now_s)
            what = f"no room {message.room} is kept here for this session: it is over, or was "
            what += "opened without ttl_s and takers"
            return served or Refusal(Code.UNKNOWN_HANDOFF, what, side=side)
        if not message.ttl_s >= 0:  # not of a NaN either
            return Refusal(Code.BAD_REQUEST, f"keep for {message.ttl_s:g} s", side=side)
        part.keeping.ttl_s = message.ttl_s
        if message.ttl_s:
            until_s = self._deadline(message.ttl_s)
            # While its engine still writes, the deadline of that counts too.
            part.deadline_s = until_s if part.aux is not None else max(part.deadline_s, until_s)
            left_s = part.deadline_s - now_s
            self._out.answer(session, room_kept(message.call, left_s, part, self.rooms, now_s))
            return None
        # Answered first: it tells who takes it now, and what ends with it comes behind.
        self._out.answer(session, room_kept(message.call, 0.0, part, self.rooms, now_s))
        why = f"the prefill engine ended room {message.room}"
        self._end_kept(part, Refusal(Code.ABORTED, why, side=side))
        return None

    def _answer_kept(self, part: SendPart) -> None:
        """``finish`` of a room that is kept returns at once, and its time begins."""
        if part.keeping is not None and part.finish_call is not None:
            part.deadline_s = self._deadline(part.keeping.ttl_s)
            call, part.finish_call = part.finish_call, None
            kept_s = part.deadline_s - self._out.at_s
            self._out.answer(
                part.session,
                client.Finished(
                    call=call,
                    failure=None,
                    decode_prefix_len=0,
                    sent_pages=0,
                    sent_bytes=0,
                    kept_s=kept_s,
                ),
            )

    def _takers(self, part: SendPart) -> list[SendPart]:
        return takers_of(part, self.rooms) if part.keeping is not None else []

    def _serve_waiting(self, keeper: SendPart) -> None:
        """Offers that came before the engine of a room that is kept."""
        if keeper.keeping is None:
            return
        for part in self.rooms.parts_of(keeper.room):
            offer = part.offer
            if offer is None or part.state is not P.AWAIT_ENGINE:
                continue
            refusal = self._not_for_taker(keeper, part.peer, offer)
            if refusal is None:
                self._take_room(keeper, part)
            else:
                self._refuse(part, refusal)

    def _not_for_taker(self, keeper: SendPart, peer: str, offer: Offer) -> Refusal | None:
        side, engine = self._settings.name, keeper.engine
        assert engine is not None
        if not keeper.awaited.is_by(peer):
            return not_for(keeper.room, keeper.awaited.destination, peer, side)
        refusal = disagreement(offer, engine, self._payload, side)
        if refusal is not None:
            self._turned_away(keeper, peer, refusal)
        return refusal or no_place(keeper, self.rooms, side)

    def _take_room(self, keeper: SendPart, part: SendPart) -> None:
        """One receive of a kept room begins: it has all that the engine has said so far."""
        engine = keeper.engine
        assert engine is not None
        part.kept_by = keeper
        part.engine, part.session, part.is_numbered = engine, keeper.session, False
        part.prompt_tokens = engine.prompt_tokens
        self._follow_keeper(part, keeper)
        self._leases.hold_for_send(engine.lease, f"send {part.id}", engine.prompt_tokens)
        keeper.history.add_line(self._out.at_s, f"{part.peer} receives it (send {part.id})")
        self._await_engine_or_await_offer_to_streaming(part, T.ENGINE_OPENED)

    def _follow_keeper(self, part: SendPart, keeper: SendPart) -> None:
        part.cursor_tokens, part.after, part.aux = keeper.cursor_tokens, keeper.after, keeper.aux

    def _end_kept(self, part: SendPart, refusal: Refusal) -> None:
        """Its time is over, its engine ends it, or the last that it was open for has it."""
        keeping = part.keeping
        assert keeping is not None
        # Whoever receives it goes on: the engine has said all that they need. A room that somebody
        # has received, or is about to, has not failed.
        if part.aux is None or not (keeping.takers or self._takers(part)):
            self.give_up_send(part, refusal)
            return
        self._move(part, T.GIVEN_UP, refusal.message)
        self._let_engine_go(part)
        self.rooms.remove_part(part)
        self.settled_sends.let_go(part, "kept-room-over")

    def closed(self, peer: Peer, message: Closed) -> None:
        """How it ended over there."""
        part = self.settled_sends.closed(peer, message)
        if part is None or message.outcome is not ReceiveOutcome.COMMITTED:
            return
        keeper, part_room = part.kept_by, self.rooms.by_room.get(part.room)
        now_s = self._out.at_s
        is_last = keeper is not None and note_taken(keeper, part, now_s)
        self.served_rooms.remember(part, now_s)
        part.kept_by = None
        # It may be over already, by its time or its engine.
        if keeper is not None and is_last and part_room is keeper:
            why = f"room {part.room} was received by all that it was open for"
            self._end_kept(keeper, Refusal(Code.ABORTED, why, side=self._settings.name))

    # ---- how it ends for the engine ----------------------------------------------------------

    def abandon_send(self, part: SendPart, refusal: Refusal) -> None:
        """The engine ends it: it failed, or is dead."""
        # After giving up, which may just have put it there: this engine ends it now and asks no
        # more.
        self.give_up_send(part, refusal)
        self.failed.pop(part.id, None)

    def cancel_call(self, session: int, call: int, refusal: Refusal) -> None:
        """Nobody waits for what this call hands over: end it."""
        part = self.handed_over.get((session, call))
        if part is not None:
            self.abandon_send(part, refusal)

    def forget_failed(self, session: int, send: int) -> FailedSend | None:
        """The engine ends a send that it was told has failed; None where there is none."""
        failed = self.failed.get(send)
        if failed is None or failed.session != session:
            return None
        return self.failed.pop(send)

    def abandon_session(self, session: int, refusal: Refusal) -> int:
        """End all sends of a session that is over, and forget what failed; how many were open."""
        parts = [part for part in self.by_send.values() if part.session == session]
        # Who takes a room that is over is in no register of the engine's.
        parts += [part for part in self.rooms.live() if part.kept_by and part.session == session]
        for part in parts:
            self.abandon_send(part, refusal)
        self.failed = {send: one for send, one in self.failed.items() if one.session != session}
        return len(parts)

    def give_up_send(self, part: SendPart, refusal: Refusal) -> None:
        """Engine failed, client gone, post failed, peer lost, deadline, operator."""
        # What has settled stays settled: a late abort of the engine, or a deadline, changes
        # nothing.
        if part.state in LIVE:
            self._end(part, T.GIVEN_UP, refusal.message, refusal)

    # ---- the peer ----------------------------------------------------------------------------

    def offered(self, peer: Peer, message: Offer, not_serving: Refusal | None) -> None:
        """Destination pages, for a room that an engine has opened or will open.

        ``not_serving``: why this node begins nothing new now, if it does not.
        """
        known = self.settled_sends.find_part(peer.incarnation, message.handoff)
        if known is not None:
            refusal = differs(known, message, self._settings.name)
            # An Offer that comes again is answered as the first one was, even while this node
            # drains; one that names other pages is a bug over there, never a new handoff.
            if refusal is None:
                self._answer_again(peer, known)
            else:
                self._peers.reject(peer.link, peer.incarnation, refusal)
            return
        # Our agent leads to the older transfer process over there: its pages are not these.
        # Asked after a repetition is answered: that needs no agent, and must stay as it was.
        if message.generation > peer.generation:
            self._peers.ask_hello(peer)  # the Offer will be repeated
            return
        kept_bytes = page_bytes(message)
        # Asked before anything of it is kept; the Offer is repeated, and taken when there is room.
        if self.settled_sends.is_full(peer, message.handoff, kept_bytes):
            return
        part = self.rooms.by_room.get(message.room)
        refusal = not_serving or self._unserved(peer, message, part)
        if refusal is not None:
            # A part of its own, and not the room's: the refusal settles this handoff id for good,
            # so that a repetition is answered alike, and whoever has the room goes on.
            stranger = self._new_part(message.room, P.AWAIT_ENGINE)
            self._join(stranger, peer, message.handoff)
            self._refuse(stranger, refusal)
            return
        keeper = part if part is not None and part.keeping is not None else None
        # The engine is still to come: each peer's Offer waits as a part of its own (``rooms``). So
        # is each that takes a room that is kept.
        if part is None or part.state is P.AWAIT_ENGINE or keeper is not None:
            part = self._new_part(message.room, P.AWAIT_ENGINE)
            # Until an engine opens the room the receiver's deadline is the only one there is.
            part.deadline_s = self._deadline(message.deadline_s)
            self.rooms.add_part(part)
        self._join(part, peer, message.handoff)
        self.settled_sends.keep_offer(part, message, kept_bytes)
        # Before the edge to STREAMING, which posts by the plan in the same step.
        self.posts.plan_part(part, message, peer)
        if keeper is not None:
            self._take_room(keeper, part)
        elif part.state is P.AWAIT_OFFER:
            self._await_engine_or_await_offer_to_streaming(part, T.OFFERED)

    def _unserved(self, peer: Peer, offer: Offer, part: SendPart | None) -> Refusal | None:
        """Why an Offer is not served; ``part`` has its room."""
        refusal = (
            # The cheap and certain ones first: an Offer of a time that is over is told so, whatever
            # else is wrong with it.
            outdated(offer, peer, self._settings.name)
            or self.rooms.refusal(offer.room, peer.name)
            or unacceptable(offer, peer, self._payload, self._settings)
        )
        if refusal is not None:
            return refusal
        if part is None or part.engine is None:
            # By when the receiver began to wait, not by when this Offer came: it may be a
            # repetition.
            now_s, asked_s = self._out.at_s, self._out.at_s - offer.waited_s
            served = self.served_rooms.refusal(offer.room, asked_s, now_s)
            return served or self.expired_rooms.refusal(offer.room, asked_s)
        if part.keeping is not None:
            return self._not_for_taker(part, peer.name, offer)
        refusal = disagreement(offer, part.engine, self._payload, self._settings.name)
        if refusal is not None:
            self._turned_away(part, peer.name, refusal)
        return refusal

    def _turned_away(self, part: SendPart, peer: str, refusal: Refusal) -> None:
        """The Offer of this peer is not what the engine waits for, and it waits on."""
        part.awaited.turned_away = f"the Offer of {peer} was refused: {refusal.message}"
        part.history.add_line(self._out.at_s, part.awaited.turned_away)

    def prefix_asked(self, peer: Peer, message: AskPrefix, not_serving: Refusal | None) -> None:
        """What is cached here of a prompt, and a room in which it is sent; or why it is not."""
        ticket = self.tickets.find(peer.incarnation, message.ask)
        if ticket is None:
            found = not_serving or self._unpulled(message) or self._open_pull(peer, message)
            if isinstance(found, Refusal):
                found = PullTicket(self._prefix(peer, message.ask, refusal=found), None)
            self.tickets.add(peer.incarnation, ticket := found)
        self._out.send(peer.link, ticket.answer)

    def _unpulled(self, message: AskPrefix) -> Refusal | None:
        """Why nothing is looked up for it."""
        side = self._settings.name
        if self._settings.cache_mode is not CacheMode.RADIX:
            why = f'cache.mode of {side} is "{self._settings.cache_mode.value}": nothing is cached'
            return Refusal(Code.NOT_SUPPORTED, why, side=side)
        tokens = check_tokens(message.tokens, max_tokens=self._settings.max_prompt_tokens)
        return tokens if isinstance(tokens, Refusal) else unfit(self._leases, side)

    def _open_pull(self, peer: Peer, message: AskPrefix) -> PullTicket | Refusal:
        """Lock what is cached, and send it from the daemon itself: no engine takes part."""
        tokens = Tokens(message.tokens)
        n_tokens = self._leases.tree.probe(tokens, message.namespace)
        if n_tokens <= message.have_tokens:
            return PullTicket(self._prefix(peer, message.ask, n_tokens=n_tokens), None)
        claim = Claim(
            session=0,
            call=0,
            reason=f"pull of {peer.name}",
            room=self._pull_room(),
            namespace=message.namespace,
            tokens=Tokens(tokens[: n_tokens * ID_BYTES]),
            reserve_tokens=0,
            priority=0,
            cache=True,
            holder=PULLER,
        )
        lease = self._leases.open_prefix(claim)
        if isinstance(lease, Shortage):  # of what is cached nothing is short
            why = f"{lease.needed_pages} pages of {lease.budget} are short"
            return Refusal(Code.NO_ROOM, why, side=self._settings.name)
        part = self._new_part(claim.room, P.AWAIT_OFFER)
        self.rooms.add_part(part)
        part.history.add_line(self._out.at_s, f"opened by a pull of {peer.name}")
        part.awaited.destination = peer.name
        digest = prompt_digest(claim.tokens, claim.namespace)
        part.engine = SendingEngine(session=0, lease=lease, tokens=claim.tokens, digest=digest)
        part.prompt_tokens = part.cursor_tokens = n_tokens
        part.deadline_s = self._deadline(message.deadline_s)
        part.is_numbered, part.aux = False, b""
        self._leases.hold_for_send(lease, f"send {part.id}", n_tokens)
        self._leases.release(lease, PULLER, "pull")
        answer = self._prefix(peer, message.ask, room=claim.room, n_tokens=n_tokens)
        return PullTicket(answer, part)

    def _prefix(
        self,
        peer: Peer,
        ask: int,
        *,
        room: int = NO_ROOM,
        n_tokens: int = 0,
        refusal: Refusal | None = None,
    ) -> PrefixFound:
        return PrefixFound(
            source=self._settings.incarnation,
            target=peer.incarnation,
            ask=ask,
            room=room,
            n_tokens=n_tokens,
            refusal=refusal,
        )

    def _pull_room(self) -> int:
        """A room that nobody has: from the top, where routers draw one in 2**63."""
        while True:
            self._last_pull_room -= 1
            if self._last_pull_room not in self.rooms.by_room:
                return self._last_pull_room

    def _end_pulls(self, incarnation: str, refusal: Refusal) -> None:
        """A peer that has not offered pages for what it pulls will not."""
        for part in self.tickets.open(incarnation):
            if part.state is P.AWAIT_OFFER:
                self.give_up_send(part, refusal)
        self.tickets.forget_peer(incarnation)

    def aborted(self, peer: Peer, message: Abort) -> None:
        """The decode side no longer wants it, and waits for our last word."""
        part = self.settled_sends.find_part(peer.incarnation, message.handoff)
        said = message.reason[:MAX_REASON]  # our Settled quotes it, and must stay readable
        why = Refusal(Code.ABORTED, f"{peer.name} gave up: {said}", side=peer.name)
        # Below the floor no Offer can come any more, so the answer is true without a tombstone.
        if part is None and message.handoff < peer.offer_floor:
            self.settled_sends.answer_below_floor(peer, message.handoff)
            return
        if part is None:
            # The Abort has overtaken its Offer, or that is lost. It leaves a tombstone, because
            # Settled must stay true: an Offer that comes later must not be served.
            if self.settled_sends.is_full(peer, message.handoff):
                return
            part = self._new_part(message.room, P.AWAIT_ENGINE)
            self._join(part, peer, message.handoff)
        if part.state in {P.AWAIT_ENGINE, P.STREAMING, P.FLUSHING}:
            # Set before the edge: from AWAIT_ENGINE it settles in this call, and Settled tells the
            # outcome.
            part.outcome = ReceiveOutcome.ABORTED
            self._end(part, T.ABORTED, said, why)
        else:
            self._answer_again(peer, part)

    def withdrawn(self, peer: Peer, message: Withdrawn) -> None:
        """The decode side gave a room up before it had pages for it: it will not come."""
        part = self.rooms.by_room.get(message.room)
        # It is lossy and comes without a handoff id: an Offer that has come meanwhile is worth
        # more.
        if part is None or part.state is not P.AWAIT_OFFER:
            return
        refusal = self.rooms.refusal(message.room, peer.name)
        if refusal is not None:
            self._peers.reject(peer.link, peer.incarnation, refusal)
            return
        why = f"{peer.name} gave up before it offered pages: {message.reason}"
        part.awaited.withdrawn[peer.name] = message.reason[:MAX_REASON]
        # One stranger must not end the wait of an engine that names nobody: all of them must.
        others = may_offer_still(part, self._peers)
        if part.keeping is not None:  # one receive less, and the next may come
            part.history.add_line(self._out.at_s, why)
            return
        if others:
            part.history.add_line(
                self._out.at_s, f"{why}; {', '.join(others[:8])} may offer them still"
            )
            return
        part.outcome = ReceiveOutcome.ABORTED
        self.give_up_send(part, Refusal(Code.ABORTED, why, side=peer.name))

    def outlived(self, incarnation: str) -> None:
        """The decode daemon restarted: nobody will say Closed, and nothing of it is wanted."""
        refusal = Refusal(
            Code.PEER_LOST,
            f"the decode daemon restarted (incarnation {short(incarnation)} is gone)",
            side=self._settings.name,
        )
        self._end_pulls(incarnation, refusal)
        # Drained like any other: posts under way still read our pages, whoever wants them.
        for part in self.parts_offered_by(incarnation):
            self.give_up_send(part, refusal)
        # Those that had settled before: nobody is left who would say Closed.
        for part in list(self.settled_sends.settled.values()):
            if part.incarnation == incarnation:
                self.settled_sends.outlive_part(part)
        self.settled_sends.fold_tombstones(incarnation)

    def peer_lost(self, peer: Peer) -> None:
        """Silence: stop posting for it."""
        why = lost_because(peer, self._out.at_s)
        refusal = Refusal(Code.PEER_LOST, why, side=self._settings.name)
        self._end_pulls(peer.incarnation, refusal)
        for part in self.parts_offered_by(peer.incarnation):
            self.give_up_send(part, refusal)

    # ---- the transfer process ----------------------------------------------------------------

    def parts_offered_by(self, incarnation: str) -> list[SendPart]:
        """The live parts that were offered by this incarnation."""
        return [part for part in self.rooms.live() if part.incarnation == incarnation]

    def push_part(self, part: SendPart) -> None:
        """Post what can be posted now, and settle if nothing is left."""
        self.posts.push_part(part)
        self._settle_if_flushed(part)

    def post_over(self, part: SendPart) -> None:
        """One of its posts can write no more."""
        if part.state is P.DRAINING:
            self._settle_if_drained(part)
        else:
            self._settle_if_flushed(part)

    # ---- time --------------------------------------------------------------------------------

    def tick(self) -> None:
        """Deadlines and repetitions."""
        now_s = self._out.at_s
        self.settled_sends.tick()
        self.expired_rooms.expire(now_s)
        self.served_rooms.expire(now_s)
        # ``live`` is a new list: parts leave their rooms meanwhile.
        for part in self.rooms.live():
            if part.state is P.DRAINING:
                # Settled is never said for a deadline's sake: only the end of its agent makes
                # sure that what is still outstanding is not written later.
                if part.drain_s <= now_s:
                    self._peers.drop_agent(
                        part.incarnation, part.generation, "still posting at the drain deadline"
                    )
            # The deadline ends the wait and not the writing: STREAMING goes to DRAINING, and
            # Settled is said when the posts are over.
            elif part.deadline_s <= now_s:
                part.outcome = ReceiveOutcome.TIMED_OUT
                late = too_late(part, now_s, self._settings)
                if part.keeping is None:
                    self.give_up_send(part, late)
                else:
                    self._end_kept(part, late)
            elif part.outstanding:
                refusal = self.posts.stalled(part, self._settings)
                if refusal is not None:
                    self.give_up_send(part, refusal)

    # ---- edges -------------------------------------------------------------------------------

    def _await_engine_or_await_offer_to_streaming(
        self, part: SendPart, trigger: PrefillTrigger
    ) -> None:
        """ENGINE_OPENED or OFFERED: both halves are here and agree."""
        self._move(part, trigger, f"decode has {part.decode_prefix_len} tokens")
        peer = self._peers.by_incarnation.get(part.incarnation)
        engine, numbered = part.engine, part.kept_by or part
        if engine is not None and numbered.is_numbered:
            # Of a room that is kept its engine hears of each, by the number of the room.
            told = msgspec.structs.replace(accepted(part), send=numbered.id)
            self._out.answer(engine.session, told)
        # After Accepted, which tells the engine its share: the failure names a send that it knows.
        if peer is not None and peer.agent is Agent.FAILED and not part.is_posted:
            why = f"no sending agent: {peer.agent_why}"
            self.give_up_send(part, Refusal(Code.POST_FAILED, why, side=self._settings.name))
        elif part.aux is not None:
            self._streaming_to_flushing(part)
        else:
            self.push_part(part)
        # Not where Settled has left in this step: it says all that Accept does, and more.
        if peer is not None and part.state in WRITING:
            self._accept(peer, part)

    def _streaming_to_flushing(self, part: SendPart) -> None:
        """FINISHED: the last page goes, whole or not, and what goes with it."""
        self._move(part, T.FINISHED, "")
        self.push_part(part)  # by the new state it sees that this is the last chunk

    def _settle_if_flushed(self, part: SendPart) -> None:
        # All three: where there is no agent pages are unposted while nothing is outstanding.
        if part.state is P.FLUSHING and part.is_posted and not part.outstanding:
            self._flushing_to_settled(part)

    def _flushing_to_settled(self, part: SendPart) -> None:
        """FLUSHED: everything is posted, and every post is done."""
        part.outcome = ReceiveOutcome.DELIVERED
        self._move(part, T.FLUSHED, f"{part.posted_pages} pages, {part.moved_bytes} bytes")
        # Before Settled: from here on the engine can neither advance nor end it.
        self._let_engine_go(part)
        self._settle(part, None)

    def _end(self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal) -> None:
        """ABORTED or GIVEN_UP, in whatever state it is."""
        match part.state:
            case P.STREAMING | P.FLUSHING:
                self._streaming_or_flushing_to_draining(part, trigger, why, refusal)
            case P.AWAIT_ENGINE:
                self._await_engine_to_settled(part, trigger, why, refusal)
            case P.AWAIT_OFFER:
                self._await_offer_to_forgotten(part, trigger, why, refusal)
            case _:  # it drains already, for a reason that everybody has been told
                self._move(part, trigger, why)

    def _streaming_or_flushing_to_draining(
        self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal
    ) -> None:
        """ABORTED or GIVEN_UP: the engine hears at once, the decode side when no post is left."""
        self._move(part, trigger, why)
        part.drain_s = self._out.at_s + self._settings.drain_s
        # The engine first, and at once: the part holds the lease for its posts, so nobody has to
        # wait for them.
        self._tell_engine(part, refusal)
        # A post that still waits for an event of the engine's may wait for ever, now that nobody
        # computes: it comes back as Unposted, and with the last one the part has drained.
        self.posts.forget_waiting(part)
        self._settle_if_drained(part)

    def _settle_if_drained(self, part: SendPart) -> None:
        # The one line that Settled rests on: a post that is outstanding may still write.
        if not part.outstanding:
            self._draining_to_settled(part)

    def _draining_to_settled(self, part: SendPart) -> None:
        """DRAINED: no post is outstanding, or each of its agents is destroyed."""
        self._move(part, T.DRAINED, "")
        self._settle(part, part.ended)

    def _await_engine_to_settled(
        self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal
    ) -> None:
        """REFUSED, ABORTED or GIVEN_UP before an engine was here: nothing was posted."""
        self._move(part, trigger, why)
        self._settle(part, refusal)

    def _await_offer_to_forgotten(
        self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal
    ) -> None:
        """GIVEN_UP: no decode side knows of it, so there is nobody to settle with."""
        self._move(part, trigger, why)
        # What ends a room that is kept, other than as it was to end, ends all that take it.
        takers = self._takers(part)
        self._tell_engine(part, refusal)
        self.rooms.remove_part(part)
        for taker in takers:
            self.give_up_send(taker, refusal)
        if refusal.side == self._settings.name:  # not where the decode side gave up
            self.expired_rooms.remember(part.room, refusal, self._out.at_s)
        self.settled_sends.end_forgotten(part, refusal)

    def _refuse(self, part: SendPart, refusal: Refusal) -> None:
        """The two sides do not agree."""
        part.outcome = ReceiveOutcome.REFUSED
        self._await_engine_to_settled(part, T.REFUSED, refusal.message, refusal)

    def _settle(self, part: SendPart, refusal: Refusal | None) -> None:
        self.rooms.remove_part(part)
        self.settled_sends.settle_part(part, refusal)

    # ---- small things ------------------------------------------------------------------------

    def _tell_engine(self, part: SendPart, refusal: Refusal) -> None:
        """The engine hears of the failure at once, and may name the send once more to end it."""
        had_engine = self._let_engine_go(part)
        self.settled_sends.tell_engine(part, refusal)
        if had_engine and part.aux is None:
            # Without this an honest ``AbortSend`` that crosses our SendFailed would be refused as
            # unknown.
            # An engine that has finished names it in no further call.
            self.failed[part.id] = FailedSend(
                session=part.session,
                refusal=refusal,
                lease=part.engine.lease.id if part.engine is not None else 0,
                prompt_tokens=part.prompt_tokens,
            )
            if len(self.failed) > MAX_FAILED_SENDS:
                del self.failed[next(iter(self.failed))]

    def _let_engine_go(self, part: SendPart) -> bool:
        """Its engine can do nothing for it any more; whether it had one until now."""
        if not part.is_numbered and part.finish_call is not None:
            call = part.session, part.finish_call
            # An engine may number two calls alike: then it is the later one that can be found.
            if self.handed_over.get(call) is part:
                del self.handed_over[call]
        return self.by_send.pop(part.id, None) is not None

    def _new_part(self, room: int, state: Prefill) -> SendPart:
        self._last_part += 1
        return SendPart(self._last_part, room=room, state=state, at_s=self._out.at_s)

    def _join(self, part: SendPart, peer: Peer, handoff: int) -> None:
        part.peer = peer.name
        part.incarnation = peer.incarnation
        part.handoff = handoff
        # From its first message on it answers for the id: any repetition must find it, whatever
        # becomes of it.
        self.settled_sends.add_part(part)

    def _accept(self, peer: Peer, part: SendPart) -> None:
        mine = self._settings.incarnation
        accept = Accept(
            source=mine,
            target=part.incarnation,
            handoff=part.handoff,
            decode_prefix_len=part.decode_prefix_len,
        )
        self._out.send(peer.link, accept)

    def _answer_again(self, peer: Peer, part: SendPart) -> None:
        """A repeated Offer or Abort: say again what we said last."""
        if part.state in WRITING:
            self._accept(peer, part)
        elif part.state in {P.SETTLED, P.CLOSED}:
            self.settled_sends.say_settled(part)

    def _deadline(self, deadline_s: float) -> float:
        # In this order a NaN of the caller loses: nothing is smaller than the first one then.
        return self._out.at_s + min(self._settings.max_deadline_s, deadline_s)

    def _move(self, part: SendPart, trigger: PrefillTrigger, why: str) -> None:
        move_prefill(part, trigger, why, self._out)


def _send_of(holder: str) -> int:
    """The number of the send that holds a lease under this name; 0: no send does."""
    kind, _, number = holder.partition(" ")
    return int(number) if kind == "send" else 0
