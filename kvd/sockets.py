"""One ZMQ socket on the event loop, driven from its file descriptor.

What lives here: reading and writing a ROUTER or DEALER without ever blocking the loop. What must
not: messages, codecs, sessions; frames go in and out as they are.

Theory of operation. A ZMQ descriptor does not say "a message is there"; it says "something changed,
ask EVENTS", and asking consumes the change. Every operation on the socket may consume it too. So
after every drain *and after every send* EVENTS is read again, and when it still says POLLIN the
next drain is scheduled by hand, because the descriptor will stay silent. A drain takes a bounded
number of messages and then yields, so that one busy socket cannot starve timers or its neighbours.

Measured with 64 requests in flight: ``recv`` frame by frame until it would block, EVENTS once per
drain, beats ``recv_multipart`` under a per-message EVENTS check by 1.3 to 1.8; and copying frames
beats ``copy=False`` at 128 KiB too (1.3 to 1.9), because a Frame object costs more than its memcpy
and the caller wants ``bytes`` anyway.

Nothing is queued here beyond libzmq's own high-water mark: that mark *is* the bounded backlog. A
message that does not fit, or whose peer has gone, is not sent, and ``send`` says which.

Invariant: unless closed, whenever a message can be received either the descriptor is readable or a
drain is scheduled.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import zmq

if TYPE_CHECKING:
    import asyncio

Frames = list[bytes]

OnMessage = Callable[[Frames], None]
"""Takes one message: for a ROUTER the routing id first. Called on the loop, never re-entered."""

BACKLOG_MESSAGES: Final = 4096
"""High-water mark per peer and direction: a reader this far behind is not reading."""

MAX_FRAME_BYTES: Final = 16 * 1024 * 1024
"""libzmq drops the connection of a sender of more; also the default of limits.max_frame_bytes."""

DRAIN_MESSAGES: Final = 32
"""Messages taken per wake-up: about 2 ms of `lease` requests, then everyone else has a turn."""


class Sent(enum.Enum):
    """What became of a message given to ``send``."""

    TAKEN = "taken"
    """libzmq has it."""
    FULL = "full"
    """Not sent: the peer is ``BACKLOG_MESSAGES`` behind. It is alive and does not read."""
    GONE = "gone"
    """Not sent: no peer of that routing id is connected (ROUTER), or this socket is closed."""


def open_router(
    context: zmq.Context[zmq.Socket[bytes]], *, max_frame_bytes: int = MAX_FRAME_BYTES
) -> zmq.Socket[bytes]:
    """A ROUTER that tells a gone peer from a sent message; not yet bound.

    A second connection that claims a routing id in use is ignored by libzmq: an id is taken by
    whoever came first, and is free again once that connection is gone.
    """
    socket = _open(context, zmq.ROUTER, max_frame_bytes)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    return socket


def open_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    *,
    routing_id: bytes | None = None,
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> zmq.Socket[bytes]:
    """A DEALER under ``routing_id``; not yet connected."""
    socket = _open(context, zmq.DEALER, max_frame_bytes)
    if routing_id is not None:
        socket.setsockopt(zmq.ROUTING_ID, routing_id)
    return socket


def _open(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, max_frame_bytes: int
) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, BACKLOG_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, BACKLOG_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    return socket


class LoopSocket:
    """One ROUTER or DEALER on one event loop. Takes the socket over: closes it too."""

    def __init__(
        self, socket: zmq.Socket[bytes], on_message: OnMessage, *, loop: asyncio.AbstractEventLoop
    ) -> None:
        """Start reading at once; ``on_message`` is first called from the loop, not from here."""
        self._socket = socket
        self._on_message = on_message
        self._loop = loop
        self._fd = int(socket.get(zmq.FD))
        self._draining = False
        self._wake: asyncio.Handle | None = None
        self._closed = False
        loop.add_reader(self._fd, self._drain)
        self._look_again()

    def send(self, frames: Sequence[bytes]) -> Sent:
        """Hand a message to libzmq; never blocks, never raises for the state of a peer.

        Args:
            frames: at least one; for a ROUTER the routing id first.
        """
        if self._closed:
            return Sent.GONE
        outcome = self._send(frames)
        if not self._draining:
            self._look_again()
        return outcome

    def close(self, *, linger_s: float = 0.0) -> None:
        """Stop reading and close; what libzmq still has to send may take up to ``linger_s``."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._wake is not None:
            self._wake.cancel()
        self._socket.close(linger=int(linger_s * 1000))

    def _send(self, frames: Sequence[bytes]) -> Sent:
        socket = self._socket
        last = len(frames) - 1
        try:
            for frame in frames[:last]:
                socket.send(frame, zmq.NOBLOCK | zmq.SNDMORE)
            socket.send(frames[last], zmq.NOBLOCK)
        except zmq.Again:
            return Sent.FULL
        except zmq.ZMQError as exc:
            if exc.errno != zmq.EHOSTUNREACH:
                raise
            return Sent.GONE
        return Sent.TAKEN

    def _drain(self) -> None:
        """Take up to ``DRAIN_MESSAGES``; runs on the loop, from the descriptor or by hand."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        socket, on_message = self._socket, self._on_message
        self._draining = True
        try:
            for _ in range(DRAIN_MESSAGES):
                if self._closed:
                    return
                try:
                    frames = [socket.recv(zmq.NOBLOCK)]
                except zmq.Again:
                    break
                while socket.get(zmq.RCVMORE):
                    frames.append(socket.recv(zmq.NOBLOCK))
                on_message(frames)
        finally:
            self._draining = False
            self._look_again()

    def _look_again(self) -> None:
        """Restore the invariant: the descriptor may be silent though a message is there."""
        if self._closed or self._wake is not None:
            return
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._wake = self._loop.call_soon(self._drain)
