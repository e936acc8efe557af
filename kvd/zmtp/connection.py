"""A protocol machine on a socket: read in turns, written in bulk, ended once.

Invariant: unless it is over, a connection is watched for what comes, or stands in line, or lingers.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.types import Sent
from kvd.zmtp.bounds import HANDSHAKE_BYTES, LONG_READ_BYTES, READ_BYTES, TURN_MESSAGES
from kvd.zmtp.events import ENDED, HUNG_UP, ConnectionClosed, ConnectionFault, HandshakeDone
from kvd.zmtp.protocol import TRAFFIC, ProtocolState
from kvd.zmtp.turns import TurnTaker

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Sequence

    from kvd.zmtp.bounds import Bounds
    from kvd.zmtp.events import Frames
    from kvd.zmtp.protocol import Event
    from kvd.zmtp.protocol import Protocol as Machine
    from kvd.zmtp.turns import FairTurns, WriteBatch

_TAKEN: Final = Sent.TAKEN
_FULL: Final = Sent.FULL
_GONE: Final = Sent.GONE

UNHEARD_S: Final = 10.0
"""A TCP connection ends when nothing of what it has sent is acknowledged for so long. The kernel
tries again ever later: after a cut of minutes for minutes more, where a new connection is there at
once."""

_PIECES: Final = 512
"""Given to the kernel at once; it takes 1024."""
_JOIN_BYTES: Final = 64 * 1024
"""Pieces up to so many bytes in all are copied into one, which is cheaper than naming each."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Owner:
    """Whose connection it is: a listener or a dialer. By default it lets in, and bears anything."""

    bounds: Bounds

    def met(self, connection: ZmtpConnection) -> bool:
        """Whether it is let in, now that its handshake is over."""
        del connection
        return True

    def message(self, connection: ZmtpConnection, frames: Frames) -> None:
        """A message came."""

    def weighs(self, connection: ZmtpConnection, before: int, *, is_fresh: bool) -> None:
        """What is kept for it has changed from ``before``, or is still there.

        ``is_fresh``: what is unfinished of it now began just now.
        """

    def ends(self, connection: ZmtpConnection, closed: ConnectionClosed) -> bool:
        """Whether it is ended at once for that; else it is not heard until its time is up."""
        del connection, closed
        return True

    def over(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        """It is over; told once."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ZmtpConnection(TurnTaker):
    """One connection. What is sent on it goes to whoever proved ``name``, or to nobody."""

    def __init__(
        self,
        sock: socket.socket,
        machine: Machine,
        owner: Owner,
        batch: WriteBatch,
        turns: FairTurns,
    ) -> None:
        """Takes the socket over, and begins the handshake with the next turn of the loop."""
        self.machine = machine
        self.name = ""
        """What the listener's keys call the key that it has proven; empty without keys."""
        self.routing_id = b""
        self.peer = ""
        """The address of the other side, where it has one."""
        self.origin = ""
        """What it is told apart by before it has proven anything: its address, or its process."""
        self.weight = 0
        """Bytes kept for it, as its owner was last told."""
        self.is_over = False
        self.is_ignored = False
        """Whether nothing of it is read any more, and nothing is said to it, until its end."""
        self._sock = sock
        self._fd = sock.fileno()
        self._owner = owner
        self._bounds: Bounds = owner.bounds
        self._batch = batch
        self.turns = turns
        """The line that it stands in."""
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._is_written = False
        """Whether the batch knows that there is something to write."""
        self._is_blocked = False
        """Whether the kernel takes no more; it says when it does."""
        self._is_watched = False
        """Whether the loop says when something comes."""
        self._is_left = False
        """Whether something came that was not dealt with yet."""
        self._lingering: asyncio.TimerHandle | None = None
        if sock.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):  # it has hung up already
                most_ms = int(1000 * UNHEARD_S)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, most_ms)
        self._watch()
        self._say_own()

    # ---- out -------------------------------------------------------------------------------------

    def send(self, frames: Sequence[bytes]) -> Sent:
        """Send one message of one frame or more; never blocks."""
        machine = self.machine
        if machine.state is not TRAFFIC or self._lingering is not None:
            return _GONE
        # An empty line is never full, and mostly it is empty or has the answers of this turn.
        if self._unsent and self._is_full():
            if not self._is_blocked:
                self.flush()
            if self.is_over:
                return _GONE
            if self._is_full():
                return _FULL
        self._put(machine.pack(frames))
        return _TAKEN

    @property
    def unsent_bytes(self) -> int:
        """Bytes that wait to be written."""
        return self._unsent_bytes

    @property
    def is_blocked(self) -> bool:
        """Whether the kernel takes no more of it: the other side does not read."""
        return self._is_blocked

    def _is_full(self) -> bool:
        bounds = self._bounds
        return (
            len(self._unsent) >= bounds.backlog_messages
            or self._unsent_bytes > bounds.backlog_bytes
        )

    def _put(self, pieces: list[bytes]) -> None:
        self._unsent += pieces
        for piece in pieces:
            self._unsent_bytes += len(piece)
        if self._is_blocked:
            self._weigh(is_fresh=False)
        elif not self._is_written:
            self._is_written = True
            self._batch.written(self)

    def _say_own(self) -> None:
        """What the machine has to say; a heartbeat's answer is lost where nobody reads."""
        said = self.machine.to_send()
        if said and not self._is_full():
            self._put(said)

    @override
    def flush(self) -> None:
        """Write what the kernel takes; the rest when it takes more."""
        self._is_written = False
        if self.is_over:
            return
        unsent = self._unsent
        try:
            while unsent:
                if len(unsent) == 1:
                    self._took(self._sock.send(unsent[0]))
                elif self._unsent_bytes <= _JOIN_BYTES:
                    self._took(self._sock.send(b"".join(unsent)))
                else:
                    self._took(self._sock.sendmsg(islice(unsent, _PIECES)))
        except (BlockingIOError, InterruptedError):
            if not self._is_blocked:
                self._is_blocked = True
                self._batch.loop.add_writer(self._fd, self.flush)
            self._weigh(is_fresh=False)
            return
        except OSError as error:
            self.end(ConnectionClosed(ConnectionFault.HUNG_UP, str(error)))
            return
        if self._is_blocked:
            self._is_blocked = False
            self._batch.loop.remove_writer(self._fd)
            self._weigh(is_fresh=False)
        if self._lingering is not None:
            with contextlib.suppress(OSError):  # the other side was faster
                self._sock.shutdown(socket.SHUT_WR)

    def _took(self, size: int) -> None:
        unsent = self._unsent
        self._unsent_bytes -= size
        if not self._unsent_bytes:
            unsent.clear()
            return
        while size:
            first = unsent[0]
            if len(first) > size:
                unsent[0] = memoryview(first)[size:]
                return
            size -= len(first)
            unsent.popleft()

    # ---- in --------------------------------------------------------------------------------------

    def _readable(self) -> None:
        if self._lingering is not None:
            self._discard()
        elif self.turns.is_open():
            self.turn(TURN_MESSAGES)
        else:
            self._stand_in_line()

    @override
    def turn(self, messages: int) -> None:
        """As ``TurnTaker``. A bug in whoever is told costs its message; what follows is read on."""
        if self.machine.state is ProtocolState.OVER or not (self._is_left or self._read()):
            return
        machine = self.machine
        self._is_left = True
        is_fresh = False
        end_s = time.monotonic() + self.turns.turn_s
        try:
            for _ in range(messages):
                event = self._next_event()
                if event is None:
                    self._is_left = False
                    break
                # A heartbeat between two frames ends no message: the time of that goes on.
                is_fresh = is_fresh or not machine.is_within_message
                self._deal(event)
                if not machine.held:
                    self._is_left = False
                    break
                if time.monotonic() >= end_s:
                    break
        finally:
            if machine.state is not TRAFFIC:
                self._say_own()
            if self.weight or machine.held:
                self._weigh(is_fresh=is_fresh)
            if self._is_left:
                self._stand_in_line()
            elif not self._is_watched:
                self._watch()

    def _next_event(self) -> Event | None:
        """Of a long frame more has come while some was read: sooner than the loop comes round."""
        machine = self.machine
        event = machine.next_event()
        if event is None and machine.lacks and self._read() and not machine.lacks:
            event = machine.next_event()
        return event

    def _read(self) -> bool:
        """Take what the kernel has; whether there is anything to deal with."""
        machine = self.machine
        most = READ_BYTES
        if machine.lacks:
            most = min(machine.lacks, LONG_READ_BYTES)
        elif machine.state is not TRAFFIC:
            most = HANDSHAKE_BYTES
        try:
            came = self._sock.recv(most)
        except (BlockingIOError, InterruptedError):
            return True
        except OSError as error:
            self.end(ConnectionClosed(ConnectionFault.HUNG_UP, str(error)))
            return False
        if not came:
            self.end(HUNG_UP)
            return False
        machine.receive(came)
        return True

    def _deal(self, event: Event) -> None:
        if isinstance(event, list):
            if event:
                self._owner.message(self, event)
            else:
                self._say_own()
        elif isinstance(event, HandshakeDone):
            self.name, self.routing_id = event.name, event.routing_id
            self.machine.accept()
            self._say_own()
            if not self._owner.met(self):
                self.end(ConnectionClosed(ConnectionFault.REFUSED, "its routing id is in use"))
        elif self._owner.ends(self, event):
            self.flush()  # what it said before its fault was answered, in this turn as well
            self.end(event)
        else:
            self.is_ignored = True
            self._unwatch()

    def _weigh(self, *, is_fresh: bool) -> None:
        before = self.weight
        self.weight = self.machine.held + (self._unsent_bytes if self._is_blocked else 0)
        self._owner.weighs(self, before, is_fresh=is_fresh)

    def _stand_in_line(self) -> None:
        self._unwatch()
        if not self.is_over:
            self.turns.wait(self)

    def _watch(self) -> None:
        if not self.is_over and not self.is_ignored:
            self._is_watched = True
            self._batch.loop.add_reader(self._fd, self._readable)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._batch.loop.remove_reader(self._fd)

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, *, linger_s: float = 0.0) -> None:
        """Hang up. What was sent has ``linger_s`` to go out and to be heard; repeatable."""
        if self.is_over or self._lingering is not None:
            return
        if not linger_s or self.machine.state is not TRAFFIC:
            self.end(ENDED)
            return
        self.machine.drop()
        self._lingering = self._batch.loop.call_later(linger_s, self.end, ENDED)
        if not self._is_watched:
            self._watch()
        if not self._is_blocked:
            self.flush()

    def _discard(self) -> None:
        """Wait until the other side hangs up: bytes of it left unread would void our last words."""
        try:
            is_over = not self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_over = True
        if is_over:
            self.end(ENDED)

    def end(self, closed: ConnectionClosed) -> None:
        """It is over, at once; repeatable."""
        if self.is_over:
            return
        self.is_over = True
        self._unwatch()
        if self._is_blocked:
            self._batch.loop.remove_writer(self._fd)
        if self._lingering is not None:
            self._lingering.cancel()
        self._sock.close()
        self._unsent.clear()
        self.machine.drop()
        self._owner.over(self, closed)
