"""What keeps the pages of a session from others: its processes, until they leave or are dead.

What lives here: when a session is over, when it is hung up on, and who is told. What must not: who
may attach, and what is said then (``attach``).
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from kvd.daemon.acceptor import ACCEPTS_PER_WAKE
from kvd.daemon.former_processes import FormerProcesses
from kvd.errors import Code, Refusal
from kvd.wire.attach import Leave, Rejected
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvd.daemon.sessions import AttachConnection, EngineSession, EngineSessions, SessionNotes
    from kvd.journal.engines import Process

MAX_REQUEST_BYTES: Final = 512 * 1024
"""An ``Attach`` of an engine that comes back names its leases: at 65,536 of them 330 KB."""

UNATTENDED_S: Final = 0.25
"""A process that is dying closes its connection first, some milliseconds before it is dead."""


class Custody:
    """Looks after all sessions from ``start`` to ``close``."""

    def __init__(
        self,
        sessions: EngineSessions,
        notes: SessionNotes,
        on_gone: Callable[[int], None],
        on_hung_up_on: Callable[[int, Refusal, tuple[int, ...]], None],
        may_write: Callable[[int], bool],
        *,
        node: str,
    ) -> None:
        """Prepare; what the callbacks take is said in ``AttachServer``."""
        self._sessions = sessions
        self._notes = notes
        self._node = node
        self._on_gone = on_gone
        self._on_hung_up_on = on_hung_up_on
        self._may_write = may_write
        self._former = FormerProcesses(sessions.awaited, self._dead)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look after those of before a restart."""
        self._loop = loop
        self._former.start(loop)

    def close(self) -> None:
        """Look no more; repeatable."""
        self._former.close()

    def shut(self, session: EngineSession, refusal: Refusal) -> None:
        """It is served no more; who keeps it is told, and awaited."""
        self._sessions.shut(session, refusal)
        for connection in session.connections:
            if not connection.is_shut:
                connection.is_shut = True
                tell(connection, refusal)
        self._say_who(session, refusal)

    def hung_up(self, connection: AttachConnection, session: EngineSession) -> None:
        """A connection of it is closed; with the last process the session ends."""
        session.drop(connection)
        if session.lingers and not session.connections and not self._may_write(session.number):
            session.awaited = ()  # it holds nothing, and nobody is left who could ask for anything
        if session.knows(connection.pid):
            self._former.look_soon()
        self._fewer(session, (connection.process,))

    def _dead(self, number: int, processes: tuple[Process, ...]) -> None:
        """Processes that were awaited are dead."""
        session = self._sessions.of_number(number)
        if session is not None:
            session.awaited = tuple([one for one in session.awaited if one not in processes])
            self._fewer(session, processes)

    def _fewer(self, session: EngineSession, gone: tuple[Process, ...]) -> None:
        """Processes have left a session, or live on without a connection."""
        if session.is_over:
            self._sessions.forget(session)
            self._notes.session_left(session.number)
            self._on_gone(session.number)
            return
        pids = session.pids
        for one in gone:
            if one.pid not in pids:
                self._notes.process_left(session.number, one.pid)
        if session.refusal is not None:
            self._say_who(session, session.refusal)
        elif session.lingers and not session.connections:
            self._loop.call_later(UNATTENDED_S, self._unattended, session)

    def _say_who(self, session: EngineSession, refusal: Refusal) -> None:
        """Who is waited for, where that is news."""
        pids = session.pids
        if frozenset(pids) != session.told:
            session.told = frozenset(pids)
            self._on_hung_up_on(session.number, refusal, pids)

    def _unattended(self, session: EngineSession) -> None:
        """Nobody of it is attached, though a process of it lives: serve it no more."""
        is_known = self._sessions.of_number(session.number) is session
        if not is_known or session.connections or session.refusal is not None:
            return
        pids = ", ".join(map(str, session.pids))
        why = (
            f"session {session.number} closed its attach socket without a word, and pid {pids} of "
            "it lives: what that may write stays held until it ends; close a node before dropping "
            "it, and attach anew"
        )
        self.shut(session, Refusal(Code.CLIENT_GONE, why, side=self._node))


def tell(connection: AttachConnection, refusal: Refusal) -> None:
    """Say why it is served no more, before its hang-up or ours.

    Best effort: a process that does not read, or is gone, does not hear it. Unread packets would
    turn our last word into a reset: they are read.
    """
    with contextlib.suppress(OSError):
        connection.sock.send(ATTACH_REPLIES.encode(Rejected(refusal)))
    hear_out(connection)


def hear_out(connection: AttachConnection) -> None:
    """Read what it has said before: it may be ``Leave``.

    A process that closes its end without having read all of ours resets it, and the reset is told
    before the packets that were there first.
    """
    for _ in range(ACCEPTS_PER_WAKE):
        try:
            packet = connection.sock.recv(MAX_REQUEST_BYTES)
        except ConnectionResetError:
            continue
        except OSError:
            return
        if not packet:
            return
        if isinstance(ATTACH_REQUESTS.decode(packet), Leave):
            connection.has_left = True
