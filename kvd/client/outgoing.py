"""A request as frames: checked here, because the daemon could not say whose a broken one was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Code, KvdError, Refusal
from kvd.wire.codec import CLIENT_REQUESTS, MAX_HEADER_BYTES

if TYPE_CHECKING:
    from kvd.types import Tokens
    from kvd.wire import client as wire


class Outgoing(msgspec.Struct, frozen=True):
    """A message to send, and the call that fails if it cannot be."""

    call: int
    frames: list[bytes]


def frames_of(request: wire.Request, tokens: Tokens | None, max_frame_bytes: int) -> list[bytes]:
    """The frames of a request; ``tokens`` are those of one that has a tokens frame.

    Raises:
        KvdError: a field has the wrong type, or a frame is longer than the daemon reads.
    """
    header = _header(request)
    max_header_bytes = min(max_frame_bytes, MAX_HEADER_BYTES)
    if len(header) > max_header_bytes:
        raise _too_long(request, len(header), max_header_bytes)
    if tokens is None:
        return [header]
    if len(tokens) > max_frame_bytes:
        raise _too_long(request, len(tokens), max_frame_bytes)
    return [header, tokens]


def _header(request: wire.Request) -> bytes:
    """The request as a frame, read back once: a field of the wrong type is the caller's to know."""
    try:
        header = CLIENT_REQUESTS.encode(request)
    except (TypeError, ValueError, OverflowError) as exc:
        raise _bad(request, str(exc)) from exc
    read = CLIENT_REQUESTS.decode(header)
    if isinstance(read, Refusal):
        raise _bad(request, read.message)
    return header


def _bad(request: wire.Request, why: str) -> KvdError:
    return KvdError(
        Refusal(
            Code.BAD_REQUEST,
            f"{type(request).__name__} cannot be sent: {why}",
            side="client",
        )
    )


def _too_long(request: wire.Request, found: int, limit: int) -> KvdError:
    return KvdError(
        Refusal(
            Code.TOO_LARGE,
            f"a frame of {type(request).__name__} has {found} bytes, the daemon reads at most "
            f"{limit}: shorten it, or raise limits.max_frame_bytes",
            side="client",
            numbers={"bytes": found, "limit": limit},
        )
    )
