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

from kvd.core.cache.namespaces import base_of
from kvd.core.handoff.parts import FailedSend, SendPart
from kvd.core.handoff.posts import Posts
from kvd.core.handoff.protocol import Prefill, PrefillTrigger
from kvd.core.handoff.refusals import rank_gone, reader_restarted, reader_silent, too_late
from kvd.core.handoff.rooms import ExpiredRooms, Rooms, takers_of
from kvd.core.handoff.served import ServedRooms
from kvd.core.handoff.settled import SettledSends
from kvd.core.handoff.sources import accepted
from kvd.core.handoff.transitions import move_prefill
from kvd.core.leases.written import tokens_of_ranks
from kvd.core.peers.peer import Agent
from kvd.errors import Code, Refusal
from kvd.types import amount
from kvd.wire.peer import Accept, ReceiveOutcome

if TYPE_CHECKING:
    from kvd.core.handoff.payload import Payload
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings

P, T = Prefill, PrefillTrigger

LIVE = {P.AWAIT_ENGINE, P.AWAIT_OFFER, P.STREAMING, P.FLUSHING, P.DRAINING}
"""States that occupy the room."""

MAX_FAILED_SENDS = 4096
"""Kept for engines that never end what has failed; the oldest is forgotten first."""

WRITING = {P.STREAMING, P.FLUSHING}


@mypyc_attr(allow_interpreted_subclasses=True)
class Prefiller:
    """The parts of this node's prefill side that are not over."""

    def __init__(
        self, settings: Settings, payload: Payload, leases: LeaseTable, peers: Peers, out: Outbox
    ) -> None:
        self.rooms = Rooms(payload, settings.name)
        """Every part in a LIVE state."""
        self.by_send: dict[int, SendPart] = {}
        """Every part an engine has opened and neither finished nor heard to have failed."""
        self.handed_over: dict[tuple[int, int], SendPart] = {}
        """Of these, those whose engine knows no number of them, by session and call."""
        self.failed: dict[int, FailedSend] = {}
        """By send id: the engine was told, and has not said finish or abort yet."""
        self.expired_rooms = ExpiredRooms(settings)
        self.served_rooms = ServedRooms(settings)
        self.settled_sends = SettledSends(settings, leases, peers, out)
        self.posts = Posts(payload, leases, peers, out)
        self._settings = settings
        self._leases = leases
        self._peers = peers
        self._out = out
        self._last_part = 0

    def known(self) -> list[SendPart]:
        """Every part that is not over: those that have a room, then those that wait for Closed."""
        return [*self.rooms.live(), *self.settled_sends.settled.values()]

    # ---- the engine --------------------------------------------------------------------------

    def rank_left(self, session: int, rank: int, ranks: int, why: str) -> int:
        """Nobody speaks for that rank any more: end the sends that it has not written; how many."""
        ended = 0
        for part in [part for part in self.by_send.values() if part.session == session]:
            lease = part.engine.lease if part.engine is not None else None
            # One that is finished is written by the word of its engine, for every rank.
            if part.aux is not None or lease is None or len(lease.said) != ranks or ranks == 1:
                continue
            upto = tokens_of_ranks(lease)[rank]
            if upto >= part.prompt_tokens:
                continue
            ended += 1
            what = f"send {part.id} (room {part.room})"
            refusal = rank_gone(why, rank, upto, part.prompt_tokens, what)
            self.give_up_send(part, msgspec.structs.replace(refusal, side=self._settings.name))
        return ended

    # ---- rooms that are kept -----------------------------------------------------------------

    def waiting_of_base(self, base: str) -> list[SendPart]:
        """The sends of a base and its members that nobody has begun to receive."""
        return [
            part
            for part in self.rooms.live()
            if part.state is P.AWAIT_OFFER
            and part.engine is not None
            and base_of(part.engine.namespace) == base
        ]

    def end_base(self, base: str, why: Refusal) -> None:
        """It has new weights: what was computed with the old ones is sent to nobody who comes now.

        Who receives it already goes on.
        """
        for part in self.waiting_of_base(base):
            if part.keeping is None:
                self.give_up_send(part, why)
            # Its engine still writes it for them: the room ends with ``finish``.
            elif part.aux is None and takers_of(part, self.rooms):
                part.keeping.over = why
            else:
                self.end_kept(part, why)

    def end_kept(self, part: SendPart, refusal: Refusal) -> None:
        """Its time is over, its engine ends it, or the last that it was open for has it."""
        keeping = part.keeping
        assert keeping is not None
        # Whoever receives it goes on: the engine has said all that they need. A room that somebody
        # has received, or is about to, has not failed.
        if part.aux is None or not (keeping.takers or takers_of(part, self.rooms)):
            self.give_up_send(part, refusal)
            return
        self.move_part(part, T.GIVEN_UP, refusal.message)
        self.let_engine_go(part)
        self.rooms.remove_part(part)
        self.settled_sends.let_go(part, "kept-room-over")

    def end_given_way(self) -> None:
        """Leases have gone because their pages were needed: so have the rooms that held them."""
        gone, self._leases.giving_way.gone = self._leases.giving_way.gone, []
        for part in self.rooms.live():
            engine = part.engine
            if engine is None or engine.lease not in gone:
                continue
            side, n_pages = self._settings.name, self._leases.pages_for(part.prompt_tokens)
            why = f"room {part.room} was open for whoever comes, and its {n_pages} pages were "
            why += f"needed by an engine of {side}: what is cached of them can be pulled"
            refusal = Refusal(Code.NO_ROOM, why, side=side, numbers={"pages": n_pages})
            part.engine = None  # nothing may read what others have now, nor release it again
            if part.keeping is None:
                self.give_up_send(part, refusal)
            else:
                self.end_kept(part, refusal)
                self.expired_rooms.remember(part.room, refusal, self._out.at_s)

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
        self.failed = {
            send: failure for send, failure in self.failed.items() if failure.session != session
        }
        return len(parts)

    def give_up_send(self, part: SendPart, refusal: Refusal) -> None:
        """Engine failed, client gone, post failed, peer lost, deadline, operator."""
        # What has settled stays settled: a late abort of the engine, or a deadline, changes
        # nothing.
        if part.state in LIVE:
            self.end_part(part, T.GIVEN_UP, refusal.message, refusal)

    # ---- the peer ----------------------------------------------------------------------------

    def outlived(self, incarnation: str) -> None:
        """The decode daemon restarted: nobody will say Closed, and nothing of it is wanted."""
        refusal = reader_restarted(incarnation, self._settings)
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
        refusal = reader_silent(peer, self._out.at_s, self._settings)
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
                    self.end_kept(part, late)
            elif part.outstanding:
                refusal = self.posts.stalled(part, self._settings)
                if refusal is not None:
                    self.give_up_send(part, refusal)

    # ---- edges -------------------------------------------------------------------------------

    def await_engine_or_await_offer_to_streaming(
        self, part: SendPart, trigger: PrefillTrigger
    ) -> None:
        """ENGINE_OPENED or OFFERED: both halves are here and agree."""
        engine = part.engine
        if engine is not None and self._leases.giving_way.leases:
            self._leases.giving_way.keep_for(engine.lease, f"send {part.id}")
        self.move_part(part, trigger, f"decode has {part.decode_prefix_len} tokens")
        peer = self._peers.by_incarnation.get(part.incarnation)
        numbered = part.kept_by or part
        if engine is not None and peer is not None:
            self._peers.in_one_epoch(peer, engine.namespace)
        if engine is not None and numbered.is_numbered:
            # Of a room that is kept its engine hears of each, by the number of the room.
            told = msgspec.structs.replace(accepted(part), send=numbered.id)
            self._out.answer(engine.session, told)
        # After Accepted, which tells the engine its share: the failure names a send that it knows.
        if peer is not None and peer.agent is Agent.FAILED and not part.is_posted:
            why = f"no sending agent: {peer.agent_why}"
            self.give_up_send(part, Refusal(Code.POST_FAILED, why, side=self._settings.name))
        elif part.aux is not None:
            self.streaming_to_flushing(part)
        else:
            self.push_part(part)
        # Not where Settled has left in this step: it says all that Accept does, and more.
        if peer is not None and part.state in WRITING:
            self._accept(peer, part)

    def streaming_to_flushing(self, part: SendPart) -> None:
        """FINISHED: the last page goes, whole or not, and what goes with it."""
        self.move_part(part, T.FINISHED, "")
        self.push_part(part)  # by the new state it sees that this is the last chunk

    def _settle_if_flushed(self, part: SendPart) -> None:
        # All three: where there is no agent pages are unposted while nothing is outstanding.
        if part.state is P.FLUSHING and part.is_posted and not part.outstanding:
            self._flushing_to_settled(part)

    def _flushing_to_settled(self, part: SendPart) -> None:
        """FLUSHED: everything is posted, and every post is done."""
        part.outcome = ReceiveOutcome.DELIVERED
        self.move_part(part, T.FLUSHED, f"{part.posted_pages} pages, {amount(part.moved_bytes)}")
        # Before Settled: from here on the engine can neither advance nor end it.
        self.let_engine_go(part)
        self._settle(part, None)

    def end_part(self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal) -> None:
        """ABORTED or GIVEN_UP, in whatever state it is."""
        match part.state:
            case P.STREAMING | P.FLUSHING:
                self._streaming_or_flushing_to_draining(part, trigger, why, refusal)
            case P.AWAIT_ENGINE:
                self._await_engine_to_settled(part, trigger, why, refusal)
            case P.AWAIT_OFFER:
                self._await_offer_to_forgotten(part, trigger, why, refusal)
            case _:  # it drains already, for a reason that everybody has been told
                self.move_part(part, trigger, why)

    def _streaming_or_flushing_to_draining(
        self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal
    ) -> None:
        """ABORTED or GIVEN_UP: the engine hears at once, the decode side when no post is left."""
        self.move_part(part, trigger, why)
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
        self.move_part(part, T.DRAINED, "")
        self._settle(part, part.ended)

    def _await_engine_to_settled(
        self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal
    ) -> None:
        """REFUSED, ABORTED or GIVEN_UP before an engine was here: nothing was posted."""
        self.move_part(part, trigger, why)
        self._settle(part, refusal)

    def _await_offer_to_forgotten(
        self, part: SendPart, trigger: PrefillTrigger, why: str, refusal: Refusal
    ) -> None:
        """GIVEN_UP: no decode side knows of it, so there is nobody to settle with."""
        self.move_part(part, trigger, why)
        # What ends a room that is kept, other than as it was to end, ends all that take it.
        takers = takers_of(part, self.rooms)
        self._tell_engine(part, refusal)
        self.rooms.remove_part(part)
        for taker in takers:
            self.give_up_send(taker, refusal)
        if refusal.side == self._settings.name:  # not where the decode side gave up
            now_s = self._out.at_s
            if part.session:
                is_kept = part.keeping is not None
                self.expired_rooms.remember_engines(part.room, refusal, now_s, is_kept=is_kept)
            else:
                self.expired_rooms.remember(part.room, refusal, now_s, is_pulled=True)
        self.settled_sends.end_forgotten(part, refusal)

    def refuse_part(self, part: SendPart, refusal: Refusal) -> None:
        """The two sides do not agree."""
        peer = self._peers.by_incarnation.get(part.incarnation)
        if peer is not None:
            self._peers.note_epochs(peer, refusal)
        part.outcome = ReceiveOutcome.REFUSED
        self._await_engine_to_settled(part, T.REFUSED, refusal.message, refusal)

    def _settle(self, part: SendPart, refusal: Refusal | None) -> None:
        self.rooms.remove_part(part)
        self.settled_sends.settle_part(part, refusal)

    # ---- small things ------------------------------------------------------------------------

    def _tell_engine(self, part: SendPart, refusal: Refusal) -> None:
        """The engine hears of the failure at once, and may name the send once more to end it."""
        had_engine = self.let_engine_go(part)
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

    def let_engine_go(self, part: SendPart) -> bool:
        """Its engine can do nothing for it any more; whether it had one until now."""
        if not part.is_numbered and part.finish_call is not None:
            call = part.session, part.finish_call
            # An engine may number two calls alike: then it is the later one that can be found.
            if self.handed_over.get(call) is part:
                del self.handed_over[call]
        return self.by_send.pop(part.id, None) is not None

    def new_part(self, room: int, state: Prefill) -> SendPart:
        """One more part, in no register yet."""
        self._last_part += 1
        return SendPart(self._last_part, room=room, state=state, at_s=self._out.at_s)

    def join_peer(self, part: SendPart, peer: Peer, handoff: int) -> None:
        """The part answers for that handoff of the peer."""
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

    def answer_again(self, peer: Peer, part: SendPart) -> None:
        """A repeated Offer or Abort: say again what we said last."""
        if part.state in WRITING:
            self._accept(peer, part)
        elif part.state in {P.SETTLED, P.CLOSED}:
            self.settled_sends.say_settled(part)

    def deadline_of(self, deadline_s: float) -> float:
        """When so many seconds are over, or the longest deadline here."""
        # In this order a NaN of the caller loses: nothing is smaller than the first one then.
        return self._out.at_s + min(self._settings.max_deadline_s, deadline_s)

    def move_part(self, part: SendPart, trigger: PrefillTrigger, why: str) -> None:
        """Apply ``trigger`` to a part of this side."""
        move_prefill(part, trigger, why, self._out)
