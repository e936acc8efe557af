"""The decode side of handoffs: ask for a prompt's KV, and own the pages it lands on.

One ``DecodePart`` is one attempt. Its states and triggers are ``tables.DECODE``; this file is what
happens on the edges. The rules that keep memory safe live here:

- pages are held before the Offer goes out, and a part that may have been accepted is never freed:
  giving up means Abort, an unlocked prefix and *quarantined* pages, until the writer's Settled, a
  fence, or the proof that the writer is gone;
- the last message is repeated until Settled; Settled is answered with Closed for ever, from the
  kept outcome or, once that is folded, from the floor;
- the engine hears of a failure at once, not when the pages come back;
- nothing enters the tree before ``verify`` says that it is what was sent. Whoever gives up while it
  looks is heard at once, and what was delivered is cached all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.admission import Admission, Waiter
from kvd.core.cargo import Cargo, legs_of
from kvd.core.coverage import uncovered
from kvd.core.lease import ARRIVAL, Claim, Lease
from kvd.core.machine import move_decode, tell_ended
from kvd.core.outcomes import Outcomes
from kvd.core.parts import DecodePart, is_wanted
from kvd.core.prompt import prompt_digest
from kvd.core.receive_askers import PreloadAsker, ReceiveAsker
from kvd.core.settling import Settling
from kvd.core.tables import Decode, DecodeTrigger
from kvd.core.tiers import DEVICE
from kvd.core.verdict import bounded, took_too_long, writer_restarted, writer_silent
from kvd.core.verify import Finding, Verifying
from kvd.errors import Code, Refusal
from kvd.types import NO_TOKENS, Tokens, count
from kvd.wire import client
from kvd.wire.peer import Abort, Accept, Offer, Outcome, Progress, Settled, Withdrawn

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.fetch import Fetcher
    from kvd.core.inputs import Verified
    from kvd.core.lease_table import LeaseTable
    from kvd.core.peer import Peer, Peers
    from kvd.core.settings import Settings

D, T = Decode, DecodeTrigger

ASKING = {D.OFFERED, D.RECEIVING}
"""The writer may write, and we still want it."""

WANTED = {*ASKING, D.VERIFYING}
"""The engine waits, unless it has given up on what is being verified."""

OPEN = {D.OFFERED, D.RECEIVING, D.VERIFYING, D.DRAINING}
"""States in which the writer's word is still to come."""


UNANSWERED = {D.OFFERED, D.RECEIVING, D.DRAINING}
"""What we said last is repeated: a lost Settled must not leave only the deadline to end it."""


class Decoder:
    """The live parts of this node's decode side. The node sets ``fetcher``, which needs it too."""

    fetcher: Fetcher

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        admission: Admission,
        peers: Peers,
        out: Outbox,
    ) -> None:
        self.parts: dict[int, DecodePart] = {}
        """By receive id: queued, under way, draining."""
        self.ready: dict[int, DecodePart] = {}
        """By lease id: delivered, until the engine releases the lease."""
        self.outcomes = Outcomes(settings, out)
        self.delivered = self.failed = self.received_bytes = self.saved_bytes = 0
        self.by_handoff: dict[int, DecodePart] = {}
        """Those that have been offered."""
        self.settling = Settling(settings, leases, peers, out)
        self._cargo = Cargo(settings.spec, leases)
        self.verifying = Verifying(settings, self._cargo, peers, out)
        self._settings = settings
        self._leases = leases
        self._admission = admission
        self.peers = peers
        self._out = out
        self._last_part = 0
        self._last_handoff = 0

    # ---- the engine --------------------------------------------------------------------------

    def receive(self, session: int, message: client.Receive, tokens: Tokens) -> None:
        """The engine wants a prompt's KV from a known peer: queue for room."""
        part = self._new_part(session, message, count(tokens))
        part.is_preloaded = message.tier == DEVICE
        fresh = self._leases.beside.fresh_tokens(part.prompt_tokens, cached=message.cache)
        claim = Claim(
            session,
            message.call,
            f"receive from {part.peer}",
            message.room,
            message.namespace,
            tokens,
            message.reserve_tokens,
            message.priority,
            message.cache,
            ARRIVAL,
            fresh_tokens=fresh,
            step_tokens=message.step_tokens,
        )
        part.waiter = Waiter(claim, part.deadline_s, ReceiveAsker(self, part, message.call))
        self._admission.submit(part.waiter)

    def cancel(self, part: DecodePart, refusal: Refusal) -> None:
        """The engine, its death, or the operator ends the attempt."""
        waiter = part.waiter
        if waiter is not None:
            self._admission.withdraw(waiter)
            waiter.asker.refused(refusal)
        else:
            self._give_up(part, refusal)

    def lease_ended(self, lease_id: int) -> None:
        """The lease that came out of a delivered part was released."""
        part = self.ready.pop(lease_id, None)
        if part is not None:
            self._move(part, T.RELEASED, "")

    # ---- the peer ----------------------------------------------------------------------------

    def accepted(self, peer: Peer, message: Accept) -> None:
        """The prefill side has begun."""
        part = self._part(peer, message.handoff)
        if part is not None and part.state is D.OFFERED:
            self._move(part, T.ACCEPTED, "")

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
        if not was_wanted:
            self._close_drained(part, "settled", in_doubt=message.in_doubt)
        elif is_delivered:
            part.aux = message.aux
            self._judge(part, self.verifying.begin(part, message.checksums))
        else:
            self._fail(part, why)
            self.settling.free(part, "settled", in_doubt=message.in_doubt)
            self._close(part, message.outcome, why)

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
                self._fail(part, refusal)
                self.settling.free(part, "writer-gone", in_doubt=True)
                self._close(part, Outcome.FAILED, refusal)
            elif part.state is D.CLOSED:
                self._close_drained(part, "new-incarnation", in_doubt=True)
        self.outcomes.forget(incarnation)

    def fenced(self) -> None:
        """Our receiving transfer process was reaped: nothing can write through it any more."""
        for part in list(self.parts.values()):
            if part.waiter is None:
                self._move(part, T.FENCED, "new transport generation")
                if part.state is D.CLOSED:
                    self._close_drained(part, "fenced", in_doubt=False)
        self.settling.fenced()

    def quiet(self, lease_id: int) -> None:
        """Nothing that had reached this host for the lease's pages can land any more."""
        self.settling.quiet(lease_id)

    def peer_lost(self, peer: Peer) -> None:
        """Silence: drain what is under way with it."""
        refusal = writer_silent(peer, self._out.at_s, self._settings)
        for part in list(self.parts.values()):
            if part.incarnation == peer.incarnation and part.state in ASKING:
                self._give_up(part, refusal)

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
            if part.state in WANTED and part.deadline_s <= now_s:
                self._give_up(part, took_too_long(part, now_s, self._settings))
            if part.state in UNANSWERED and part.resend_s <= now_s:
                self._resend(part)

    # ---- edges -------------------------------------------------------------------------------

    def admitted(self, part: DecodePart, lease: Lease, call: int) -> None:
        """QUEUED -> OFFERED: prefix locked, delta pages held; send the Offer."""
        peer = self.peers.by_name[part.peer]
        part.waiter = None
        part.lease = lease
        part.incarnation = peer.incarnation
        part.prefix_tokens = lease.prefix_tokens
        self._last_handoff += 1
        part.handoff = self._last_handoff
        self.by_handoff[part.handoff] = part
        grants = self._cargo.grants(lease, part.prompt_tokens)
        part.unanswered = offer = Offer(
            source=self._settings.incarnation,
            target=peer.incarnation,
            handoff=part.handoff,
            room=part.room,
            generation=self.peers.generation,
            prompt_tokens=part.prompt_tokens,
            decode_prefix_len=part.prefix_tokens,
            digest=prompt_digest(lease.tokens, lease.namespace),
            grants=grants,
            deadline_s=part.deadline_s - self._out.at_s,
            integrity=self._settings.integrity,
            waited_s=self._out.at_s - part.since_s,
        )
        part.legs = legs_of(offer, peer.incoming)
        part.total_bytes = self._cargo.granted_bytes(grants, part.legs)
        part.seals = self._cargo.seals(offer, part.legs)
        n_pages = sum(count(grant.pages) for grant in grants)
        self._move(part, T.ADMITTED, f"has {part.prefix_tokens} tokens, {n_pages} pages wanted")
        self._out.answer(part.session, client.Receiving(call, part.id, part.prefix_tokens))
        part.resend_gap_s = self._settings.resend_s
        self._resend(part)

    def not_admitted(self, part: DecodePart, why: Refusal, call: int) -> None:
        """QUEUED -> CLOSED: nothing was held."""
        part.waiter = None
        self._move(part, T.GIVEN_UP, why.message)
        self._out.answer(part.session, client.Failed(call, why))
        del self.parts[part.id]
        self.withdraw(part.room, part.peer, why)
        self._tell_ended(part, Outcome.REFUSED, why)

    def not_ready(self, source: str) -> str | None:
        """What a receive from this node waits for; None when an Offer can go out."""
        refusal = uncovered(source, self.peers, self._settings)
        return self.peers.not_ready(source) or (refusal.message if refusal is not None else None)

    def withdraw(self, room: int, source: str, why: Refusal) -> None:
        """Nothing is offered: an engine that waits for it over there need not wait longer."""
        peer = self.peers.by_name.get(source)
        if peer and peer.incarnation and not is_wanted(room, source, self.parts.values()):
            mine, code = self._settings.incarnation, why.code.value
            self._out.send(peer.link, Withdrawn(mine, peer.incarnation, room, code))

    def _judge(self, part: DecodePart, found: Finding | Refusal) -> None:
        if isinstance(found, Refusal):
            self._reject(part, found)
        elif found is Finding.GOOD and part.lease is not None:
            if part.is_preloaded and part.ended is None:
                asker = PreloadAsker(self, part)
                self.fetcher.preload(part.lease, part.prompt_tokens, asker)
            else:
                self._commit(part, part.lease)

    def preloaded(self, part: DecodePart, refusal: Refusal | None) -> None:
        """The prompt is in the device buffer too, or cannot be; its bytes are good all the same."""
        if refusal is not None and part.ended is None:
            self._fail(part, refusal)
        if part.lease is not None:
            self._commit(part, part.lease)

    def _commit(self, part: DecodePart, lease: Lease) -> None:
        """VERIFYING -> READY: whole pages join the tree, the rest stays with the lease."""
        self._move(part, T.VERIFIED, "")
        self.received_bytes += part.moved_bytes
        self.saved_bytes += self._leases.bytes_of(part.prefix_tokens)
        left = part.ended
        if left is None:
            self._leases.hand_over(lease, f"received from {part.peer}")
        self._leases.commit(lease, NO_TOKENS)
        if left is None:
            self.ready[lease.id] = part
            rows = self._leases.beside.rows(lease)
            received = client.Received(part.id, lease.id, lease.row, part.aux, rows)
            self._out.answer(part.session, received)
        part.aux = b""
        self._close(part, Outcome.COMMITTED, None)
        if left is not None:
            self._leases.release(lease, ARRIVAL, left.code.value)
            self._move(part, T.RELEASED, left.message)

    def _reject(self, part: DecodePart, why: Refusal) -> None:
        """VERIFYING -> CLOSED: nothing was cached, and nobody gets the pages before Quiet."""
        self._move(part, T.CORRUPTED, why.message)
        if part.ended is None:
            self._fail(part, why)
        self.settling.free(part, "corrupt", in_doubt=True)
        self._close(part, Outcome.CORRUPT, why)

    def _give_up(self, part: DecodePart, refusal: Refusal) -> None:
        """-> DRAINING: tell the engine and the writer, keep the pages from everybody."""
        lease = part.lease
        if part.state not in WANTED or part.ended is not None or lease is None:
            return
        self._fail(part, refusal)
        self._move(part, T.GIVEN_UP, refusal.message)
        if part.state is D.VERIFYING:
            part.story.tell(self._out.at_s, f"given up while verifying ({refusal.message})")
            return
        self.settling.quarantine(part, lease, refusal.message)
        part.unanswered = Abort(
            self._settings.incarnation,
            part.incarnation,
            part.handoff,
            part.room,
            refusal.code.value,
        )
        part.resend_gap_s = self._settings.resend_s
        self._resend(part)

    def _close_drained(self, part: DecodePart, proof: str, *, in_doubt: bool) -> None:
        """DRAINING -> CLOSED: the writer is done, and the quarantine over unless it is in doubt."""
        if part.lease is not None:
            self.settling.end(part.lease, proof, in_doubt=in_doubt)
        self._close(part, Outcome.ABORTED, part.ended)

    def _close(self, part: DecodePart, outcome: Outcome, reason: Refusal | None) -> None:
        """The writer has no more to say: tell it the outcome, and keep that for its repetitions."""
        del self.parts[part.id]
        del self.by_handoff[part.handoff]
        peer = self.peers.by_incarnation.get(part.incarnation)
        self.outcomes.keep(peer, part, outcome, reason)
        if outcome is Outcome.COMMITTED:
            self.delivered += 1
        else:
            self.failed += 1
        self._tell_ended(part, outcome, reason)

    def _fail(self, part: DecodePart, refusal: Refusal) -> None:
        part.ended = refusal
        self._out.answer(part.session, client.ReceiveFailed(part.id, refusal))

    def _tell_ended(self, part: DecodePart, outcome: Outcome, reason: Refusal | None) -> None:
        is_committed = outcome is Outcome.COMMITTED
        saved_bytes = self._leases.bytes_of(part.prefix_tokens) if is_committed else 0
        tell_ended(part, outcome, reason, saved_bytes, self._out)

    # ---- small things ------------------------------------------------------------------------

    def _new_part(self, session: int, message: client.Receive, n_tokens: int) -> DecodePart:
        self._last_part += 1
        name = self.peers.find(message.source[0]) or message.source[0]
        part = DecodePart(self._last_part, message.room, session, name, self._out.at_s)
        part.prompt_tokens = n_tokens
        part.deadline_s += min(self._settings.max_deadline_s, message.deadline_s)
        part.story.tell(self._out.at_s, f"asked for by session {session}")
        self.parts[part.id] = part
        return part

    def _moved(self, part: DecodePart, moved_bytes: int) -> None:
        """What the writer says has landed, as far as it can be."""
        part.moved_bytes = min(max(part.moved_bytes, moved_bytes), part.total_bytes)

    def _part(self, peer: Peer, handoff: int) -> DecodePart | None:
        part = self.by_handoff.get(handoff)
        return part if part is not None and part.incarnation == peer.incarnation else None

    def _resend(self, part: DecodePart) -> None:
        peer = self.peers.by_incarnation.get(part.incarnation)
        if peer is not None and part.unanswered is not None:
            self._out.send(peer.link, part.unanswered)
        part.resend_s = self._out.at_s + part.resend_gap_s
        part.resend_gap_s = min(2 * part.resend_gap_s, self._settings.max_resend_s)

    def _move(self, part: DecodePart, trigger: DecodeTrigger, why: str) -> None:
        move_decode(part, trigger, why, self._out)
