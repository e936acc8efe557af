"""The bodies that pass through a proxy: what is read of clients, what they and engines are told.

JSON is read strictly, as one value with one meaning, and written anew for each engine: what was
judged is what goes on. Where KV lies is between engines and the proxy. A client that could say it
would have an engine fetch from a node of the client's choice, so the names in ``NOT_OF_CLIENTS``
are dropped from every body, at every depth.

The parameters of a transfer are those that engines and their routers use already: the prefill
engine is told ``do_remote_decode``, and what it answers in ``kv_transfer_params`` goes to the
decode engine as it is. The room of kvd's own handoff is the prefill engine's, and in that answer.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import secrets
from array import array
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NoReturn, ParamSpec, TypeVar

from kvd.errors import Code, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

Body = dict[str, object]
"""A request of the HTTP API: any JSON object; what the proxy does not know goes through."""

ROOM_BITS: Final = 62
"""Of a room; drawn, so that no two proxies have to agree."""

TRANSFER: Final = "kv_transfer_params"

NOT_OF_CLIENTS: Final = frozenset(
    {
        *(TRANSFER, "ec_transfer_params"),
        # SGLang's words for it.
        *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    }
)

MAX_DEPTH: Final = 200
"""Of a body; a request with tools has some twenty."""

MOST_VALUES: Final = 1_000_000
"""Of a body: numbers, texts, lists and objects; a prompt in tokens has one for each."""

VALUE_BYTES: Final = 40
"""About what is made of one value, beside its bytes: two bytes of JSON can become forty."""

LONG_BODY_BYTES: Final = 2**17
"""What is made of a longer one is made beside the loop."""

Given = ParamSpec("Given")
Made = TypeVar("Made")

_ONE_TOKEN: Final = ("max_tokens", "max_completion_tokens")
_NOT_FOR_PREFILL: Final = ("stream_options", "min_tokens", "n", "best_of", "use_beam_search")
"""They speak of an answer, of which a prefill engine gives one token."""

_NAMES: Final = re.compile("|".join(sorted(NOT_OF_CLIENTS)).encode(), re.IGNORECASE)
_NAME_BYTES: Final = max(len(name) for name in NOT_OF_CLIENTS)
_STRINGS_AND_BRACKETS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{]|[\]}]', re.DOTALL)
"""A string without an end is taken to the end of the body, so that each byte is read once."""
_STRINGS: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_BEFORE_VALUES: Final = (b",", b"[", b"{")

_LEAST_SNIFFED: Final = 4


@functools.cache
def _beside_the_loop() -> ThreadPoolExecutor:
    # One thread: they take turns at the interpreter anyway, and the loop would wait for each.
    return ThreadPoolExecutor(1, thread_name_prefix="kvd-proxy-json")


async def worked(
    n_bytes: int, work: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
) -> Made:
    """The work on so many bytes of JSON; beside the loop where it would hold up other requests."""
    if n_bytes <= LONG_BODY_BYTES:
        return work(*args, **kwargs)
    made = functools.partial(work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_beside_the_loop(), made)


def most_values_in(raw: bytes) -> int:
    """At most so many values are in this JSON; what stands in texts is counted like the rest."""
    return 1 + _before_values(raw, 0, len(raw))


def parse_json(raw: bytes, most_values: int = MOST_VALUES) -> object:
    """One JSON value in UTF-8, without the names that are not for clients to say.

    Raises:
        KvdError: ``bad-request``: it is none, or one that two readers would take for two values,
            or it holds more than ``most_values``.
    """
    if most_values_in(raw) > most_values:
        _check_values(raw, most_values)
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(raw)
    try:
        found = json.loads(
            raw.decode(),
            object_pairs_hook=_object,
            parse_float=_number,
            parse_constant=_no_number,
        )
    except UnicodeDecodeError as error:
        raise _bad("the body is no UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise _bad(f"the body is not JSON: {str(error)[:200]}") from error
    if b"\\ud" in raw.lower():
        # Half a surrogate pair stands for no character, and no engine could be told of it.
        json_bytes(found)
    return found


def parse_body(raw: bytes, most_values: int = MOST_VALUES) -> Body:
    """The JSON object of a request, as ``parse_json`` reads it.

    Raises:
        KvdError: ``bad-request``: it is none.
    """
    body = parse_json(raw, most_values)
    if not isinstance(body, dict):
        raise _bad("the body must be a JSON object")
    return body


def json_bytes(value: object) -> bytes:
    """JSON in UTF-8, for an engine.

    Raises:
        KvdError: ``bad-request``: it has half a surrogate pair.
    """
    try:
        return json.dumps(
            value, ensure_ascii=False, allow_nan=False, separators=(",", ":")
        ).encode()
    except UnicodeEncodeError as error:
        raise _bad("the body has half of a surrogate pair, which is no character") from error


def new_room() -> str:
    """A name for one handoff, in words: some who hand it on keep 53 bits of a number."""
    return str(1 + secrets.randbelow((1 << ROOM_BITS) - 1))


def new_traceparent() -> str:
    """The head of a trace, for a request that came with none (W3C Trace Context)."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def prefill_body(body: Body, room: str, fuller_node: str = "") -> Body:
    """The same prompt for one token, whose KV another engine will decode from.

    ``room`` is for engines whose router has to name the transfer. kvd's connector opens it and
    answers it, with its node: nobody else knows where the KV is. ``fuller_node``: the one that has
    more of the prompt than the engine's own, so that it may fetch that; if there is.
    """
    told = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    told["stream"] = False
    for key in _ONE_TOKEN:
        if key in body or key == "max_tokens":
            told[key] = 1
    transfer: Body = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": room,
        "kvd": {"v": 1, "opens": room} | ({"peer": fuller_node} if fuller_node else {}),
    }
    return told | {TRANSFER: transfer}


def transfer_in(answer: bytes) -> Body | None:
    """What a prefill engine says of where the KV is; None if it says nothing.

    Raises:
        ValueError: the answer is no JSON object, so no engine of this API has given it.
    """
    try:
        said = json.loads(answer, parse_float=_number, parse_constant=_no_number)
        found = said.get(TRANSFER)
        if isinstance(found, dict):
            json_bytes(found)
            return found
    except (RecursionError, AttributeError, KvdError) as error:
        raise ValueError(f"its answer is no JSON object: {error}") from error
    return None


def decode_body(body: Body, transfer: Body | None) -> Body:
    """The request as it came, and where its KV is; with nothing known the engine computes it."""
    told = {key: value for key, value in body.items() if key != TRANSFER}
    if transfer is not None:
        told[TRANSFER] = transfer
    return told


def prompt_bytes(body: Body) -> bytes:
    """The prompt of a request, as bytes that begin alike where prompts do."""
    prompt = body["messages"] if "messages" in body else body.get("prompt", "")
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    tokens = token_ids(prompt)
    if tokens is not None:
        # Four bytes each; the order of the bytes is nobody's but this process's.
        return array("I", tokens).tobytes()
    return json.dumps(prompt, separators=(",", ":")).encode()


def is_one_prompt(body: Body) -> bool:
    """The request has one prompt, whose KV can be handed over; of several each has its own."""
    prompt = body.get("prompt")
    return not isinstance(prompt, list) or len(prompt) == 1 or token_ids(prompt) is not None


def token_ids(prompt: object) -> list[int] | None:
    """A prompt that is one list of token ids; None if it is anything else."""
    if not isinstance(prompt, list) or not prompt:
        return None
    # A million of them must not take the time of a Python loop.
    is_all_ints = set(map(type, prompt)) == {int}
    return prompt if is_all_ints and min(prompt) >= 0 and max(prompt) < 1 << 31 else None


def error_json(message: str, kind: str, code: int) -> Body:
    """An error as clients of the HTTP API read it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def error_body(message: str, kind: str, code: int) -> bytes:
    """The same as the body of an answer."""
    return json.dumps(error_json(message, kind, code)).encode()


class Upload:
    """A body that is no JSON on its way to an engine, piece by piece, unchanged.

    Engines read a body as JSON whatever its Content-Type says, so one that begins like JSON goes no
    further. Of parts of a form only those are stopped that have a name in ``NOT_OF_CLIENTS``; the
    engine is then hung up on in the middle of the body, and has not got a request.

    Args:
        next_piece: of the client's body; empty at its end.
        is_form: ``multipart/form-data``, which begins with a boundary.
    """

    def __init__(self, next_piece: Callable[[], Awaitable[bytes]], *, is_form: bool) -> None:
        self._next_piece = next_piece
        self._is_form = is_form
        self._head = b""
        self._rest = b""
        self.error: Exception | None = None
        """Why it broke off, where that was not the engine's doing."""

    async def begin(self) -> None:
        """Read the first bytes, by which it is judged.

        Raises:
            KvdError: ``bad-request``: it may not go on.
        """
        while len(self._head) < _LEAST_SNIFFED and (piece := await self._next_piece()):
            self._head += piece
        if self._is_form and not self._head.lstrip(b"\r\n").startswith(b"--"):
            raise _bad("a form (multipart/form-data) begins with its boundary")
        if looks_like_json(self._head):
            raise _bad("this body begins like JSON: say so in Content-Type")
        self._check_names(self._head)

    async def pieces(self) -> AsyncIterator[bytes]:
        """All of it, as it comes."""
        try:
            yield self._head
            self._head = b""
            while piece := await self._next_piece():
                self._check_names(piece)
                yield piece
        except Exception as error:
            # The HTTP client makes an error of the connection out of whatever ends this.
            self.error = error
            raise

    def _check_names(self, piece: bytes) -> None:
        seen = self._rest + piece
        if found := _NAMES.search(seen):
            raise _bad(f"{found[0].decode().lower()} is not for clients to say")
        self._rest = seen[1 - _NAME_BYTES :]


def looks_like_json(head: bytes) -> bool:
    """A body with these first bytes may be a JSON object or list, in any encoding of Unicode."""
    begun = head.lstrip(b" \t\r\n\0\xff\xfe\xef\xbb\xbf")
    return bool(head) and (not begun or begun[:1] in {b"{", b"["})


def _object(pairs: list[tuple[str, object]]) -> Body:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has a name twice")
    for name in NOT_OF_CLIENTS.intersection(map(_plain, found)):
        found = {key: value for key, value in found.items() if _plain(key) != name}
    return found


def _plain(name: str) -> str:
    """A name as a lenient reader may take it."""
    return name.strip().lower().replace("-", "_")


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is above what a number can be")
    return number


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number of JSON")


def _check_depth(raw: bytes) -> None:
    depth = 0
    for found in _STRINGS_AND_BRACKETS.finditer(raw):
        mark = found[0]
        if mark in {b"[", b"{"}:
            depth += 1
            if depth > MAX_DEPTH:
                raise _bad(f"the body is nested deeper than {MAX_DEPTH}")
        elif mark in {b"]", b"}"}:
            depth -= 1


def _check_values(raw: bytes, most: int) -> None:
    found, at = 1, 0
    for text in _STRINGS.finditer(raw):
        found += _before_values(raw, at, text.start())
        at = text.end()
        if found > most:
            break
    if found + _before_values(raw, at, len(raw)) > most:
        raise _bad(
            f"the body has more than {most} values (numbers, texts, lists and objects), which is "
            "the proxy's limit body_values"
        )


def _before_values(raw: bytes, begin: int, end: int) -> int:
    return sum(raw.count(mark, begin, end) for mark in _BEFORE_VALUES)


def _bad(why: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_REQUEST, why, side="proxy"))
