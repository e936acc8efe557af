"""One connection to one address, as a DEALER has it, made again for ever when it breaks.

What is sent while there is none waits for the next, up to the bounds of a backlog: so the first
words need not wait for the first connection.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

from typing_extensions import override

from kvd.types import Sent
from kvd.zmtp.bounds import BOUNDS, TURN_S
from kvd.zmtp.connection import Owner, ZmtpConnection
from kvd.zmtp.events import ConnectionClosed, ConnectionFault
from kvd.zmtp.protocol import TRAFFIC, Protocol
from kvd.zmtp.turns import FairTurns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.zmtp.bounds import Bounds
    from kvd.zmtp.events import Frames
    from kvd.zmtp.mechanism import Mechanism
    from kvd.zmtp.turns import WriteBatch

FIRST_PAUSE_S: Final = 0.1
LAST_PAUSE_S: Final = 1.0
"""Before the address is dialed again: doubled each time in vain."""

CONNECT_S: Final = 5.0
"""For a name to be found and a connection to be taken."""

_TOO_SLOW: Final = ConnectionClosed(ConnectionFault.TOO_SLOW, "its handshake took too long")
_UNFINISHED: Final = ConnectionClosed(ConnectionFault.TOO_SLOW, "a message took too long")


class Dialer(Owner):
    """Dials from now on until ``close``."""

    def __init__(
        self,
        host: str,
        port: int,
        mechanism: Callable[[], Mechanism],
        batch: WriteBatch,
        *,
        on_message: Callable[[Frames], None],
        on_failed: Callable[[ConnectionClosed], None],
        bounds: Bounds = BOUNDS,
    ) -> None:
        """Prepare, and begin with the next turn of the loop.

        Args:
            host: name or IP address.
            port: of TCP.
            mechanism: makes our side of it for each connection.
            batch: of the loop.
            on_message: takes each message.
            on_failed: takes why a handshake failed. That nobody listens is not told.
            bounds: limits.
        """
        self.bounds = bounds
        self._host, self._port = host, port
        self._mechanism = mechanism
        self._batch = batch
        self._on_message = on_message
        self._on_failed = on_failed
        self._turns = FairTurns(batch.loop, TURN_S)
        self._waiting: deque[Sequence[bytes]] = deque()
        self._waiting_bytes = 0
        self._connection: ZmtpConnection | None = None
        self._is_met = False
        self._unfinished: asyncio.TimerHandle | None = None
        """Runs from the first byte of a message to its last."""
        self._over = asyncio.Event()
        self._run = batch.loop.create_task(self._dial())

    def send(self, frames: Sequence[bytes]) -> Sent:
        """Send one message, now or once somebody is there; never blocks."""
        if self._connection is not None and self._is_met:
            return self._connection.send(frames)
        if self._run.done():
            return Sent.GONE
        bounds = self.bounds
        if (
            len(self._waiting) >= bounds.backlog_messages
            or self._waiting_bytes > bounds.backlog_bytes
        ):
            return Sent.FULL
        self._waiting.append(frames)
        self._waiting_bytes += sum(map(len, frames))
        return Sent.TAKEN

    async def close(self, *, linger_s: float = 0.0) -> None:
        """Hang up; what was sent has ``linger_s`` to go out. Repeatable."""
        self._run.cancel()
        await asyncio.wait([self._run])
        connection = self._connection
        if connection is not None:
            connection.close(linger_s=linger_s)
            await self._over.wait()

    async def _dial(self) -> None:
        loop, pause_s = self._batch.loop, FIRST_PAUSE_S
        while True:
            sock = await self._connected()
            if sock is not None:
                self._over.clear()
                self._is_met = False
                machine = Protocol(self._mechanism(), self.bounds.max_message_bytes)
                connection = ZmtpConnection(sock, machine, self, self._batch, self._turns)
                self._connection = connection
                timer = loop.call_later(self.bounds.handshake_s, self._look, connection)
                try:
                    await self._over.wait()
                finally:
                    timer.cancel()
                if self._is_met:
                    pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _connected(self) -> socket.socket | None:
        """A connection; None where nobody takes it in time."""
        loop = self._batch.loop
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
                for family, kind, proto, _, address in found:
                    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
                    try:
                        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        await loop.sock_connect(sock, address)
                    except OSError:
                        sock.close()
                        continue
                    except BaseException:
                        sock.close()
                        raise
                    return sock
        except (OSError, TimeoutError):
            pass
        return None

    def _look(self, connection: ZmtpConnection) -> None:
        if not self._is_met:
            connection.end(_TOO_SLOW)

    # ---- as Owner --------------------------------------------------------------------------------

    @override
    def met(self, connection: ZmtpConnection) -> bool:
        self._is_met = True
        waiting, self._waiting = self._waiting, deque()
        self._waiting_bytes = 0
        for frames in waiting:
            connection.send(frames)
        return True

    @override
    def message(self, connection: ZmtpConnection, frames: Frames) -> None:
        self._on_message(frames)

    @override
    def weighs(self, connection: ZmtpConnection, before: int, *, is_fresh: bool) -> None:
        """As ``Owner``: what it keeps is bounded by one message and the backlog; so is its time."""
        machine = connection.machine
        if self._unfinished is not None and (is_fresh or not machine.held):
            self._unfinished.cancel()
            self._unfinished = None
        if self._unfinished is None and machine.held and machine.state is TRAFFIC:
            self._unfinished = self._batch.loop.call_later(
                self.bounds.message_s, connection.end, _UNFINISHED
            )

    @override
    def over(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        if self._unfinished is not None:
            self._unfinished.cancel()
            self._unfinished = None
        self._connection = None
        self._over.set()
        if not self._is_met and closed.fault is not ConnectionFault.ENDED:
            self._on_failed(closed)
