"""A session's sockets for a thread that blocks. One thread at a time may use them."""

from __future__ import annotations

import math
import os
import select
import time
from types import coroutine
from typing import TYPE_CHECKING, Any, ClassVar, Final

from kvd.client.attachment import ATTACH_WITHIN_S, Attachment, ask, dial, take_answer, too_late
from kvd.client.endpoint import attach_path
from kvd.client.session_sockets import SessionSockets

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from socket import socket

    from kvd.client.connection import Connection
    from kvd.client.pending import PendingCall, SlotWait
    from kvd.client.state import Slot
    from kvd.wire.attach import Attach, Join

_DESCRIPTORS: Final = 4
"""Told of at once; a session has two, or one while the daemon is away."""

CONNECT_WITHIN_S: Final = 0.5
"""Waited at most, when a session is opened, for a handshake that takes a tenth of a millisecond."""

MEET_WITHIN_S: Final = 0.005
"""The same for a connection that was made again, once for each: by then a pump goes on with it."""

MISS_MEET_WITHIN_S: Final = 0.0002
"""The same where no call ever waits for the daemon: it takes a tenth of a millisecond, or hangs."""

EPOLL_COUNTS_S: Final = 0.001
"""By this, rounded up: who waits for less than that waits for it otherwise."""

_PUMP_TURNS: Final = 16
"""Of reading, at most, in one pump: a scheduler has a step to begin."""

LOOK_EVERY_S: Final = 0.1
"""How late a pump notices that the time of a begun call is up."""


def attach(endpoint: str, request: Attach | Join, within_s: float = ATTACH_WITHIN_S) -> Attachment:
    """Open or join a session of the daemon at ``endpoint``, whose answer may take ``within_s``.

    Raises:
        KvdError: ``unreachable``, or the daemon's refusal.
    """
    path = attach_path(endpoint)
    end_s = time.monotonic() + within_s
    # 0 would be for ever.
    sock = dial(path, wait_s=max(0.001, min(within_s, ATTACH_WITHIN_S)))
    if sock is None:
        raise too_late(path, within_s)
    try:
        ask(sock, request)
        attachment = _answer(sock, end_s)
    except BaseException:
        sock.close()
        raise
    if attachment is None:
        sock.close()
        raise too_late(path, within_s)
    attachment.require_socket(endpoint)
    return attachment


def _answer(sock: socket, end_s: float) -> Attachment | None:
    ready = select.poll()
    ready.register(sock, select.POLLIN)
    ready.poll(max(0.0, end_s - time.monotonic()) * 1000)
    return take_answer(sock)


class BlockingChannel:
    """The sockets of one session for a thread without a loop; as ``Channel`` and ``CallDriver``.

    Sockets are looked at by ``pump``, ``glance`` and ``block``, and by nobody between two of them.
    """

    gathers: ClassVar[bool] = False

    def __init__(
        self,
        endpoint: str,
        attachment: Attachment,
        connection: Connection,
        name: str,
        *,
        waits_for_return: bool = True,
    ) -> None:
        """Takes the attachment over. ``waits_for_return``: as long as a call that finds it away."""
        self._connection = connection
        self._attachment = attachment
        self._waits_for_return = waits_for_return
        self._meets_within_s = MEET_WITHIN_S if waits_for_return else MISS_MEET_WITHIN_S
        self._ready = select.epoll()
        self._readers: dict[int, Callable[[], object]] = {}
        self._writers: dict[int, Callable[[], object]] = {}
        self._step_s = math.inf
        self._is_read_left = False
        self._is_closed = False
        self._begun: dict[PendingCall[Any], None] = {}
        self._woken: dict[PendingCall[Any], None] = {}
        """Those for which something has come since they were stepped."""
        self._ended: dict[PendingCall[Any], None] = {}
        """Those whose engine has not been told."""
        self._late_s = 0.0
        """When to look for calls whose time is up."""
        self._is_pumping = False
        self._is_gathering = False
        """Whether what is said waits for more, until somebody waits for an answer."""
        self._bell: SessionBell | None = None
        self._sockets = SessionSockets(endpoint, attachment, connection, name, self)
        try:
            self._sockets.open()
            self._sockets.meet(CONNECT_WITHIN_S)
        except BaseException:
            self.close()
            raise

    # ---- as Channel ------------------------------------------------------------------------------

    def flush(self) -> None:
        """Send what the connection has queued; what the kernel does not take now is sent later.

        Nobody may pump for a while, so where the connection is a new one, or has broken since it
        was read, this has the message leave all the same, within ``MEET_WITHIN_S``. For an engine
        that must not wait it leaves with the next call or pump, if the handshake is not over now.
        """
        if self._is_gathering:
            return
        sockets = self._sockets
        sockets.flush()
        if sockets.stream.unsent_bytes:
            sockets.mend(self._meets_within_s)

    @coroutine
    def wait(self, slot: Slot[Any], within_s: float) -> Generator[SlotWait, None, None]:
        """Say what the verb waits for; it goes on once ``slot`` is filled or the time is up."""
        if slot.value is None:
            yield slot, time.monotonic() + within_s

    def look(self) -> None:
        """Nobody else looks between two calls.

        One that is away is stepped towards by whoever waits for it, or pumps; where nobody ever
        waits, by every call.
        """
        sockets = self._sockets
        if self._waits_for_return or sockets.way is None:
            sockets.look()
        else:
            self._turn(0.0)

    @property
    def is_stopped(self) -> bool:
        """As ``Channel``."""
        return self._sockets.is_stopped

    def close(self) -> None:
        """Leave the session; repeatable."""
        if self._is_closed:
            return
        self._is_closed = True
        self._sockets.close()
        if self._bell is not None:
            self._bell.close()
        self._ready.close()

    # ---- as CallDriver ---------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """As ``CallDriver``."""
        return self._connection.end is not None

    def begun(self, call: PendingCall[Any]) -> None:
        """As ``CallDriver``."""
        self._begun[call] = None

    def woke(self, call: PendingCall[Any]) -> None:
        """As ``CallDriver``."""
        self._woken[call] = None
        if self._bell is not None:
            self._ring()

    def ended(self, call: PendingCall[Any]) -> None:
        """As ``CallDriver``."""
        self._begun.pop(call, None)
        self._woken.pop(call, None)
        self._ended[call] = None

    def told(self, call: PendingCall[Any]) -> None:
        """As ``CallDriver``."""
        self._ended.pop(call, None)

    def glance(self) -> None:
        """As ``CallDriver``."""
        if not self._is_closed:
            self._turn(0.0)

    def block(self, slot: Slot[Any], until_s: float) -> None:
        """As ``CallDriver``. Reads no further than it must: what else has come is read later.

        While the daemon is away it goes back, step by step.
        """
        self.send_gathered()
        self._sockets.hurry()
        while slot.value is None and not self.is_over:
            now_s = time.monotonic()
            if now_s >= until_s:
                return
            self._turn(min(until_s, self._step_s) - now_s)

    # ---- for who never blocks --------------------------------------------------------------------

    def pump(self) -> list[PendingCall[Any]]:
        """Do all that there is to do now; the begun calls that have ended since they were told."""
        self._attachment.require_own()
        self._is_pumping = True
        try:
            if self._bell is not None:
                self._bell.hush()
            is_left = not self._is_closed
            for _ in range(_PUMP_TURNS):
                is_left = is_left and self._turn(0.0)
                if not is_left:
                    break
            self._advance()
        finally:
            self._is_pumping = False
        if is_left:
            self._ring()
        ended, self._ended = list(self._ended), {}
        return ended

    def fileno(self) -> int:
        """Readable while ``pump`` has something to do; the same one as long as the session."""
        if self._bell is None:
            self._bell = SessionBell(self._ready.fileno())
            if self._woken or self._ended or self._is_read_left:
                self._ring()
        return self._bell.fileno()

    def gather(self) -> None:
        """What is said from now on leaves together: by ``send_gathered``, or before a wait."""
        self._is_gathering = True

    def send_gathered(self) -> None:
        """Have it leave; from now on what is said leaves at once. Repeatable."""
        if self._is_gathering:
            self._is_gathering = False
            if self._connection.queued and not self._is_closed:
                self.flush()

    def _advance(self) -> None:
        """Have calls go on for which something has come, now and then those whose time is up."""
        now_s = time.monotonic()
        if now_s >= self._late_s:
            self._late_s = now_s + LOOK_EVERY_S
            self._woken |= self._begun
        woken, self._woken = self._woken, {}
        for call in woken:
            call.advance()

    def _ring(self) -> None:
        if self._bell is not None and not self._is_pumping:
            self._bell.ring()

    def _turn(self, within_s: float) -> bool:
        """Do what there is to do, once something has come, or the time is up; whether there was."""
        if not self._attachment.is_own:
            self._attachment.require_own()
        if self._is_read_left:
            self._is_read_left = False
            self._sockets.read()
            return True
        if 0 < within_s < EPOLL_COUNTS_S:
            within_s = self._come(within_s)
        found = self._ready.poll(max(0.0, within_s), _DESCRIPTORS)
        for fd, events in found:
            # Taken anew each time: the one before may have forgotten this one.
            if events & select.EPOLLOUT and fd in self._writers:
                self._writers[fd]()
            if events & ~select.EPOLLOUT and fd in self._readers:
                self._readers[fd]()
        if self._step_s < math.inf and self._step_s <= time.monotonic():
            self._step_s = math.inf
            self._sockets.step()
            return True
        return bool(found)

    def _come(self, within_s: float) -> float:
        """Wait so long for something to come; how much of it is left for who waits by epoll."""
        try:
            select.select([self._ready], (), (), within_s)
        except ValueError:  # of thousands of descriptors it knows the first ones alone
            return within_s
        return 0.0

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
        self._ring()

    def step_after(self, pause_s: float) -> None:
        """As ``Watcher``."""
        self._step_s = time.monotonic() + pause_s


class SessionBell:
    """One descriptor for all of a session's, readable as well while the bell has rung.

    The session's sockets come and go with the daemon; this one stays, so that an engine names it
    to its ``select`` or its loop once.
    """

    def __init__(self, ready_fd: int) -> None:
        """``ready_fd``: of the ``epoll`` that has the sockets."""
        self._all = select.epoll()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._has_rung = False
        self._all.register(ready_fd, select.EPOLLIN)
        self._all.register(self._event, select.EPOLLIN)

    def fileno(self) -> int:
        """The descriptor."""
        return self._all.fileno()

    def ring(self) -> None:
        """Something was read that no socket tells of any more."""
        if not self._has_rung and not self._all.closed:
            self._has_rung = True
            os.eventfd_write(self._event, 1)

    def hush(self) -> None:
        """It is dealt with."""
        if self._has_rung and not self._all.closed:
            self._has_rung = False
            os.eventfd_read(self._event)

    def close(self) -> None:
        """Give the descriptors back; repeatable."""
        if not self._all.closed:
            self._all.close()
            os.close(self._event)
