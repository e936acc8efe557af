"""What keeps the session of an engine, and how it ends: hung up on, left, or its processes dead.

What lives here: which of that the node is told, once and in order. What must not: who is let in,
and what processes say while they are served (``attach``).

A process that lives may write the pages of its session, whatever becomes of its connections. So a
session that is served no more is kept until the last of its processes has left or is dead.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from kvd import __version__
from kvd.core.inputs import (
    ClientHungUp,
    Heir,
    HungUpOn,
    ProcessesNow,
    RankLeft,
    SessionWhole,
    WorkerGone,
)
from kvd.daemon.former_processes import FormerProcesses
from kvd.daemon.inherited import InheritedConnections
from kvd.daemon.sessions import UNSEEN
from kvd.errors import Code, Refusal
from kvd.wire.attach import Leave, Rejected
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvd.daemon.reactor import Reactor
    from kvd.daemon.session_keys import SessionKeys
    from kvd.daemon.sessions import AttachConnection, EngineSession, EngineSessions
    from kvd.journal.engines import Process, SessionNotes

UNATTENDED_S: Final = 0.25
"""A process that is dying closes its connection first, some milliseconds before it is dead."""

MAX_REQUEST_BYTES: Final = 512 * 1024
"""An ``Attach`` of an engine that comes back names its leases: at 65,536 of them 330 KB."""

_LAST_PACKETS: Final = 16
"""That are read of a process whose connection is over."""


class AnsweredSessions(Protocol):
    """Where sessions are answered, as far as their ends touch it."""

    def over(self, session: int) -> None:
        """The session is over."""

    def hang_up(self, session: int) -> None:
        """The session is served no more."""


class SessionEnds:
    """From ``start`` to ``close``; ``drop`` closes a connection and says nothing of it."""

    def __init__(
        self,
        reactor: Reactor,
        sessions: EngineSessions,
        keys: SessionKeys,
        notes: SessionNotes,
        drop: Callable[[AttachConnection], None],
    ) -> None:
        self._reactor = reactor
        self._node = reactor.node.settings.name
        self._sessions = sessions
        self._keys = keys
        self._notes = notes
        self._drop = drop
        self._former = FormerProcesses(sessions.awaited, self.dead)
        self._inherited = InheritedConnections(sessions.attached, self._outlived)

    def start(self, loop: asyncio.AbstractEventLoop, clients: AnsweredSessions) -> None:
        """Look for the dead; ``clients`` hears who is served no more."""
        self._loop = loop
        self._clients = clients
        self._former.start(loop)
        self._inherited.start(loop)

    def close(self) -> None:
        """Look for nobody any more."""
        self._former.close()
        self._inherited.close()

    def shut(self, session: EngineSession, refusal: Refusal) -> None:
        """It is served no more; who keeps it is told, and awaited."""
        # From here on its route leads nowhere: no request of it is taken any more.
        self._sessions.shut(session, refusal)
        for connection in session.connections:
            if not connection.is_shut:
                connection.is_shut = True
                tell(connection, refusal)
        self._say_who(session, refusal)

    def hung_up(self, connection: AttachConnection, session: EngineSession) -> None:
        """A connection of it is closed; with the last process the session ends."""
        session.drop(connection)
        # Asked of the node: where it holds nothing for the session, what a process could write is
        # nobody's.
        may_write = self._reactor.node.sessions.may_write(session.number)
        if session.lingers and not session.connections and not may_write:
            session.awaited = ()  # it holds nothing, and nobody is left who could ask for anything
        if any(map(session.knows, (connection.pid, *connection.pids))):
            self._former.look_soon()
        if not connection.may_write:
            self._worker_gone(session, connection.number)
        self._fewer(session, (connection.process, *connection.heirs))
        if not connection.is_outlived and not session.is_over:
            self._rank_left(session, connection)

    def _rank_left(self, session: EngineSession, connection: AttachConnection) -> None:
        """Whether it is dead or not, it has no way left to say how far it is."""
        rank = connection.rank
        # Another one may have joined in its place, when it was dead and its connection was not.
        if rank is None or session.has_rank(rank):
            return
        reactor = self._reactor
        reactor.feed(
            RankLeft(
                at_s=reactor.clock(),
                session=session.number,
                rank=rank.rank,
                ranks=rank.ranks,
                pid=connection.pid,
            )
        )

    def dead(self, number: int, processes: tuple[Process, ...]) -> None:
        """Processes that were awaited are dead."""
        session = self._sessions.of_number(number)
        if session is not None:
            for worker in session.dead(processes):
                self._worker_gone(session, worker)
            self._fewer(session, processes)
            self.whole(session)

    def _worker_gone(self, session: EngineSession, worker: int) -> None:
        """No copy of that process moves a byte any more."""
        reactor = self._reactor
        reactor.feed(WorkerGone(at_s=reactor.clock(), session=session.number, worker=worker))

    def whole(self, session: EngineSession) -> None:
        """Told once: nobody of before the restart is awaited any more."""
        if session.is_partly_back and not session.former:
            session.is_partly_back = False
            reactor = self._reactor
            reactor.feed(SessionWhole(at_s=reactor.clock(), session=session.number))

    def _fewer(self, session: EngineSession, gone: tuple[Process, ...]) -> None:
        """Processes have left a session, or live on without a connection."""
        if session.is_over:
            # Before the node is told: what it does about it may come back here, and must find
            # nobody.
            self._sessions.forget(session)
            self._keys.release(session)
            self._notes.session_ended(session.number)
            self._reactor.feed(ClientHungUp(self._reactor.clock(), session.number))
            self._clients.over(session.number)
            return
        pids = session.pids
        for process in gone:
            # One process may have had several connections: it has left with the last.
            if process.pid not in pids:
                self._notes.process_left(session.number, process.pid)
        if session.refusal is not None:
            self._say_who(session, session.refusal)
            return
        # Not at once: processes of an engine that ends come to their end one by one.
        self._loop.call_later(UNATTENDED_S, self._say_kept, session)
        if session.lingers and not session.connections:
            # Not at once: the process may be dying, and then it is over in the right way in a
            # moment.
            self._loop.call_later(UNATTENDED_S, self._unattended, session)

    def _outlived(self, connection: AttachConnection, heirs: tuple[Process, ...]) -> None:
        """Its process is dead, and these have the connection that it had."""
        session = connection.session
        if session is None or (connection.is_outlived and heirs == connection.heirs):
            return
        before, connection.heirs = connection.heirs, heirs
        if not connection.is_outlived:
            connection.is_outlived = True
            self._rank_left(session, connection)
        # The daemon after this one waits for them: they map the pool.
        for heir in heirs:
            if heir not in before:
                self._notes.session_joined(session.number, heir)
        # Where none is seen, the dead one stands for them.
        pids = session.pids
        for process in (connection.process, *before):
            if process.pid not in pids:
                self._notes.process_left(session.number, process.pid)
        if session.refusal is not None:
            self._say_who(session, session.refusal)
        else:
            self._say_kept(session)

    def _say_kept(self, session: EngineSession) -> None:
        """Who keeps it, where that is news."""
        is_known = self._sessions.of_number(session.number) is session
        if not is_known or session.refusal is not None:
            return
        heirs = [
            Heir(pid=heir.pid, of_pid=connection.pid)
            for connection in session.connections
            if connection.is_outlived
            for heir in connection.heirs or UNSEEN
        ]
        now = ProcessesNow(
            at_s=0.0, session=session.number, pids=session.pids, heirs=tuple(sorted(heirs, key=str))
        )
        if now != session.told_kept:
            session.told_kept = now
            self._reactor.feed(msgspec.structs.replace(now, at_s=self._reactor.clock()))

    def _say_who(self, session: EngineSession, refusal: Refusal) -> None:
        """Who is waited for, where that is news."""
        pids = session.pids
        if frozenset(pids) != session.told:
            session.told = frozenset(pids)
            self._clients.hang_up(session.number)
            # Not at once: it may be an answer of the running step that could not be sent.
            self._loop.call_soon(self._shut_out, session, refusal, pids)

    def _shut_out(self, session: EngineSession, why: Refusal, pids: tuple[int, ...]) -> None:
        """Tell the node; where it holds nothing that they may write, nobody is awaited."""
        number, reactor = session.number, self._reactor
        reactor.feed(HungUpOn(at_s=reactor.clock(), session=number, why=why, pids=pids))
        # Asked again: a process may have been found dead while the node was told, and all is done
        # then.
        if number not in reactor.node.sessions.by_id and self._sessions.of_number(number):
            for connection in session.connections:
                self._drop(connection)
            self._sessions.forget(session)
            self._keys.release(session)
            self._notes.session_ended(number)

    def _unattended(self, session: EngineSession) -> None:
        """Nobody of it is attached, though a process of it lives: serve it no more."""
        # A quarter of a second later it may be over, or attended again.
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
        connection.sock.send(ATTACH_REPLIES.encode(Rejected(refusal, version=__version__)))
        # A worker sleeps until we end the connection, and is not woken by answers to its words.
        connection.sock.shutdown(socket.SHUT_WR)
    hear_out(connection)


def hear_out(connection: AttachConnection) -> None:
    """Read what it has said before: it may be ``Leave``.

    A process that closes its end without having read all of ours resets it, and the reset is told
    before the packets that were there first.
    """
    for _ in range(_LAST_PACKETS):
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
