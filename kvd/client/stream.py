"""The client socket of one session: a DEALER over a unix stream, in steps that never wait.

What lives here: dialing, the handshake, what waits to be written, what has come. What must not: a
loop, a thread, a clock, what messages mean, and when to dial again.

Theory of operation. The machine is ``kvd.zmtp.protocol``. Messages wait whole, in the pieces that
the machine made of them, until the kernel has taken all of their bytes: where a connection breaks,
whatever the other side cannot have read goes out on the next one. What waits is gathered into one
system call each time; a backlog is named in pieces and never joined.

Invariant: nothing of a message is written before the handshake is over, and ``_written`` bytes of
the first one that waits have been.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.types import MAX_FRAME_BYTES, Sent
from kvd.zmtp.bounds import HANDSHAKE_BYTES, LONG_READ_BYTES, PART_BYTES, READ_BYTES, TURN_MESSAGES
from kvd.zmtp.events import HUNG_UP, ConnectionClosed, ConnectionFault, HandshakeDone
from kvd.zmtp.mechanism import DEALER, Null
from kvd.zmtp.protocol import Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.zmtp.events import Frames


class WaitingMessage(NamedTuple):
    """A message in the pieces that it is written in, and whose it is."""

    pieces: list[bytes]
    n_bytes: int
    call: int


BACKLOG_MESSAGES: Final = 4096
BACKLOG_BYTES: Final = 256 * 1024 * 1024
"""What may wait for a daemon that does not read, whichever is less."""

_SEND_BUFFER_BYTES: Final = 1024 * 1024
"""Asked of the kernel, which grants up to twice its limit, 416 KiB at least: several prompts."""

_WRITE_BYTES: Final = 512 * 1024
_PIECES: Final = 256
"""Given to the kernel at once: more than it takes, and less than it refuses to look at."""


class ClientStream:
    """A socket to ``path`` under a routing id. ``fault`` says why it is of no use any more."""

    def __init__(self, path: str, route: bytes) -> None:
        """Nothing is dialed yet; what is sent waits."""
        self._path = path
        self._route = route
        self._sock: socket.socket | None = None
        self._machine = self._new_machine()
        self._own: deque[WaitingMessage] = deque()
        """Of the handshake."""
        self._unsent: deque[WaitingMessage] = deque()
        self.unsent_bytes = 0
        """Of all messages that wait, be it for the handshake."""
        self._written = 0
        self.is_deaf = False
        """Whether the other side reads no more; what it said before may still be here."""
        self.is_met = False
        """Whether the handshake is over."""
        self.is_blocked = False
        """Whether the kernel takes no more for now."""
        self.is_left = False
        """Whether something has come that was not dealt with, and no descriptor tells of it."""
        self.fault: ConnectionClosed | None = None
        self.nobody = ""
        """Why the last dialing found nobody who listens; empty where somebody does."""

    def dial(self) -> bool:
        """Connect and begin the handshake; whether somebody listens, and has room for one more.

        Raises:
            OSError: no descriptor is left in this process.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            sock.connect(self._path)
        except OSError as exc:
            sock.close()
            # A queue that is full is that of somebody who listens.
            self.nobody = "" if isinstance(exc, BlockingIOError) else exc.strerror or str(exc)
            return False
        self.nobody = ""
        self._sock = sock
        self._machine = self._new_machine()
        self._own.clear()
        self._written = 0
        self.unsent_bytes = sum(message.n_bytes for message in self._unsent)
        self.is_met = self.is_blocked = self.is_left = self.is_deaf = False
        self.fault = None
        self._say_own()
        return True

    def fileno(self) -> int:
        """-1 while there is no connection."""
        return -1 if self._sock is None else self._sock.fileno()

    def hang_up(self) -> None:
        """End the connection; what waits is kept for the next one. Repeatable."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        self._machine.drop()
        self.is_met = self.is_blocked = self.is_left = False

    # ---- out -------------------------------------------------------------------------------------

    @property
    def has_unsent(self) -> bool:
        """Whether ``write`` has something to do."""
        return bool(self._unsent if self.is_met else self._own)

    @property
    def has_waiting(self) -> bool:
        """Whether messages wait, be it for the handshake."""
        return bool(self._unsent)

    def unsent_calls(self) -> set[int]:
        """Whose messages the other side cannot have read."""
        return {message.call for message in self._unsent}

    def send(self, frames: Sequence[bytes], call: int = 0) -> Sent:
        """Have one message of one frame or more, which is of ``call``, written by ``write``."""
        if self._is_full():
            return Sent.FULL
        # Without keys a message is packed alike before the handshake is over.
        self._wait(self._unsent, self._machine.pack(frames), call)
        return Sent.TAKEN

    def write_one(self, frames: Sequence[bytes], call: int) -> Sent:
        """``send`` one message that is not gathered with others, and have it written now.

        Where something waits before it, or it is a long one, that is left to ``write``.
        """
        sock = self._sock
        if self._unsent or sock is None or not self.is_met or self.is_deaf:
            return self.send(frames, call)
        pieces = self._machine.pack(frames)
        n_bytes = taken = 0
        for piece in pieces:
            n_bytes += len(piece)
        if n_bytes <= PART_BYTES:
            try:
                taken = sock.send(b"".join(pieces), socket.MSG_NOSIGNAL)
            except OSError:
                taken = 0  # what it means is found out when the rest is written
        if taken < n_bytes:
            self._unsent.append(WaitingMessage(pieces, n_bytes, call))
            self.unsent_bytes += n_bytes - taken
            self._written = taken
        return Sent.TAKEN

    def write(self) -> None:
        """Write what the kernel takes."""
        sock = self._sock
        queue = self._unsent if self.is_met else self._own
        if sock is None or self.is_deaf:
            return
        self.is_blocked = False
        try:
            while queue:
                pieces, size = self._gathered(queue)
                if len(pieces) == 1:
                    taken = sock.send(pieces[0], socket.MSG_NOSIGNAL)
                elif size <= PART_BYTES:
                    taken = sock.send(b"".join(pieces), socket.MSG_NOSIGNAL)
                else:
                    taken = sock.sendmsg(pieces, (), socket.MSG_NOSIGNAL)
                self._took(queue, taken)
                if taken < size:
                    self.is_blocked = True
                    return
        except (BlockingIOError, InterruptedError):
            self.is_blocked = True
        except OSError:
            # Not the end yet: what the other side said before it hung up is still to be read.
            self.is_deaf = True

    def _is_full(self) -> bool:
        return len(self._unsent) >= BACKLOG_MESSAGES or self.unsent_bytes > BACKLOG_BYTES

    def _wait(self, queue: deque[WaitingMessage], pieces: list[bytes], call: int) -> None:
        n_bytes = 0
        for piece in pieces:
            n_bytes += len(piece)
        queue.append(WaitingMessage(pieces, n_bytes, call))
        self.unsent_bytes += n_bytes

    def _gathered(self, queue: deque[WaitingMessage]) -> tuple[list[bytes | memoryview], int]:
        """The pieces to write next, and their bytes."""
        pieces: list[bytes | memoryview] = []
        size = -self._written
        for message in queue:
            pieces += message.pieces
            size += message.n_bytes
            if size >= _WRITE_BYTES or len(pieces) >= _PIECES:
                break
        skipped = self._written
        while skipped:
            n_bytes = len(pieces[0])
            if skipped < n_bytes:
                pieces[0] = memoryview(pieces[0])[skipped:]
                break
            skipped -= n_bytes
            del pieces[0]
        return pieces, size

    def _took(self, queue: deque[WaitingMessage], taken: int) -> None:
        self.unsent_bytes -= taken
        taken += self._written
        while queue and taken >= queue[0].n_bytes:
            taken -= queue.popleft().n_bytes
        self._written = taken

    def _say_own(self) -> None:
        """What the machine has to say: its part of the handshake, later answers to heartbeats."""
        said = self._machine.to_send()
        if not said:
            return
        if not self.is_met:
            self._wait(self._own, said, 0)
        elif not self._is_full():
            self._wait(self._unsent, said, 0)

    # ---- in --------------------------------------------------------------------------------------

    def read(self, take: Callable[[Frames], None]) -> bool:
        """Give ``take`` the messages that have come; whether there was anything.

        After so many messages that others should have a turn, it ``is_left``. Where ``take`` raises
        it is, too: that costs its message, and what follows is read on.
        """
        if self._sock is None or not (self.is_left or self._receive()):
            return False
        machine = self._machine
        was_met = self.is_met
        self.is_left = True
        for _ in range(TURN_MESSAGES):
            event = machine.next_event()
            if event is None and machine.lacks and self._receive() and not machine.lacks:
                event = machine.next_event()  # more of a long frame came while some was read
            if event is None:
                self.is_left = False
                break
            if isinstance(event, list):
                if event:
                    take(event)
                else:
                    self._say_own()
            elif isinstance(event, HandshakeDone):
                machine.accept()
                self.is_met = True
                self._say_own()
            else:
                self.fault = event
                self.is_left = False
                break
            if not machine.held:
                self.is_left = False
                break
        if not was_met and self.fault is None:
            self._say_own()
        return True

    def _receive(self) -> bool:
        """Take what the kernel has; whether something came."""
        sock, machine = self._sock, self._machine
        if sock is None:
            return False
        most = READ_BYTES
        if machine.lacks:
            most = min(machine.lacks, LONG_READ_BYTES)
        elif not self.is_met:
            most = HANDSHAKE_BYTES
        try:
            came = sock.recv(most)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            self.fault = ConnectionClosed(ConnectionFault.HUNG_UP, str(error))
            return False
        if not came:
            self.fault = HUNG_UP
            return False
        machine.receive(came)
        return True

    def _new_machine(self) -> Protocol:
        return Protocol(Null(DEALER, self._route), MAX_FRAME_BYTES)
