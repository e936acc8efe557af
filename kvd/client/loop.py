"""A session's sockets on an event loop."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kvd.client.attachment import ATTACH_WITHIN_S, Attachment, ask, dial, take_answer, too_late
from kvd.client.endpoint import attach_path
from kvd.client.session_sockets import SessionSockets

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


async def attach(
    endpoint: str, request: Attach | Join, within_s: float = ATTACH_WITHIN_S
) -> Attachment:
    """Open or join a session of the daemon at ``endpoint``, whose answer may take ``within_s``.

    Raises:
        KvdError: ``unreachable``, or the daemon's refusal.
    """
    path = attach_path(endpoint)
    try:
        async with asyncio.timeout(within_s):
            while (sock := dial(path)) is None:  # noqa: ASYNC110 - no event tells of room there
                await asyncio.sleep(BUSY_PAUSE_S)
            try:
                ask(sock, request)
                attachment = await _answer(sock)
            except BaseException:
                sock.close()
                raise
    except TimeoutError:
        raise too_late(path, within_s) from None
    attachment.require_socket(endpoint)
    return attachment


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
    """The sockets of one session on the running loop; as ``Channel``, and their ``Watcher``.

    It goes back by itself to a daemon that is away, by callbacks: no task, nothing to be awaited.
    """

    gathers: ClassVar[bool] = True

    def __init__(
        self, endpoint: str, attachment: Attachment, connection: Connection, name: str
    ) -> None:
        """Start at once; takes the attachment over."""
        self._loop = asyncio.get_running_loop()
        self._sockets = SessionSockets(endpoint, attachment, connection, name, self)
        self._step_at: asyncio.TimerHandle | None = None
        self._is_writing_soon = False
        self._is_reading_soon = False
        self._until_s: dict[asyncio.Future[None], float] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._is_closed = False
        try:
            self._sockets.open()
        except BaseException:
            self.close()
            raise

    def flush(self) -> None:
        """Send what the connection has queued, with all else that this turn of the loop brings."""
        self._sockets.flush()

    async def wait(self, slot: Slot[Any], within_s: float) -> None:
        """Suspend until ``slot`` is filled or the time is up."""
        if slot.value is not None:
            return
        short: asyncio.TimerHandle | None = None
        future: asyncio.Future[None] = self._loop.create_future()
        wake = partial(_wake, future)
        slot.wake_with(wake)
        self._until_s[future] = self._loop.time() + within_s
        if within_s < LOOK_EVERY_S:
            short = self._loop.call_later(within_s, _wake, future)
        elif self._alarm is None:
            self._alarm = self._loop.call_later(LOOK_EVERY_S, self._wake_late)
        try:
            await future
        finally:
            del self._until_s[future]
            slot.forget(wake)
            if short is not None:
                short.cancel()

    def look(self) -> None:
        """The loop tells of a hang-up, but not before it has a turn."""
        self._sockets.look()

    @property
    def is_stopped(self) -> bool:
        """As ``Channel``."""
        return self._sockets.is_stopped

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        for timer in (self._alarm, self._step_at):
            if timer is not None:
                timer.cancel()
        self._sockets.close()

    def _wake_late(self) -> None:
        """End the waits whose time is up; look again as long as anybody waits."""
        now_s = self._loop.time()
        for future in [future for future, until_s in self._until_s.items() if until_s <= now_s]:
            _wake(future)
        self._alarm = None
        if self._until_s and not self._is_closed:
            self._alarm = self._loop.call_later(LOOK_EVERY_S, self._wake_late)

    # ---- as Watcher ------------------------------------------------------------------------------

    def watch(self, fd: int, act: Callable[[], object]) -> None:
        """As ``Watcher``."""
        self._loop.add_reader(fd, act)

    def watch_writing(self, fd: int, act: Callable[[], object] | None) -> None:
        """As ``Watcher``."""
        if act is None:
            self._loop.remove_writer(fd)
        else:
            self._loop.add_writer(fd, act)

    def unwatch(self, fd: int) -> None:
        """As ``Watcher``."""
        self._loop.remove_reader(fd)
        self._loop.remove_writer(fd)

    def write_soon(self) -> None:
        """As ``Watcher``: what all callers of a turn say goes out together."""
        if not self._is_writing_soon:
            self._is_writing_soon = True
            self._loop.call_soon(self._write)

    def read_soon(self) -> None:
        """As ``Watcher``."""
        if not self._is_reading_soon:
            self._is_reading_soon = True
            self._loop.call_soon(self._read)

    def step_after(self, pause_s: float) -> None:
        """As ``Watcher``."""
        if self._step_at is not None:
            self._step_at.cancel()
        self._step_at = self._loop.call_later(pause_s, self._sockets.step)

    def _write(self) -> None:
        self._is_writing_soon = False
        self._sockets.write()

    def _read(self) -> None:
        self._is_reading_soon = False
        self._sockets.read()


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
