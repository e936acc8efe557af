"""Bytes to messages and back: one codec for every socket, and hostile bytes never raise past it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, Tokens
from kvd.wire import admin, client, peer
from kvd.wire.attach import AttachReply, AttachRequest
from kvd.wire.bounds import MAX_PEER_BYTES, Call
from kvd.wire.values import has_more_values

if TYPE_CHECKING:
    from collections.abc import Callable

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


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The head of a request; what follows is skipped."""

    tag: str
    call: Call


_ENVELOPES = msgspec.msgpack.Decoder(_Envelope)


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
        self._flaw = flaw
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(union)
        self.encode: Callable[[M], bytes] = msgspec.msgpack.Encoder().encode
        """The message as one frame."""

    def decode(self, frame: bytes) -> M | Refusal:
        """The message, or why it is none; never raises."""
        if len(frame) > self._max_bytes:
            return Refusal(
                Code.BAD_REQUEST,
                f"the message has {len(frame)} bytes, at most {self._max_bytes} are read",
                numbers={"bytes": len(frame), "limit": self._max_bytes},
            )
        limit = self._max_values if len(frame) > SHORT_BYTES else 0
        if limit and has_more_values(frame, limit):
            return _no_message(frame, f"more than {limit} values in one message")
        try:
            message = self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            return _no_message(frame, str(exc))
        flaw = None if self._flaw is None else self._flaw(message)
        return message if flaw is None else _no_message(frame, flaw)

    def call_of(self, frame: bytes) -> int:
        """Whom to answer when a request was refused here: its call, or ``NO_CALL``; never raises.

        A request with one field out of its bounds, or a verb of a later version, costs its sender
        that request, not every other.
        """
        if len(frame) > self._max_bytes:
            return NO_CALL
        try:
            return _ENVELOPES.decode(frame).call
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return NO_CALL


def _no_message(frame: bytes, why: str) -> Refusal:
    if len(why) > MAX_WHY:
        why = f"{why[:MAX_WHY]}..."
    return Refusal(
        Code.BAD_REQUEST,
        f"{len(frame)} bytes are not a message of this socket: {why}",
        numbers={"bytes": len(frame)},
    )


CLIENT_REQUESTS: Codec[client.Request] = Codec(client.Request)
CLIENT_REPLIES: Codec[client.Reply] = Codec(client.Reply, max_bytes=MAX_REPLY_BYTES)
ATTACH_REQUESTS: Codec[AttachRequest] = Codec(AttachRequest)
ATTACH_REPLIES: Codec[AttachReply] = Codec(AttachReply)
PEER_MESSAGES: Codec[peer.Message] = Codec(
    peer.Message, max_bytes=MAX_PEER_BYTES, max_values=MAX_VALUES, flaw=peer.flaw
)
ADMIN_REQUESTS: Codec[admin.AdminRequest] = Codec(admin.AdminRequest)
ADMIN_REPLIES: Codec[admin.AdminReply] = Codec(admin.AdminReply, max_bytes=MAX_REPLY_BYTES)


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
