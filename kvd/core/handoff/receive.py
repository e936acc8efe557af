"""The decode side of handoffs: ask for a prompt's KV, and own the pages it lands on.

One ``ReceiveAttempt`` has one ``ReceivePart`` for each source, which is one in most cases. States
and triggers of a part are ``protocol.DECODE``; what happens on the edge from ``offered`` to
``draining`` is the method whose name ends in ``offered..._to_draining``. The rules that keep memory
safe:

- pages are held before the Offer goes out, and a part that may have been accepted is never freed:
  giving up means Abort, an unlocked prefix and *quarantined* pages, until the writer's Settled, a
  fence, or the proof that the writer is gone; of several, the last one that may write;
- the last message is repeated until Settled; Settled is answered with Closed for ever, from the
  kept outcome or, once that is folded, from the floor (``outcomes``);
- the engine hears of a failure at once, not when the pages come back. One source that fails ends
  the attempt: what the others still send is given up, what they have sent is dropped;
- nothing enters the tree before ``verify`` says of every part that it is what was sent. Whoever
  gives up while it looks is heard at once, and what was delivered is cached all the same.

What must not live here: who sends which pages (``offer``, ``sources``), what gives a quarantined
page back (``quarantine``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import ARRIVAL
from kvd.core.effects import Doubt
from kvd.core.handoff.arriving import Arrivals
from kvd.core.handoff.offer import OfferWriter
from kvd.core.handoff.open_receives import OpenReceives
from kvd.core.handoff.outcomes import Outcomes
from kvd.core.handoff.protocol import Decode, DecodeTrigger
from kvd.core.handoff.quarantine import Quarantines
from kvd.core.handoff.refusals import (
    begun_elsewhere,
    bounded,
    not_its_own,
    of_source,
    took_too_long,
    writer_restarted,
    writer_silent,
)
from kvd.core.handoff.transitions import move_decode, tell_ended
from kvd.core.handoff.verify import SumFinding, Verifying
from kvd.core.leases.lent_pages import RECEIVED
from kvd.errors import Code, Refusal
from kvd.types import NO_TOKENS, Pages, count
from kvd.wire import client
from kvd.wire.peer import Abort, Accept, Progress, ReceiveOutcome, Settled

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart
    from kvd.core.handoff.payload import Payload
    from kvd.core.inputs import Verified
    from kvd.core.leases.admission import Admission
    from kvd.core.leases.engine_copies import EngineCopies
    from kvd.core.leases.fetch import Fetch, Fetcher
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings

D, T = Decode, DecodeTrigger

ASKING = {D.OFFERED, D.RECEIVING}
"""The writer may write, and we still want it."""

WRITABLE = {*ASKING, D.DRAINING}
"""The writer may write: what we said last is repeated, so that a lost Settled is no deadline."""

WANTED = {*ASKING, D.VERIFYING}
"""The engine waits, unless it has given up on what is being verified."""

MOVING_S = 0.25
"""So long after a word of its writer the bytes of a receive are taken to be on their way."""


@mypyc_attr(allow_interpreted_subclasses=True)
class PreloadAsker:
    """A verified receive whose prompt is copied to its buffer before its engine hears of it."""

    __slots__ = ("_attempt", "_decoder")

    def __init__(self, decoder: Decoder, attempt: ReceiveAttempt) -> None:
        self._decoder = decoder
        self._attempt = attempt

    def fetched(self, fetch: Fetch, pages: Pages) -> None:
        """The prompt is in the buffer."""
        self._decoder.preloaded(self._attempt, None)

    def refused(self, refusal: Refusal) -> None:
        """The engine asked for more than can be had."""
        self._decoder.preloaded(self._attempt, refusal)


@mypyc_attr(allow_interpreted_subclasses=True)
class Decoder:
    """The parts of this node's decode side that are not over."""

    def __init__(
        self,
        settings: Settings,
        payload: Payload,
        leases: LeaseTable,
        admission: Admission,
        peers: Peers,
        fetcher: Fetcher,
        copies: EngineCopies,
        out: Outbox,
    ) -> None:
        self.open: OpenReceives = OpenReceives()
        self.offers = OfferWriter(settings, payload, peers, out)
        self.verifying = Verifying(settings, payload, peers, out)
        self.arriving = Arrivals(payload, self.verifying, leases, out)
        self.quarantines = Quarantines(settings, leases, copies, peers, out)
        self.outcomes = Outcomes(settings, out)
        self.delivered = self.failed = 0
        """Parts that were committed, and that ended otherwise after they were offered."""
        self.received_bytes = self.saved_bytes = 0
        self._settings = settings
        self._leases = leases
        self._admission = admission
        self._peers = peers
        self._fetcher = fetcher
        self._out = out
        self._heard_s = float("-inf")
        """When a writer last said that it has begun, or how far it is."""

    @property
    def is_moving(self) -> bool:
        """Whether bytes are on their way here, or are summed, as far as that is known.

        A writer may compute for minutes between two pages: only its word says that some move.
        """
        if self.verifying.parts:
            return True
        return bool(self.open.by_handoff) and self._out.at_s - self._heard_s < MOVING_S

    # ---- the engine --------------------------------------------------------------------------

    def cancel_session(self, session: int, refusal: Refusal) -> int:
        """End all receives of a session that is over; how many they were."""
        attempts = self.open.of_session(session)
        for attempt in attempts:
            self.cancel_attempt(attempt, refusal)
        return len(attempts)

    def cancel_attempt(self, attempt: ReceiveAttempt, refusal: Refusal) -> None:
        """The engine, its death, or the operator ends the attempt."""
        waiter = attempt.waiter
        # Still queued: nothing is held and nothing was offered, so nothing need be drained.
        if waiter is not None:
            self._admission.withdraw(waiter)
            waiter.asker.refused(refusal)
        else:
            self._give_up(attempt, refusal)

    def lease_ended(self, lease_id: int) -> None:
        """The lease that came out of delivered parts was released."""
        attempt = self.open.ready.pop(lease_id, None)
        if attempt is not None:
            if attempt.request is not None:
                self.open.unname(attempt)
            self._ready_to_closed(attempt, "")

    # ---- the peer ----------------------------------------------------------------------------

    def accepted(self, peer: Peer, message: Accept) -> None:
        """The prefill side has begun."""
        part = self._part(peer, message)
        if part is None:
            return
        # Accept comes again with each repeated Offer, and may be late: then it changes nothing.
        if part.state is D.OFFERED:
            self._heard_s = self._out.at_s
            self._offered_to_receiving(part)
        begins = message.decode_prefix_len
        if part.state in ASKING and begins is not None and begins != part.prefix_tokens:
            why = begun_elsewhere(part, begins, self._settings)
            # Given up, not closed: it has begun to write somewhere, so the pages must be drained.
            self._give_up(part.attempt, of_source(part, why))

    def progressed(self, peer: Peer, message: Progress) -> None:
        """Bytes that have landed so far; lossy: what is not heard is summed at the end."""
        part = self._part(peer, message)
        # Not while it drains or is verified: what is told then is what Settled said.
        if part is not None and part.state in ASKING:
            self._heard_s = self._out.at_s
            self._moved(part, message.moved_bytes)
            self.verifying.note_landed(part, message)

    def settled(self, peer: Peer, message: Settled) -> None:
        """The writer's last word."""
        part = self._part(peer, message)
        if part is None:
            if message.handoff not in self.open.by_handoff:
                self.outcomes.answer_settled(peer, message.handoff)
            return
        if part.state is D.VERIFYING:
            return  # the first last word stays; Closed follows when the pages are verified
        # An aux that is too long makes a failure of a delivery, before anything rests on it.
        message = bounded(message, self._settings)
        is_delivered = message.outcome is ReceiveOutcome.DELIVERED
        # Before the part closes: its end is told with these bytes.
        self._moved(part, message.moved_bytes)
        # A peer that gives no reason has still ended it: an engine must not hear an empty refusal.
        why = message.reason or Refusal(Code.ABORTED, message.outcome.value, side=peer.name)
        # This message does not travel behind the bytes of a destroyed agent: those may come later.
        doubt = Doubt.SENT if message.in_doubt else Doubt.NONE
        if part.state is D.DRAINING:
            # Delivered after we gave up is a Settled like any other: nobody wants the bytes.
            trigger = T.DELIVERED if is_delivered else T.SETTLED
            said = "" if is_delivered else why.message
            self._draining_to_closed(part, trigger, said, proof="settled", doubt=doubt)
        elif is_delivered:
            if part.attempt.lease is not None:
                self._peers.in_one_epoch(peer, part.attempt.lease.namespace)
            self._offered_or_receiving_to_verifying(part, message)
        else:
            if part.attempt.lease is not None:
                self._peers.heard_epochs(peer, part.attempt.lease.namespace, why)
            self._offered_or_receiving_to_closed(part, T.SETTLED, why.message)
            self._end(part, message.outcome, why, cause="settled", doubt=doubt)

    def verified(self, got: Verified) -> None:
        """Our transfer process has compared what arrived with what was sent."""
        part = self.verifying.parts.get(got.ticket)
        # The part may be over: another source failed, and this answer was under way.
        if part is not None and part.state is D.VERIFYING:
            self._judge(part, self.verifying.judge_answer(got))

    def serving(self) -> None:
        """A transfer process serves: it is asked what its predecessor did not answer."""
        self.verifying.ask_again()

    def writer_gone(self, incarnation: str) -> None:
        """Proof that this incarnation never writes again: nothing of it need be drained."""
        refusal = writer_restarted(incarnation, self._settings)
        why = "new incarnation"
        # A list first: parts leave ``parts`` as they end. Two parts of one attempt are never of one
        # incarnation, so none of these is closed before its turn.
        for part in [part for part in self.open.parts.values() if part.incarnation == incarnation]:
            # It writes no more, but what it had sent may still be on its way: Doubt.SENT.
            if part.state in ASKING:
                self._offered_or_receiving_to_closed(part, T.WRITER_GONE, why)
                self._end(
                    part, ReceiveOutcome.FAILED, refusal, cause="writer-gone", doubt=Doubt.SENT
                )
            elif part.state is D.DRAINING:
                self._draining_to_closed(
                    part, T.WRITER_GONE, why, proof="new-incarnation", doubt=Doubt.SENT
                )
            else:  # all of it has landed, and only our own transfer process is asked about it
                self.move_part(part, T.WRITER_GONE, why)
        # Last: closing the parts above keeps outcomes that nobody will ask for.
        self.outcomes.forget_writer(incarnation)

    def fenced(self) -> None:
        """Our receiving transfer process was reaped: nothing can write through it any more."""
        why = "new transport generation"
        # No doubt is left: bytes land through the agent of the reaped process or not at all.
        for part in list(self.open.parts.values()):
            if part.state is D.DRAINING:
                self._draining_to_closed(part, T.FENCED, why, proof="fenced", doubt=Doubt.NONE)
            elif part.state is not D.QUEUED:
                # What is wanted stays open: the prefill side hears of the new generation, says
                # Settled, and its reason reaches the engine.
                self.move_part(part, T.FENCED, why)
        # Then the leases whose writers were over before: they only waited for quiet.
        self.quarantines.fenced()

    def peer_lost(self, peer: Peer) -> None:
        """Silence: drain what is under way with it."""
        refusal = writer_silent(peer, self._out.at_s, self._settings)
        for part in list(self.open.parts.values()):
            # VERIFYING goes on without the peer: all its bytes are here. DRAINING goes on too,
            # silence is no proof that it writes no more.
            if part.incarnation == peer.incarnation and part.state in ASKING:
                self._give_up(part.attempt, of_source(part, refusal))

    # ---- time --------------------------------------------------------------------------------

    def tick(self) -> None:
        """Deadlines and repetitions."""
        now_s = self._out.at_s
        for part in list(self.open.parts.values()):
            # DRAINING has no deadline: its pages are not free before the writer is over, however
            # late.
            if part.state in WANTED and part.deadline_s <= now_s and part.ended is None:
                why = took_too_long(part.attempt, now_s, self._settings)
                self._give_up(part.attempt, why)
            if part.state in WRITABLE and part.resend_s <= now_s:
                self.resend(part)

    # ---- edges: the bytes arrive -------------------------------------------------------------

    def _offered_to_receiving(self, part: ReceivePart) -> None:
        """ACCEPTED. The Offer is repeated all the same: its Settled may be lost."""
        self.move_part(part, T.ACCEPTED, "")

    def _offered_or_receiving_to_verifying(self, part: ReceivePart, message: Settled) -> None:
        """DELIVERED: every byte has landed, says the writer; Accept may have been lost."""
        self.move_part(part, T.DELIVERED, "")
        # The Settled of the other sources brings none, and must not erase it.
        if part.share.is_authoritative:
            part.attempt.aux = message.aux
        self._judge(part, self.verifying.begin_part(part, message.checksums))

    def _judge(self, part: ReceivePart, found: SumFinding | Refusal) -> None:
        if isinstance(found, Refusal):
            self._verifying_to_closed(part, T.CORRUPTED, found)
            # Delivered is a proof of the writer's that all has arrived; the sums say it is none.
            self._end(part, ReceiveOutcome.CORRUPT, found, cause="corrupt", doubt=Doubt.ARRIVED)
            return
        attempt, lease = part.attempt, part.lease
        # ASKED is neither good nor bad: the transfer process will say, and ``verified`` comes here
        # again.
        part.is_verified = found is SumFinding.GOOD
        # The lease is one: it is committed when the last source is good, and not page by page.
        if lease is None or not all(part.is_verified for part in attempt.parts):
            return
        # Who has given up needs no copy in the device buffer; the pages are cached all the same.
        if attempt.is_preloaded and attempt.ended is None:
            self._fetcher.preload(lease, attempt.prompt_tokens, PreloadAsker(self, attempt))
        else:
            self._verifying_to_ready(attempt, lease)

    def preloaded(self, attempt: ReceiveAttempt, refusal: Refusal | None) -> None:
        """The prompt is in the device buffer too, or cannot be; its bytes are good all the same."""
        if refusal is not None and attempt.ended is None:
            # The engine hears why; what was received is cached all the same, so that asking again
            # moves nothing.
            self.fail_attempt(attempt, refusal)
        if attempt.lease is not None:
            self._verifying_to_ready(attempt, attempt.lease)

    def _verifying_to_ready(self, attempt: ReceiveAttempt, lease: LeaseRecord) -> None:
        """VERIFIED, all parts together: whole pages join the tree, the rest stays with the lease.

        Also where the engine has given up meanwhile: the bytes are good, so they are cached.
        """
        for part in attempt.parts:
            self.move_part(part, T.VERIFIED, "")
            self.received_bytes += part.moved_bytes
        self.saved_bytes += self._leases.bytes_of(attempt.prefix_tokens)
        if lease.lent is not None:
            self._land_in_arena(attempt, lease)
            return
        # Read before the commit: who has given up is not told Received, and gets no lease.
        left = attempt.ended
        if left is None:
            # Before the commit: a journal notes what moves in leases that an engine has, and this
            # one has it from here on.
            said = "pulled" if attempt.is_pulled else "received"
            self._leases.holders.hand_over(lease, f"{said} from {attempt.sources}")
        # No tokens beyond those claimed: the whole prompt is in its pages, and nothing else is. No
        # engine has said so, so it is noted also where only words of engines count.
        lease.written_tokens = count(lease.tokens)
        self._leases.commits.commit(lease, NO_TOKENS)
        if left is None:
            self.open.ready[lease.id] = attempt
            rows = self._leases.components.page_tables(lease)
            received = client.Received(
                receive=attempt.id,
                lease=lease.id,
                pages=lease.page_table,
                aux=attempt.aux,
                beside=rows,
            )
            self._out.answer(attempt.session, received)
        # The engine has it; a READY attempt lives as long as its lease, and must not keep it.
        attempt.aux = b""
        for part in attempt.parts:
            self._close(part, ReceiveOutcome.COMMITTED, None)
        if left is not None:
            # After the commit, so that the pages stay cached; the lock alone is let go.
            self._leases.holders.release(lease, ARRIVAL, left.code.value)
            self._ready_to_closed(attempt, left.message)

    def _land_in_arena(self, attempt: ReceiveAttempt, lease: LeaseRecord) -> None:
        """The engine has the KV where it wants it: there is no lease behind it, and no cache."""
        left = attempt.ended
        aux, attempt.aux = attempt.aux, b""
        # Before Received: what it names is the engine's again by then.
        pages = lease.page_table
        self._leases.holders.release(lease, ARRIVAL, RECEIVED if left is None else left.code.value)
        if left is None:
            told = client.Received(receive=attempt.id, lease=0, pages=pages, aux=aux)
            self._out.answer(attempt.session, told)
        for part in attempt.parts:
            self._close(part, ReceiveOutcome.COMMITTED, None)
        self._ready_to_closed(attempt, left.message if left is not None else "")

    def _verifying_to_closed(
        self, part: ReceivePart, trigger: DecodeTrigger, refusal: Refusal
    ) -> None:
        """CORRUPTED, or DROPPED because another source failed: nothing of it is cached."""
        self.move_part(part, trigger, refusal.message)
        # An answer that is under way must find no ticket: the part is closed, its pages may be
        # others'.
        self.verifying.forget_part(part)

    def _ready_to_closed(self, attempt: ReceiveAttempt, why: str) -> None:
        """RELEASED."""
        for part in attempt.parts:
            self.move_part(part, T.RELEASED, why)
        attempt.parts = ()

    # ---- edges: it ends without its bytes ----------------------------------------------------

    def _give_up(self, attempt: ReceiveAttempt, refusal: Refusal) -> None:
        """Tell the engine and the writers, keep the pages from everybody."""
        # An engine hears of one end. Deadline, cancel and a lost peer may come in one tick.
        if attempt.ended is not None or attempt.lease is None:
            return
        if not attempt.in_state(*WANTED):
            return
        self.fail_attempt(attempt, refusal)
        # One source that may still write is enough: the lease cannot be completed without it.
        if attempt.in_state(*ASKING):
            self._drop_parts(attempt, refusal)
            return
        # Every byte has landed and no writer is left to drain: the engine has heard, and what was
        # verified when the answer comes is cached for the next one.
        for part in attempt.in_state(D.VERIFYING):
            self.move_part(part, T.GIVEN_UP, refusal.message)
            part.history.add_line(self._out.at_s, f"given up while verifying ({refusal.message})")

    def _end(
        self, part: ReceivePart, outcome: ReceiveOutcome, why: Refusal, *, cause: str, doubt: Doubt
    ) -> None:
        """A part is CLOSED without its bytes: nothing comes of the others either."""
        attempt = part.attempt
        ended = attempt.ended
        if ended is None:
            ended = of_source(part, why)
            self.fail_attempt(attempt, ended)
        # First the others: who of them may still write decides whether the pages are free now.
        self._drop_parts(attempt, ended)
        self._writer_over(part, cause, doubt)
        self._close(part, outcome, why)

    def _drop_parts(self, attempt: ReceiveAttempt, refusal: Refusal) -> None:
        """What its sources still send is given up, what they have sent is of no use."""
        asking, delivered = attempt.in_state(*ASKING), attempt.in_state(D.VERIFYING)
        for part in asking:
            self._offered_or_receiving_to_draining(part, refusal)
        for part in delivered:
            self._verifying_to_closed(part, T.DROPPED, refusal)
        # Quarantined before the Aborts leave and before a part is closed: from here on nothing
        # that happens to the lease can free a page that one of these writers still fills.
        if asking and attempt.lease is not None:
            self.quarantines.begin_quarantine(attempt.lease, asking, refusal.message)
        for part in asking:
            self.resend(part)
        for part in delivered:
            self._close(part, ReceiveOutcome.ABORTED, refusal)

    def _offered_or_receiving_to_draining(self, part: ReceivePart, refusal: Refusal) -> None:
        """GIVEN_UP: what is said to the writer from now on, until it settles, is Abort."""
        self.move_part(part, T.GIVEN_UP, refusal.message)
        self.verifying.forget_part(part)
        part.unanswered = Abort(
            source=self._settings.incarnation,
            target=part.incarnation,
            handoff=part.handoff,
            room=part.room,
            reason=refusal.code.value,
        )
        # The Offer may have been repeated for long and its gap has grown; the Abort begins anew.
        part.resend_gap_s = self._settings.resend_s

    def _offered_or_receiving_to_closed(
        self, part: ReceivePart, trigger: DecodeTrigger, why: str
    ) -> None:
        """SETTLED without the bytes, or WRITER_GONE; ``_end`` says what that means."""
        self.move_part(part, trigger, why)
        self.verifying.forget_part(part)

    def _draining_to_closed(
        self, part: ReceivePart, trigger: DecodeTrigger, why: str, *, proof: str, doubt: Doubt
    ) -> None:
        """DELIVERED, SETTLED, WRITER_GONE or FENCED: the writer is done."""
        self.move_part(part, trigger, why)
        self._writer_over(part, proof, doubt)
        self._close(part, ReceiveOutcome.ABORTED, part.ended)

    def _writer_over(self, part: ReceivePart, proof: str, doubt: Doubt) -> None:
        """A writer writes no more; the pages go back with the last one, unless bytes are in doubt.

        Only where the attempt has failed: what is delivered is committed.
        """
        attempt, lease = part.attempt, part.lease
        # The worst of all writers counts: quiet is asked for once, for the whole lease.
        attempt.doubt = max(attempt.doubt, doubt)
        if lease is None:
            return
        writers = attempt.in_state(*WRITABLE)
        if writers:
            self.quarantines.narrow_writers(lease, writers)
        # Two ways to the same end: drained, it is in quarantine since the Abort; ended by the
        # writer itself, it never was, and only doubt can put it there.
        elif lease.quarantine is not None:
            self.quarantines.end_quarantine(lease, proof, attempt.doubt)
        else:
            self.quarantines.release_or_quarantine(part, lease, proof, attempt.doubt)

    def _close(self, part: ReceivePart, outcome: ReceiveOutcome, reason: Refusal | None) -> None:
        """The writer has no more to say: tell it the outcome, and keep that for its repetitions."""
        # First: from here on a repeated Settled finds no part, and ``outcomes`` answers it.
        is_last = self.open.close(part)
        peer = self._peers.by_incarnation.get(part.incarnation)
        # By incarnation: to a newer process of that node nothing is said, it never heard of this
        # handoff.
        self.outcomes.keep_outcome(peer, part, outcome, reason)
        is_committed = outcome is ReceiveOutcome.COMMITTED
        if is_committed:
            self.delivered += 1
        else:
            self.failed += 1
        self.tell_ended(part, outcome, reason)
        attempt = part.attempt
        if is_last:
            # A delivered attempt keeps its parts while READY: ``kvd why`` tells of them.
            if not is_committed:
                attempt.parts = ()
            if attempt.request is not None and self.open.lease_of_ready(attempt) is None:
                self.open.unname(attempt)

    def fail_attempt(self, attempt: ReceiveAttempt, refusal: Refusal) -> None:
        """The engine hears why nothing comes of it."""
        attempt.ended = refusal
        self._out.answer(attempt.session, client.ReceiveFailed(attempt.id, refusal))

    # ---- small things ------------------------------------------------------------------------

    def tell_ended(
        self, part: ReceivePart, outcome: ReceiveOutcome, reason: Refusal | None
    ) -> None:
        """Bytes that need not be sent are told with one part, that of the first component's end."""
        is_told = outcome is ReceiveOutcome.COMMITTED and part.share.is_authoritative
        tell_ended(
            part,
            outcome,
            reason,
            prefix_tokens=part.prefix_tokens,
            saved_bytes=self._leases.bytes_of(part.prefix_tokens) if is_told else 0,
            lease=part.lease.id if part.lease is not None else 0,
            out=self._out,
        )

    def resend(self, part: ReceivePart) -> None:
        """Say to the prefill side again what it has not answered, and when the next time is."""
        peer = self._peers.by_incarnation.get(part.incarnation)
        if peer is not None and part.unanswered is not None:
            self._out.send(peer.link, part.unanswered)
        part.plan_resend(self._out.at_s, self._settings)

    def _moved(self, part: ReceivePart, moved_bytes: int) -> None:
        """What the writer says has landed, as far as it can be."""
        # Progress is lossy and may be overtaken, and a peer may say any number: never less than was
        # known, never more than was granted.
        part.moved_bytes = min(max(part.moved_bytes, moved_bytes), part.total_bytes)

    def _part(self, peer: Peer, message: Accept | Progress | Settled) -> ReceivePart | None:
        # The id is ours, and any peer could name it: only whoever it was offered to speaks of it.
        part = self.open.by_handoff.get(message.handoff)
        if part is not None and part.incarnation != peer.incarnation:
            refusal = not_its_own(part, peer, type(message).__name__, self._settings)
            self._peers.reject(peer.link, peer.incarnation, refusal)
            return None
        return part

    def move_part(self, part: ReceivePart, trigger: DecodeTrigger, why: str) -> None:
        """Apply ``trigger`` to a part of this side."""
        move_decode(part, trigger, why, self._out)
