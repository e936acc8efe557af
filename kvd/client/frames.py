"""A request as frames, and what is wrong with one that cannot be sent, by the name of the field."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.errors import Code, KvdError, Refusal
from kvd.wire import client as wire
from kvd.wire.codec import CLIENT_REQUESTS, MAX_HEADER_BYTES

_ENCODE: Final = CLIENT_REQUESTS.encode
_READ: Final = msgspec.msgpack.Decoder(wire.Request).decode

if TYPE_CHECKING:
    from kvd.types import Tokens


def frames_of(request: wire.Request, tokens: Tokens | None, max_frame_bytes: int) -> list[bytes]:
    """The frames of a request; ``tokens`` are those of one that has a tokens frame.

    The header is read back once: a field of the wrong type is the caller's to know.

    Raises:
        KvdError: a field has the wrong type, or a frame is longer than the daemon reads.
    """
    try:
        header = _ENCODE(request)
    except (TypeError, ValueError, OverflowError) as exc:
        raise _bad(request, _unwritable(request) or str(exc)) from exc
    try:
        _READ(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        read = CLIENT_REQUESTS.decode(header)
        why = read.message if isinstance(read, Refusal) else str(exc)
        raise _bad(request, _flaw(request, why)) from None
    max_header_bytes = min(max_frame_bytes, MAX_HEADER_BYTES)
    if len(header) > max_header_bytes:
        raise _too_long(request, len(header), max_header_bytes)
    if tokens is None:
        return [header]
    if len(tokens) > max_frame_bytes:
        raise _too_long(request, len(tokens), max_frame_bytes)
    return [header, tokens]


_PLACE: Final = re.compile(r"^.*: (?P<why>.*) - at `\$(?P<path>[^`]*)`$", re.DOTALL)


_SAID_AS: Final = {"peer": "to", "n_pages": "pages", "extend_tokens": "extend"}
"""Fields that engines know by another name."""


def _flaw(request: wire.Request, message: str) -> str:
    """What is wrong, by the name of the field: the codec tells it by its place in the frame."""
    found = _PLACE.match(message)
    if found is None:
        return message
    what, name = _at(request, [int(at) for at in re.findall(r"\[([0-9]+)\]", found["path"])])
    if not name:
        return message
    name = _SAID_AS.get(name, name)
    limit = re.search(r"length <= ([0-9]+)", found["why"])
    if limit is not None and isinstance(what, str | bytes | tuple):
        unit = {str: "characters", bytes: "bytes"}.get(type(what), "elements")
        return f"{name} has {len(what)} {unit}, {limit[1]} are taken at most"
    return f"{name} is {what!r:.100}: {found['why']}"


def _unwritable(request: wire.Request) -> str:
    """Which field has what no message can carry, and why; empty where each of them could."""
    about = _asked(request)
    for name in about.__struct_fields__:
        value = getattr(about, name)
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, ValueError, OverflowError) as exc:
            return f"{_SAID_AS.get(name, name)} is {value!r:.100}: {exc}"
    return ""


def _asked(request: wire.Request) -> wire.Request:
    return request.request if isinstance(request, wire.AboutPrompt) else request


def _at(request: wire.Request, places: list[int]) -> tuple[object, str]:
    """What is at that place of a request, and how it is called; no name where nothing is."""
    what: object = request
    name = ""
    for place in places:
        if isinstance(what, msgspec.Struct) and 0 < place <= len(what.__struct_fields__):
            name = what.__struct_fields__[place - 1]  # the tag comes first
            what = getattr(what, name)
        elif isinstance(what, tuple) and place < len(what):
            name = f"{name}[{place}]"
            what = what[place]
        else:
            return what, ""
    return what, name


def _bad(request: wire.Request, why: str) -> KvdError:
    return KvdError(
        Refusal(
            Code.BAD_REQUEST,
            f"{type(_asked(request)).__name__} cannot be sent: {why}",
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
