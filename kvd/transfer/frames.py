"""How orders and reports cross the stream socket between the daemon and its transfer process.

A frame is a little-endian uint32 length and that many bytes of MessagePack: one order, or one list
of reports.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvd.transfer.orders import Order, Report

if TYPE_CHECKING:
    from collections.abc import Iterator

T = TypeVar("T")

MAX_WHY = 300
"""Characters of a flaw that are told."""

MAX_FRAME_BYTES = 256 * 2**20
"""A post of 32 million pages; anything longer is a damaged stream, not an order."""

_LENGTH = struct.Struct("<I")


class BadStream(Exception):
    """The other end of the order socket sent what is no frame of it; the message says what."""


_ENCODER = msgspec.msgpack.Encoder()
_ORDER: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_REPORTS = msgspec.msgpack.Decoder(list[Report])


def frame_of(message: Order | list[Report]) -> bytes:
    """The bytes of one frame."""
    body = _ENCODER.encode(message)
    return _LENGTH.pack(len(body)) + body


def order_of(body: bytes) -> Order:
    """Decode the body of a frame on the child's side.

    Raises:
        BadStream: it is no order.
    """
    return _read(_ORDER, body)


def reports_of(body: bytes) -> list[Report]:
    """Decode the body of a frame on the daemon's side.

    Raises:
        BadStream: it is no list of reports.
    """
    return _read(_REPORTS, body)


def _read(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"{len(body)} bytes that cannot be read: {str(exc)[:MAX_WHY]}"
        raise BadStream(msg) from exc


class Frames:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add what was read; yield each body that is now whole.

        Raises:
            BadStream: a length above ``MAX_FRAME_BYTES``: the stream is damaged for good.
        """
        self._pending += data
        at = 0
        while len(self._pending) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending, at)
            if length > MAX_FRAME_BYTES:
                msg = f"frame of {length} bytes on the order socket; the limit is {MAX_FRAME_BYTES}"
                raise BadStream(msg)
            if len(self._pending) - at - _LENGTH.size < length:
                break
            at += _LENGTH.size
            yield bytes(self._pending[at : at + length])
            at += length
        del self._pending[:at]
