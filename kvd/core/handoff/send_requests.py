"""What an engine asks of its sends: open a room, say how far its prompt is written, finish it.

Two verbs open a room: ``open_send``, of an engine that writes meanwhile, and ``hand_over``, of one
that has written all of it. Both meet the Offers that wait there (``rooms``), or wait for one.

What must not live here: transitions (``send``), rooms that stay open behind ``finish`` (``kept``),
what a decode side says (``offered``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.kept import follow_keeper, keeping_of
from kvd.core.handoff.offer import not_reached
from kvd.core.handoff.posts import no_event
from kvd.core.handoff.protocol import Prefill, PrefillTrigger
from kvd.core.handoff.refusals import long_aux
from kvd.core.handoff.retries import sent_request
from kvd.core.handoff.rooms import NO_OFFERS, RoomMatch, taken, takers_of, turned_away
from kvd.core.leases.written import word_for_sends
from kvd.errors import Code, Refusal
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.kept import KeptRooms
    from kvd.core.handoff.parts import Keeping, SendingEngine, SendPart
    from kvd.core.handoff.payload import Payload
    from kvd.core.handoff.send import Prefiller
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.types import Pages

P, T = Prefill, PrefillTrigger


@mypyc_attr(allow_interpreted_subclasses=True)
class SendRequests:
    """The verbs of engines that send; each answers its call, or says why it is refused."""

    def __init__(
        self,
        settings: Settings,
        payload: Payload,
        leases: LeaseTable,
        peers: Peers,
        sends: Prefiller,
        kept: KeptRooms,
        out: Outbox,
    ) -> None:
        self._settings = settings
        self._payload = payload
        self._leases = leases
        self._peers = peers
        self._sends = sends
        self._kept = kept
        self._out = out

    def open_send(self, message: client.SendRequest, engine: SendingEngine) -> Refusal | None:
        """The engine is here for a room; the caller has checked that the lease is its own."""
        part = self._enter_room(message, engine)
        if isinstance(part, Refusal):
            return part
        self._out.answer(engine.session, client.Sending(message.call, part.id, part.finishes))
        # After Sending, which names the send: Accepted and a failure speak of it by its number.
        if part.state is P.AWAIT_ENGINE:
            self._sends.await_engine_or_await_offer_to_streaming(part, T.ENGINE_OPENED)
        self._kept.serve_waiting(part)
        self._finish_if_written(part)
        return None

    def hand_over(self, message: client.HandOver, engine: SendingEngine) -> Refusal | None:
        """As ``open_send``, by an engine that has finished already."""
        part = self._enter_room(message, engine)
        if isinstance(part, Refusal):
            return part
        part.is_numbered = False
        if part.keeping is None:  # of one that is kept the call is answered at once
            self._sends.handed_over[part.session, message.call] = part
        self._note_finish(part, message.call, message.aux, message.after)
        if part.state is P.AWAIT_ENGINE:
            self._sends.await_engine_or_await_offer_to_streaming(part, T.ENGINE_OPENED)
        else:
            self._sends.move_part(part, T.FINISHED, "")
        self._kept.answer_finish(part)
        self._kept.serve_waiting(part)
        return None

    def _enter_room(
        self, message: client.SendRequest | client.HandOver, engine: SendingEngine
    ) -> SendPart | Refusal:
        """The part that the engine meets there, or waits with."""
        sends = self._sends
        part = sends.rooms.by_room.get(message.room)
        # A room has one engine; Offers that wait for one (AWAIT_ENGINE) are what it came to meet.
        if part is not None and part.state is not P.AWAIT_ENGINE:
            return taken(part, self._settings.name, f"send {part.id}")
        keeping = keeping_of(message, self._settings.name)
        if isinstance(keeping, Refusal):
            return keeping
        destination = self._destination(message.peer) if message.peer else ""
        if isinstance(destination, Refusal):
            return destination
        meeting = self._meet(message.room, destination, engine, keeping)
        # Also where the engine itself is refused: its word has decided about these Offers.
        for turned in meeting.turned:
            sends.refuse_part(turned.part, turned.refusal)
        if meeting.refusal is not None:
            return meeting.refusal
        part = meeting.part or sends.new_part(message.room, P.AWAIT_OFFER)
        if type(message) is client.HandOver:
            refusal = self._unfinishable(part, engine, len(message.aux), message.after)
            if refusal is not None:
                return refusal
        if meeting.part is None:
            sends.rooms.open_room(part)
            part.history.add_line(self._out.at_s, f"opened by session {engine.session}")
            for turned in meeting.turned:
                turned_away(part, turned.part.peer, turned.refusal, self._out.at_s)
        part.awaited.destination = destination
        # A new attempt: an Offer that comes now is for it, and must not hear why the last one
        # failed.
        sends.expired_rooms.forget(message.room)
        sends.served_rooms.forget(message.room)
        part.keeping = keeping
        part.finishes = type(message) is client.SendRequest and message.when_written
        digest, n_tokens = engine.digest, engine.prompt_tokens
        part.request = sent_request(message, digest, n_tokens) if message.request_id else None
        part.engine = engine
        part.session = engine.session
        part.prompt_tokens = engine.prompt_tokens
        part.deadline_s = sends.deadline_of(message.deadline_s)
        sends.by_send[part.id] = part
        part.cursor_tokens, part.after = word_for_sends(
            engine.lease, engine.prompt_tokens, with_cached=part.finishes
        )
        # Held by the send from here on: the engine may release its lease, or die, while posts read.
        self._leases.holders.hold_for_send(engine.lease, f"send {part.id}", engine.prompt_tokens)
        return part

    def _destination(self, peer: str) -> str | Refusal:
        """Whom a send is for, by name: the engine may give an address, and Offers come from nodes.

        A name that nobody has said yet is one that may come.
        """
        found = self._peers.find(peer)
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
        return self._sends.rooms.match_engine(room, destination, engine)

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
            self._sends.move_part(part, T.ADVANCED, "")
            if self._is_finished_by_itself(part):
                # That pushes all that is left, a last page too that is not whole: in one post.
                self._finish(part, None, b"", part.after)
                return
            self._sends.posts.push_part(part)
            for taker in takers_of(part, self._sends.rooms):
                if taker.state is P.STREAMING:
                    self._advance_part(taker, upto_tokens, after)

    def _finish_if_written(self, part: SendPart) -> None:
        if self._is_finished_by_itself(part):
            self._finish(part, None, b"", part.after)

    def _is_finished_by_itself(self, part: SendPart) -> bool:
        """Whether it was opened to be finished once all of it is written, and is."""
        return (
            part.finishes
            and part.aux is None
            and part.cursor_tokens >= part.prompt_tokens
            and self._unfinishable(part, part.engine, 0, part.after) is None
        )

    def lease_written(self, lease: LeaseRecord) -> None:
        """Its engine, or one of its ranks, has said how far it is: its sends go on by that."""
        if len(lease.holders) == 1:  # as of most leases: nobody sends it
            return
        for part in [self._sends.by_send.get(_send_of(holder)) for holder in sorted(lease.holders)]:
            if part is not None:
                upto_tokens, after = word_for_sends(lease, part.prompt_tokens)
                self._advance_part(part, upto_tokens, after)

    def finish_send(
        self, part: SendPart, call: int, aux: bytes, after: bytes = b""
    ) -> Refusal | None:
        """All KV is written; ``call`` is answered when the decode side has spoken."""
        if part.aux is not None:
            what = f"send {part.id} is finished already"
            return Refusal(Code.WRONG_STATE, what, side=self._settings.name)
        refusal = self._unfinishable(part, part.engine, len(aux), after)
        if refusal is None:
            self._finish(part, call, aux, after)
        return refusal

    def _finish(self, part: SendPart, call: int | None, aux: bytes, after: bytes) -> None:
        self._note_finish(part, call, aux, after)
        if part.state is P.STREAMING:
            self._sends.streaming_to_flushing(part)
        else:  # no Offer yet: it streams and flushes in one step when that comes
            self._sends.move_part(part, T.FINISHED, "")
        self._kept.answer_finish(part)
        takers = takers_of(part, self._sends.rooms)
        if part.keeping is not None and part.keeping.over is not None:
            self._sends.end_kept(part, part.keeping.over)
        for taker in takers:
            if taker.state is P.STREAMING:
                follow_keeper(taker, part)
                self._sends.streaming_to_flushing(taker)

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

    def _note_finish(self, part: SendPart, call: int | None, aux: bytes, after: bytes) -> None:
        part.finish_call = call
        part.aux = aux
        part.after = after or part.after
        # Finish is the last advance too: an engine need not have said how far it was.
        part.cursor_tokens = part.prompt_tokens

    def reads_of(self, arena: LeaseRecord) -> list[tuple[str, Pages]]:
        """The sends that may still read pages of an arena, in words, and which pages those are."""
        return [
            (f"send {part.id} (room {part.room})", part.engine.pages)
            for part in self._sends.rooms.live()
            if part.engine is not None and part.engine.lease is arena
        ]


def _send_of(holder: str) -> int:
    """The number of the send that holds a lease under this name; 0: no send does."""
    kind, _, number = holder.partition(" ")
    return int(number) if kind == "send" else 0
