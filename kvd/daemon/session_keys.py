"""Keys by which processes of one engine find their session, and those that wait for one.

The processes of an engine share a string that its launcher drew, and start in any order. One of
them connects with it; the others join by it, and wait where they are early::

    Join(key) --> waits --the session with the key is there--> joined
                    |----wait_s is over-----------------------> refused: deadline
                    '----it hangs up--------------------------> forgotten

A key is of one user: what another user connects or joins by the same string is another key. So it
is no secret among the processes of a user, and opens nothing to those of others.

What lives here: which session has which key, and who waits. What must not: sockets, timers, what
is said to anybody.

Invariants: a key has one session at most, whose opener is attached; nobody waits for a key that has
one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from kvd.daemon.sessions import AttachConnection, EngineSession, KeyOfUser

_EVERYBODY: Final = ["0", "0", "4294967295"]
"""What a user namespace maps that maps every user: the first one of the system."""


class SessionKeys:
    """The keys of the sessions that are served."""

    def __init__(self) -> None:
        self._sessions: dict[KeyOfUser, EngineSession] = {}
        self._waiting: dict[KeyOfUser, list[AttachConnection]] = {}

    def session(self, key: KeyOfUser) -> EngineSession | None:
        """The session with that key; None where its opener is gone, or it is served no more."""
        session = self._sessions.get(key)
        if session is None or session.main is None or session.refusal is not None:
            return None
        return session

    def claim(self, key: KeyOfUser, session: EngineSession) -> list[AttachConnection]:
        """The key is of that session from now on; who waited for it."""
        self._sessions[key] = session
        session.key = key
        return self._waiting.pop(key, [])

    def release(self, session: EngineSession) -> None:
        """Its key finds nothing any more."""
        if session.key is not None and self._sessions.get(session.key) is session:
            del self._sessions[session.key]

    def wait(self, key: KeyOfUser, connection: AttachConnection) -> None:
        """It waits for a session with that key."""
        connection.waits_for = key
        self._waiting.setdefault(key, []).append(connection)

    def wait_no_more(self, connection: AttachConnection) -> None:
        """It has joined, or is gone; repeatable."""
        key, connection.waits_for = connection.waits_for, None
        waiting = self._waiting.get(key, []) if key is not None else []
        if key is not None and connection in waiting:
            waiting.remove(connection)
            if not waiting:
                del self._waiting[key]

    def n_waiting(self, uid: int) -> int:
        """How many processes of that user wait."""
        return sum(len(waiting) for key, waiting in self._waiting.items() if key.uid == uid)


def is_told_apart(uid: int) -> bool:
    """Whether that number is of one user alone.

    In a user namespace all users of the system that it does not map look alike.
    """
    if uid != int(Path("/proc/sys/kernel/overflowuid").read_text()):
        return True
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    return [line.split() for line in lines] == [_EVERYBODY]
