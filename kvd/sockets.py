"""One ZMQ socket on the event loop, driven from its file descriptor.

What lives here: reading and writing a ROUTER or DEALER without ever blocking the loop. What must
not: messages, codecs, sessions; frames go in and out as they are.

Theory of operation. A ZMQ descriptor does not say "a message is there"; it says "something changed,
look", and every operation on the socket may consume the change. So a drain ends only when the
socket has said that nothing is left (EVENTS without POLLIN, or a ``recv`` that would block), and
after sends outside a drain EVENTS is read once, later in the same turn of the loop; what is there
then is drained by hand, because the descriptor will stay silent. A drain takes a bounded number of
messages and then yields, so that one busy socket cannot starve timers or its neighbours.

Measured, per message: a ``recv`` that would block costs 4.5 us because it raises, EVENTS 2, and
RCVMORE 1.2 because pyzmq looks its name up. So a drain asks EVENTS once, after its first message,
and ``more`` of a Frame says whether another frame follows, which saves 1.8 us for three frames; the
caller gets ``bytes``, so a copy is made either way.

Nothing is queued here beyond libzmq's own high-water mark: that mark *is* the bounded backlog. A
message that does not fit, or whose peer has gone, is not sent, and ``send`` says which.

Invariant: unless closed, whenever a message can be received either the descriptor is readable or a
drain is scheduled.
"""

from __future__ import annotations

import errno
import socket as unix
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import zmq

from kvd import types
from kvd.types import Sent

if TYPE_CHECKING:
    import asyncio

Frames = list[bytes]

OnMessage = Callable[[Frames], None]
"""Takes one message: for a ROUTER the routing id first. Called on the loop, never re-entered."""


Push = Callable[[bytes, int], object]
"""Gives one frame to libzmq, with its flags."""

BACKLOG_MESSAGES: Final = 4096
"""High-water mark per peer and direction: a reader this far behind is not reading."""

MAX_FRAME_BYTES: Final = types.MAX_FRAME_BYTES
"""libzmq drops the connection of a sender of more; also the default of limits.max_frame_bytes."""

DRAIN_MESSAGES: Final = 32
"""Messages taken per wake-up: about 2 ms of `lease` requests, then everyone else has a turn."""


# As plain ints: an operation on pyzmq's enums takes about 1 us.
_EVENTS: Final = int(zmq.EVENTS)
_READABLE: Final = int(zmq.POLLIN)
_NOW: Final = int(zmq.NOBLOCK)
_NOW_AND_MORE: Final = int(zmq.NOBLOCK) | int(zmq.SNDMORE)


def is_ipv6(endpoint: str) -> bool:
    """Whether an endpoint has an IPv6 address: libzmq takes those only when told so."""
    return endpoint.startswith("tcp://[")


def nobody_listens(endpoint: str) -> str:
    """Why nobody can be reached there, in a sentence; empty where somebody may be.

    ZMQ would wait in silence for a daemon to come; the file of its socket tells at once.
    """
    scheme, _, path = endpoint.partition("://")
    if scheme != "ipc" or path.startswith("@"):
        return ""
    with unix.socket(unix.AF_UNIX, unix.SOCK_STREAM | unix.SOCK_NONBLOCK) as probe:
        code = probe.connect_ex(path)
    match code:
        case 0 | errno.EAGAIN:
            return ""
        case errno.ENOENT:
            return f"there is no socket at {path}"
        case errno.ECONNREFUSED:
            return f"nobody listens on {path} any more"
        case errno.EACCES | errno.EPERM:
            return f"permission denied on {path}: join the group of the socket (usually kvd)"
        case _:
            return f"{path} cannot be reached: {errno.errorcode.get(code, str(code))}"


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


def pusher(socket: zmq.Socket[bytes]) -> Push:
    """What ``send_now`` sends with: the binding's own method.

    pyzmq wraps it to look at options that are never used here, which is half of the 1 us that a
    small frame takes.
    """
    push: Push = super(zmq.Socket, socket).send
    return push


def send_now(push: Push, frames: Sequence[bytes]) -> Sent:
    """Hand a message to libzmq without waiting.

    libzmq takes all frames of a message or none: only the first can be refused.
    """
    last = len(frames) - 1
    try:
        for frame in frames[:last]:
            push(frame, _NOW_AND_MORE)
        push(frames[last], _NOW)
    except zmq.Again:
        return Sent.FULL
    except zmq.ZMQError as exc:
        if exc.errno != zmq.EHOSTUNREACH:
            raise
        return Sent.GONE
    return Sent.TAKEN


def receive_now(socket: zmq.Socket[bytes]) -> Frames | None:
    """The next message; None when there is none now, which libzmq then knows for certain."""
    try:
        frame = socket.recv(_NOW, copy=False)
    except zmq.Again:
        return None
    frames = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOW, copy=False)
        frames.append(frame.bytes)
    return frames


class LoopSocket:
    """One socket on one event loop. Takes the socket over: closes it too."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        on_message: OnMessage,
        *,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """Start reading at once; ``on_message`` is first called from the loop, not from here."""
        self._socket = socket
        self._push = pusher(socket)
        self._on_message = on_message
        self._loop = loop
        self._fd = int(socket.get(zmq.FD))
        self._draining = False
        self._wake: asyncio.Handle | None = None
        self._closed = False
        loop.add_reader(self._fd, self._drain)
        self._look_soon()

    def send(self, frames: Sequence[bytes]) -> Sent:
        """Hand a message to libzmq; never blocks, never raises for the state of a peer.

        Args:
            frames: at least one; for a ROUTER the routing id first.
        """
        if self._closed:
            return Sent.GONE
        outcome = send_now(self._push, frames)
        if not self._draining:
            self._look_soon()
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

    def _drain(self) -> None:
        """Take up to ``DRAIN_MESSAGES``; runs on the loop, from the descriptor or by hand."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        socket, on_message = self._socket, self._on_message
        is_empty = False
        self._draining = True
        try:
            for taken in range(DRAIN_MESSAGES):
                # Once, after the first: alone, it is the common case, and asking beats an Again.
                is_empty = self._closed or (taken == 1 and not self._is_readable())
                if is_empty:
                    return
                frames = receive_now(socket)
                if frames is None:
                    is_empty = True
                    return
                on_message(frames)
        finally:
            self._draining = False
            if not is_empty:
                self._look_soon()

    def _look_soon(self) -> None:
        """Restore the invariant: the descriptor may be silent though a message is there."""
        if self._wake is None and not self._closed:
            self._wake = self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._wake = None
        if self._is_readable():
            self._drain()

    def _is_readable(self) -> bool:
        return bool(int(self._socket.get(_EVENTS)) & _READABLE)
