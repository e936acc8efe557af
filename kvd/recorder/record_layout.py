"""How a record lies in the ring and in a file.

A record is a header of 16 bytes and its data, padded so that the next header is aligned too::

    u32 length of the message, top 2 bits: its kind | u32 length of the tokens | f64 at_s
    message | tokens, as they came | padding

What must not live here: what a record says, and any import of the node. Who only counts records
loads nothing else.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

HEADER: Final = struct.Struct("<IId")
ALIGNMENT: Final = 16
INPUT, MARK, CLIENT_FRAME, PEER_FRAME = range(4)
KIND_AT: Final = 30
"""The bits of the kind begin here."""
LENGTH: Final = (1 << KIND_AT) - 1


class InputRecord(NamedTuple):
    """One record as bytes: its message, and the tokens that came with it."""

    at_s: float
    message: bytes
    tokens: bytes = b""
    kind: int = INPUT

    @property
    def is_mark(self) -> bool:
        """Whether it is a mark, and no input."""
        return self.kind == MARK

    def headed(self) -> bytes:
        """Its header and its message, as they lie in the ring before its tokens."""
        n_message = len(self.message) | self.kind << KIND_AT
        return HEADER.pack(n_message, len(self.tokens), self.at_s) + self.message


def padded(n_bytes: int) -> int:
    """The length of a record with ``n_bytes`` of data, header and padding included."""
    return HEADER.size + (n_bytes + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
