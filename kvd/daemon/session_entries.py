"""How a process gets into the session of an engine: it opens one, comes back to it, or joins.

What lives here: who is let in, and what it is told of the memory. What must not: what a process
says once it is in (``attach``), and how its session ends (``session_ends``).

A process that joins by a key before another connects with it waits for that (``session_keys``). An
engine of before a restart of this daemon comes back with the token that it had: it is the same
session again.
"""

from __future__ import annotations

import os
import resource
import socket
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvd import __version__
from kvd.config.address import ipc_path
from kvd.core.inputs import ClientCameBack, ClientJoined
from kvd.core.leases.written import MAX_RANKS
from kvd.daemon.session_keys import SessionKeys, is_told_apart
from kvd.daemon.sessions import TOKEN_HEAD, AttachConnection, EngineSessions, KeyOfUser, Rank
from kvd.errors import Code, Refusal
from kvd.wire.attach import Attach, Attached, Join
from kvd.wire.codec import ATTACH_REPLIES

if TYPE_CHECKING:
    import array
    import asyncio
    from collections.abc import Callable

    from kvd.daemon.reactor import Reactor
    from kvd.daemon.session_ends import SessionEnds
    from kvd.daemon.sessions import EngineSession
    from kvd.journal.engines import SessionNotes
    from kvd.wire.memory import DeviceMemory, PoolMemory

MAX_NAME_BYTES: Final = 128
"""Names are shown in every table an operator reads."""

SPARE_DESCRIPTORS: Final = 24
"""A session takes three or four, the last of them after it was let in; and operators, who can end
one, must still be let in themselves."""

MAX_WAIT_S: Final = 3600.0
"""A process that waits for its session longer than this is one that somebody has forgotten."""


class AttachLimits(msgspec.Struct, frozen=True):
    """How much one daemon carries.

    ``max_frame_bytes`` is announced to clients, so that they refuse a frame that the client socket
    would drop them for.
    """

    max_sessions: int = 256
    processes_per_session: int = 16
    waiting_per_user: int = 256
    request_within_s: float = 5.0
    max_frame_bytes: int = 16 * 1024 * 1024


class ToldMemory(NamedTuple):
    """What a process that is let in is told, and handed.

    Attributes:
        pools: the memory, in words.
        fds: descriptors of it, in the order that ``pools`` says.
        on_devices: of it, what has no descriptor.
        endpoint: of the client socket. The attach socket lies beside it, and whoever was looking
            for another one that would is told whose it is.
    """

    pools: tuple[PoolMemory, ...]
    fds: array.array[int]
    on_devices: tuple[DeviceMemory, ...]
    endpoint: str


class SessionEntries:
    """From ``start`` on; ``turn_away`` says why a connection is not served, and closes it."""

    def __init__(
        self,
        reactor: Reactor,
        sessions: EngineSessions,
        keys: SessionKeys,
        notes: SessionNotes,
        ends: SessionEnds,
        *,
        memory: ToldMemory,
        limits: AttachLimits,
        turn_away: Callable[[AttachConnection, Refusal], None],
    ) -> None:
        self._reactor = reactor
        self._node = reactor.node.settings.name
        self._sessions = sessions
        self._keys = keys
        self._notes = notes
        self._ends = ends
        self._memory = memory
        self._limits = limits
        self._turn_away = turn_away

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let processes in; who waits for a session does so on ``loop``."""
        self._loop = loop

    def attach(self, connection: AttachConnection, request: Attach) -> Refusal | None:
        """A process opens a session, or comes back to its own; or why not."""
        name = request.name
        if not name or len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():
            return self._refuse(
                Code.BAD_REQUEST,
                f"a session's name is 1 to {MAX_NAME_BYTES} printable bytes, this one has "
                f"{len(name.encode())}: name the engine, for example decode-0",
            )
        refusal = self._bad_key(connection, request.key) if request.key else None
        if refusal is not None:
            return refusal
        former = self._sessions.resumable(request.resumes)
        if former is not None:
            return self._return(connection, former, request)
        key = KeyOfUser(connection.uid, request.key)
        other = self._keys.session(key) if request.key else None
        if other is not None and other.main is not None:
            return self._key_taken(key, other, other.main)
        full = self._why_full()
        if full:
            return self._refuse(Code.NO_ROOM, full)
        session = self._sessions.open()
        session.main = connection
        session.take(connection)
        said = session.token.removeprefix(TOKEN_HEAD)
        # Before the memory is handed over: a daemon that is killed in between leaves a note too
        # many, and not a process that maps the pool and is unknown to the next.
        self._notes.session_opened(session.number, said, name, connection.process)
        # Before ``Attached``: where that cannot be sent the session is over at once, and the node
        # must have heard that it began.
        self._joined(session, connection, name, kind=request.kind)
        self._tell_attached(connection, session)
        self._open_to(connection, session, request.key)
        return None

    def _why_full(self) -> str:
        """Why no other session is opened, and what to do; empty where there is room."""
        if len(self._sessions) >= self._limits.max_sessions:
            return (
                f"{len(self._sessions)} sessions are open on {self._node}, which is its limit: end "
                "some, or raise limits.max_clients"
            )
        open_now, most = open_descriptors()
        if most - open_now < SPARE_DESCRIPTORS:
            return (
                f"{open_now} of {most} descriptors of {self._node} are open, and the last "
                f"{SPARE_DESCRIPTORS} are for operators and peers: end some sessions, or raise "
                "LimitNOFILE of the unit, or ulimit -n"
            )
        return ""

    def _return(
        self, connection: AttachConnection, former: EngineSession, request: Attach
    ) -> Refusal | None:
        """The process of a session of before the restart is here again."""
        # Before it is taken in: of the new route nobody has been told yet.
        full = self._full(former, connection)
        if full is not None:
            return full
        self._sessions.renew_route(former)
        former.main = connection
        was_known = self._take(former, connection)
        # Before it is answered: the answer names what the node has kept for it.
        leases = self._came_back(former, connection, request)
        self._tell_attached(connection, former, leases, was_known=was_known)
        self._open_to(connection, former, request.key)
        return None

    def _bad_key(self, connection: AttachConnection, key: str) -> Refusal | None:
        """Why nobody can connect or join by that key."""
        if not key.isprintable():
            return self._refuse(Code.BAD_REQUEST, "a key is printable: draw another one")
        if not is_told_apart(connection.uid):
            return self._refuse(
                Code.NOT_SUPPORTED,
                f"{self._node} runs in a user namespace that does not map the user of pid "
                f"{connection.pid}, so it cannot tell whose key that is: join by node.token",
            )
        return None

    def _key_taken(self, key: KeyOfUser, session: EngineSession, main: AttachConnection) -> Refusal:
        return Refusal(
            Code.WRONG_STATE,
            f"the key {key.key!r} is of session {session.number} of {self._node}, whose pid "
            f"{main.pids[0]} is attached: end that engine first, or draw a key for each engine",
            side=self._node,
            numbers={"session": session.number, "pid": main.pids[0]},
        )

    def _open_to(self, connection: AttachConnection, session: EngineSession, key: str) -> None:
        """Who has waited for the key of a session joins it now."""
        owned = KeyOfUser(connection.uid, key)
        # Gone already, where the answer could not be sent; or a session of before the restart whose
        # key was taken meanwhile: what joined that by its token stays of it.
        if not key or session.main is not connection or self._keys.session(owned) is not None:
            return
        for waiting in self._keys.claim(owned, session):
            self._keys.wait_no_more(waiting)
            request, waiting.join = waiting.join, None
            assert request is not None, "it waits"
            refusal = self._join_session(waiting, request, session)
            if refusal is not None:
                self._turn_away(waiting, refusal)

    def _joined(
        self,
        session: EngineSession,
        connection: AttachConnection,
        name: str,
        *,
        keeps_blocks: bool = False,
        kind: str = "",
    ) -> None:
        """A process is of the session; one that opened it gives it its name."""
        self._reactor.feed(
            ClientJoined(
                at_s=self._reactor.clock(),
                session=session.number,
                name=name,
                pid=connection.pid,
                keeps_blocks=keeps_blocks,
                kind=kind,
            )
        )

    def _came_back(
        self, session: EngineSession, connection: AttachConnection, request: Attach
    ) -> tuple[int, ...]:
        """An engine of before the restart is back; which of its leases it can still release."""
        self._reactor.feed(
            ClientCameBack(
                at_s=self._reactor.clock(),
                session=session.number,
                pid=connection.pid,
                leases=request.leases,
                is_whole=not session.former,
                keeps_blocks=request.keeps_blocks,
                kind=request.kind,
            )
        )
        session.is_partly_back = bool(session.former)
        kept = {lease.id for lease in self._reactor.node.former_leases.of_session(session.number)}
        return tuple(lease for lease in request.leases if lease in kept)

    def join(self, connection: AttachConnection, request: Join) -> Refusal | None:
        """A process joins a session that is open, or waits for it; or why not."""
        refusal = self._bad_join(connection, request)
        if refusal is not None:
            return refusal
        if not request.key:
            return self._join_by_token(connection, request)
        key = KeyOfUser(connection.uid, request.key)
        session = self._keys.session(key)
        if session is None:
            return self._wait_for(connection, request, key)
        return self._join_session(connection, request, session)

    def _join_by_token(self, connection: AttachConnection, request: Join) -> Refusal | None:
        session = self._sessions.of_token(request.token)
        if session is None:
            return self._refuse(
                Code.UNKNOWN_SESSION,
                f"{self._node} has no session of this token: it ended with its last process, or "
                "the daemon was restarted; attach anew",
            )
        if session.refusal is not None:
            return session.refusal
        if not session.connections:
            return self._refuse(
                Code.UNREACHABLE,
                f"session {session.number} is of before {self._node} was restarted, and the "
                "process that opened it has not come back yet: join again in a moment",
            )
        return self._join_session(connection, request, session)

    def _bad_join(self, connection: AttachConnection, request: Join) -> Refusal | None:
        """Why that is nothing to join by."""
        if bool(request.token) == bool(request.key):
            return self._refuse(Code.BAD_REQUEST, "a process joins by a token, or by a key")
        if request.ranks and not 0 <= request.rank < request.ranks <= MAX_RANKS:
            return Refusal(
                Code.BAD_REQUEST,
                f"rank {request.rank} of {request.ranks}: ranks count from 0, and there are at "
                f"most {MAX_RANKS}",
                side=self._node,
                numbers={"rank": request.rank, "ranks": request.ranks},
            )
        if not 0 <= request.wait_s <= MAX_WAIT_S:
            return Refusal(
                Code.BAD_REQUEST,
                f"wait_s is {request.wait_s}: it is the longest wait for the process that "
                f"connects with the key, 0 to {MAX_WAIT_S:g} s",
                side=self._node,
                numbers={"wait_s": repr(request.wait_s), "longest_s": MAX_WAIT_S},
            )
        return self._bad_key(connection, request.key) if request.key else None

    def _wait_for(
        self, connection: AttachConnection, request: Join, key: KeyOfUser
    ) -> Refusal | None:
        """No session has that key yet."""
        waiting, limit = self._keys.n_waiting(key.uid), self._limits.waiting_per_user
        if waiting >= limit:
            return Refusal(
                Code.NO_ROOM,
                f"{waiting} processes of user {key.uid} wait on {self._node} for sessions that "
                "they join by a key, which is the limit: connect with those keys, or end some",
                side=self._node,
                numbers={"waiting": waiting, "limit": limit},
            )
        if not request.wait_s:
            return self._nobody_came(key, 0.0)
        connection.join = request
        self._keys.wait(key, connection)
        connection.timer = self._loop.call_later(
            request.wait_s,
            lambda: self._turn_away(connection, self._nobody_came(key, request.wait_s)),
        )
        return None

    def _nobody_came(self, key: KeyOfUser, wait_s: float) -> Refusal:
        return Refusal(
            Code.DEADLINE,
            f"no process of user {key.uid} has connected to {self._node} with the key {key.key!r} "
            f"within {wait_s:g} s: connect(name=..., key=...) in the process that opens leases, as "
            "the same user, or wait longer",
            side=self._node,
            numbers={"wait_s": wait_s, "uid": key.uid},
        )

    def _join_session(
        self, connection: AttachConnection, request: Join, session: EngineSession
    ) -> Refusal | None:
        """One more process of a session that is attached."""
        full = self._full(session, connection)
        if full is not None:
            return full
        if connection.timer is not None:  # of its wait
            connection.timer.cancel()
        if request.ranks:
            rank = Rank(request.rank, request.ranks)
            refusal = session.why_no_rank(rank)
            if refusal is not None:
                return msgspec.structs.replace(refusal, side=self._node)
            connection.rank = rank
        was_known = self._take(session, connection)
        if request.keeps_blocks:
            self._notes.session_keeps_blocks(session.number)
        self._joined(session, connection, "", keeps_blocks=request.keeps_blocks)
        self._tell_attached(connection, session, was_known=was_known)
        return None

    def _full(self, session: EngineSession, connection: AttachConnection) -> Refusal | None:
        """Why no more processes may be of it: the daemon after this one awaits so many."""
        limit, n_processes = self._limits.processes_per_session, session.n_processes
        if n_processes < limit or session.knows(connection.pid):
            return None
        return Refusal(
            Code.NO_ROOM,
            f"{n_processes} processes map the pool for session {session.number} of {self._node}, "
            "which is the limit of one session: close some, or open a session for the others",
            side=self._node,
            numbers={"limit": limit},
        )

    def _take(self, session: EngineSession, connection: AttachConnection) -> bool:
        """A process is of the session now; whether it was awaited."""
        was_known = session.take(connection)
        self._ends.whole(session)
        if not was_known:
            self._notes.session_joined(session.number, connection.process)
        return was_known

    def _tell_attached(
        self,
        connection: AttachConnection,
        session: EngineSession,
        leases: tuple[int, ...] = (),
        *,
        was_known: bool = False,
    ) -> None:
        """Answer with the memory; a process that is gone already is dropped like any other."""
        is_new = session.route == session.token
        reply = Attached(
            session=session.number,
            token=session.token,
            node=self._node,
            incarnation=self._reactor.node.settings.incarnation,
            pools=self._memory.pools,
            max_frame_bytes=self._limits.max_frame_bytes,
            leases=leases,
            route=b"" if is_new else session.route,
            devices=self._memory.on_devices,
            version=__version__,
            endpoint=self._memory.endpoint,
            socket_file=_file_of(self._memory.endpoint),
            hears_waits=True,
        )
        fds = self._memory.fds
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        packet = ATTACH_REPLIES.encode(reply)
        try:
            connection.sock.sendmsg([packet], passed)
        except OSError as exc:
            connection.has_left = not was_known  # it has no descriptor, unless from before
            self._turn_away(
                connection,
                self._refuse(
                    Code.INTERNAL,
                    f"the description of the pools has {len(packet)} bytes and could not be sent "
                    f"to pid {connection.pid}: {exc.strerror}",
                ),
            )

    def _refuse(self, code: Code, message: str) -> Refusal:
        return Refusal(code, message, side=self._node)


def _file_of(endpoint: str) -> tuple[int, int] | None:
    """Device and inode of a socket; None where there is none."""
    try:
        found = os.stat(ipc_path(endpoint) or "")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def open_descriptors() -> tuple[int, int]:
    """How many descriptors this process has open, and how many it may; takes some 50 us."""
    return len(os.listdir("/proc/self/fd")), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
