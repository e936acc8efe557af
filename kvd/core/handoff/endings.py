"""How a receive ends without its bytes: what becomes of its parts, its writers and its pages.

One source that fails ends the attempt, as giving it up does: the engine hears of it at once, what
the other sources still send is given up (Abort, DRAINING, the pages in quarantine), what they have
sent is dropped. The pages come back with the last writer that may write, and not before.

What must not live here: what a message does (``decode``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.effects import worse
from kvd.core.handoff.outcomes import Outcomes
from kvd.core.handoff.protocol import Decode, DecodeTrigger, move_decode, tell_ended
from kvd.core.handoff.quarantine import Quarantines
from kvd.core.handoff.refusals import of_source
from kvd.wire import client
from kvd.wire.peer import Abort, Outcome

if TYPE_CHECKING:
    from kvd.core.effects import Doubt, Outbox
    from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart
    from kvd.core.handoff.verify import Verifying
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.peers.registry import Peers
    from kvd.core.settings import Settings
    from kvd.errors import Refusal

D, T = Decode, DecodeTrigger

ASKING = {D.OFFERED, D.RECEIVING}
"""The writer may write, and we still want it."""

WRITABLE = {*ASKING, D.DRAINING}
"""The writer may write: what we said last is repeated, so that a lost Settled is no deadline."""


class Endings:
    """The parts that are not over, and how they end."""

    def __init__(
        self,
        settings: Settings,
        leases: LeaseTable,
        peers: Peers,
        verifying: Verifying,
        out: Outbox,
    ) -> None:
        self.parts: dict[int, ReceivePart] = {}
        """By number: queued, under way, draining."""
        self.receptions: dict[int, ReceiveAttempt] = {}
        """By receive id: those that have such a part."""
        self.by_handoff: dict[int, ReceivePart] = {}
        """Those that have been offered."""
        self.outcomes = Outcomes(settings, out)
        self.settling = Quarantines(settings, leases, peers, out)
        self.delivered = self.failed = 0
        self._settings = settings
        self._leases = leases
        self._peers = peers
        self._verifying = verifying
        self._out = out

    def drop(self, reception: ReceiveAttempt, refusal: Refusal) -> None:
        """What its sources still send is given up, what they have sent is of no use."""
        asking, delivered = reception.in_state(*ASKING), reception.in_state(D.VERIFYING)
        for part in asking:
            move_decode(part, T.GIVEN_UP, refusal.message, self._out)
        for part in delivered:
            move_decode(part, T.DROPPED, refusal.message, self._out)
            self._verifying.forget(part)
        if asking and reception.lease is not None:
            self.settling.quarantine(reception.lease, asking, refusal.message)
        for part in asking:
            mine, code = self._settings.incarnation, refusal.code.value
            part.unanswered = Abort(
                source=mine,
                target=part.incarnation,
                handoff=part.handoff,
                room=part.room,
                reason=code,
            )
            part.resend_gap_s = self._settings.resend_s
            self.resend(part)
        for part in delivered:
            self.close(part, Outcome.ABORTED, refusal)

    def end(
        self, part: ReceivePart, outcome: Outcome, why: Refusal, *, cause: str, doubt: Doubt
    ) -> None:
        """A part is CLOSED without its bytes: nothing comes of the others either."""
        reception = part.reception
        ended = reception.ended
        if ended is None:
            ended = of_source(part, why)
            self.fail(reception, ended)
        self.drop(reception, ended)
        self._over(part, cause, doubt)
        self.close(part, outcome, why)

    def drained(self, part: ReceivePart, proof: str, doubt: Doubt) -> None:
        """DRAINING -> CLOSED: the writer is done."""
        self._over(part, proof, doubt)
        self.close(part, Outcome.ABORTED, part.ended)

    def _over(self, part: ReceivePart, proof: str, doubt: Doubt) -> None:
        """A writer writes no more; the pages go back with the last one, unless bytes are in doubt.

        Only where the attempt has failed: what is delivered is committed.
        """
        reception, lease = part.reception, part.lease
        reception.doubt = worse(reception.doubt, doubt)
        if lease is None:
            return
        writers = reception.in_state(*WRITABLE)
        if writers:
            self.settling.narrow(lease, writers)
        elif lease.quarantine is not None:
            self.settling.end(lease, proof, reception.doubt)
        else:
            self.settling.free(part, lease, proof, reception.doubt)

    def close(self, part: ReceivePart, outcome: Outcome, reason: Refusal | None) -> None:
        """The writer has no more to say: tell it the outcome, and keep that for its repetitions."""
        del self.parts[part.id]
        del self.by_handoff[part.handoff]
        peer = self._peers.by_incarnation.get(part.incarnation)
        self.outcomes.keep(peer, part, outcome, reason)
        is_committed = outcome is Outcome.COMMITTED
        if is_committed:
            self.delivered += 1
        else:
            self.failed += 1
        self.tell(part, outcome, reason)
        reception = part.reception
        if not any(one.id in self.parts for one in reception.parts):
            del self.receptions[reception.id]
            if not is_committed:
                reception.parts = ()

    def fail(self, reception: ReceiveAttempt, refusal: Refusal) -> None:
        """The engine hears why nothing comes of it."""
        reception.ended = refusal
        self._out.answer(reception.session, client.ReceiveFailed(reception.id, refusal))

    def tell(self, part: ReceivePart, outcome: Outcome, reason: Refusal | None) -> None:
        """Bytes that need not be sent are told with one part, that of the first component's end."""
        is_told = outcome is Outcome.COMMITTED and part.share.is_authoritative
        saved_bytes = self._leases.bytes_of(part.prefix_tokens) if is_told else 0
        tell_ended(part, outcome, reason, saved_bytes, self._out)

    def resend(self, part: ReceivePart) -> None:
        """Say to the prefill side again what it has not answered, and when the next time is."""
        peer = self._peers.by_incarnation.get(part.incarnation)
        if peer is not None and part.unanswered is not None:
            self._out.send(peer.link, part.unanswered)
        part.resend_s = self._out.at_s + part.resend_gap_s
        part.resend_gap_s = min(2 * part.resend_gap_s, self._settings.max_resend_s)
