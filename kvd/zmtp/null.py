"""The mechanism NULL (RFC 37): each side says READY, nobody proves anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from kvd.zmtp import frames
from kvd.zmtp.bounds import PART_BYTES
from kvd.zmtp.mechanism import ROUTER, malformed, met, own_properties, refused

if TYPE_CHECKING:
    from kvd.zmtp.events import ConnectionClosed, HandshakeDone


class Null:
    """A ROUTER waits to hear who comes before it says READY; a DEALER says it at once."""

    name: ClassVar[bytes] = b"NULL"
    overhead: ClassVar[int] = 0

    def __init__(self, socket_type: bytes = ROUTER, routing_id: bytes = b"") -> None:
        self.is_listening = socket_type == ROUTER
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
        head = frames.header(len(payload), flags)
        if len(payload) < PART_BYTES:
            out.append(head + payload)
        else:
            out += (head, payload)

    def unwrap(self, body: bytes) -> bytes | ConnectionClosed:
        """As ``Mechanism``; never asked."""
        return b"\0" + body
