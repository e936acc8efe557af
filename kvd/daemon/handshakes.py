"""Handshakes with peers that fail: counted by reason, and told now and then with what to do.

libzmq tells of them on a monitor socket, to which its I/O thread writes; that thread would wait if
there were a limit, so there is none. A stranger can make handshakes fail as often as it likes:
each is counted, one in ten seconds of a reason is told, and nothing is kept of it.
"""

from __future__ import annotations

import contextlib
import struct
from typing import TYPE_CHECKING, Final

import zmq

from kvd.core.inputs import HandshakeFailed
from kvd.curve import HANDSHAKE_MS
from kvd.sockets import LoopSocket

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvd.curve import PeerKeys
    from kvd.daemon.reactor import Reactor

TELL_EVERY_S: Final = 10.0

_NO_DETAIL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_PROTOCOL: Final = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
_AUTH: Final = int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)

_CRYPTOGRAPHIC: Final = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_MECHANISM: Final = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

UNKNOWN_KEY: Final = "unknown-key"
WRONG_SERVER_KEY: Final = "wrong-server-key"
NO_CURVE: Final = "no-curve"
CUT_SHORT: Final = "cut-short"
MALFORMED: Final = "malformed"
REFUSED: Final = "refused"


class _Told:
    """When a reason was told last, and how often it has happened since."""

    __slots__ = ("at_s", "times")

    def __init__(self) -> None:
        self.at_s = float("-inf")
        self.times = 0


class Handshakes:
    """Watches the sockets of peers. ``count`` takes the reason of each failure."""

    def __init__(
        self,
        reactor: Reactor,
        keys: PeerKeys | None,
        count: Callable[[str], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._reactor = reactor
        self._keys = keys
        self._count = count
        self._loop = loop
        self._told: dict[tuple[str, str], _Told] = {}
        self._monitors: list[tuple[zmq.Socket[bytes], LoopSocket]] = []

    def watch_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Of a socket that is not bound yet."""
        self._watch(socket, self._dialed_us)

    def watch_dealer(self, socket: zmq.Socket[bytes], link: str, name: str, address: str) -> None:
        """Of a socket that will dial ``name``; not connected yet.

        libzmq gives a connection up for ever when the other side speaks another mechanism: it is
        dialed again from here, for that side may be restarted with a key.
        """

        def failed(event: int, value: int) -> None:
            self._dialed_them(link, name, address, event, value)
            if event != _NO_DETAIL:
                self._loop.call_later(HANDSHAKE_MS / 1e3, redial)

        def redial() -> None:
            if socket.closed:
                return
            with contextlib.suppress(zmq.ZMQError):  # it has no such connection any more
                socket.disconnect(address)
            socket.connect(address)

        self._watch(socket, failed)

    def close(self) -> None:
        """Stop watching; before the sockets themselves are closed."""
        for watched, monitor in self._monitors:
            if not watched.closed:
                watched.disable_monitor()
            monitor.close()

    def stranger(self, address: str) -> None:
        """The key gate did not know a key."""
        why = (
            f"a client at {address} has a key that is not in peers.keys of this node: list it "
            "under its node's name and kvd reload, or find out who it is"
        )
        self._failed("", address, UNKNOWN_KEY, why)

    def _watch(self, socket: zmq.Socket[bytes], on_failed: Callable[[int, int], None]) -> None:
        endpoint = f"inproc://kvd-handshakes-{len(self._monitors)}"
        socket.monitor(endpoint, _NO_DETAIL | _PROTOCOL | _AUTH)
        monitor = socket.context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)
        monitor.connect(endpoint)

        def take(frames: list[bytes]) -> None:
            event, value = struct.unpack("=HI", frames[0])
            on_failed(event, value)

        self._monitors.append((socket, LoopSocket(monitor, take, loop=self._loop)))

    def _dialed_us(self, event: int, value: int) -> None:
        if event == _AUTH:
            return  # the key gate has said whose, and from where
        if event == _NO_DETAIL:
            reason, why = CUT_SHORT, "somebody connected to peers.listen and hung up or was silent"
        elif value == _CRYPTOGRAPHIC:
            reason = WRONG_SERVER_KEY
            why = "somebody dials this node with another public key than its own: peers.keys there"
        elif value == _MECHANISM:
            reason = NO_CURVE
            why = "somebody dials this node without keys: set peers.secret_key_file there"
            if self._keys is None:
                why = "somebody dials this node with keys: set peers.secret_key_file here too"
        else:
            reason, why = MALFORMED, f"somebody does not speak ZMTP to peers.listen ({value:#x})"
        self._failed("", "", reason, why)

    def _dialed_them(self, link: str, name: str, address: str, event: int, value: int) -> None:
        keys = self._keys
        if event == _PROTOCOL and value == _MECHANISM:
            reason = NO_CURVE
            why = f"{name} at {address} has no key: set peers.secret_key_file there"
            if keys is None:
                why = f"{name} at {address} wants keys: set peers.secret_key_file and peers.keys"
        elif keys is None:
            reason, why = CUT_SHORT, f"{address} hangs up or is silent: is it the kvd of {name}?"
        else:
            reason = REFUSED
            why = (
                f"{name} at {address} ends the handshake: the key {keys.own.public} of this node "
                f"must be in its peers.keys, and its own must be that of peers.keys.{name} here"
            )
        self._failed(link, address, reason, why)

    def _failed(self, link: str, address: str, reason: str, why: str) -> None:
        """Count it; tell it unless the same was told a moment ago."""
        self._count(reason)
        told = self._told.setdefault((link, reason), _Told())
        told.times += 1
        now_s = self._reactor.clock()
        if now_s - told.at_s < TELL_EVERY_S:
            return
        times, told.times, told.at_s = told.times, 0, now_s
        self._reactor.feed(HandshakeFailed(now_s, link, address, reason, why, times))
