"""One connection to one host, as a DEALER has it, made again for ever when it breaks.

What is sent while there is none waits for the next, up to the bounds of a backlog: so the first
words need not wait for the first connection.

A name may have several addresses, and not at each of them is who is meant. They are tried in turn:
an address where nobody takes a connection, ends the handshake, says nothing for long, or is turned
away makes place for the next; the one that served is the first again when its connection breaks.
The name is looked up anew before each round.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import TYPE_CHECKING, Any, Final

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
"""For a name to be found, and for a connection to be taken."""

NEXT_S: Final = 1.5
"""For a connection to be taken where there are other addresses to try."""

_SILENT: Final = ConnectionClosed(ConnectionFault.TOO_SLOW, "it said nothing for too long")
_LAST_WORDS_S: Final = 0.2

_TOO_SLOW: Final = ConnectionClosed(ConnectionFault.TOO_SLOW, "its handshake took too long")
_UNFINISHED: Final = ConnectionClosed(ConnectionFault.TOO_SLOW, "a message took too long")


Address = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]
"""As ``getaddrinfo`` has it. Any: a socket address is of texts and numbers, by family."""

_SHOWN: Final = 4
"""Of the addresses that a sentence names."""


def _ignore(why: str) -> None:
    """Nobody wants to know."""


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
        on_unreachable: Callable[[str], None] = _ignore,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """Prepare, and begin with the next turn of the loop.

        Args:
            host: name or IP address.
            port: of TCP.
            mechanism: makes our side of it for each connection.
            batch: of the loop.
            on_message: takes each message.
            on_failed: takes why a handshake failed.
            on_unreachable: takes why a round of all addresses found nobody who takes a connection:
                empty for one that found somebody.
            bounds: limits.
        """
        self.bounds = bounds
        self._host, self._port = host, port
        self._mechanism = mechanism
        self._batch = batch
        self._on_message = on_message
        self._on_failed = on_failed
        self._on_unreachable = on_unreachable
        self._heard_s = 0.0
        self._first: Address | None = None
        """Which address is tried first, where the host still has it."""
        self._is_turned_away = False
        self._n_addresses = 0
        """In this round."""
        self._turns = FairTurns(batch, TURN_S)
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

    def turn_away(self) -> None:
        """Whoever answered is not who was meant: try the next address, if there is one."""
        self._is_turned_away = True
        if self._n_addresses > 1 and self._connection is not None:
            self._connection.close(linger_s=_LAST_WORDS_S)  # what it was told still goes out

    async def _dial(self) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            if await self._round():
                pause_s = FIRST_PAUSE_S
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _round(self) -> bool:
        """Try every address until one has served; whether one has."""
        try:
            async with asyncio.timeout(CONNECT_S):
                found = await self._batch.loop.getaddrinfo(
                    self._host, self._port, type=socket.SOCK_STREAM
                )
        except OSError as error:
            self._on_unreachable(
                f"the name {self._host} cannot be resolved ({error.strerror or error})"
            )
            return False
        except TimeoutError:
            self._on_unreachable(f"the name {self._host} was not resolved within {CONNECT_S:g} s")
            return False
        addresses = list(dict.fromkeys(found))
        self._n_addresses = len(addresses)
        if self._first in addresses:
            at = addresses.index(self._first)
            addresses = addresses[at:] + addresses[:at]
        missed: list[str] = []
        for number, address in enumerate(addresses):
            # Before it is tried: a round that ends here goes on with the next one.
            self._first = addresses[(number + 1) % len(addresses)]
            sock = await self._connected(address, missed)
            if sock is None:
                continue
            self._on_unreachable("")
            if await self._serve(sock):
                self._first = address
                return True
        if len(missed) == len(addresses):
            self._on_unreachable("; ".join(missed[:_SHOWN]))
        return False

    async def _connected(self, found: Address, missed: list[str]) -> socket.socket | None:
        """A connection; where nobody takes it in time None, and why is added to ``missed``."""
        family, kind, proto, _, address = found
        limit_s = NEXT_S if self._n_addresses > 1 else CONNECT_S
        sock = socket.socket(family, kind | socket.SOCK_NONBLOCK, proto)
        try:
            async with asyncio.timeout(limit_s):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._batch.loop.sock_connect(sock, address)
        except ConnectionRefusedError:
            missed.append(f"nobody listens at {address[0]} port {self._port}")
        except TimeoutError:
            missed.append(f"{address[0]} port {self._port} has not answered in {limit_s:g} s")
        except OSError as error:
            missed.append(f"{address[0]} port {self._port}: {error.strerror or error}")
        except BaseException:
            sock.close()
            raise
        else:
            return sock
        sock.close()
        return None

    async def _serve(self, sock: socket.socket) -> bool:
        """Serve a connection until it ends; whether it was one of whom is meant."""
        loop = self._batch.loop
        self._over.clear()
        self._is_met = self._is_turned_away = False
        self._heard_s = loop.time()
        machine = Protocol(self._mechanism(), self.bounds.max_message_bytes)
        connection = ZmtpConnection(sock, machine, self, self._batch, self._turns)
        self._connection = connection
        timer = loop.call_later(self.bounds.handshake_s, self._look, connection)
        try:
            silent_s = self.bounds.silent_s
            while silent_s is not None and not self._over.is_set():
                left_s = self._heard_s + silent_s - loop.time()
                if left_s <= 0:
                    connection.end(_SILENT)
                    return False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await self._over.wait()
            await self._over.wait()
        finally:
            timer.cancel()
        return self._is_met and not self._is_turned_away

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
        self._heard_s = self._batch.loop.time()
        self._on_message(frames)

    @override
    def weighs(self, connection: ZmtpConnection, before: int, *, is_fresh: bool) -> None:
        """As ``Owner``: what it keeps is bounded by one message and the backlog; so is its time."""
        if not connection.weight and self._unfinished is None:
            return
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
