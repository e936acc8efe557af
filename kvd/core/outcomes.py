"""What the decode side answers to every repeated Settled: Closed, for ever.

An outcome is kept until the prefill side's floor has passed its id, or that incarnation is gone.
After that a late Settled is still answered: unknown, which ends its repetition just as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.peer_drain import as_told
from kvd.errors import Code, Refusal
from kvd.wire.peer import Closed, Outcome

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.parts import DecodePart
    from kvd.core.peer import Peer
    from kvd.core.settings import Settings


class Outcomes:
    """Closed messages by handoff id."""

    def __init__(self, settings: Settings, out: Outbox) -> None:
        self.kept: dict[int, Closed] = {}
        self._settings = settings
        self._out = out

    def keep(
        self, peer: Peer | None, part: DecodePart, outcome: Outcome, reason: Refusal | None
    ) -> None:
        """Say Closed now, and again whenever Settled comes again; no peer: nobody will ask."""
        if peer is not None:
            reason = as_told(reason, peer)
            closed = Closed(
                self._settings.incarnation, part.incarnation, part.handoff, outcome, reason
            )
            self.kept[part.handoff] = closed
            self._out.send(peer.link, closed)

    def answer(self, peer: Peer, handoff: int) -> None:
        """A Settled for a part that is over here."""
        kept = self.kept.get(handoff)
        if kept is None or kept.target != peer.incarnation:
            kept = Closed(
                self._settings.incarnation,
                peer.incarnation,
                handoff,
                Outcome.FAILED,
                Refusal(
                    Code.UNKNOWN_OUTCOME,
                    f"handoff {handoff} ended here before; its outcome was folded away",
                    side=self._settings.name,
                ),
            )
        self._out.send(peer.link, kept)

    def fold(self, peer: Peer) -> None:
        """Forget what the prefill side no longer asks about."""
        over = [
            handoff
            for handoff, closed in self.kept.items()
            if closed.target == peer.incarnation and handoff < peer.settled_floor
        ]
        for handoff in over:
            del self.kept[handoff]

    def forget(self, incarnation: str) -> None:
        """That writer is gone: nobody asks."""
        self.kept = {
            handoff: closed for handoff, closed in self.kept.items() if closed.target != incarnation
        }
