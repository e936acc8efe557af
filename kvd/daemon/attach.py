"""The attach socket: where engine processes get the pool's memory, and how their death is noticed.

What lives here: a unix SOCK_SEQPACKET listener on the event loop and the connections behind it.
What must not: leases, handoffs, the ZMQ socket; what keeps a session alive is in ``sessions``.

Theory of operation. One connection is one process. It says one thing (``Attach`` or ``Join``), is
told one thing (``Attached`` with the memory descriptors, or ``Rejected``), and then stays silent:
the kernel closes it when the process dies, however it dies, and that hang-up is the news. ::

    accepted --Attach/Join--> attached --hang-up--> gone
       |                          | any byte
       +--5 s, garbage, limits--> Rejected, closed

When the last connection of a session is gone, ``on_gone`` is called, once. A descriptor inherited
by a forked child keeps the connection open: such a child maps the pool too. An engine of before a
restart of this daemon comes back with the token that it had: it is the same session again.

Invariants: every attached connection belongs to exactly one session; one without a connection is
awaited from before a restart; ``session_of`` answers for attached sessions only; at most
``max_sessions * processes_per_session`` connections are open, and one that has not attached lasts
5 s at most.
"""

from __future__ import annotations

import array
import errno
import socket
from typing import TYPE_CHECKING, Final

from kvd.daemon.attach_limits import DEFAULT_LIMITS, AttachLimits
from kvd.daemon.seqpacket import open_listener, peer_pid, remove_own
from kvd.daemon.sessions import NO_PAST, Connection, Sessions, Unwritten, nobody_returned
from kvd.errors import Code, Refusal
from kvd.wire.attach import PROTOCOL, Attach, Attached, Join, Rejected
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from kvd.daemon.sessions import OnReturned, Past, Session, SessionNotes
    from kvd.journal.engines import Process
    from kvd.wire.memory import DeviceMemory, PoolMemory

MAX_REQUEST_BYTES: Final = 512 * 1024
"""An ``Attach`` of an engine that comes back names its leases: at 65,536 of them 330 KB."""

MAX_NAME_BYTES: Final = 128
"""Names are shown in every table an operator reads."""

_ACCEPTS_PER_WAKE: Final = 16
_PAUSE_S: Final = 0.1
"""Without free descriptors ``accept`` fails and the listener stays readable: look away shortly."""

_REPLY_BUFFER_BYTES: Final = 2 * 1024 * 1024
"""Asked for each connection (Linux grants up to twice that): a reply is one packet that names
every tensor of every layer, about 100 KB for a thousand layers; clients read up to 4 MiB."""


class AttachServer:
    """Listens on ``path`` from ``start`` to ``close``."""

    def __init__(  # noqa: PLR0913 - the composition root names each of these once
        self,
        path: str,
        *,
        describe: Callable[[], tuple[PoolMemory, ...]],
        fds: Sequence[int],
        on_devices: tuple[DeviceMemory, ...] = (),
        node: str,
        incarnation: str,
        on_opened: Callable[[int, str, int], None],
        on_joined: Callable[[int, int], None],
        on_gone: Callable[[int], None],
        on_refused: Callable[[int, Refusal], None],
        limits: AttachLimits = DEFAULT_LIMITS,
        past: Past = NO_PAST,
        on_returned: OnReturned = nobody_returned,
        notes: SessionNotes | None = None,
    ) -> None:
        """Prepare; nothing is opened before ``start``.

        Args:
            path: of the socket file.
            describe: the pools as they are now.
            fds: descriptors of the memory that ``describe`` tells of, in the order that it says.
            on_devices: of it, what has no descriptor.
            node: this daemon's name.
            incarnation: this daemon's life.
            on_opened: takes session, name, pid: a new session.
            on_joined: takes session, pid: one more process of it.
            on_gone: takes session: its last process hung up.
            on_refused: takes pid, why: a process was sent away for its own fault.
            limits: modes and bounds.
            past: the sessions of before a restart.
            on_returned: takes session, name, pid, leases that its engine still uses, and returns
                those that are kept for it: one of before a restart is back.
            notes: who writes down the sessions, for the daemon after this one.
        """
        self._path = path
        self._describe = describe
        self._fds = array.array("i", fds)
        self._devices = on_devices
        self._node = node
        self._incarnation = incarnation
        self._on_opened = on_opened
        self._on_joined = on_joined
        self._on_gone = on_gone
        self._on_refused = on_refused
        self._limits = limits
        self._on_returned = on_returned
        self._notes = notes or Unwritten()
        self._max_processes = limits.max_sessions * limits.processes_per_session
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listener: socket.socket | None = None
        self._resume: asyncio.TimerHandle | None = None
        self._inode = 0
        self._connections: set[Connection] = set()
        self._sessions = Sessions(past)

    def start(self, loop: asyncio.AbstractEventLoop, listening: int | None = None) -> None:
        """Serve the socket ``listening``, whose file is not ours, or listen.

        Raises:
            AddressInUse: another process listens on the path.
            OSError: the directory is missing or not ours, or there is no such group.
        """
        self._loop = loop
        mode, group = self._limits.mode, self._limits.group
        self._listener, self._inode = open_listener(self._path, mode, group, listening)
        loop.add_reader(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Hang up on everybody and remove the socket file; calls nobody back; repeatable."""
        loop, listener = self._loop, self._listener
        if loop is None or listener is None:
            return
        self._listener = None
        if self._resume is not None:
            self._resume.cancel()
        loop.remove_reader(listener.fileno())
        listener.close()
        for connection in list(self._connections):
            self._drop(connection)
        self._sessions.clear()
        remove_own(self._path, self._inode)

    def session_of(self, route: bytes) -> int | None:
        """The attached session that a ZMQ routing id belongs to."""
        session = self._sessions.of_route(route)
        return None if session is None else session.number

    def end(self, session: int, refusal: Refusal) -> None:
        """Hang up on every process of a session, saying why; ``on_gone`` follows."""
        one = self._sessions.await_no_more(session)
        for connection in list(one.connections) if one else []:
            self._reject(connection, refusal)

    def awaited(self) -> dict[int, tuple[Process, ...]]:
        """Session to its processes of before the restart that have not come back."""
        return self._sessions.awaited()

    def over(self, session: int) -> None:
        """Those of a session are dead; ``on_gone`` follows when no other process is of it."""
        one = self._sessions.await_no_more(session)
        if one is not None:
            self._end_if_over(one)

    # ---- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        """Take the connections that wait; runs on the loop."""
        for _ in range(_ACCEPTS_PER_WAKE):
            if self._listener is None:
                return
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}:
                    self._look_away()
                    return
                continue
            self._welcome(sock)

    def _look_away(self) -> None:
        """No descriptors left: stop accepting for a moment, instead of spinning on the listener."""
        if self._loop is None or self._listener is None:
            return
        listener, loop = self._listener, self._loop

        def look_again() -> None:
            self._resume = None
            loop.add_reader(listener.fileno(), self._accept)

        loop.remove_reader(listener.fileno())
        self._resume = loop.call_later(_PAUSE_S, look_again)

    def _welcome(self, sock: socket.socket) -> None:
        if self._loop is None:
            return
        sock.settimeout(0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REPLY_BUFFER_BYTES)
        connection = Connection(sock, pid=peer_pid(sock))
        self._connections.add(connection)
        self._loop.add_reader(sock.fileno(), self._read, connection)
        if len(self._connections) > self._max_processes:
            full = Refusal(
                Code.NO_ROOM,
                f"{self._max_processes} processes are attached to {self._node}, which is its "
                "limit: end some, or raise limits.max_clients",
                side=self._node,
                numbers={"limit": self._max_processes},
            )
            self._turn_away(connection, full)
            return
        connection.timer = self._loop.call_later(
            self._limits.request_within_s, self._too_late, connection
        )

    def _too_late(self, connection: Connection) -> None:
        pid, within_s = connection.pid, self._limits.request_within_s
        late = Refusal(
            Code.DEADLINE,
            f"pid {pid} connected and said nothing for {within_s:g} s: send Attach or Join at once",
            side=self._node,
            numbers={"within_s": within_s, "pid": pid},
        )
        self._turn_away(connection, late)

    def _read(self, connection: Connection) -> None:
        """Something came from a process, or it hung up; runs on the loop."""
        try:
            packet, _, flags, _ = connection.sock.recvmsg(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet:
            self._hang_up(connection)
            return
        refusal = self._answer(connection, packet, flags)
        if refusal is not None:
            self._turn_away(connection, refusal)

    def _answer(self, connection: Connection, packet: bytes, flags: int) -> Refusal | None:
        """Attach it, or say why not."""
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.session is not None:
            return self._refuse(
                Code.WRONG_STATE,
                f"pid {connection.pid} is attached already and sent {len(packet)} more bytes: this "
                "socket stays silent after Attached, requests go to the client socket",
            )
        if flags & socket.MSG_TRUNC:
            return self._refuse(
                Code.TOO_LARGE, f"the request is longer than {MAX_REQUEST_BYTES} bytes"
            )
        request = ATTACH_REQUESTS.decode(packet)
        if isinstance(request, Refusal):
            return request
        if request.protocol != PROTOCOL:
            return self._refuse(
                Code.NOT_SUPPORTED,
                f"the client speaks protocol {request.protocol}, {self._node} speaks {PROTOCOL}: "
                "install the same version of kvd on both",
            )
        match request:
            case Attach():
                return self._attach(connection, request)
            case Join(token):
                return self._join(connection, token)

    # ---- sessions --------------------------------------------------------------------------------

    def _attach(self, connection: Connection, request: Attach) -> Refusal | None:
        name = request.name
        if not name or len(name.encode()) > MAX_NAME_BYTES or not name.isprintable():
            return self._refuse(
                Code.BAD_REQUEST,
                f"a session's name is 1 to {MAX_NAME_BYTES} printable bytes, this one has "
                f"{len(name.encode())}: name the engine, for example decode-0",
            )
        former = self._sessions.resume(request.resumes)
        if former is not None:
            former.main = connection
            if not former.take(connection):
                self._notes.session_joined(former.number, connection.pid)
            kept = self._on_returned(former.number, name, connection.pid, request.leases)
            leases = tuple(one for one in request.leases if one in kept)
            self._tell_attached(connection, former, leases)
            return None
        if len(self._sessions) >= self._limits.max_sessions:
            return self._refuse(
                Code.NO_ROOM,
                f"{len(self._sessions)} sessions are open on {self._node}, which is its limit: end "
                "some, or raise limits.max_clients",
            )
        session = self._sessions.open()
        session.take(connection)
        self._notes.session_opened(session.number, session.token, name, connection.pid)
        self._on_opened(session.number, name, connection.pid)
        self._tell_attached(connection, session)
        return None

    def _join(self, connection: Connection, token: bytes) -> Refusal | None:
        session = self._sessions.of_token(token)
        if session is None:
            return self._refuse(
                Code.UNKNOWN_SESSION,
                f"{self._node} has no session of this token: it ended with its last process, or "
                "the daemon was restarted; attach anew",
            )
        if not session.connections:
            return self._refuse(
                Code.UNREACHABLE,
                f"session {session.number} is of before {self._node} was restarted, and the "
                "process that opened it has not come back yet: join again in a moment",
            )
        if not session.take(connection):
            self._notes.session_joined(session.number, connection.pid)
        self._on_joined(session.number, connection.pid)
        self._tell_attached(connection, session)
        return None

    def _tell_attached(
        self, connection: Connection, session: Session, leases: tuple[int, ...] = ()
    ) -> None:
        """Answer with the memory; a process that is gone already is dropped like any other."""
        is_new = session.route == session.token
        reply = Attached(
            session=session.number,
            token=session.token,
            node=self._node,
            incarnation=self._incarnation,
            pools=self._describe(),
            max_frame_bytes=self._limits.max_frame_bytes,
            leases=leases,
            route=b"" if is_new else session.route,
            devices=self._devices,
        )
        passed = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, self._fds)] if self._fds else []
        packet = ATTACH_REPLIES.encode(reply)
        try:
            connection.sock.sendmsg([packet], passed)
        except OSError as exc:
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

    # ---- ends ------------------------------------------------------------------------------------

    def _turn_away(self, connection: Connection, refusal: Refusal) -> None:
        """Reject it for a fault of its own."""
        self._on_refused(connection.pid, refusal)
        self._reject(connection, refusal)

    def _reject(self, connection: Connection, refusal: Refusal) -> None:
        """Say why, then hang up. Unread packets would turn our last word into a reset: read them.

        Best effort: a process that does not read, or is gone, does not hear it.
        """
        try:
            connection.sock.send(ATTACH_REPLIES.encode(Rejected(refusal)))
            for _ in range(_ACCEPTS_PER_WAKE):
                if not connection.sock.recv(MAX_REQUEST_BYTES):
                    break
        except OSError:
            pass
        self._hang_up(connection)

    def _hang_up(self, connection: Connection) -> None:
        """A process is gone, or is sent away; with the last one its session ends."""
        self._drop(connection)
        session = connection.session
        if session is None:
            return
        session.drop(connection)
        self._end_if_over(session)

    def _end_if_over(self, session: Session) -> None:
        if session.is_over:
            self._sessions.forget(session)
            self._notes.session_left(session.number)
            self._on_gone(session.number)

    def _drop(self, connection: Connection) -> None:
        if self._loop is not None:
            self._loop.remove_reader(connection.sock.fileno())
        if connection.timer is not None:
            connection.timer.cancel()
        self._connections.discard(connection)
        connection.sock.close()
