"""A session's sockets on an event loop."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import zmq

from kvd.client.attachment import ATTACH_WITHIN_S, Attachment, ask, dial, take_answer, too_late
from kvd.client.endpoint import attach_path
from kvd.client.port import unread
from kvd.sockets import LoopSocket, Sent, open_dealer

if TYPE_CHECKING:
    from socket import socket

    from kvd.client.connection import Connection
    from kvd.client.state import Slot
    from kvd.wire.attach import AttachRequest

BUSY_PAUSE_S = 0.01
"""Between two attempts to connect to a daemon whose queue of connections is full."""

LOOK_EVERY_S = 0.1
"""How late the end of a wait may be noticed. A timer for every wait costs 2 us, looking 0.2."""


async def attach(endpoint: str, request: AttachRequest) -> Attachment:
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
    """The client socket and the attach socket of one session, on the running loop."""

    def __init__(self, endpoint: str, attachment: Attachment, connection: Connection) -> None:
        """Start at once; takes the attachment over."""
        self._loop = asyncio.get_running_loop()
        self._attachment = attachment
        self._connection = connection
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = open_dealer(self._context, routing_id=attachment.attached.token)
        dealer.connect(endpoint)
        self._socket = LoopSocket(dealer, self._take, loop=self._loop)
        self._watched = attachment.fileno()
        self._loop.add_reader(self._watched, self._hung_up)
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

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.cancel()
        self._loop.remove_reader(self._watched)
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

    def _hung_up(self) -> None:
        why = self._attachment.last_word()
        if why is not None:
            self._loop.remove_reader(self._watched)
            self._connection.fail_all(why)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
