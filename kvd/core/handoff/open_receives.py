"""Which receives of this node are open, and what they are found by.

A part is found by its number, and by its handoff once it is offered; an attempt by the number of
its first part, by the lease that it was delivered as, and by the name that its engine gave it.

Invariants: an attempt is in ``attempts`` while one of its parts is in ``parts``; ``by_handoff`` are
those of ``parts`` that were offered; who is in ``ready`` has no part that is open.

What must not live here: what happens to a part (``receive``), and before it is offered
(``receive_requests``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.handoff.protocol import Decode

if TYPE_CHECKING:
    from kvd.core.handoff.parts import ReceiveAttempt, ReceivePart, RequestName

OPEN = {Decode.OFFERED, Decode.RECEIVING, Decode.VERIFYING, Decode.DRAINING}
"""States in which the writer's word is still to come."""


@mypyc_attr(allow_interpreted_subclasses=True)
class OpenReceives:
    """Parts and attempts that are not over, and the numbers of those to come."""

    __slots__ = ("_last_handoff", "_last_part", "attempts", "by_handoff", "named", "parts", "ready")

    def __init__(self) -> None:
        self.parts: dict[int, ReceivePart] = {}
        """By number: queued, under way, draining."""
        self.attempts: dict[int, ReceiveAttempt] = {}
        """By receive id: those that have such a part."""
        self.by_handoff: dict[int, ReceivePart] = {}
        """Of ``parts`` those that have been offered: a message names its handoff."""
        self.ready: dict[int, ReceiveAttempt] = {}
        """By lease id: delivered, until the engine releases the lease."""
        self.named: dict[RequestName, ReceiveAttempt] = {}
        """Of ``attempts`` and ``ready`` those with a request id, the last of each."""
        self._last_part = 0
        self._last_handoff = 0

    def next_number(self) -> int:
        """Of a part, and of the receive whose first part it is."""
        self._last_part += 1
        return self._last_part

    def next_handoff(self) -> int:
        """Of an Offer that goes out in this step."""
        self._last_handoff += 1
        return self._last_handoff

    # ---- it begins and ends ------------------------------------------------------------------

    def add(self, attempt: ReceiveAttempt) -> None:
        """It is asked for."""
        for part in attempt.parts:
            self.parts[part.id] = part
        self.attempts[attempt.id] = attempt
        name = attempt.name
        if name is not None:
            self.named[name] = attempt

    def offered(self, attempt: ReceiveAttempt) -> None:
        """From now on a peer may speak of each of its parts."""
        for part in attempt.parts:
            self.by_handoff[part.handoff] = part

    def drop(self, attempt: ReceiveAttempt) -> None:
        """It ends before it was offered."""
        for part in attempt.parts:
            del self.parts[part.id]
        del self.attempts[attempt.id]

    def close(self, part: ReceivePart) -> bool:
        """Its writer has no more to say; whether it is the last part of its attempt."""
        # From here on a repeated Settled finds no part, and ``outcomes`` answers it.
        del self.parts[part.id]
        del self.by_handoff[part.handoff]
        attempt = part.attempt
        # The last part takes the attempt along; before, ``cancel`` and ``why`` must still find it.
        if any(other.id in self.parts for other in attempt.parts):
            return False
        del self.attempts[attempt.id]
        return True

    def unname(self, attempt: ReceiveAttempt) -> None:
        """No call is answered with it any more; a later one may have its name by now."""
        name = attempt.name
        if name is not None and self.named.get(name) is attempt:
            del self.named[name]

    # ---- it is found -------------------------------------------------------------------------

    def known(self) -> list[ReceivePart]:
        """Every part that is not over: those under way, then those that were delivered."""
        delivered = [part for attempt in self.ready.values() for part in attempt.parts]
        return [*self.parts.values(), *delivered]

    def of_session(self, session: int) -> list[ReceiveAttempt]:
        """Those that an engine still waits for, or that drain."""
        return [attempt for attempt in self.attempts.values() if attempt.session == session]

    def lease_of_ready(self, attempt: ReceiveAttempt) -> int | None:
        """The lease as which it was delivered; None: it is not READY."""
        lease = attempt.lease
        return lease.id if lease is not None and self.ready.get(lease.id) is attempt else None

    def offer_floor(self, incarnation: str) -> int:
        """The lowest handoff id still open towards this incarnation; the next id if none is."""
        return min(
            (
                part.handoff
                for part in self.parts.values()
                # QUEUED has no id yet; of every other one in ``parts`` there is still something to
                # be said.
                if part.incarnation == incarnation and part.state in OPEN
            ),
            default=self._last_handoff + 1,
        )
