"""The prefill side of handoffs: write what the decode side lacks, then never write again.

One ``SendPart`` joins two halves that come in any order: the engine's ``send`` and the decode
side's Offer. Its states and triggers are ``tables.PREFILL``; this file is what happens on the
edges, with ``posts`` for the pages under way, ``transfers`` for what becomes of them and
``last_word`` for the end. The rules that keep memory safe:

- pages go only through the transport generation that the Offer names;
- Settled is said when no post is outstanding. A failed post stays outstanding until its sending
  agent is destroyed: its bytes are in doubt until then;
- the source lease is held by the part while a post may read its pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.handoff.frames import page_bytes
from kvd.core.handoff.offer import differs, disagreement, not_reached, unacceptable
from kvd.core.handoff.parts import FailedSend, SendingEngine, SendPart, stalled
from kvd.core.handoff.payload import Payload
from kvd.core.handoff.posts import Posts, no_event
from kvd.core.handoff.protocol import Prefill, PrefillTrigger, move_prefill
from kvd.core.handoff.refusals import long_aux, too_late
from kvd.core.handoff.rooms import ExpiredRooms, Rooms, may_offer_still, taken
from kvd.core.handoff.settled import SettledSends
from kvd.core.handoff.sources import accepted
from kvd.core.peers.agents import Agent
from kvd.core.peers.peer_drain import lost_because
from kvd.errors import Code, Refusal
from kvd.types import short
from kvd.wire import client
from kvd.wire.bounds import MAX_REASON
from kvd.wire.peer import Abort, Accept, Offer, Outcome, Withdrawn

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.handoff.drain import Drainer
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.peers.peer import Peer, Peers
    from kvd.core.settings import Settings

P, T = Prefill, PrefillTrigger

LIVE = {P.AWAIT_ENGINE, P.AWAIT_OFFER, P.STREAMING, P.FLUSHING, P.DRAINING}
"""States that occupy the room."""

MAX_FAILED_SENDS = 4096
"""Kept for engines that never end what has failed; the oldest is forgotten first."""

WRITING = {P.STREAMING, P.FLUSHING}


class Prefiller:
    """The live parts of this node's prefill side. The node sets ``drainer``, which needs it too."""

    drainer: Drainer

    def __init__(self, settings: Settings, leases: LeaseTable, peers: Peers, out: Outbox) -> None:
        self._cargo = Payload(settings.spec, leases)
        self.rooms = Rooms(self._cargo, settings.name)
        """Every part in a LIVE state."""
        self.by_room = self.rooms.by_room
        self.by_send: dict[int, SendPart] = {}
        """Every part an engine has opened and neither finished nor heard to have failed."""
        self.failed: dict[int, FailedSend] = {}
        """By send id: the engine was told, and has not said finish or abort yet."""
        self.lapsed = ExpiredRooms(settings)
        self.last_word = SettledSends(settings, leases, peers, out)
        self.posts = Posts(self._cargo, leases, peers, out)
        self._settings = settings
        self._leases = leases
        self._peers = peers
        self._out = out
        self._last_part = 0

    # ---- the engine --------------------------------------------------------------------------

    def open(self, message: client.Send, engine: SendingEngine) -> Refusal | None:
        """The engine is here for a room; the caller has checked that the lease is its own."""
        part = self.by_room.get(message.room)
        if part is not None and part.state is not P.AWAIT_ENGINE:
            return taken(part, self._settings.name, f"send {part.id}")
        destination = (self._peers.find(message.peer) or message.peer) if message.peer else ""
        meeting = self.rooms.meet(message.room, destination, engine)
        for turned in meeting.turned:
            self._refuse(turned.part, turned.refusal)
        if meeting.refusal is not None:
            return meeting.refusal
        part = meeting.part
        if part is None:
            part = self._new_part(message.room, P.AWAIT_OFFER)
            self.rooms.enter(part)
            part.story.tell(self._out.at_s, f"opened by session {engine.session}")
            for turned in meeting.turned:
                self._turned_away(part, turned.part.peer, turned.refusal)
        part.awaited.destination = destination
        self.lapsed.forget(message.room)
        part.engine = engine
        part.session = engine.session
        part.prompt_tokens = engine.prompt_tokens
        part.deadline_s = self._deadline(message.deadline_s)
        self.by_send[part.id] = part
        self._leases.hold_for_send(engine.lease, f"send {part.id}", engine.prompt_tokens)
        self._out.answer(engine.session, client.Sending(message.call, part.id))
        if part.state is P.AWAIT_ENGINE:
            self._stream(part, T.ENGINE_OPENED)
        return None

    def advance(self, part: SendPart, upto_tokens: int, after: bytes = b"") -> Refusal | None:
        """KV below ``upto_tokens`` is written, or will be when the event behind ``after`` comes."""
        refusal = no_event(after, self._settings.name)
        if refusal is not None:
            return refusal
        if not 0 <= upto_tokens <= part.prompt_tokens:
            return Refusal(
                Code.BAD_REQUEST,
                f"advance to {upto_tokens} of a prompt of {part.prompt_tokens} tokens",
                side=self._settings.name,
                numbers={"upto_tokens": upto_tokens, "prompt_tokens": part.prompt_tokens},
            )
        if part.aux is None and upto_tokens > part.cursor_tokens:
            part.cursor_tokens = upto_tokens
            part.after = after or part.after
            self._move(part, T.ADVANCED, "")
            self.posts.push(part)
        return None

    def finish(self, part: SendPart, message: client.Finish) -> Refusal | None:
        """All KV is written; answered when the decode side has spoken."""
        peer = self._peers.by_incarnation.get(part.incarnation)
        refusal = long_aux(part, len(message.aux), peer, self._settings)
        refusal = refusal or no_event(message.after, self._settings.name)
        if refusal is not None:
            return refusal
        if part.aux is not None:
            what = f"send {part.id} is finished already"
            return Refusal(Code.WRONG_STATE, what, side=self._settings.name)
        if part.engine is not None and part.share.is_authoritative:
            refusal = not_reached(part.engine, self._cargo, self._settings.name)
            if refusal is not None:
                return refusal
        part.finish_call = message.call
        part.aux = message.aux
        part.after = message.after or part.after
        part.cursor_tokens = part.prompt_tokens
        self._move(part, T.FINISHED, "")
        self.push(part)
        return None

    def abandon(self, part: SendPart, refusal: Refusal) -> None:
        """The engine ends it: it failed, or is dead."""
        self.give_up(part, refusal)
        self.failed.pop(part.id, None)

    def forget_failed(self, session: int, send: int) -> bool:
        """The engine ends a send that it was told has failed; False where there is none."""
        failed = self.failed.get(send)
        if failed is None or failed.session != session:
            return False
        del self.failed[send]
        return True

    def abandon_session(self, session: int, refusal: Refusal) -> int:
        """End all sends of a session that is over, and forget what failed; how many were open."""
        parts = [part for part in self.by_send.values() if part.session == session]
        for part in parts:
            self.abandon(part, refusal)
        self.failed = {send: one for send, one in self.failed.items() if one.session != session}
        return len(parts)

    def give_up(self, part: SendPart, refusal: Refusal) -> None:
        """Engine failed, client gone, post failed, peer lost, deadline, operator."""
        if part.state in LIVE:
            before = part.state
            self._move(part, T.GIVEN_UP, refusal.message)
            if before is not P.DRAINING:
                self._stop(part, refusal)

    # ---- the peer ----------------------------------------------------------------------------

    def offered(self, peer: Peer, message: Offer) -> None:
        """Destination pages, for a room that an engine has opened or will open."""
        known = self.last_word.find(peer.incarnation, message.handoff)
        if known is not None:
            refusal = differs(known, message, self._settings.name)
            if refusal is None:
                self._answer_again(peer, known)
            else:
                self._peers.reject(peer.link, peer.incarnation, refusal)
            return
        if message.generation > peer.generation:
            self._peers.ask_hello(peer)  # the Offer will be repeated
            return
        kept_bytes = page_bytes(message)
        if self.last_word.is_full(peer, message.handoff, kept_bytes):
            return
        part = self.by_room.get(message.room)
        refusal = self._unserved(peer, message, part)
        if refusal is not None:
            stranger = self._new_part(message.room, P.AWAIT_ENGINE)
            self._join(stranger, peer, message.handoff)
            self._refuse(stranger, refusal)
            return
        if part is None or part.state is P.AWAIT_ENGINE:
            part = self._new_part(message.room, P.AWAIT_ENGINE)
            part.deadline_s = self._deadline(message.deadline_s)
            self.rooms.enter(part)
        self._join(part, peer, message.handoff)
        self.last_word.keep(part, message, kept_bytes)
        self.posts.plan(part, message, peer)
        if part.state is P.AWAIT_OFFER:
            self._stream(part, T.OFFERED)

    def _unserved(self, peer: Peer, offer: Offer, part: SendPart | None) -> Refusal | None:
        """Why an Offer is not served; ``part`` has its room."""
        refusal = self.drainer.refusal()
        refusal = refusal or unacceptable(offer, peer, self.rooms, self._cargo, self._settings)
        if refusal is not None:
            return refusal
        if part is None or part.engine is None:
            return self.lapsed.refusal(offer.room, self._out.at_s - offer.waited_s)
        refusal = disagreement(offer, part.engine, self._cargo, self._settings.name)
        if refusal is not None:
            self._turned_away(part, peer.name, refusal)
        return refusal

    def _turned_away(self, part: SendPart, peer: str, refusal: Refusal) -> None:
        """The Offer of this peer is not what the engine waits for, and it waits on."""
        part.awaited.turned_away = f"the Offer of {peer} was refused: {refusal.message}"
        part.story.tell(self._out.at_s, part.awaited.turned_away)

    def aborted(self, peer: Peer, message: Abort) -> None:
        """The decode side no longer wants it, and waits for our last word."""
        part = self.last_word.find(peer.incarnation, message.handoff)
        said = message.reason[:MAX_REASON]  # our Settled quotes it, and must stay readable
        why = Refusal(Code.ABORTED, f"{peer.name} gave up: {said}", side=peer.name)
        if part is None and message.handoff < peer.offer_floor:
            self.last_word.answer_below_floor(peer, message.handoff)
            return
        if part is None:
            if self.last_word.is_full(peer, message.handoff):
                return
            part = self._new_part(message.room, P.AWAIT_ENGINE)
            self._join(part, peer, message.handoff)
        if part.state in {P.AWAIT_ENGINE, P.STREAMING, P.FLUSHING}:
            part.outcome = Outcome.ABORTED
            self._move(part, T.ABORTED, said)
            self._stop(part, why)
        else:
            self._answer_again(peer, part)

    def withdrawn(self, peer: Peer, message: Withdrawn) -> None:
        """The decode side gave a room up before it had pages for it: it will not come."""
        part = self.by_room.get(message.room)
        if part is None or part.state is not P.AWAIT_OFFER:
            return
        refusal = self.rooms.refusal(message.room, peer.name)
        if refusal is not None:
            self._peers.reject(peer.link, peer.incarnation, refusal)
            return
        why = f"{peer.name} gave up before it offered pages: {message.reason}"
        part.awaited.withdrawn[peer.name] = message.reason[:MAX_REASON]
        others = may_offer_still(part, self._peers)
        if others:
            part.story.tell(self._out.at_s, f"{why}; {', '.join(others[:8])} may offer them still")
            return
        part.outcome = Outcome.ABORTED
        self.give_up(part, Refusal(Code.ABORTED, why, side=peer.name))

    def outlived(self, incarnation: str) -> None:
        """The decode daemon restarted: nobody will say Closed, and nothing of it is wanted."""
        refusal = Refusal(
            Code.PEER_LOST,
            f"the decode daemon restarted (incarnation {short(incarnation)} is gone)",
            side=self._settings.name,
        )
        for part in self.parts_of(incarnation):
            self.give_up(part, refusal)
        for part in list(self.last_word.settled.values()):
            if part.incarnation == incarnation:
                self.last_word.outlive(part)
        self.last_word.forget(incarnation)

    def peer_lost(self, peer: Peer) -> None:
        """Silence: stop posting for it."""
        why = lost_because(peer, self._out.at_s)
        refusal = Refusal(Code.PEER_LOST, why, side=self._settings.name)
        for part in self.parts_of(peer.incarnation):
            self.give_up(part, refusal)

    # ---- the transfer process ----------------------------------------------------------------

    def parts_of(self, incarnation: str) -> list[SendPart]:
        """The live parts that were offered by this incarnation."""
        return [part for part in self.rooms.live() if part.incarnation == incarnation]

    def push(self, part: SendPart) -> None:
        """Post what can be posted now, and settle if nothing is left."""
        self.posts.push(part)
        self._flush(part)

    def post_over(self, part: SendPart) -> None:
        """One of its posts can write no more."""
        if part.state is P.DRAINING:
            self._drain(part)
        else:
            self._flush(part)

    # ---- time --------------------------------------------------------------------------------

    def tick(self) -> None:
        """Deadlines and repetitions."""
        now_s = self._out.at_s
        self.last_word.tick()
        self.lapsed.expire(now_s)
        for part in self.rooms.live():
            if part.state is P.DRAINING:
                if part.drain_s <= now_s:
                    self._peers.drop_agent(
                        part.incarnation, part.generation, "still posting at the drain deadline"
                    )
            elif part.deadline_s <= now_s:
                part.outcome = Outcome.TIMED_OUT
                self.give_up(part, too_late(part, now_s, self._settings))
            elif part.outstanding:
                refusal = stalled(part, now_s, self._settings)
                if refusal is not None:
                    self.give_up(part, refusal)

    # ---- edges -------------------------------------------------------------------------------

    def _stream(self, part: SendPart, trigger: PrefillTrigger) -> None:
        """-> STREAMING: both halves are here and agree."""
        self._move(part, trigger, f"decode has {part.decode_prefix_len} tokens")
        peer = self._peers.by_incarnation.get(part.incarnation)
        if peer is not None:
            self._accept(peer, part)
        if part.engine is not None:
            self._out.answer(part.engine.session, accepted(part))
        if peer is not None and peer.agent is Agent.FAILED and not part.is_posted:
            why = f"no sending agent: {peer.agent_why}"
            self.give_up(part, Refusal(Code.POST_FAILED, why, side=self._settings.name))
            return
        if part.aux is not None:
            self._move(part, T.FINISHED, "")
        self.push(part)

    def _flush(self, part: SendPart) -> None:
        """FLUSHING -> SETTLED when everything is posted and nothing outstanding."""
        if part.state is P.FLUSHING and part.is_posted and not part.outstanding:
            part.outcome = Outcome.DELIVERED
            self._move(part, T.FLUSHED, f"{part.posted_pages} pages, {part.moved_bytes} bytes")
            del self.by_send[part.id]
            self._settle(part, None)

    def _stop(self, part: SendPart, refusal: Refusal) -> None:
        """Given up or aborted: tell the engine at once, settle when nothing is outstanding."""
        part.drain_s = self._out.at_s + self._settings.drain_s
        self.last_word.tell_engine(part, refusal)
        if self.by_send.pop(part.id, None) is not None and part.aux is None:
            # An engine that has finished names it in no further call.
            self.failed[part.id] = FailedSend(part.session, refusal)
            if len(self.failed) > MAX_FAILED_SENDS:
                del self.failed[next(iter(self.failed))]
        if part.state is P.DRAINING:
            self.posts.forget(part)
            self._drain(part)
        elif part.state is P.SETTLED:
            self._settle(part, refusal)
        else:
            self.rooms.leave(part)
            if refusal.side == self._settings.name:  # not where the decode side gave up
                self.lapsed.remember(part.room, refusal, self._out.at_s)
            self.last_word.forgotten(part, refusal)

    def _drain(self, part: SendPart) -> None:
        if not part.outstanding:
            self._move(part, T.DRAINED, "")
            self._settle(part, part.ended)

    def _refuse(self, part: SendPart, refusal: Refusal) -> None:
        """AWAIT_ENGINE -> SETTLED(REFUSED): the two sides do not agree."""
        part.outcome = Outcome.REFUSED
        self._move(part, T.REFUSED, refusal.message)
        self._settle(part, refusal)

    def _settle(self, part: SendPart, refusal: Refusal | None) -> None:
        self.rooms.leave(part)
        self.last_word.settle(part, refusal)

    # ---- small things ------------------------------------------------------------------------

    def _new_part(self, room: int, state: Prefill) -> SendPart:
        self._last_part += 1
        return SendPart(self._last_part, room, state, self._out.at_s)

    def _join(self, part: SendPart, peer: Peer, handoff: int) -> None:
        part.peer = peer.name
        part.incarnation = peer.incarnation
        part.handoff = handoff
        self.last_word.join(part)

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
            self.last_word.say(part)

    def _deadline(self, deadline_s: float) -> float:
        # In this order a NaN of the caller loses.
        return self._out.at_s + min(self._settings.max_deadline_s, deadline_s)

    def _move(self, part: SendPart, trigger: PrefillTrigger, why: str) -> None:
        move_prefill(part, trigger, why, self._out)
