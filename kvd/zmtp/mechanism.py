"""What the two mechanisms have in common: a handshake of commands, and a wrapping of frames.

The simple one of them is here: NULL (RFC 37), by which each side says READY and nobody proves
anything.
"""

from __future__ import annotations

from typing import ClassVar, Final, Protocol

from mypy_extensions import mypyc_attr

from kvd.zmtp import frames
from kvd.zmtp.bounds import PART_BYTES
from kvd.zmtp.events import ConnectionClosed, ConnectionFault, HandshakeDone
from kvd.zmtp.frames import MAX_SHORT, MORE, SHORT_HEADERS

ROUTER: Final = b"ROUTER"
DEALER: Final = b"DEALER"
PUB: Final = b"PUB"
_TALKS_TO: Final = {
    ROUTER: {b"DEALER", b"REQ", b"ROUTER"},
    DEALER: {b"ROUTER", b"DEALER", b"REP"},
    PUB: {b"SUB", b"XSUB"},
}


class Mechanism(Protocol):
    """One side of one connection."""

    name: ClassVar[bytes]
    is_listening: bool
    """Whether the other side came to us."""
    overhead: ClassVar[int]
    """Bytes that wrapping adds to a frame."""

    def begin(self) -> bytes:
        """What to send when the greetings are exchanged."""
        ...

    def take(self, name: bytes, body: bytes) -> bytes | HandshakeDone | ConnectionClosed:
        """What a command of the handshake leads to: bytes to send, or its end."""
        ...

    def accept(self) -> bytes:
        """What to send to whoever is ready and is let in."""
        ...

    def wrap(self, out: list[bytes], payload: bytes, flags: int) -> None:
        """Append the pieces of one frame, header and all."""
        ...

    def unwrap(self, body: bytes) -> bytes | ConnectionClosed:
        """The flags, in one byte, and the payload of a frame that came; only with ``overhead``."""
        ...


def own_properties(socket_type: bytes, routing_id: bytes) -> bytes:
    """What we say of ourselves."""
    return frames.properties(((b"Socket-Type", socket_type), (b"Identity", routing_id)))


def met(own_type: bytes, metadata: bytes, name: str = "") -> HandshakeDone | ConnectionClosed:
    """Who the other side says it is."""
    found = frames.read_properties(metadata)
    if found is None:
        return malformed("properties")
    socket_type, routing_id = found.get(b"socket-type", b""), found.get(b"identity", b"")
    if socket_type not in _TALKS_TO[own_type]:
        return malformed(f"a socket of type {socket_type[:20]!r}")
    if len(routing_id) > frames.MAX_ROUTING_ID:
        return malformed(f"a routing id of {len(routing_id)} bytes")
    return HandshakeDone(routing_id, socket_type, name)


def refused(body: bytes) -> ConnectionClosed:
    """It said ERROR."""
    return ConnectionClosed(
        ConnectionFault.REFUSED, f"it says {body[1:].decode('ascii', 'replace')!r}"
    )


def malformed(what: str) -> ConnectionClosed:
    """It said something that nobody may say there."""
    return ConnectionClosed(ConnectionFault.MALFORMED, f"it sent {what}")


@mypyc_attr(allow_interpreted_subclasses=True)
class Null:
    """A DEALER says READY at once; a ROUTER or a PUB, which listen, wait to hear who comes."""

    name: ClassVar[bytes] = b"NULL"
    overhead: ClassVar[int] = 0

    def __init__(self, socket_type: bytes = ROUTER, routing_id: bytes = b"") -> None:
        self.is_listening = socket_type != DEALER
        self._socket_type = socket_type
        self._ready = frames.command(b"READY", own_properties(socket_type, routing_id))

    def begin(self) -> bytes:
        """As ``Mechanism``."""
        return self._ready if not self.is_listening else b""

    def take(self, name: bytes, body: bytes) -> bytes | HandshakeDone | ConnectionClosed:
        """As ``Mechanism``."""
        match name:
            case b"READY":
                return met(self._socket_type, body)
            case b"ERROR":
                return refused(body)
            case _:
                return malformed(f"{name[:20]!r} in its handshake")

    def accept(self) -> bytes:
        """As ``Mechanism``."""
        return self._ready if self.is_listening else b""

    def wrap(self, out: list[bytes], payload: bytes, flags: int) -> None:
        """As ``Mechanism``; a large frame is not copied."""
        size = len(payload)
        if size <= MAX_SHORT and flags <= MORE:
            head = SHORT_HEADERS[flags][size]  # without a call, as nearly all are
        else:
            head = frames.header(size, flags)
        if size < PART_BYTES:
            out.append(head + payload)
        else:
            out += (head, payload)

    def unwrap(self, body: bytes) -> bytes | ConnectionClosed:
        """As ``Mechanism``; never asked."""
        return b"\0" + body
