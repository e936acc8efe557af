"""A session's sockets for a thread that blocks. One thread at a time may use them."""

from __future__ import annotations

import math
import select
import time
from typing import TYPE_CHECKING, Any, Final

from kvd.client.attachment import ATTACH_WITHIN_S, Attachment, ask, dial, take_answer, too_late
from kvd.client.endpoint import attach_path
from kvd.client.session_sockets import SessionSockets

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from kvd.client.connection import Connection
    from kvd.client.state import Slot
    from kvd.wire.attach import AttachRequest

_DESCRIPTORS: Final = 4
"""Told of at once; a session has two, or one while the daemon is away."""


def attach(endpoint: str, request: AttachRequest) -> Attachment:
    """Open or join a session of the daemon at ``endpoint``.

    Raises:
        KvdError: ``unreachable``, or the daemon's refusal.
    """
    path = attach_path(endpoint)
    end_s = time.monotonic() + ATTACH_WITHIN_S
    sock = dial(path, wait_s=ATTACH_WITHIN_S)
    if sock is None:
        raise too_late(path)
    try:
        ask(sock, request)
        attachment = _answer(sock, end_s)
    except BaseException:
        sock.close()
        raise
    if attachment is None:
        sock.close()
        raise too_late(path)
    return attachment


def _answer(sock: socket, end_s: float) -> Attachment | None:
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    ready.poll(max(0.0, end_s - time.monotonic()) * 1000)
    return take_answer(sock)


class BlockingChannel:
    """The sockets of one session for a thread that blocks in ``wait``; their ``Watcher``, too."""

    def __init__(
        self, endpoint: str, attachment: Attachment, connection: Connection, name: str
    ) -> None:
        """Takes the attachment over."""
        self._connection = connection
        self._ready = select.epoll()
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        self._step_s = math.inf
        self._is_read_left = False
        self._is_closed = False
        self._sockets = SessionSockets(endpoint, attachment, connection, name, self)
        self._sockets.open()

    def flush(self) -> None:
        """Send what the connection has queued; ``wait`` sends what the kernel does not take now."""
        self._sockets.flush()

    async def wait(self, slot: Slot[Any], within_s: float) -> None:
        """Block until ``slot`` is filled or the time is up; never suspends.

        Reads no further than it must: what else has come is read by a later call. While the daemon
        is away it goes back, step by step.
        """
        end_s = time.monotonic() + within_s
        self._sockets.hurry()
        while slot.value is None and self._connection.end is None:
            now_s = time.monotonic()
            if now_s >= end_s:
                return
            self._turn(min(end_s, self._step_s) - now_s)

    def look(self) -> None:
        """Nobody else looks between two calls. One that is away is stepped towards by ``wait``."""
        self._sockets.look()

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        self._sockets.close()
        self._ready.close()

    def _turn(self, within_s: float) -> None:
        """Do what there is to do, once something has come, or the time is up."""
        if self._is_read_left:
            self._is_read_left = False
            self._sockets.read()
            return
        for fd, events in self._ready.poll(max(0.0, within_s), _DESCRIPTORS):
            # Taken anew each time: the one before may have forgotten this one.
            if events & select.EPOLLOUT and fd in self._writers:
                self._writers[fd]()
            if events & ~select.EPOLLOUT and fd in self._readers:
                self._readers[fd]()
        if self._step_s <= time.monotonic():
            self._step_s = math.inf
            self._sockets.step()

    # ---- as Watcher ------------------------------------------------------------------------------

    def watch(self, fd: int, act: Callable[[], object]) -> None:
        """As ``Watcher``."""
        self._readers[fd] = act
        self._ready.register(fd, select.EPOLLIN)

    def watch_writing(self, fd: int, act: Callable[[], object] | None) -> None:
        """As ``Watcher``."""
        if act is None:
            self._writers.pop(fd, None)
            self._ready.modify(fd, select.EPOLLIN)
        else:
            self._writers[fd] = act
            self._ready.modify(fd, select.EPOLLIN | select.EPOLLOUT)

    def unwatch(self, fd: int) -> None:
        """As ``Watcher``."""
        self._writers.pop(fd, None)
        if self._readers.pop(fd, None) is not None:
            self._ready.unregister(fd)

    def write_soon(self) -> None:
        """As ``Watcher``."""
        self._sockets.write()

    def read_soon(self) -> None:
        """As ``Watcher``."""
        self._is_read_left = True

    def step_after(self, pause_s: float) -> None:
        """As ``Watcher``."""
        self._step_s = time.monotonic() + pause_s
