"""What a protocol machine tells of a connection, and why one ends."""

from __future__ import annotations

import enum
from typing import Final

import msgspec

Frames = list[bytes]
"""A message: the machine says it as it is, because most of what it says is messages."""


class ConnectionFault(enum.Enum):
    """Why a connection is over."""

    HUNG_UP = "hung-up"
    """The other side ended it, or the network did."""
    ENDED = "ended"
    """We did, because we are done."""
    NOT_ZMTP = "not-zmtp"
    OLD_VERSION = "old-version"
    MECHANISM = "mechanism"
    """The two sides do not want the same: keys here and none there."""
    MALFORMED = "malformed"
    WRONG_SERVER_KEY = "wrong-server-key"
    """Its first box does not open: it takes us for somebody else."""
    UNKNOWN_KEY = "unknown-key"
    """It has proven a key, and that is not listed. It gets no answer."""
    REFUSED = "refused"
    """The other side said ERROR, or its routing id is in use."""
    TOO_LARGE = "too-large"
    TOO_MANY_FRAMES = "too-many-frames"
    TOO_SLOW = "too-slow"
    """Its handshake, or one message of it, took too long."""
    CROWDED = "crowded"
    """Others needed its place, and it had said least."""
    TOO_HEAVY = "too-heavy"
    """Of all connections it kept most memory, when too much was kept."""


class HandshakeDone(msgspec.Struct, frozen=True):
    """The handshake is over, as far as the other side has to say something.

    ``name`` is what the keys of the listener call the proven key; empty without keys.
    """

    routing_id: bytes
    socket_type: bytes
    name: str = ""


class ConnectionClosed(msgspec.Struct, frozen=True):
    """The connection is over. ``why`` is for an operator; it ends a sentence."""

    fault: ConnectionFault
    why: str


HUNG_UP: Final = ConnectionClosed(ConnectionFault.HUNG_UP, "it hung up")
ENDED: Final = ConnectionClosed(ConnectionFault.ENDED, "we hung up")
