"""What is said to a prefill engine, to a decode engine, and to a client that errs.

The parameters of a transfer are those that engines and their routers use already: the prefill
engine is told ``do_remote_decode``, and what it answers in ``kv_transfer_params`` goes to the
decode engine as it is. kvd's own keys are in one entry, ``kvd``, which others ignore.
"""

from __future__ import annotations

import json
import secrets
from typing import Final

from kvd.errors import Code, KvdError, Refusal

Body = dict[str, object]
"""A request of the HTTP API: any JSON object; what the proxy does not know goes through."""

ROOM_BITS: Final = 62
"""Of a room; drawn, so that no two proxies have to agree."""

TRANSFER: Final = "kv_transfer_params"

_ONE_TOKEN: Final = ("max_tokens", "max_completion_tokens")
_NOT_FOR_PREFILL: Final = ("stream_options", "min_tokens", "n", "best_of", "use_beam_search")
"""They speak of an answer, of which a prefill engine gives one token."""


def parse_body(raw: bytes) -> Body:
    """The JSON object of a request.

    Raises:
        KvdError: ``bad-request``: it is none.
    """
    try:
        body = json.loads(raw)
    except ValueError as error:
        raise _bad(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _bad("the body must be a JSON object")
    return body


def new_room() -> str:
    """A room for one handoff, in words: some who hand it on keep 53 bits of a number."""
    return str(1 + secrets.randbelow((1 << ROOM_BITS) - 1))


def new_traceparent() -> str:
    """The head of a trace, for a request that came with none (W3C Trace Context)."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-01"


def prefill_body(body: Body, room: str) -> Body:
    """The same prompt for one token, whose KV another engine will decode from."""
    told = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    told["stream"] = False
    for key in _ONE_TOKEN:
        if key in body or key == "max_tokens":
            told[key] = 1
    told[TRANSFER] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "kvd": {"v": 1, "room": room},
    }
    return told


def transfer_in(answer: bytes) -> Body | None:
    """What a prefill engine says of where the KV is; None if it says nothing."""
    try:
        said = json.loads(answer)
    except ValueError:
        return None
    found = said.get(TRANSFER) if isinstance(said, dict) else None
    return found if isinstance(found, dict) else None


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
        return prompt.encode()
    tokens = token_ids(prompt)
    if tokens is not None:
        return b"".join(one.to_bytes(4, "little") for one in tokens)
    return json.dumps(prompt, separators=(",", ":")).encode()


def token_ids(prompt: object) -> list[int] | None:
    """A prompt that is one list of token ids; None if it is anything else."""
    if not isinstance(prompt, list) or not prompt:
        return None
    return prompt if all(type(one) is int and 0 <= one < 1 << 31 for one in prompt) else None


def error_body(message: str, kind: str, code: int) -> bytes:
    """An error as clients of the HTTP API read it."""
    said = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    return json.dumps(said).encode()


def _bad(why: str) -> KvdError:
    return KvdError(Refusal(Code.BAD_REQUEST, why, side="proxy"))
