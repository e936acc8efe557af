"""Which requests go on to engines: their method, their path, and how both may be spelled.

A path is judged as it came and goes on byte for byte. So it has one spelling or is refused: what
one server reads as ``/v1/completions`` and another as something else never gets that far. Engines
also serve pages that put them to sleep, load adapters or change their weights; only what is for
clients is passed on.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote_to_bytes, urlsplit

import msgspec

TOKEN_PATHS: Final = ("/v1/completions", "/v1/chat/completions")
"""Prefilled by one engine and decoded by another; all else goes to an engine that decodes."""

FORWARDED: Final = (
    "/v1/",
    "/v2/",
    "/cohere/v2/",
    "/inference/v1/generate",
    "/generate",
    "/generative_scoring",
    "/classify",
    "/pooling",
    "/rerank",
    "/score",
    "/tokenize",
    "/detokenize",
    "/version",
)
"""What engines serve to clients: all below a path that ends with a slash, else that path alone."""

NOT_FORWARDED: Final = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
"""Below a path of ``FORWARDED``, and for operators."""

OWN_PAGES: Final = ("/health", "/metrics")
"""What the proxy answers itself."""

METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

MAX_TARGET_BYTES: Final = 4096

BAD_REQUEST: Final = 400
NOT_FOUND: Final = 404
METHOD_NOT_ALLOWED: Final = 405

_LITERAL: Final = re.compile(r"[A-Za-z0-9\-._~!$&'()*+,=:@/]*")
"""Of a path: RFC 3986, without ``;``, which some servers cut a segment at."""
_QUERY: Final = re.compile(r"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@/?\[\]|{}^`]|%[0-9A-Fa-f]{2})*")
_ENCODED: Final = re.compile(r"%[0-9A-Fa-f]{2}")
_NEVER_ENCODED: Final = frozenset(b"/\\%.;?#" + bytes(range(0x20)) + b"\x7f")


class NotForwarded(Exception):
    """A request that goes no further: the status and the sentence that its client gets."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class RequestTarget(msgspec.Struct, frozen=True):
    """A request's path and its query with the ``?``, as they came."""

    path: str
    query: str

    @property
    def is_for_tokens(self) -> bool:
        """One engine prefills it, another decodes it."""
        return self.path in TOKEN_PATHS

    @property
    def as_it_came(self) -> str:
        """Both, as they go on."""
        return self.path + self.query


def target_of(raw: str) -> RequestTarget:
    """The target of a request, as it stands in its first line, if it has the one spelling.

    Raises:
        NotForwarded: 400, with what is wrong with it.
    """
    if len(raw) > MAX_TARGET_BYTES:
        raise _odd(f"{len(raw)} bytes of path; the proxy passes on {MAX_TARGET_BYTES}")
    if raw[:8].lower().startswith(("http://", "https:/")):
        # The form for proxies, which a server has to take too. The host is not looked at: there
        # is one proxy here, and its engines are those of the command line.
        raw = _without_origin(raw)
    path, mark, query = raw.partition("?")
    if not path.startswith("/"):
        raise _odd("a path begins with /")
    if not _QUERY.fullmatch(query):
        raise _odd("the query has characters that must be %-encoded")
    encoded = _ENCODED.findall(path)
    for found in encoded:
        byte = unquote_to_bytes(found)[0]
        if byte in _NEVER_ENCODED or _LITERAL.fullmatch(chr(byte)) or found != found.upper():
            raise _odd(f"{found} is another spelling; write the character, or leave it out")
    if not _LITERAL.fullmatch(_ENCODED.sub("", path)):
        raise _odd("the path has characters that must be %-encoded, or ;")
    segments = path.split("/")[1:]
    if any(segment in {".", ".."} for segment in segments):
        raise _odd("the path has a . or .. segment")
    if path != "/" and not all(segments):
        raise _odd("the path has an empty segment: // or a slash at its end")
    return RequestTarget(path, mark + query)


def check_forwarded(method: str, path: str, also: tuple[str, ...] = ()) -> None:
    """Whether a request with this path may go on; ``also``: paths like those of ``FORWARDED``.

    Raises:
        NotForwarded: 404 or 405.
    """
    if method not in METHODS:
        raise NotForwarded(METHOD_NOT_ALLOWED, f"the proxy passes on no {method}")
    if _is_below(path, also):
        return
    if path in NOT_FORWARDED or not _is_below(path, FORWARDED):
        raise NotForwarded(
            NOT_FOUND, "the proxy passes this path on to no engine (kvd proxy --pass-path)"
        )


def check_also(path: str) -> None:
    """Whether a path that an operator has passed on can be one of a request.

    Raises:
        NotForwarded: with what is wrong with it.
    """
    found = target_of(path if path == "/" else path.removesuffix("/"))
    if found.query or path == "//":
        raise _odd("it is no path")


def _is_below(path: str, allowed: tuple[str, ...]) -> bool:
    return any(
        path.startswith(pattern) if pattern.endswith("/") else path == pattern
        for pattern in allowed
    )


def _without_origin(raw: str) -> str:
    try:
        parts = urlsplit(raw)
    except ValueError as error:
        raise _odd("the address cannot be read") from error
    found = raw[len(parts.scheme) + len("://") + len(parts.netloc) :]
    return found if found.startswith("/") else f"/{found}"


def _odd(why: str) -> NotForwarded:
    return NotForwarded(BAD_REQUEST, f"this request's path cannot be passed on: {why}")
