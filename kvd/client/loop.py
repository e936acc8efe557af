"""A session's sockets on an event loop."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from kvd.client.attachment import ATTACH_WITHIN_S, Attachment, ask, dial, take_answer, too_late
from kvd.client.endpoint import attach_path
from kvd.client.port import unread
from kvd.client.returning import LAST_WORDS_S, WayBack, go_back, main_way
from kvd.sockets import LoopSocket, open_dealer
from kvd.types import Sent

if TYPE_CHECKING:
    from collections.abc import Callable
    from socket import socket

    from kvd.client.connection import Connection
    from kvd.client.state import Slot
    from kvd.wire.attach import Attach, Join

BUSY_PAUSE_S = 0.01
"""Between two attempts to connect to a daemon whose queue of connections is full."""

LOOK_EVERY_S = 0.1
"""How late the end of a wait may be noticed. A timer for every wait costs 2 us, looking 0.2."""


async def attach(endpoint: str, request: Attach | Join) -> Attachment:
    """Open or join a session of the daemon at ``endpoint``.

    Raises:
        KvdError: ``unreachable``, or the daemon's refusal.
    """
    path = attach_path(endpoint)
    try:
        async with asyncio.timeout(ATTACH_WITHIN_S):
            while (sock := dial(path)) is None:  # noqa: ASYNC110 - no event tells of room there
                await asyncio.sleep(BUSY_PAUSE_S)
            try:
                ask(sock, request)
                return await _answer(sock)
            except BaseException:
                sock.close()
                raise
    except TimeoutError:
        raise too_late(path) from None


async def _answer(sock: socket) -> Attachment:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sock.fileno(), ready.set)
    try:
        while True:
            await ready.wait()
            ready.clear()
            attachment = take_answer(sock)
            if attachment is not None:
                return attachment
    finally:
        loop.remove_reader(sock.fileno())


class LoopChannel:
    """The client socket and the attach socket of one session, on the running loop.

    It goes back by itself to a daemon that is away, by callbacks: no task, nothing to be awaited.
    """

    def __init__(
        self, endpoint: str, attachment: Attachment, connection: Connection, name: str
    ) -> None:
        """Start at once; takes the attachment over."""
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._name = name
        self._attachment = attachment
        self._connection = connection
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._way: WayBack | None = None
        self._next_step: asyncio.TimerHandle | None = None
        self._watched = -1
        self._open()
        self._until_s: dict[asyncio.Future[None], float] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._is_closed = False

    def flush(self) -> None:
        """Send what the connection has queued; a call that cannot be sent fails."""
        for outgoing in self._connection.take_outgoing():
            if self._socket.send(outgoing.frames) is not Sent.TAKEN:
                self._connection.not_sent(outgoing, unread())

    async def wait(self, slot: Slot[Any], within_s: float) -> None:
        """Suspend until ``slot`` is filled or the time is up."""
        if slot.value is not None:
            return
        future: asyncio.Future[None] = self._loop.create_future()
        wake = partial(_wake, future)
        slot.wake_with(wake)
        self._until_s[future] = self._loop.time() + within_s
        if self._alarm is None:
            self._alarm = self._loop.call_later(LOOK_EVERY_S, self._wake_late)
        try:
            await future
        finally:
            del self._until_s[future]
            slot.forget(wake)

    def look(self) -> None:
        """The loop tells of a hang-up, but not before it has a turn."""
        if self._way is None and self._connection.end is None:
            self._hung_up()

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._alarm, self._next_step):
            if timer is not None:
                timer.cancel()
        self._unwatch()
        if self._way is not None:
            self._way.abandon()
        self._socket.close()
        self._context.term()
        self._attachment.close()

    def _take(self, frames: list[bytes]) -> None:
        self._connection.feed(frames)
        self.flush()

    def _wake_late(self) -> None:
        """End the waits whose time is up; look again as long as anybody waits."""
        now_s = self._loop.time()
        for future in [one for one, until_s in self._until_s.items() if until_s <= now_s]:
            _wake(future)
        self._alarm = None
        if self._until_s and not self._is_closed:
            self._alarm = self._loop.call_later(LOOK_EVERY_S, self._wake_late)

    # ---- the daemon's end, and its return --------------------------------------------------------

    def _open(self) -> None:
        """Speak with the daemon that the attachment is with."""
        dealer = open_dealer(self._context, routing_id=self._attachment.route)
        dealer.connect(self._endpoint)
        self._socket = LoopSocket(dealer, self._take, loop=self._loop)
        self._watch(self._attachment.fileno(), self._hung_up)

    def _hung_up(self) -> None:
        why = self._attachment.last_word()
        if why is None:
            return
        self._unwatch()
        self._socket.receive_last(lambda: self._connection.is_waiting, LAST_WORDS_S)
        # What waits in it must not reach the daemon that is back: libzmq would deliver it.
        self._socket.close()
        if not why.is_retryable:
            self._connection.fail_all(why)
            return
        path = attach_path(self._endpoint)
        self._way = main_way(path, self._attachment, self._name, self._connection)
        self._connection.lost(why)
        self._step()

    def _step(self) -> None:
        self._unwatch()
        way = self._way
        if way is None or self._is_closed:
            return
        if go_back(way, self._attachment, self._connection):
            self._way = None
            self._open()
            self.flush()
        elif self._connection.end is None:
            if way.sock is not None:
                self._watch(way.sock.fileno(), self._step)
            else:
                self._next_step = self._loop.call_later(way.pause_s, self._step)

    def _watch(self, fd: int, on_readable: Callable[[], None]) -> None:
        self._watched = fd
        self._loop.add_reader(fd, on_readable)

    def _unwatch(self) -> None:
        if self._watched >= 0:
            self._loop.remove_reader(self._watched)
            self._watched = -1


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
