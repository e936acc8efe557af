"""Takes connections on a bound socket, as a ROUTER does; keeps number, time and weight in bounds.

Whoever costs something and says nothing gives way first: of those in handshake the oldest, of the
others who has been silent for longest, of those that make us keep bytes the one with most. All of
this is decided between keys before it is decided between connections (``shares``), and for those
who have proven nothing yet apart from those who have. So an honest peer gets in beside any number
of others, and stays, and its messages become whole.

Whose a connection is: of the listed key that it has proven, of the session that it speaks for
(``keep``); else of the process that the kernel names, or where there is none, of its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import TYPE_CHECKING, ClassVar, Final

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.zmtp.acceptor import Acceptor, peer_credentials
from kvd.zmtp.bounds import BOUNDS, COMING_S, RELIEF_BYTES, TURN_S, UNKEPT_S
from kvd.zmtp.connection import Owner, ZmtpConnection
from kvd.zmtp.curve import CurveServer
from kvd.zmtp.events import ConnectionClosed, ConnectionFault
from kvd.zmtp.mechanism import PUB, ROUTER, Null
from kvd.zmtp.protocol import TRAFFIC, Protocol
from kvd.zmtp.shares import Budget, Places
from kvd.zmtp.turns import FairTurns

if TYPE_CHECKING:
    from kvd.zmtp.bounds import Bounds
    from kvd.zmtp.curve import KeyRing
    from kvd.zmtp.events import Frames
    from kvd.zmtp.turns import WriteBatch

BACKLOG: Final = 1024
"""Connections that the kernel keeps for us."""

_SWEEP_S: Final = 0.25
"""How late the end of a time may be noticed."""

_LEFT_WAITING: Final = frozenset({ConnectionFault.UNKNOWN_KEY, ConnectionFault.MECHANISM})
"""A dialing libzmq comes again after 0.1 s when it is hung up on; or never, if we both disagree and
it finds out. It knows only what we say."""

_CROWDED: Final = ConnectionClosed(ConnectionFault.CROWDED, "others needed its place")
_SLOW_HANDSHAKE: Final = ConnectionClosed(ConnectionFault.TOO_SLOW, "its handshake took too long")
_SLOW_MESSAGE: Final = ConnectionClosed(ConnectionFault.TOO_SLOW, "a message took too long")


LAST_WORDS_S: Final = 0.5
"""What was answered may take so long to go out at the end."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ListenerOwner:
    """Who answers for a listener. By default everyone is let in, and nothing is said."""

    socket_type: ClassVar[bytes] = ROUTER
    """What it is to others; of a PUB, messages that come are what a SUB wants to hear."""

    def start(
        self,
        sock: socket.socket,
        batch: WriteBatch,
        bounds: Bounds = BOUNDS,
        ring: KeyRing | None = None,
    ) -> None:
        """Serve ``sock``, bound and listening."""
        self.batch = batch
        self.listener = Listener(sock, self, batch, ring=ring, bounds=bounds)

    async def close(self) -> None:
        """Stop serving; what was answered still goes out."""
        await self.listener.close(linger_s=LAST_WORDS_S)

    def knows(self, connection: ZmtpConnection) -> bool:
        """Whether it is somebody once its handshake is over; else it is a stranger until kept."""
        del connection
        return True

    def welcome(self, connection: ZmtpConnection) -> bool:
        """Whether to let in whoever has ended its handshake."""
        del connection
        return True

    def take(self, connection: ZmtpConnection, frames: Frames) -> None:
        """Take a message, which has one frame or more."""

    def gone(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        """A connection that was let in is over."""

    def failed(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        """A handshake failed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Listener(Owner):
    """Serves until ``close``. Takes the socket over, bound and listening."""

    def __init__(
        self,
        sock: socket.socket,
        host: ListenerOwner,
        batch: WriteBatch,
        *,
        ring: KeyRing | None = None,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """``ring``: our key and whose are let in; without, everyone may say anything."""
        self.bounds = bounds
        self._host = host
        self._batch = batch
        self._ring = ring
        # Strangers cannot make those wait who are here, nor those who are here whoever is kept.
        # Who is not kept is timed from the first on: what one of them costs is not known.
        self._to_come = FairTurns(batch, COMING_S, untimed=1)
        self._turns = FairTurns(batch, UNKEPT_S, untimed=1)
        self._to_keep = FairTurns(batch, TURN_S)
        self._connections: set[ZmtpConnection] = set()
        self._coming: dict[ZmtpConnection, float] = {}
        """In handshake, and until when; oldest first."""
        self._at_door = Places()
        """The same ones, by process or address."""
        self._silent = Places()
        """Let in and not kept."""
        self._unfinished: dict[ZmtpConnection, float] = {}
        """Of whom a message has begun, and until when it must be whole; oldest first."""
        longest = bounds.max_message_bytes
        of_key = max(bounds.key_bytes, 2 * longest)
        # Strangers have one share for all of them together: there may be any number.
        self._strangers = Budget(key_bytes=of_key, safe_bytes=0, total_bytes=of_key)
        self._known = Budget(
            key_bytes=of_key,
            safe_bytes=longest,
            total_bytes=max(bounds.total_bytes, 4 * of_key),
        )
        self._heaviest = 0
        """Kept at most since memory was given back."""
        self._sweeper: asyncio.TimerHandle | None = None
        self._is_closed = False
        self._empty = asyncio.Event()
        self._acceptor = Acceptor(
            batch.loop, sock, self._take_in, self._make_place, turns=self._to_come
        )

    def keep(self, connection: ZmtpConnection, key: str) -> None:
        """It stays, however silent it is, and is no stranger: what is kept for it is ``key``'s."""
        self._silent.remove(connection)
        connection.turns = self._to_keep
        self._strangers.remove(connection)
        self._known.remove(connection)
        self._known.add(connection, key)

    def let_go(self, connection: ZmtpConnection) -> None:
        """It is a stranger again, like any other of the process that it is."""
        if connection.is_over:
            return
        self._known.remove(connection)
        self._strangers.add(connection, connection.origin)
        self._silent.add(connection, connection.origin)
        connection.turns = self._turns

    @property
    def kept_bytes(self) -> int:
        """Kept for all that are let in."""
        return self._strangers.weight + self._known.weight

    async def close(self, *, linger_s: float = 0.0) -> None:
        """Hang up on everybody; what was sent has ``linger_s`` to go out. Repeatable."""
        if not self._is_closed:
            self._is_closed = True
            if self._sweeper is not None:
                self._sweeper.cancel()
            self._acceptor.close()
        for connection in list(self._connections):
            connection.close(linger_s=linger_s)
        if self._connections:
            await self._empty.wait()

    # ---- coming ----------------------------------------------------------------------------------

    def _take_in(self, sock: socket.socket, address: tuple[str, int] | str) -> None:
        if len(self._at_door) >= self.bounds.max_handshakes:
            oldest = self._at_door.least_missed()
            if oldest is not None:
                oldest.end(_CROWDED)
        if len(self._connections) >= self.bounds.max_connections and not self._make_place():
            sock.close()
            return
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it has hung up already
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = self._host.socket_type
        mechanism = Null(kind) if self._ring is None else CurveServer(self._ring)
        machine = Protocol(mechanism, self.bounds.max_message_bytes, takes_topics=kind == PUB)
        connection = ZmtpConnection(sock, machine, self, self._batch, self._to_come)
        connection.peer = address[0] if isinstance(address, tuple) else ""
        connection.origin = connection.peer or _process_behind(sock)
        self._connections.add(connection)
        self._at_door.add(connection, connection.origin)
        # From here on, whatever it says: no step of a handshake gives it more time.
        self._coming[connection] = time.monotonic() + self.bounds.handshake_s
        self._sweep_later()

    def _make_place(self) -> bool:
        """Hang up on whoever is missed least."""
        for waiting in (self._silent, self._at_door):
            least = waiting.least_missed()
            if least is not None:
                least.end(_CROWDED)
                return True
        return False

    # ---- as Owner --------------------------------------------------------------------------------

    @override
    def met(self, connection: ZmtpConnection) -> bool:
        key = f"the key of {connection.name}" if connection.name else connection.origin
        self._silent.add(connection, key)
        connection.turns = self._turns
        budget = self._known if self._host.knows(connection) else self._strangers
        budget.add(connection, key)
        if not self._host.welcome(connection):
            return False
        del self._coming[connection]
        self._at_door.remove(connection)
        return True

    @override
    def message(self, connection: ZmtpConnection, frames: Frames) -> None:
        self._silent.spoke(connection)
        self._host.take(connection, frames)

    @override
    def weighs(self, connection: ZmtpConnection, before: int, *, is_fresh: bool) -> None:
        """As ``Owner``: whoever is beyond its share is hung up on, and nobody else."""
        machine, weight = connection.machine, connection.weight
        # After nearly every read nothing is kept of it, as before: no share is another one.
        if not weight and not before:
            self._unfinished.pop(connection, None)
            return
        if machine.state is TRAFFIC:
            if is_fresh or not machine.held:
                self._unfinished.pop(connection, None)
            if machine.held and connection not in self._unfinished:
                self._unfinished[connection] = time.monotonic() + self.bounds.message_s
                self._sweep_later()
        more = weight - before
        # Whoever does not read is no younger for what it says meanwhile.
        is_fresh = is_fresh and not connection.is_blocked
        for budget in (self._known, self._strangers):
            if budget.weigh(connection, more, is_fresh=is_fresh):
                while (found := budget.beyond(connection)) is not None:
                    heaviest, why = found
                    heaviest.end(ConnectionClosed(ConnectionFault.TOO_HEAVY, why))
        if more > 0:
            self._heaviest = max(self._heaviest, self.kept_bytes)

    @override
    def ends(self, connection: ZmtpConnection, closed: ConnectionClosed) -> bool:
        """As ``Owner``: whoever would only come again at once is left waiting."""
        if closed.fault not in _LEFT_WAITING:
            return True
        self._host.failed(connection, closed)
        self._coming[connection] = time.monotonic() + self.bounds.refused_s
        return False

    @override
    def over(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        self._connections.discard(connection)
        self._silent.remove(connection)
        self._at_door.remove(connection)
        self._unfinished.pop(connection, None)
        self._known.remove(connection)
        self._strangers.remove(connection)
        if self._coming.pop(connection, None) is None:
            self._host.gone(connection, closed)
        elif not connection.is_ignored and closed.fault is not ConnectionFault.ENDED:
            self._host.failed(connection, closed)
        if self._is_closed and not self._connections:
            self._empty.set()

    # ---- times -----------------------------------------------------------------------------------

    def _sweep_later(self) -> None:
        if self._sweeper is None and not self._is_closed:
            self._sweeper = self._batch.loop.call_later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        """End what took too long; the first of each comes first."""
        self._sweeper = None
        now_s = time.monotonic()
        # All of these, which are few: who is left waiting has less time than who came before it.
        for connection, end_s in list(self._coming.items()):
            if end_s <= now_s:
                connection.end(_SLOW_HANDSHAKE)
        while self._unfinished:
            connection, end_s = next(iter(self._unfinished.items()))
            if end_s > now_s:
                break
            connection.end(_SLOW_MESSAGE)
        if self._heaviest > RELIEF_BYTES and self.kept_bytes < RELIEF_BYTES // 2:
            self._heaviest = 0
            self._batch.relieve()
        if self._coming or self._unfinished or self._heaviest > RELIEF_BYTES:
            self._sweep_later()


def _process_behind(sock: socket.socket) -> str:
    """Of a unix socket; a process of another pid namespace has number 0."""
    pid, uid = peer_credentials(sock)
    return f"pid {pid} of uid {uid}"
