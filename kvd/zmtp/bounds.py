"""Every limit of a connection and of a listener. Nobody on the other side can raise one."""

from __future__ import annotations

from typing import Final

import msgspec

HANDSHAKE_BYTES: Final = 2048
"""All that is read of a connection before its handshake is over; CURVE needs 64 + 202 + 550."""

COMMAND_BYTES: Final = 1024
"""Of one command: INITIATE with a routing id of 255 bytes has 547."""

MAX_FRAMES: Final = 4
"""Of one message; those of kvd have one or two, and a REQ puts an empty one before."""

READ_BYTES: Final = 64 * 1024
"""Read at a time."""

LONG_READ_BYTES: Final = 256 * 1024
"""The same of a frame that is known to be long."""

PIECE_BYTES: Final = 8 * 1024
"""A frame from this size on is kept in pieces until it is whole, none but the last shorter."""

TURN_MESSAGES: Final = 32
TURN_S: Final = 0.002
"""What one connection may take before all others have had their turn, whichever is less."""

COMING_S: Final = 0.0002
"""What all handshakes of a listener may take before everybody else has had a turn, and what it
takes to accept connections. A call of an engine waits for so much of a flood, twice at most."""

UNKEPT_S: Final = 0.0005
"""The same of all who are through their handshake and are not kept."""

RELIEF_BYTES: Final = 16 * 1024 * 1024
"""Once a listener has kept more than this, and keeps little again, memory is given back."""

PART_BYTES: Final = 16 * 1024
"""A frame from this size on is written from where it lies, and not copied behind its header."""


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that differ between sockets."""

    max_message_bytes: int = 16 * 1024 * 1024
    """Of one message over all its frames; more is hung up on when its length is read."""
    handshake_s: float = 10.0
    """For a whole handshake. It takes up to four round trips, and a congested network may need
    seconds for each: whoever had less time there could never come back after its link broke."""
    refused_s: float = 2.0
    """Until who is left waiting is hung up on: when it comes again, it may be welcome."""
    message_s: float = 30.0
    """From the first byte of a message to its last: 16 MiB take 13 s at 10 Mbit/s."""
    silent_s: float | None = None
    """Whom we dialed is hung up on when it has said nothing for so long: it may have gone without a
    word. None: however long."""
    max_handshakes: int = 256
    """Connections in handshake at once; the oldest makes place for the next."""
    max_connections: int = 4096
    """All of a listener; who has been silent for longest, and is not kept, makes place."""
    key_bytes: int = 32 * 1024 * 1024
    """Kept by a listener for one key on all its connections: unfinished messages, and what it does
    not read; at least two of the longest messages. Above it the connection of that key that keeps
    most is hung up on. Strangers have so much for all of them together."""
    total_bytes: int = 256 * 1024 * 1024
    """The same of all keys together; at least four times ``key_bytes``. Above it the key that keeps
    most pays, unless each has less than one of the longest messages: then who took longest."""
    backlog_messages: int = 4096
    """Waiting to be written to one connection; a reader this far behind is not reading."""
    backlog_bytes: int = 16 * 1024 * 1024
    """The same in bytes: whoever has more waiting is sent nothing else."""


BOUNDS: Final = Bounds()
