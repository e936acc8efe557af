"""Watches over processes that map the pool and have no connection here: when they are dead.

Nothing tells this daemon of their death. The connections that would have are those of the daemon
before a restart, or were closed by a process that lives. So it looks: soon after somebody is
awaited, because a process that is dying closes its connection just before it is dead, then less and
less often, and every half second while there is anyone to look for.

A process counts as dead only when that is certain. /proc may hide the processes of other users, but
a signal 0 tells those from none at all. A number that is in use again belongs to another process
when that one was started at another time. One of another pid namespace (0) is never found dead.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kvd.journal.engines import Process

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping

LOOK_EVERY_S: Final = 0.5
FIRST_LOOK_S: Final = 0.005
"""After somebody is awaited; each look then comes twice as late as the one before."""

_ENDED_TICKS: Final = 1
"""No process of an engine has started so early."""

_STATE: Final = 0
_THREADS: Final = 17
_STARTED: Final = 19
"""Places of fields 3, 20 and 22 of /proc/PID/stat, behind the name in brackets."""


def started_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since the boot.

    Returns:
        0 when it lives and that cannot be seen; None when there is no such process, or nothing but
        an exit status is left of it.
    """
    if pid <= 0:
        return 0
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        # Hidden is not dead.
        return 0 if _is_there(pid) else None
    # A zombie whose threads go on is no dead one: they still write.
    if fields[_STATE] in {b"Z", b"X"} and int(fields[_THREADS]) <= 1:
        return None
    return int(fields[_STARTED])


def process_now(pid: int) -> Process:
    """The process that has this pid; one that has ended is noted so that nobody passes for it."""
    ticks = started_ticks(pid)
    return Process(pid, _ENDED_TICKS if ticks is None else ticks)


def is_alive(process: Process) -> bool:
    """Whether it is not certain that this very process is dead."""
    found = started_ticks(process.pid)
    if found is None:
        return False
    return not found or not process.start_ticks or found == process.start_ticks


class FormerProcesses:
    """Looks from ``start`` to ``close``, while anybody is awaited."""

    def __init__(
        self,
        awaited: Callable[[], Mapping[int, tuple[Process, ...]]],
        on_dead: Callable[[int, tuple[Process, ...]], None],
    ) -> None:
        """Prepare.

        Args:
            awaited: session to its processes that have no connection and are not proven dead.
            on_dead: takes session, those of them that are.
        """
        self._awaited = awaited
        self._on_dead = on_dead
        self._next: asyncio.TimerHandle | None = None
        self._gap_s = LOOK_EVERY_S

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look now, and again while there is anyone to look for."""
        self._loop = loop
        self._look()

    def look_soon(self) -> None:
        """One more is awaited."""
        # One timer only: the one under way would look too late.
        self.close()
        self._gap_s = FIRST_LOOK_S
        self._next = self._loop.call_later(self._gap_s, self._look)

    def close(self) -> None:
        """Look no more; repeatable."""
        if self._next is not None:
            self._next.cancel()

    def _look(self) -> None:
        awaited = self._awaited()
        self._gap_s = min(LOOK_EVERY_S, 2 * self._gap_s)
        # Before anybody is told: what they do may await another one, and begin to look anew.
        self._next = self._loop.call_later(self._gap_s, self._look) if awaited else None
        for session, processes in awaited.items():
            dead = tuple([process for process in processes if not is_alive(process)])
            if dead:
                self._on_dead(session, dead)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
