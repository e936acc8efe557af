"""What the decode side answers to every repeated Settled: Closed, for ever.

An outcome is kept until the prefill side's floor has passed its id, or that incarnation is gone, or
``MAX_KEPT`` later ones are. After that a late Settled is still answered: unknown, which ends its
repetition just as well.
"""

from __future__ import annotations

from itertools import takewhile
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.peers.peer import as_told
from kvd.errors import Code, Refusal
from kvd.wire.peer import Closed, ReceiveOutcome

if TYPE_CHECKING:
    from kvd.core.handoff.parts import ReceivePart
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings


MAX_KEPT = 16_384
"""Of one writer, which may never raise its floor: half a minute of 500 handoffs a second."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Outcomes:
    """Closed messages by writer and handoff id."""

    def __init__(self, settings: Settings, out: Outbox) -> None:
        self.kept: dict[str, dict[int, Closed]] = {}
        """By the writer's incarnation, in the order in which they were closed."""
        self._settings = settings
        self._out = out

    def keep_outcome(
        self, peer: Peer | None, part: ReceivePart, outcome: ReceiveOutcome, reason: Refusal | None
    ) -> None:
        """Say Closed now, and again whenever Settled comes again; no peer: nobody will ask."""
        if peer is not None:
            # Worded before it is kept: a peer that learns the newer codes later must not hear
            # another answer than the first time.
            reason = as_told(reason, peer)
            closed = Closed(
                source=self._settings.incarnation,
                target=part.incarnation,
                handoff=part.handoff,
                outcome=outcome,
                reason=reason,
            )
            # Kept as well as said: Closed may be lost, and then Settled comes again until it is
            # heard.
            kept = self.kept.setdefault(part.incarnation, {})
            kept[part.handoff] = closed
            if len(kept) > MAX_KEPT:
                # The oldest by order of closing: whoever still repeats that Settled hears that its
                # outcome is unknown, which ends it too.
                del kept[next(iter(kept))]
            self._out.send(peer.link, closed)

    def answer_settled(self, peer: Peer, handoff: int) -> None:
        """A Settled for a part that is over here."""
        kept = self.kept.get(peer.incarnation, {}).get(handoff)
        # Silence would let it repeat Settled until its linger is over; any Closed ends that.
        if kept is None:
            kept = Closed(
                source=self._settings.incarnation,
                target=peer.incarnation,
                handoff=handoff,
                outcome=ReceiveOutcome.FAILED,
                reason=Refusal(
                    Code.UNKNOWN_OUTCOME,
                    f"handoff {handoff} ended here before; its outcome was folded away",
                    side=self._settings.name,
                ),
            )
        self._out.send(peer.link, kept)

    def fold_outcomes(self, peer: Peer) -> None:
        """Forget what the prefill side no longer asks about: a Ping costs what it folds.

        One that was closed after a later one goes with that.
        """
        kept = self.kept.get(peer.incarnation)
        if kept is None:
            return
        # From the front and no further than it must: a Ping that folds nothing costs one look.
        for handoff in list(takewhile(lambda one: one < peer.settled_floor, kept)):
            del kept[handoff]
        if not kept:
            del self.kept[peer.incarnation]

    def forget_writer(self, incarnation: str) -> None:
        """That writer is gone: nobody asks."""
        self.kept.pop(incarnation, None)
