"""The decode side of handoffs: ask for a prompt's KV, and own the pages it lands on.

One ``ReceiveAttempt`` has one ``ReceivePart`` for each source, which is one in most cases. States
and triggers of parts are ``protocol.DECODE``; this file is what happens on the edges. The rules that keep memory safe live here:

- pages are held before the Offer goes out, and a part that may have been accepted is never freed:
  giving up means Abort, an unlocked prefix and *quarantined* pages, until the writer's Settled, a
  fence, or the proof that the writer is gone; of several, the last one that may write;
- the last message is repeated until Settled; Settled is answered with Closed for ever, from the
  kept outcome or, once that is folded, from the floor;
- the engine hears of a failure at once, not when the pages come back. One source that fails ends
  the attempt: what the others still send is given up, what they have sent is dropped;
- nothing enters the tree before ``verify`` says of every part that it is what was sent. Whoever
  gives up while it looks is heard at once, and what was delivered is cached all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.cache.lease import ARRIVAL, Claim, Lease
from kvd.core.effects import Doubt
from kvd.core.handoff.endings import ASKING, WRITABLE, Endings
from kvd.core.handoff.offering import Offering
from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart, is_wanted
from kvd.core.handoff.payload import Payload
from kvd.core.handoff.protocol import Decode, DecodeTrigger, move_decode
from kvd.core.handoff.receive_askers import PreloadAsker, ReceiveAsker
from kvd.core.handoff.refusals import (
    begun_elsewhere,
    bounded,
    of_source,
    took_too_long,
    writer_restarted,
    writer_silent,
)
from kvd.core.handoff.verify import SumFinding, Verifying
from kvd.core.leases.admission import Admission, Waiter
from kvd.core.leases.receive_tier import DEVICE
from kvd.errors import Code, Refusal
from kvd.types import NO_TOKENS, Tokens, count
from kvd.wire import client
from kvd.wire.peer import Accept, Offer, Outcome, Progress, Settled, Withdrawn

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.inputs import Verified
    from kvd.core.leases.fetch import Fetcher
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.peers.peer import Peer, Peers
    from kvd.core.settings import Settings

D, T = Decode, DecodeTrigger

WANTED = {*ASKING, D.VERIFYING}
"""The engine waits, unless it has given up on what is being verified."""

OPEN = {D.OFFERED, D.RECEIVING, D.VERIFYING, D.DRAINING}
"""States in which the writer's word is still to come."""


class Decoder:
    """The live parts of this node's decode side."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        admission: Admission,
        peers: Peers,
        fetcher: Fetcher,
        out: Outbox,
    ) -> None:
        cargo = Payload(settings.spec, leases)
        self.verifying = Verifying(settings, cargo, peers, out)
        self.offering = Offering(settings, cargo, peers, out)
        self.endings = Endings(settings, leases, peers, self.verifying, out)
        # The same registers: a part leaves them as it ends.
        self.parts = self.endings.parts
        self.receptions = self.endings.receptions
        self.by_handoff = self.endings.by_handoff
        self.outcomes = self.endings.outcomes
        self.settling = self.endings.settling
        self.ready: dict[int, ReceiveAttempt] = {}
        """By lease id: delivered, until the engine releases the lease."""
        self.received_bytes = self.saved_bytes = 0
        self._settings = settings
        self._leases = leases
        self._admission = admission
        self.peers = peers
        self._fetcher = fetcher
        self._out = out
        self._last_part = 0
        self._last_handoff = 0

    @property
    def delivered(self) -> int:
        """Parts that were committed."""
        return self.endings.delivered

    @property
    def failed(self) -> int:
        """Parts that ended otherwise after they were offered."""
        return self.endings.failed

    def known(self) -> list[ReceivePart]:
        """Every part that is not over: those under way, then those that were delivered."""
        delivered = [part for one in self.ready.values() for part in one.parts]
        return [*self.parts.values(), *delivered]

    # ---- the engine --------------------------------------------------------------------------

    def receive(self, session: int, message: client.Receive, tokens: Tokens) -> None:
        """The engine wants a prompt's KV from known peers: queue for room."""
        reception = self._new_reception(session, message, count(tokens))
        reception.is_preloaded = message.tier == DEVICE
        fresh = self._leases.components.fresh_tokens(reception.prompt_tokens, cached=message.cache)
        claim = Claim(
            session=session,
            call=message.call,
            reason=f"receive from {reception.sources}",
            room=message.room,
            namespace=message.namespace,
            tokens=tokens,
            reserve_tokens=message.reserve_tokens,
            priority=message.priority,
            cache=message.cache,
            holder=ARRIVAL,
            fresh_tokens=fresh,
            step_tokens=message.step_tokens,
        )
        asker = ReceiveAsker(self, reception, message.call)
        reception.waiter = Waiter(claim, reception.deadline_s, asker)
        self._admission.submit(reception.waiter)

    def cancel_session(self, session: int, refusal: Refusal) -> int:
        """End all receives of a session that is over; how many they were."""
        receptions = [one for one in self.receptions.values() if one.session == session]
        for one in receptions:
            self.cancel(one, refusal)
        return len(receptions)

    def cancel(self, reception: ReceiveAttempt, refusal: Refusal) -> None:
        """The engine, its death, or the operator ends the attempt."""
        waiter = reception.waiter
        if waiter is not None:
            self._admission.withdraw(waiter)
            waiter.asker.refused(refusal)
        else:
            self._give_up(reception, refusal)

    def lease_ended(self, lease_id: int) -> None:
        """The lease that came out of delivered parts was released."""
        reception = self.ready.pop(lease_id, None)
        if reception is not None:
            self._released(reception, "")

    # ---- the peer ----------------------------------------------------------------------------

    def accepted(self, peer: Peer, message: Accept) -> None:
        """The prefill side has begun."""
        part = self._part(peer, message.handoff)
        if part is None:
            return
        if part.state is D.OFFERED:
            self._move(part, T.ACCEPTED, "")
        begins = message.decode_prefix_len
        if part.state in ASKING and begins is not None and begins != part.prefix_tokens:
            why = begun_elsewhere(part, begins, self._settings)
            self._give_up(part.reception, of_source(part, why))

    def progressed(self, peer: Peer, message: Progress) -> None:
        """Bytes that have landed so far; lossy, for the eyes only."""
        part = self._part(peer, message.handoff)
        if part is not None and part.state in ASKING:
            self._moved(part, message.moved_bytes)

    def settled(self, peer: Peer, message: Settled) -> None:
        """The writer's last word."""
        part = self._part(peer, message.handoff)
        if part is None:
            self.outcomes.answer(peer, message.handoff)
            return
        if part.state is D.VERIFYING:
            return  # the first last word stays; Closed follows when the pages are verified
        message = bounded(message, self._settings)
        is_delivered = message.outcome is Outcome.DELIVERED
        trigger = T.DELIVERED if is_delivered else T.SETTLED
        was_wanted = part.state in ASKING
        self._moved(part, message.moved_bytes)
        why = message.reason or Refusal(Code.ABORTED, message.outcome.value, side=peer.name)
        self._move(part, trigger, "" if is_delivered else why.message)
        doubt = Doubt.SENT if message.in_doubt else Doubt.NONE
        if not was_wanted:
            self.endings.drained(part, "settled", doubt)
        elif is_delivered:
            if part.share.is_authoritative:
                part.reception.aux = message.aux
            self._judge(part, self.verifying.begin(part, message.checksums))
        else:
            self.endings.end(part, message.outcome, why, cause="settled", doubt=doubt)

    def verified(self, got: Verified) -> None:
        """Our transfer process has compared what arrived with what was sent."""
        part = self.verifying.parts.get(got.ticket)
        if part is not None and part.state is D.VERIFYING:
            self._judge(part, self.verifying.judge(got))

    def serving(self) -> None:
        """A transfer process serves: it is asked what its predecessor did not answer."""
        self.verifying.ask_again()

    def writer_gone(self, incarnation: str) -> None:
        """Proof that this incarnation never writes again: nothing of it need be drained."""
        refusal = writer_restarted(incarnation, self._settings)
        for part in [one for one in self.parts.values() if one.incarnation == incarnation]:
            was_wanted = part.state in ASKING
            self._move(part, T.WRITER_GONE, "new incarnation")
            if was_wanted:
                cause, doubt = "writer-gone", Doubt.SENT
                self.endings.end(part, Outcome.FAILED, refusal, cause=cause, doubt=doubt)
            elif part.state is D.CLOSED:
                self.endings.drained(part, "new-incarnation", Doubt.SENT)
        self.outcomes.forget(incarnation)

    def fenced(self) -> None:
        """Our receiving transfer process was reaped: nothing can write through it any more."""
        for part in list(self.parts.values()):
            if part.waiter is None:
                self._move(part, T.FENCED, "new transport generation")
                if part.state is D.CLOSED:
                    self.endings.drained(part, "fenced", Doubt.NONE)
        self.settling.fenced()

    def peer_lost(self, peer: Peer) -> None:
        """Silence: drain what is under way with it."""
        refusal = writer_silent(peer, self._out.at_s, self._settings)
        for part in list(self.parts.values()):
            if part.incarnation == peer.incarnation and part.state in ASKING:
                self._give_up(part.reception, of_source(part, refusal))

    def offer_floor(self, incarnation: str) -> int:
        """The lowest handoff id still open towards this incarnation; the next id if none is."""
        return min(
            (
                part.handoff
                for part in self.parts.values()
                if part.incarnation == incarnation and part.state in OPEN
            ),
            default=self._last_handoff + 1,
        )

    # ---- time --------------------------------------------------------------------------------

    def tick(self) -> None:
        """Deadlines and repetitions."""
        now_s = self._out.at_s
        for part in list(self.parts.values()):
            if part.state in WANTED and part.deadline_s <= now_s and part.ended is None:
                why = took_too_long(part.reception, now_s, self._settings)
                self._give_up(part.reception, why)
            if part.state in WRITABLE and part.resend_s <= now_s:
                self.endings.resend(part)

    # ---- edges -------------------------------------------------------------------------------

    def admitted(self, reception: ReceiveAttempt, lease: Lease, call: int) -> None:
        """QUEUED -> OFFERED: prefix locked, delta pages held; send the Offers.

        -> CLOSED where an Offer, or the Settled that it asks for, would be longer than is read.
        """
        reception.waiter = None
        reception.lease = lease
        reception.prefix_tokens = lease.prefix_tokens
        for part in reception.parts:
            part.incarnation = self.peers.by_name[part.peer].incarnation
            self._last_handoff += 1
            part.handoff = self._last_handoff
        self.offering.prepare(reception, lease)
        refusal = self.offering.too_long(reception)
        if refusal is not None:
            reception.lease = None
            self._leases.release(lease, ARRIVAL, refusal.code.value)
            self.not_admitted(reception, refusal, call)
            return
        for part in reception.parts:
            self.by_handoff[part.handoff] = part
        for part in reception.parts:
            self._move(part, T.ADMITTED, _wanted(part))
        answer = client.Receiving(call, reception.id, reception.prefix_tokens)
        self._out.answer(reception.session, answer)
        for part in reception.parts:
            part.resend_gap_s = self._settings.resend_s
            self.endings.resend(part)

    def not_admitted(self, reception: ReceiveAttempt, why: Refusal, call: int) -> None:
        """QUEUED -> CLOSED: nothing was held."""
        reception.waiter = None
        for part in reception.parts:
            self._move(part, T.GIVEN_UP, why.message)
        self._out.answer(reception.session, client.Failed(call, why))
        for part in reception.parts:
            del self.parts[part.id]
        for part in reception.parts:
            self.withdraw(part.room, part.peer, why)
            self.endings.tell(part, Outcome.REFUSED, why)
        del self.receptions[reception.id]
        reception.parts = ()

    def withdraw(self, room: int, source: str, why: Refusal) -> None:
        """Nothing is offered: an engine that waits for it over there need not wait longer."""
        peer = self.peers.by_name.get(source)
        if peer and peer.incarnation and not is_wanted(room, source, self.parts.values()):
            mine, code = self._settings.incarnation, why.code.value
            self._out.send(
                peer.link, Withdrawn(source=mine, target=peer.incarnation, room=room, reason=code)
            )

    def _judge(self, part: ReceivePart, found: SumFinding | Refusal) -> None:
        if isinstance(found, Refusal):
            self._reject(part, found)
            return
        reception, lease = part.reception, part.lease
        part.is_verified = found is SumFinding.GOOD
        if lease is None or not all(one.is_verified for one in reception.parts):
            return
        if reception.is_preloaded and reception.ended is None:
            self._fetcher.preload(lease, reception.prompt_tokens, PreloadAsker(self, reception))
        else:
            self._commit(reception, lease)

    def preloaded(self, reception: ReceiveAttempt, refusal: Refusal | None) -> None:
        """The prompt is in the device buffer too, or cannot be; its bytes are good all the same."""
        if refusal is not None and reception.ended is None:
            self.endings.fail(reception, refusal)
        if reception.lease is not None:
            self._commit(reception, reception.lease)

    def _commit(self, reception: ReceiveAttempt, lease: Lease) -> None:
        """VERIFYING -> READY: whole pages join the tree, the rest stays with the lease."""
        for part in reception.parts:
            self._move(part, T.VERIFIED, "")
            self.received_bytes += part.moved_bytes
        self.saved_bytes += self._leases.bytes_of(reception.prefix_tokens)
        left = reception.ended
        if left is None:
            self._leases.hand_over(lease, f"received from {reception.sources}")
        self._leases.commit(lease, NO_TOKENS)
        if left is None:
            self.ready[lease.id] = reception
            rows = self._leases.components.page_tables(lease)
            received = client.Received(
                receive=reception.id,
                lease=lease.id,
                pages=lease.page_table,
                aux=reception.aux,
                beside=rows,
            )
            self._out.answer(reception.session, received)
        reception.aux = b""
        for part in reception.parts:
            self.endings.close(part, Outcome.COMMITTED, None)
        if left is not None:
            self._leases.release(lease, ARRIVAL, left.code.value)
            self._released(reception, left.message)

    def _released(self, reception: ReceiveAttempt, why: str) -> None:
        """READY -> CLOSED."""
        for part in reception.parts:
            self._move(part, T.RELEASED, why)
        reception.parts = ()

    def _reject(self, part: ReceivePart, why: Refusal) -> None:
        """VERIFYING -> CLOSED: nothing was cached, and nobody gets the pages before Quiet."""
        self._move(part, T.CORRUPTED, why.message)
        # Delivered is a proof of the writer's that all has arrived; the sums say it is none.
        self.endings.end(part, Outcome.CORRUPT, why, cause="corrupt", doubt=Doubt.ARRIVED)

    def _give_up(self, reception: ReceiveAttempt, refusal: Refusal) -> None:
        """-> DRAINING: tell the engine and the writers, keep the pages from everybody."""
        if reception.ended is not None or reception.lease is None:
            return
        if not reception.in_state(*WANTED):
            return
        self.endings.fail(reception, refusal)
        if reception.in_state(*ASKING):
            self.endings.drop(reception, refusal)
            return
        for part in reception.in_state(D.VERIFYING):
            self._move(part, T.GIVEN_UP, refusal.message)
            part.story.tell(self._out.at_s, f"given up while verifying ({refusal.message})")

    # ---- small things ------------------------------------------------------------------------

    def _new_reception(
        self, session: int, message: client.Receive, n_tokens: int
    ) -> ReceiveAttempt:
        number, at_s = self._last_part + 1, self._out.at_s
        reception = ReceiveAttempt(number, message.room, session, at_s)
        reception.prompt_tokens = n_tokens
        reception.deadline_s += min(self._settings.max_deadline_s, message.deadline_s)
        parts = []
        for source in message.source:
            self._last_part += 1
            part = ReceivePart(self._last_part, self.peers.find(source) or source, reception)
            part.story.tell(at_s, f"asked for by session {session}")
            self.parts[part.id] = part
            parts.append(part)
        reception.parts = tuple(parts)
        self.receptions[number] = reception
        return reception

    def _moved(self, part: ReceivePart, moved_bytes: int) -> None:
        """What the writer says has landed, as far as it can be."""
        part.moved_bytes = min(max(part.moved_bytes, moved_bytes), part.total_bytes)

    def _part(self, peer: Peer, handoff: int) -> ReceivePart | None:
        part = self.by_handoff.get(handoff)
        return part if part is not None and part.incarnation == peer.incarnation else None

    def _move(self, part: ReceivePart, trigger: DecodeTrigger, why: str) -> None:
        move_decode(part, trigger, why, self._out)


def _wanted(part: ReceivePart) -> str:
    """What it asks for."""
    offer = part.unanswered
    assert isinstance(offer, Offer)
    n_pages = sum(count(grant.pages) for grant in offer.grants)
    return f"has {part.prefix_tokens} tokens, {n_pages} pages wanted"
