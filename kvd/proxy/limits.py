"""How long and how large anything may be that passes through a proxy.

Every phase of a request has an end of its own: a client that sends half of one, an engine that
takes it and says nothing, one that stops in the middle, a client that no longer reads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Iterable


class ProxyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one proxy: seconds, and bytes.

    Attributes:
        head_s: for the head of a request, and for a kept connection without one.
        body_idle_s: between two pieces of a request's body.
        body_s: for a request's body as a whole.
        connect_s: to an engine.
        prefill_s: for the answer of a prefill engine.
        first_byte_s: from a request to a decode engine to the first byte of the answer's body.
        idle_s: between two pieces of an answer.
        answer_s: for an answer as a whole.
        write_s: for a client to take one piece of it.
        health_s: for the answer to ``/health``, and between two questions.
        doubted_s: for each request in a row that an engine failed; it gets what no other takes.
        tokenize_s: for the tokens of a prompt.
        stop_s: for the requests that there are when the proxy is told to end.
        body_bytes: of one request in JSON.
        body_values: of one request in JSON: numbers, texts, lists and objects.
        bodies_bytes: of all of them that are being served, each with forty bytes more for a value;
            copies on their way to engines take about three times as much beside it.
    """

    head_s: float = 15.0
    body_idle_s: float = 15.0
    body_s: float = 300.0
    connect_s: float = 5.0
    prefill_s: float = 300.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    answer_s: float = 3600.0
    write_s: float = 60.0
    health_s: float = 2.0
    doubted_s: float = 5.0
    tokenize_s: float = 1.0
    stop_s: float = 60.0
    body_bytes: int = 64 * 2**20
    body_values: int = 1_000_000
    bodies_bytes: int = 512 * 2**20


def parse_limits(given: Iterable[str]) -> ProxyLimits:
    """Of ``NAME=NUMBER`` each, where a name is one of ``ProxyLimits``.

    Raises:
        KvdError: ``bad-request``: says which one is wrong, and what there is.
    """
    known = ProxyLimits.__struct_fields__
    said: dict[str, float | int] = {}
    for text in given:
        name, _, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known or name in said:
            raise _wrong(text, f"it is none of {', '.join(known)}, each once")
        try:
            number = float(value)
        except ValueError as error:
            raise _wrong(text, f"{value!r} is no number") from error
        if not 0 < number < math.inf:
            raise _wrong(text, "it must be above 0")
        is_count = name.endswith(("_bytes", "_values"))
        if is_count and number < 1:
            raise _wrong(text, "it must be 1 or more")
        said[name] = int(number) if is_count else number
    return msgspec.convert(said, ProxyLimits)


def _wrong(text: str, why: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_REQUEST, f"--limit {text}: {why}", side="proxy"))
