"""One connection to an admin socket, which says when it is there and when it is lost.

libzmq would connect again by itself and say nothing; but what was asked on the old connection is
never answered. So a connection that is lost stays lost, and its owner makes another.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvd.sockets import LoopSocket, open_dealer
from kvd.wire.codec import MAX_REPLY_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.sockets import Frames

_WATCHED = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Line:
    """Connects at once; ``on_frame`` gets every message. Close it."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        on_frame: Callable[[bytes], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.up: asyncio.Future[None] = loop.create_future()
        """Done when the other end's socket is there; whether anybody reads it is not known."""
        self.lost: asyncio.Future[None] = loop.create_future()
        """Done when the connection has ended."""
        self._on_frame = on_frame
        self._dealer = open_dealer(context, max_frame_bytes=MAX_REPLY_BYTES)
        self._monitor = LoopSocket(
            self._dealer.get_monitor_socket(_WATCHED), self._watch, loop=loop
        )
        self._socket = LoopSocket(self._dealer, self._hear, loop=loop)
        self._dealer.connect(endpoint)

    def send(self, frame: bytes) -> None:
        """Hand a request over; it is lost with the line."""
        self._socket.send([frame])

    def close(self) -> None:
        """Hang up; repeatable."""
        self.up.cancel()
        self.lost.cancel()
        if not self._dealer.closed:
            self._dealer.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def _hear(self, frames: Frames) -> None:
        self._on_frame(frames[-1])

    def _watch(self, frames: Frames) -> None:
        event = parse_monitor_message(frames)["event"]
        if event != zmq.EVENT_CONNECTED:
            if not self.lost.done():
                self.lost.set_result(None)
        elif not self.up.done():
            self.up.set_result(None)
