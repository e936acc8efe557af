"""Bytes to messages and back: one codec for every socket, and hostile bytes never raise past it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec
from mypy_extensions import mypyc_attr

from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Tokens
from kvd.wire import admin, client, peer
from kvd.wire.attach import AttachReply, AttachRequest, Speaker
from kvd.wire.bounds import MAX_PEER_BYTES
from kvd.wire.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

M = TypeVar("M")

MAX_HEADER_BYTES = 4 * 1024 * 1024
"""A request holds page ids at most: 4 MiB is a million pages."""

MAX_REPLY_BYTES = 64 * 1024 * 1024
"""A daemon's answer may be a whole snapshot or tree."""


SHORT_BYTES = 64 * 1024
"""A message of a peer up to this length is read in a millisecond, whatever is in it."""

MAX_VALUES = 4096
"""Of a longer one: an Offer has four for each grant and some twenty more."""

MAX_WHY = 300
"""Characters of a flaw that are told: msgspec quotes the frame, which may be megabytes of a tag."""

NO_CALL = -1
"""The ``call`` of an answer to a request whose own could not be read."""


_SIZES = {
    0xCA: 5, 0xCB: 9,
    0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9,
    0xD0: 2, 0xD1: 3, 0xD2: 5, 0xD3: 9,
    0xD4: 3, 0xD5: 4, 0xD6: 6, 0xD7: 10, 0xD8: 18,
    0xDC: 3, 0xDD: 5, 0xDE: 3, 0xDF: 5,
}  # fmt: skip
"""Of a whole value by its first byte, of an array or a map its head; 1 where it is not here."""

_LENGTHS = {
    0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0),
    0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1),
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0),
}  # fmt: skip
"""Bytes of the length of a text or of bytes, and bytes between it and those."""


SEVERAL_BYTES = 64 * 1024
"""Of replies that are sent as one message: copied once more for it, and read at once."""

_ENCODE = msgspec.msgpack.Encoder().encode
_SEVERAL_TAG = client.Several.__struct_config__.tag

_HEADS = msgspec.msgpack.Decoder(client.RequestHead)


@mypyc_attr(allow_interpreted_subclasses=True)
class Codec(Generic[M]):
    """One message union. ``flaw`` finds what the types of its fields cannot say.

    ``max_values``: of a frame above ``SHORT_BYTES``; 0: any number of them is read.
    """

    def __init__(
        self,
        union: object,
        *,
        max_bytes: int = MAX_HEADER_BYTES,
        max_values: int = 0,
        flaw: Callable[[M], str | None] | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._max_values = max_values
        self._plain_bytes = min(max_bytes, SHORT_BYTES) if max_values else max_bytes
        """Up to here a frame is read without a look at it."""
        self._flaw = flaw
        self._read: Callable[[bytes], M] = msgspec.msgpack.Decoder(union).decode
        self.encode: Callable[[M], bytes] = msgspec.msgpack.Encoder().encode
        """The message as one frame."""

    def decode(self, frame: bytes) -> M | Refusal:
        """The message, or why it is none; never raises."""
        if len(frame) > self._plain_bytes:
            refusal = self._too_long(frame)
            if refusal is not None:
                return refusal
        try:
            message = self._read(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            return _no_message(frame, str(exc))
        if self._flaw is None:
            return message
        flaw = self._flaw(message)
        return message if flaw is None else _no_message(frame, flaw)

    def _too_long(self, frame: bytes) -> Refusal | None:
        """Why a frame that is not short is not read; None: it is."""
        if len(frame) > self._max_bytes:
            return Refusal(
                Code.BAD_REQUEST,
                f"the message has {len(frame)} bytes, at most {self._max_bytes} are read",
                numbers={"bytes": len(frame), "limit": self._max_bytes},
            )
        limit = self._max_values
        if limit and has_more_values(frame, limit):
            return _no_message(frame, f"more than {limit} values in one message")
        return None

    def call_of(self, frame: bytes) -> int:
        """Whom to answer when a request was refused here: its call, or ``NO_CALL``; never raises.

        A request with one field out of its bounds, or a verb of a later version, costs its sender
        that request, not every other.
        """
        if len(frame) > self._max_bytes:
            return NO_CALL
        try:
            return _HEADS.decode(frame).call
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return NO_CALL


def has_more_values(frame: bytes, limit: int) -> bool:
    """Whether there are more than ``limit`` values, in arrays and maps too, before the frame ends.

    A long message is long because of the bytes in it: page ids, sums, metadata. One that is long
    because of many small values, be it in fields that are not even known here, costs a hundred
    times as much to read. It is told apart by jumping from head to head, without reading a value.

    Of a frame that is no MessagePack nothing is promised, but that it takes no longer.
    """
    at, end = 0, len(frame)
    for _ in range(limit):
        if at >= end:
            return False
        head = frame[at]
        if head in _LENGTHS:
            n_bytes, more = _LENGTHS[head]
            at += 1 + n_bytes + more + int.from_bytes(frame[at + 1 : at + 1 + n_bytes])
        elif 0xA0 <= head < 0xC0:
            at += 1 + (head & 0x1F)
        else:
            at += _SIZES.get(head, 1)
    return at < end


def _no_message(frame: bytes, why: str) -> Refusal:
    if len(why) > MAX_WHY:
        why = f"{why[:MAX_WHY]}..."
    return Refusal(
        Code.BAD_REQUEST,
        f"{len(frame)} bytes are not a message of this socket: {why}",
        numbers={"bytes": len(frame)},
    )


CLIENT_REQUESTS: Codec[client.Request] = Codec(client.Request)
CLIENT_REPLIES: Codec[client.Reply | client.Several] = Codec(
    client.Reply | client.Several, max_bytes=MAX_REPLY_BYTES
)
ATTACH_REQUESTS: Codec[AttachRequest] = Codec(AttachRequest)
ATTACH_REPLIES: Codec[AttachReply] = Codec(AttachReply)
SPEAKERS: Codec[Speaker] = Codec(Speaker)
"""Reads either of the two before, whatever its protocol; only who sent it."""
PEER_MESSAGES: Codec[peer.Message] = Codec(
    peer.Message, max_bytes=MAX_PEER_BYTES, max_values=MAX_VALUES, flaw=peer.flaw
)
ADMIN_REQUESTS: Codec[admin.AdminRequest] = Codec(admin.AdminRequest)
ADMIN_REPLIES: Codec[admin.AdminReply] = Codec(admin.AdminReply, max_bytes=MAX_REPLY_BYTES)


_IN_PARTS: msgspec.msgpack.Decoder[client.RepliesInParts | client.EventsInParts] = (
    msgspec.msgpack.Decoder(client.RepliesInParts | client.EventsInParts)
)
_EVENT: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(Event)


def readable_replies(frame: bytes) -> tuple[list[client.Reply], int]:
    """Of a message that ``CLIENT_REPLIES`` cannot read: what can be, and how many parts cannot.

    A daemon of a later version says things that are not known here, beside others that are: one of
    them must not cost the calls whose answers came with it.
    """
    if len(frame) > MAX_REPLY_BYTES:
        return [], 1
    parts = _parts_of(frame)
    if isinstance(parts, client.EventsInParts):
        return _known_events(parts)
    found: list[client.Reply] = []
    n_unreadable = 0
    for part in () if parts is None else parts.replies:
        reply = CLIENT_REPLIES.decode(bytes(part))
        inner = _parts_of(part) if isinstance(reply, Refusal) else None
        if isinstance(inner, client.EventsInParts):
            events, unreadable = _known_events(inner)
            found += events
            n_unreadable += unreadable
        elif isinstance(reply, Refusal | client.Several):
            n_unreadable += 1
        else:
            found.append(reply)
    return found, n_unreadable if parts is not None else 1


def _parts_of(frame: bytes | msgspec.Raw) -> client.RepliesInParts | client.EventsInParts | None:
    try:
        return _IN_PARTS.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _known_events(parts: client.EventsInParts) -> tuple[list[client.Reply], int]:
    """Those that are known; the others are missing between them, and so are told of as lost."""
    events = [_event(raw) for raw in parts.events]
    known = tuple(event for event in events if event is not None)
    n_leading = next((at for at, event in enumerate(events) if event is not None), len(events))
    return [client.Events(parts.lost + n_leading, known)], len(events) - len(known)


def _event(raw: msgspec.Raw) -> Event | None:
    try:
        return _EVENT.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def joined_replies(encoded: Sequence[bytes]) -> list[bytes]:
    """Replies, each encoded, as few messages in the same order: what a connection is sent."""
    if len(encoded) == 1:
        return [encoded[0]]
    found: list[bytes] = []
    together: list[bytes] = []
    n_bytes = 0
    for message in encoded:
        if together and n_bytes + len(message) > SEVERAL_BYTES:
            found.append(_several(together))
            together, n_bytes = [], 0
        together.append(message)
        n_bytes += len(message)
    found.append(_several(together))
    return found


def _several(encoded: list[bytes]) -> bytes:
    if len(encoded) == 1:
        return encoded[0]
    # Made of what is encoded already: each was when it was said, so that one that cannot be costs
    # nobody else anything.
    return _ENCODE((_SEVERAL_TAG, [msgspec.Raw(message) for message in encoded]))


def check_tokens(frame: bytes, *, max_tokens: int) -> Tokens | Refusal:
    """The tokens frame, or why it is none."""
    if len(frame) % ID_BYTES:
        return Refusal(
            Code.BAD_TOKENS,
            f"the tokens frame has {len(frame)} bytes, not a multiple of {ID_BYTES}: "
            "send little-endian int32",
            numbers={"bytes": len(frame)},
        )
    if len(frame) // ID_BYTES > max_tokens:
        return Refusal(
            Code.TOO_LARGE,
            f"{len(frame) // ID_BYTES} tokens in one frame, the limit here is {max_tokens}: "
            "raise limits.max_prompt_tokens or shorten the prompt",
            numbers={"tokens": len(frame) // ID_BYTES, "limit": max_tokens},
        )
    return Tokens(frame)
