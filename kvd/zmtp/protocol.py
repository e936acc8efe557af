r"""The machine of one connection: bytes in and events out, frames in and bytes out; no socket.

::

    GREETING --64 bytes--> HANDSHAKE --HandshakeDone--> MET --accept--> TRAFFIC
        \________ whatever nobody may say: ConnectionClosed, once ________/  --> OVER

Theory of operation. What comes is kept as it came until it is a whole frame, and a message until it
is whole. Every length is held against its bound when it is read, before there is anything of what
it announces. So what a machine keeps is below the bounds, and ``held`` says how much it is.

Invariants: at most ``HANDSHAKE_BYTES`` are kept before TRAFFIC; after that at most one message of
``max_message_bytes`` and ``MAX_FRAMES`` frames, and what came behind it in the same read.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.zmtp import frames
from kvd.zmtp.bounds import COMMAND_BYTES, HANDSHAKE_BYTES, MAX_FRAMES, PIECE_BYTES
from kvd.zmtp.events import ConnectionClosed, ConnectionFault, Frames, HandshakeDone
from kvd.zmtp.frames import BOXED_COMMAND, COMMAND, FLAGS, LONG, LONG_HEADER, MORE, SHORT_HEADER
from kvd.zmtp.mechanism import malformed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.zmtp.mechanism import Mechanism

Event = HandshakeDone | Frames | ConnectionClosed

_FIRST: Final = frames.VERSION_AT + 1
"""Of a greeting: with these libzmq says how it goes on, and before it knows what is not to its
liking. So whoever comes says what it wants, whole, and hears why that is not what we want."""

_PING_CONTEXT: Final = 16
_PING_TTL: Final = 2


class ProtocolState(enum.Enum):
    """How far a connection is."""

    GREETING = "greeting"
    HANDSHAKE = "handshake"
    MET = "met"
    """The other side is ready and waits to be accepted."""
    TRAFFIC = "traffic"
    OVER = "over"


TRAFFIC: Final = ProtocolState.TRAFFIC
"""By a name of its own: it is asked several times of each message, and an enum is slow to ask."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Protocol:
    """One side. ``receive`` bytes, then ask for ``next_event`` until there is none."""

    def __init__(
        self, mechanism: Mechanism, max_message_bytes: int, *, takes_topics: bool = False
    ) -> None:
        """``takes_topics``: whether commands of a SUB are messages, spelled as in ZMTP 3.0."""
        self.state = ProtocolState.GREETING
        self._takes_topics = takes_topics
        self._mechanism = mechanism
        self._is_wrapped = mechanism.overhead > 0
        self._max_wire = max_message_bytes + mechanism.overhead
        self._buffer: bytes | bytearray = b""
        """What came; read as far as ``_at``."""
        self._at = 0
        self._frames: Frames = []
        """Of a message that is not whole, with ``_bytes`` in all."""
        self._bytes = 0
        self._flags = 0
        self._handshake_left = HANDSHAKE_BYTES
        self._body: list[bytes] = []
        """Of a long frame that is not whole, in pieces, with ``_body_bytes`` in all."""
        self._body_bytes = 0
        self.lacks = 0
        """Bytes that are known to be missing of it."""
        as_server = self._is_wrapped and mechanism.is_listening
        whole = frames.greeting(mechanism.name, as_server=as_server)
        self._out, self._rest = [whole[:_FIRST]], whole[_FIRST:]

    @property
    def held(self) -> int:
        """Bytes kept of what is not a whole message yet, or was not asked for.

        A frame counts for one more than is in it: an empty one is the begin of a message too.
        """
        return len(self._buffer) - self._at + self._body_bytes + self._bytes + len(self._frames)

    @property
    def is_within_message(self) -> bool:
        """Whether a frame has come whose message is not whole."""
        return bool(self._frames)

    def receive(self, came: bytes) -> None:
        """Take what came in."""
        if self.lacks:
            came = self._continue(came)
        if self._at == len(self._buffer):
            self._buffer, self._at = came, 0
            return
        if isinstance(self._buffer, bytes):
            self._buffer = bytearray(self._buffer)
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        self._buffer += came

    def _continue(self, came: bytes) -> bytes:
        """Take what is of a long frame, in few pieces however small they come; returns the rest."""
        # Compiled code copies a slice that is all of it, too.
        mine, rest = came, b""
        if len(came) > self.lacks:
            mine, rest = came[: self.lacks], came[self.lacks :]
        if self._body and len(self._body[-1]) < PIECE_BYTES:
            self._body[-1] += mine
        else:
            self._body.append(mine)
        self._body_bytes += len(mine)
        self.lacks -= len(mine)
        return rest

    def next_event(self) -> Event | None:
        """What has happened; None when it takes more bytes to say.

        A message without a frame is a command that is dealt with: see what is ``to_send``.
        """
        event: Event | None
        if self.state is TRAFFIC:
            event = None if self.lacks else self._next_message()
        else:
            event = self._next_step()
        if type(event) is list:
            return event
        if event is None:
            self._keep_rest()
        elif type(event) is ConnectionClosed:
            self.drop()
        return event

    def accept(self) -> None:
        """Let in whoever is ready."""
        self.state = TRAFFIC
        self._out.append(self._mechanism.accept())

    def pack(self, message: Sequence[bytes]) -> list[bytes]:
        """The bytes of a message, in one piece or few. In TRAFFIC only."""
        out: list[bytes] = []
        mechanism, more = self._mechanism, len(message)
        for frame in message:
            more -= 1
            mechanism.wrap(out, frame, MORE if more else 0)
        return out

    def to_send(self) -> list[bytes]:
        """What the machine itself has to say, once."""
        out, self._out = self._out, []
        return [piece for piece in out if piece]

    def drop(self) -> None:
        """Forget everything: it is over."""
        self.state = ProtocolState.OVER
        self._buffer, self._at = b"", 0
        self._frames, self._bytes = [], 0
        self._body, self._body_bytes, self.lacks = [], 0, 0

    # ---- handshake -------------------------------------------------------------------------------

    def _next_step(self) -> HandshakeDone | ConnectionClosed | None:
        if self.state is ProtocolState.GREETING:
            flaw = self._greeted()
            if flaw is not None or self.state is ProtocolState.GREETING:
                return flaw
        while self.state is ProtocolState.HANDSHAKE:
            payload = self._next_command()
            if not isinstance(payload, bytes):
                return payload
            step = self._mechanism.take(*frames.split_command(payload))
            if isinstance(step, bytes):
                self._out.append(step)
                continue
            if isinstance(step, HandshakeDone):
                self.state = ProtocolState.MET
            return step
        return None

    def _greeted(self) -> ConnectionClosed | None:
        """Each byte is judged as it comes: whoever does not speak ZMTP is told at its first."""
        mechanism = self._mechanism
        said = bytes(memoryview(self._buffer)[self._at : self._at + frames.GREETING_BYTES])
        if said and not frames.is_signature(said):
            return ConnectionClosed(ConnectionFault.NOT_ZMTP, f"it began with {said[:10]!r}")
        if len(said) > frames.VERSION_AT and said[frames.VERSION_AT] < frames.MAJOR:
            major = said[frames.VERSION_AT]
            return ConnectionClosed(
                ConnectionFault.OLD_VERSION, f"it speaks ZMTP {major}; 3.0 is the least"
            )
        if self._rest and len(said) >= (
            frames.GREETING_BYTES if mechanism.is_listening else _FIRST
        ):
            self._out.append(self._rest)
            self._rest = b""
        if len(said) < frames.GREETING_BYTES:
            return None
        wanted = frames.mechanism_of(said)
        if wanted != mechanism.name:
            ours = mechanism.name.decode("ascii")
            return ConnectionClosed(
                ConnectionFault.MECHANISM, f"it wants {wanted!r}, we want {ours}"
            )
        self._at += frames.GREETING_BYTES
        self._handshake_left -= frames.GREETING_BYTES
        self.state = ProtocolState.HANDSHAKE
        self._out.append(mechanism.begin())
        return None

    def _next_command(self) -> bytes | ConnectionClosed | None:
        head = bytes(memoryview(self._buffer)[self._at : self._at + LONG_HEADER])
        if head and head[0] & ~LONG != COMMAND:
            return malformed("a frame that is no command in its handshake")
        header = LONG_HEADER if head and head[0] & LONG else SHORT_HEADER
        if len(head) < header:
            return None
        size = int.from_bytes(head[1:header], "big")
        if size > COMMAND_BYTES or header + size > self._handshake_left:
            return ConnectionClosed(
                ConnectionFault.TOO_LARGE, f"it announced {size} bytes in its handshake"
            )
        begin = self._at + header
        if len(self._buffer) - begin < size:
            return None
        self._handshake_left -= header + size
        self._at = begin + size
        return bytes(memoryview(self._buffer)[begin : self._at])

    # ---- traffic ---------------------------------------------------------------------------------

    def _next_message(self) -> Frames | ConnectionClosed | None:
        while True:
            payload = self._next_frame()
            if not isinstance(payload, bytes):
                return payload
            flags = self._flags
            if self._is_wrapped:
                plain = self._mechanism.unwrap(payload)
                if isinstance(plain, ConnectionClosed):
                    return plain
                flags, payload = plain[0] & MORE, plain[1:]
                if plain[0] & BOXED_COMMAND:
                    flags |= COMMAND
            if flags & COMMAND:
                return self._commanded(payload)
            if not flags & MORE and not self._frames:
                return [payload]
            self._frames.append(payload)
            self._bytes += len(payload)
            if not flags & MORE:
                whole, self._frames, self._bytes = self._frames, [], 0
                return whole

    def _next_frame(self) -> bytes | ConnectionClosed | None:
        """What a whole frame holds; how it is flagged is in ``_flags``."""
        if self._body:
            whole, self._body, self._body_bytes = b"".join(self._body), [], 0
            return whole
        buffer, at = self._buffer, self._at
        came = len(buffer)
        flags = buffer[at] if at < came else 0
        body = at + (LONG_HEADER if flags & LONG else SHORT_HEADER)
        if came < body:
            return None
        size = int.from_bytes(buffer[at + 1 : body], "big") if flags & LONG else buffer[at + 1]
        if (
            flags > (LONG | MORE)
            or self._bytes + size > self._max_wire
            or len(self._frames) == MAX_FRAMES
        ):
            flaw = self._flaw(flags, size)
            if flaw is not None:
                return flaw
        end = body + size
        self._flags = flags
        if came < end:
            if size >= PIECE_BYTES:
                self._buffer, self._at = b"", 0
                self.lacks = size
                self._continue(bytes(memoryview(buffer)[body:]))
            return None
        if end == came:
            self._buffer, self._at = b"", 0
        else:
            self._at = end
        if isinstance(buffer, bytes):
            return buffer[body:end]
        return bytes(memoryview(buffer)[body:end])

    def _flaw(self, flags: int, size: int) -> ConnectionClosed | None:
        """What is wrong with a frame, by its header alone; for those that may have a flaw."""
        if flags & ~FLAGS:
            return malformed(f"a frame with flags {flags:#x}")
        if flags & COMMAND and not self._is_wrapped:
            if size > COMMAND_BYTES:
                return ConnectionClosed(
                    ConnectionFault.TOO_LARGE, f"it announced a command of {size} bytes"
                )
        elif self._bytes + size > self._max_wire:
            total, limit = self._bytes + size, self._max_wire
            return ConnectionClosed(
                ConnectionFault.TOO_LARGE,
                f"it announced a message of {total} bytes, {limit} are the limit",
            )
        elif len(self._frames) == MAX_FRAMES:
            return ConnectionClosed(
                ConnectionFault.TOO_MANY_FRAMES,
                f"a message of it has more than {MAX_FRAMES} frames",
            )
        return None

    def _commanded(self, payload: bytes) -> Frames:
        """A heartbeat is answered; what we do not know is of no meaning here."""
        name, body = frames.split_command(payload)
        if self._takes_topics and name in frames.TOPIC_COMMANDS:
            return [frames.TOPIC_COMMANDS[name] + body]
        if name == b"PING":
            context = body[_PING_TTL : _PING_TTL + _PING_CONTEXT]
            self._mechanism.wrap(self._out, frames.named(b"PONG", context), COMMAND)
        return []

    def _keep_rest(self) -> None:
        """Of a read only what is not done with; an idle connection keeps nothing."""
        if self._at == len(self._buffer):
            self._buffer, self._at = b"", 0
        elif self._at:
            self._buffer = bytearray(memoryview(self._buffer)[self._at :])
            self._at = 0
