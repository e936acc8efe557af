"""When bytes of a writer that is over have come to rest, so that its pages may be another's.

Over TCP a peer's write is read off a socket straight into our pages by NIXL's progress thread. A
peer that destroyed its sending agent, or died, sends nothing more by itself; yet its system may
hold megabytes of it, which it goes on sending, packets are on their way, and what has arrived
waits in our kernel until the thread gets to it. Only the connection tells when that is over: its
end follows the data. What the peer says of itself comes another way, and may come first.

So a question that reaches to what was ``SENT`` waits for the end of every connection that there was
when it was asked: a writer that was over by then has none but these, for UCX answers a connection
before anything is written through it. The end is an end of stream or a reset that has arrived, with
nothing unread; or that the socket is closed. A far end that does not know the connection any more
resets it; one that is silent is given up by our kernel after 10 s, for which we have it ask. Not
waited for are connections of this process with itself and those of its own sending agents, through
which nobody writes to us; and what the daemon exempts, if that connection still stands: a
connection of the same name would have ended it.

What has arrived must then be read, and the thread must have got past storing it: it went to sleep,
or computed for longer than storing one read can take.

On one host nothing of a peer's is in between: its process copies into our pages itself, and its end
is the end of that (``mapping``); its connections end with it. RDMA passes no socket
and leaves no mark: where this process has such a device open, the answer is never Quiet, and only
its own end, a fence, gives the pages back. The queue pairs and registrations end with it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

from kvd.core.effects import Doubt
from kvd.core.inputs import Awaiting, Quiet
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.streams import ask_alive, inward, marks, rdma_devices

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import Exempt, Quiesce
    from kvd.transfer.orders import Report
    from kvd.transfer.streams import StreamMark

_STORED_AFTER_NS: Final = 2_000_000
SHORTEST_TICK_S: Final = 0.002
LONGEST_TICK_S: Final = 0.1
TICKS_PER_WAIT: Final = 16


class PendingQuiesce:
    """One lease: what it still waits for."""

    def __init__(self, order: Quiesce, seen: dict[str, StreamMark]) -> None:
        self.lease = order.lease
        self.due = {name: mark.received for name, mark in seen.items() if mark.unread}
        """By socket: bytes that must have been read."""
        self.ends: dict[str, str] = {}
        """By socket: the streams that must end."""
        # Otherwise only what has reached this host is in doubt, and that is in ``due``.
        if order.doubt is Doubt.SENT:
            self.ends = {name: mark.stream for name, mark in seen.items()}
        self.taken_at_ns: int | None = None

    def look(self, seen: dict[str, StreamMark]) -> None:
        """Drop what is over."""
        self.due = {
            name: due
            # Counted from the beginning of the connection: what came later is not in doubt.
            for name, due in self.due.items()
            if name in seen and seen[name].received - seen[name].unread < due
        }
        self.ends = {
            name: stream for name, stream in self.ends.items() if _may_bring(seen.get(name))
        }

    def exempt(self, streams: set[str], seen: dict[str, StreamMark]) -> None:
        """Wait no more for these; but one that does not stand any more is read to its end."""
        self.ends = {
            name: stream
            for name, stream in self.ends.items()
            if stream not in streams or name not in seen or not seen[name].is_established
        }


class Quiescence:
    """The questions that are not answered yet.

    Args:
        thread: NIXL's progress thread.
        outgoing: the sockets of the sending agents of this process.
        report: takes the answers.
    """

    def __init__(
        self, thread: int, outgoing: Callable[[], set[str]], report: Callable[[Report], None]
    ) -> None:
        self._thread = thread
        self._outgoing = outgoing
        self._report = report
        self._asked: list[Quiesce] = []
        self._open: list[PendingQuiesce] = []
        self._told: dict[int, tuple[str, ...]] = {}
        self._since_s = 0.0
        self._next_s = 0.0

    @property
    def patience_s(self) -> float | None:
        """How long a look may wait; None: nothing is asked."""
        if not self._asked and not self._open:
            return None
        return max(0.0, self._next_s - time.monotonic())

    def ask(self, order: Quiesce) -> None:
        """Take a question; what there is at the next ``step`` is what it is about."""
        self._asked.append(order)
        # At once, and then less and less often the longer it takes.
        self._since_s = self._next_s = time.monotonic()

    def exempt(self, order: Exempt) -> None:
        """Some connections are of living writers."""
        # With what is there at this moment: by its name alone a stream may be another one's by now.
        seen, leases = self._look(), set(order.leases)
        self._begin(seen)
        for question in self._open:
            if question.lease in leases:
                question.exempt(set(order.streams), seen)
        self._next_s = 0.0

    def step(self) -> None:
        """Look, if it is time; answer what can be."""
        now_s = time.monotonic()
        if now_s < self._next_s or not (self._asked or self._open):
            return
        # One look for all that is asked, before what was asked is begun: it is about these
        # connections.
        seen = self._look()
        self._begin(seen)
        # Asked at every look: what is not open now may be later.
        is_blind = bool(devices := rdma_devices())
        rest = []
        for question in self._open:
            question.look(seen)
            # What comes by RDMA leaves no mark: no look here could ever say that it is over.
            if is_blind or not self._is_at_rest(question):
                rest.append(question)
            else:
                self._told.pop(question.lease, None)
                self._report(Quiet(UNSTAMPED, question.lease))
        self._open = rest
        self._tell(tuple(f"rdma ({device})" for device in devices))
        tick_s = (now_s - self._since_s) / TICKS_PER_WAIT
        self._next_s = now_s + min(LONGEST_TICK_S, max(SHORTEST_TICK_S, tick_s))

    def _begin(self, seen: dict[str, StreamMark]) -> None:
        """What is asked is about what there is now."""
        begun = [PendingQuiesce(order, seen) for order in self._asked]
        # Only where an end is waited for: a silent host would never give it by itself.
        if ends := {name for question in begun for name in question.ends}:
            ask_alive(ends)
        self._open += begun
        # Answered from now on by ``_open``: a question asked after this has a look of its own.
        self._asked.clear()

    def _look(self) -> dict[str, StreamMark]:
        """The connections by which somebody may write to us."""
        outgoing, seen = self._outgoing(), inward(marks())
        return {name: mark for name, mark in seen.items() if name not in outgoing}

    def _is_at_rest(self, question: PendingQuiesce) -> bool:
        if question.due or question.ends:
            return False
        # From here on everything in doubt has been read, but may not be stored yet: the count
        # begins.
        busy_ns = _cpu_ns(self._thread)
        if question.taken_at_ns is None:
            question.taken_at_ns = busy_ns
        return _sleeps(self._thread) or busy_ns - question.taken_at_ns > _STORED_AFTER_NS

    def _tell(self, unseen: tuple[str, ...]) -> None:
        """Report what is waited for where it has changed; together, where it is the same."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for question in self._open:
            streams = (*unseen, *sorted(question.ends.values()))
            # Each lease hears of a change only: a look comes every few milliseconds.
            if self._told.get(question.lease, ()) != streams:
                self._told[question.lease] = streams
                groups.setdefault(streams, []).append(question.lease)
        for streams, leases in groups.items():
            self._report(Awaiting(UNSTAMPED, tuple(leases), streams))


def _may_bring(mark: StreamMark | None) -> bool:
    """Whether something may still be read off this connection; None: it is closed."""
    return mark is not None and (not mark.has_ended or mark.unread > 0)


def _sleeps(thread: int) -> bool:
    """Whether the thread waits for an event: copying never sleeps that way."""
    with open(f"/proc/self/task/{thread}/stat", encoding="ascii") as line:
        return line.read().rpartition(")")[2].split()[0] == "S"


def _cpu_ns(thread: int) -> int:
    """Nanoseconds the thread has computed so far."""
    with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as line:
        return int(line.read().split()[0])
