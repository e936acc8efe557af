"""Which headers go through a proxy, in both directions.

All that are for the other end go through, in the words they came with. Not those of one connection
(RFC 9110, 7.6.1: hop by hop, and whatever ``Connection`` names), not cookies, and not what the
proxy says itself: how long the body is, which host is asked. An engine's own credentials stand in
the place of its client's.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final

from multidict import CIMultiDict

from kvd.proxy.paths import BAD_REQUEST, NotForwarded

if TYPE_CHECKING:
    from collections.abc import Mapping

    from multidict import CIMultiDictProxy

    Headers = CIMultiDictProxy[str] | CIMultiDict[str]

HOP_BY_HOP: Final = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "http2-settings", "proxy-authenticate", "proxy-authorization"),
        *("proxy-authentication-info",),
    }
)

_OF_THE_PROXY: Final = frozenset({"host", "content-length", "expect", "cookie", "cookie2"})
"""Of a request, what the proxy says itself or never says."""

_OF_THE_ENGINE: Final = frozenset({"set-cookie", "set-cookie2", "alt-svc"})
"""Of an answer: in the name of the proxy no engine sets cookies, or offers another way."""

_ONCE: Final = (
    *("host", "authorization", "content-type", "content-encoding", "content-length"),
    *("transfer-encoding", "traceparent"),
)
"""Two of them would be read by one server this way, and by the next one that way."""

NOT_IMPLEMENTED: Final = 501
UNSUPPORTED_MEDIA: Final = 415
LOOP: Final = 508

IDENTITY: Final = "identity"


def proxy_name() -> str:
    """What one proxy calls itself in ``Via``; no other has it, so that it knows itself again."""
    return f"kvd-{secrets.token_hex(4)}"


def check_headers(headers: Headers, name: str) -> None:
    """Whether a request with these may go on through the proxy of this name.

    Raises:
        NotForwarded: 400, 415, 501 or 508, with what is wrong.
    """
    for once in _ONCE:
        if len(headers.getall(once, ())) > 1:
            raise NotForwarded(BAD_REQUEST, f"the header {once} is there more than once")
    for header, value in headers.items():
        if not _can_be_written(value):
            raise NotForwarded(BAD_REQUEST, f"the header {header.lower()} is no text")
    coding = headers.get("transfer-encoding", "chunked").strip().lower()
    if coding != "chunked":
        raise NotForwarded(NOT_IMPLEMENTED, "of transfer codings the proxy knows chunked alone")
    if headers.get("content-encoding", IDENTITY).strip().lower() not in {IDENTITY, ""}:
        # What is in it could not be judged without unpacking, and that has no bound in its size.
        raise NotForwarded(UNSUPPORTED_MEDIA, "the proxy takes no compressed body: send it plain")
    if headers.get("upgrade", "").strip().lower() == "websocket":
        raise NotForwarded(NOT_IMPLEMENTED, "the proxy passes on no WebSocket")
    if any(f" {name}" in value for value in headers.getall("via", ())):
        raise NotForwarded(LOOP, "this request has been here before: an engine is this proxy")


def request_headers(
    headers: Headers, name: str, trace: str, authorization: str
) -> CIMultiDict[str]:
    """Those of a client's request that an engine gets.

    Args:
        headers: of the client.
        name: what this proxy calls itself.
        trace: the ``traceparent`` of a request that came with none.
        authorization: of the proxy at that engine; empty: the client's own goes through.
    """
    passed = _end_to_end(headers, HOP_BY_HOP | _OF_THE_PROXY)
    passed.setdefault("traceparent", trace)
    if authorization:
        passed["authorization"] = authorization
    passed.add("via", f"1.1 {name}")
    return passed


def own_request_headers(passed: Headers, media: str = "application/json") -> CIMultiDict[str]:
    """Of a question that the proxy asks for its client: with a JSON body of its own making."""
    own = CIMultiDict(passed)
    for header in ("accept-encoding", "accept", "content-type", "range", "if-none-match"):
        own.popall(header, None)
    own["content-type"] = media
    own["accept"] = media
    # A few bytes that unpack to gigabytes are an engine's lie that costs nobody but itself.
    own["accept-encoding"] = IDENTITY
    return own


def answer_headers(headers: Headers, name: str) -> CIMultiDict[str]:
    """Those of an engine's answer that its client gets.

    Raises:
        ValueError: one cannot be written; the engine is not to be believed.
    """
    passed = _end_to_end(headers, HOP_BY_HOP | _OF_THE_ENGINE)
    for header, value in passed.items():
        if not _can_be_written(value) or not header.isascii():
            raise ValueError(f"its header {header.lower()!r} is no text")
    passed.add("via", f"1.1 {name}")
    return passed


def media_type(headers: Mapping[str, str]) -> str:
    """``Content-Type`` without its parameters, in small letters; empty where there is none."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _end_to_end(headers: Headers, without: frozenset[str]) -> CIMultiDict[str]:
    named = {
        token.strip().lower()
        for value in headers.getall("connection", ())
        for token in value.split(",")
    }
    return CIMultiDict(
        (header, value)
        for header, value in headers.items()
        if (low := header.lower()) not in without and low not in named
    )


def _can_be_written(value: str) -> bool:
    """What the parser lets through as bytes that are no UTF-8 comes as half a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return not any(char in value for char in "\r\n\0")
