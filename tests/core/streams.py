"""The connections of simulated sending agents: paths of their own, with what was left in them.

What a dead process or a destroyed agent had sent arrives in order, and then the end of its
connection. By default that is at once; a test holds the network, and says when.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvd.core import effects, inputs
from kvd.core.effects import Doubt

if TYPE_CHECKING:
    from tests.core.side import Flight, Side


class Stream:
    """One connection into the process that ``to`` runs now."""

    def __init__(self, name: str, to: Side) -> None:
        self.name = name
        self.to = to
        self.left: deque[Flight] = deque()
        self.is_over = False
        """Its sender sends no more."""


class Inflow:
    """The receiving end of a process: its connections, and who waits for their ends."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.open: dict[str, Stream] = {}
        self.questions: dict[int, set[str]] = {}
        """By lease: the connections that must end before it is quiet."""

    def quiesce(self, order: effects.Quiesce) -> None:
        ends = set(self.open) if order.doubt is Doubt.SENT else set()
        self.questions[order.lease] = ends
        if ends:
            self._tell(order.lease)

    def exempt(self, order: effects.Exempt) -> None:
        for lease in order.leases:
            if lease in self.questions:
                self.questions[lease] -= set(order.streams)

    def ends(self, stream: Stream) -> None:
        """What it had left has arrived, and nothing follows."""
        assert not stream.left
        if self.open.pop(stream.name, None) is not None:
            for lease, streams in self.questions.items():
                if stream.name in streams:
                    streams.discard(stream.name)
                    self._tell(lease)

    def over(self) -> list[Stream]:
        """Connections whose senders send no more."""
        return [stream for stream in self.open.values() if stream.is_over]

    def answered(self) -> list[int]:
        """The leases for which nothing is on its way any more."""
        found = [lease for lease, ends in self.questions.items() if not ends]
        for lease in found:
            del self.questions[lease]
        return found

    def _tell(self, lease: int) -> None:
        streams = tuple(sorted(self.questions[lease]))
        self.side.inbox.append(inputs.Awaiting(0.0, (lease,), streams))
