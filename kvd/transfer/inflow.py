"""When bytes that have already arrived at this host have come to rest.

Over TCP a peer's write is read off a socket straight into our pages by NIXL's progress thread. A
peer that destroyed its sending agent sends nothing more, yet what it had sent may still wait in
our kernel's receive buffer, and would land when the thread gets to it. ``Inflow`` tells when
everything that was waiting at one moment has been taken off its socket and the thread has got
past it: it went to sleep, or computed for longer than storing one read can take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvd.transfer.nixl import Receiver

_STORED_AFTER_NS: Final = 2_000_000


class Inflow:
    """One question: has what was waiting when this was made come to rest?"""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._due = {name: mark.received for name, mark in receiver.marks().items() if mark.unread}
        self._taken_at_ns: int | None = None

    def is_at_rest(self) -> bool:
        """Whether it has; stays true."""
        marks = self._receiver.marks()
        self._due = {
            name: due
            for name, due in self._due.items()
            if name in marks and marks[name].received - marks[name].unread < due
        }
        if self._due:
            return False
        busy_ns = _cpu_ns(self._receiver.thread)
        if self._taken_at_ns is None:
            self._taken_at_ns = busy_ns
        return _sleeps(self._receiver.thread) or busy_ns - self._taken_at_ns > _STORED_AFTER_NS


def _sleeps(thread: int) -> bool:
    """Whether the thread waits for an event: copying never sleeps that way."""
    with open(f"/proc/self/task/{thread}/stat", encoding="ascii") as line:
        return line.read().rpartition(")")[2].split()[0] == "S"


def _cpu_ns(thread: int) -> int:
    """Nanoseconds the thread has computed so far."""
    with open(f"/proc/self/task/{thread}/schedstat", encoding="ascii") as line:
        return int(line.read().split()[0])
