"""The connections of simulated transfer processes, and what is left in them when a sender is over.

A connection is a path of its own, slower or faster than what is said about it: what a dead process
or a destroyed agent had sent arrives piece by piece, in order, and the end of the connection behind
it. What has arrived waits in the receiver's socket until it is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.effects import Doubt

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core import effects
    from kvd.sim.agenda import Agenda
    from kvd.sim.flight import Flight

PIECE_S = 0.3
"""At most, between two pieces of what was left behind."""
SILENT = 0.03
"""Of the ends: the network or the sender's host is silent, and keepalive finds out."""
KEEPALIVE_S = 10.0
LOOK_S = 0.05
READ_S = 0.2


class Stream:
    """One connection of a sending agent, as both of its ends know it."""

    def __init__(self, name: str, to: Inbound) -> None:
        self.name = name
        self.to = to
        self.left: list[Flight] = []
        """Sent, and not all arrived yet; in order."""


class InboundQuestion:
    """An order to say Quiet that is not carried out yet."""

    def __init__(self, lease: int, ends: set[str]) -> None:
        self.lease = lease
        self.ends = ends
        """Connections that must end first."""


class Inbound:
    """The receiving end of one transfer process."""

    def __init__(
        self,
        agenda: Agenda,
        random: Callable[[], float],
        on_quiet: Callable[[int], None],
        on_awaiting: Callable[[int, tuple[str, ...]], None],
    ) -> None:
        self.streams: dict[str, Stream] = {}
        """Those that have not ended here."""
        self.questions: list[InboundQuestion] = []
        self.asked = 0
        """Orders that nobody has looked at yet."""
        self.is_alive = True
        self._unread: list[Flight] = []
        """In our own sockets."""
        self._agenda = agenda
        self._random = random
        self._on_quiet = on_quiet
        self._on_awaiting = on_awaiting

    def connect(self, name: str) -> Stream:
        """A sending agent has made a connection to us."""
        stream = self.streams[name] = Stream(name, self)
        return stream

    def die(self) -> None:
        """Our sockets are gone, and whatever was on its way to them."""
        self.is_alive = False
        self.streams.clear()
        self.questions.clear()
        self._unread.clear()

    # ---- the network -------------------------------------------------------------------------

    def over(self, stream: Stream) -> None:
        """Its sender sends no more: what it has left arrives, and then the end."""
        is_silent = self._random() < SILENT
        delay_s = KEEPALIVE_S if is_silent else PIECE_S * self._random()
        self._agenda.after(delay_s, self._arrive, stream)

    def _arrive(self, stream: Stream) -> None:
        if not self.is_alive:
            return
        if not stream.left:
            self._end(stream)
            return
        flight = stream.left[0]
        rest = len(flight.source) - flight.arrived
        flight.arrived += int((rest + 1) * self._random())
        if flight not in self._unread:
            self._unread.append(flight)
            self._agenda.after(READ_S * self._random(), self._read, flight)
        if self._random() < 0.5 or flight.arrived == len(flight.source):
            del stream.left[0]
        self._agenda.after(PIECE_S * self._random(), self._arrive, stream)

    def _end(self, stream: Stream) -> None:
        del self.streams[stream.name]
        for question in [one for one in self.questions if stream.name in one.ends]:
            question.ends.discard(stream.name)
            self._told(question)

    # ---- our sockets -------------------------------------------------------------------------

    def _read(self, flight: Flight) -> None:
        """Some of what waits lands."""
        if flight not in self._unread:
            return
        n_pages = flight.arrived - flight.done
        flight.land(int((n_pages + 1) * self._random()))
        if flight.done < flight.arrived:
            self._agenda.after(READ_S * self._random(), self._read, flight)
        else:
            self._unread.remove(flight)

    # ---- orders ------------------------------------------------------------------------------

    def quiesce(self, order: effects.Quiesce) -> None:
        """Say Quiet when nothing that is in doubt can still land."""
        self.asked += 1
        self._agenda.after(LOOK_S * self._random(), self._look, order)

    def exempt(self, order: effects.Exempt) -> None:
        """These are of living writers."""
        for question in [one for one in self.questions if one.lease in order.leases]:
            if question.ends & set(order.streams):
                question.ends -= set(order.streams)
                self._told(question)

    def _look(self, order: effects.Quiesce) -> None:
        if self.is_alive:
            self.asked -= 1
            ends = set(self.streams) if order.doubt is Doubt.SENT else set()
            question = InboundQuestion(order.lease, ends)
            self.questions.append(question)
            self._told(question)

    def _told(self, question: InboundQuestion) -> None:
        if question.ends:
            self._on_awaiting(question.lease, tuple(sorted(question.ends)))
        else:
            self._agenda.after(LOOK_S * self._random(), self._quiet, question)

    def _quiet(self, question: InboundQuestion) -> None:
        if question not in self.questions:
            return
        self.questions.remove(question)
        for flight in self._unread:
            flight.land(flight.arrived - flight.done)
        self._unread.clear()
        self._on_quiet(question.lease)
