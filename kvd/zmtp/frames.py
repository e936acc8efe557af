"""How ZMTP 3 is spelled (RFC 23 and 37): greetings, frame headers, commands, properties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

MORE: Final = 1
LONG: Final = 2
COMMAND: Final = 4
FLAGS: Final = MORE | LONG | COMMAND
"""A frame with any other bit is none."""

BOXED_COMMAND: Final = 2
"""In the box of a frame of CURVE the flags are MORE and this."""

SHORT_HEADER: Final = 2
LONG_HEADER: Final = 9
MAX_SHORT: Final = 255

GREETING_BYTES: Final = 64
VERSION_AT: Final = 10
"""In the greeting, behind the signature."""
_MECHANISM_AT: Final = 12
_MECHANISM_END: Final = 32
MAJOR: Final = 3
_MINOR: Final = 1

MAX_ROUTING_ID: Final = 255

SHORT_HEADERS: Final = tuple(
    tuple(bytes((flags, size)) for size in range(MAX_SHORT + 1)) for flags in (0, MORE)
)
"""Of frames that are no commands, by flags and size: as ``header`` makes them."""


SUBSCRIBED: Final = b"\1"
CANCELLED: Final = b"\0"
TOPIC_COMMANDS: Final = {b"SUBSCRIBE": SUBSCRIBED, b"CANCEL": CANCELLED}
"""How a SUB says what it wants to hear: in ZMTP 3.1 a command, in 3.0 a message of this byte and
the beginning of topics."""


def greeting(mechanism: bytes, *, as_server: bool) -> bytes:
    """What each side says first. libzmq does not say whether it is the server, nor reads it."""
    head = b"\xff" + bytes(8) + b"\x7f" + bytes((MAJOR, _MINOR)) + mechanism.ljust(20, b"\0")
    return (head + bytes((as_server,))).ljust(GREETING_BYTES, b"\0")


def is_signature(start: bytes) -> bool:
    """Whether the first bytes, one or more, can be those of a greeting of ZMTP 2 or later."""
    return start[0] == 0xFF and (len(start) < VERSION_AT or start[VERSION_AT - 1] == 0x7F)


def mechanism_of(said: bytes) -> bytes:
    """Of a whole greeting."""
    return said[_MECHANISM_AT:_MECHANISM_END].rstrip(b"\0")


def header(size: int, flags: int) -> bytes:
    """Of a frame of ``size`` bytes."""
    if size > MAX_SHORT:
        return bytes((flags | LONG,)) + size.to_bytes(8, "big")
    return bytes((flags, size)) if flags > MORE else SHORT_HEADERS[flags][size]


def command(name: bytes, body: bytes = b"") -> bytes:
    """A whole command frame."""
    payload = named(name, body)
    return header(len(payload), COMMAND) + payload


def named(name: bytes, body: bytes) -> bytes:
    """The payload of a command."""
    return bytes((len(name),)) + name + body


def split_command(payload: bytes) -> tuple[bytes, bytes]:
    """Name and body of a command; an empty name where it has none."""
    if not payload:
        return b"", b""
    end = 1 + payload[0]
    return (payload[1:end], payload[end:]) if end <= len(payload) else (b"", b"")


def properties(of: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The metadata of a handshake."""
    return b"".join(
        bytes((len(name),)) + name + len(value).to_bytes(4, "big") + value for name, value in of
    )


def read_properties(metadata: bytes) -> dict[bytes, bytes] | None:
    """By name in lower case; None where that is no metadata."""
    found: dict[bytes, bytes] = {}
    at, end = 0, len(metadata)
    while at < end:
        value_at = at + 1 + metadata[at] + 4
        size = int.from_bytes(metadata[value_at - 4 : value_at], "big")
        if metadata[at] == 0 or value_at + size > end:
            return None
        found[metadata[at + 1 : value_at - 4].lower()] = metadata[value_at : value_at + size]
        at = value_at + size
    return found
