"""Requests of a Mooncake-format trace, and the tokens they stand for.

A line of a trace is one request: ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids``, one per block of 512 input tokens; equal ids mean equal blocks. The tokens behind a
block are not in the trace, so they are made from its id, the same on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.types import ID_BYTES, Tokens

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

BLOCK_TOKENS = 512
VOCABULARY = 128256
"""Llama 3's; the ids only have to look like tokens."""

BLOCKS_AT_ONCE = 4096
"""Blocks made in one numpy expression, to bound its memory."""

_OFFSETS = np.arange(BLOCK_TOKENS, dtype=np.uint64)


class TraceRequest(msgspec.Struct, frozen=True):
    """One line of the trace."""

    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


class BadTrace(Exception):
    """The file is not a trace of this format; the message names the line."""


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of ``path``, in file order; all when None.

    Raises:
        BadTrace: a line is not a request, or its hash ids do not cover its input.
    """
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(requests) >= limit:
                break
            try:
                request = decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise BadTrace(f"{path}:{number}: {error}; expected a JSON object") from error
            if len(request.hash_ids) * BLOCK_TOKENS < request.input_length:
                raise BadTrace(
                    f"{path}:{number}: {len(request.hash_ids)} hash ids of {BLOCK_TOKENS} tokens "
                    f"do not cover input_length={request.input_length}"
                )
            requests.append(request)
    return requests


def expand(request: TraceRequest) -> Tokens:
    """The input tokens of ``request``: ``input_length`` of them, from its block ids alone."""
    tokens = block_tokens(np.asarray(request.hash_ids, dtype=np.uint64))
    return Tokens(tokens[: request.input_length * ID_BYTES])


def block_tokens(hash_ids: Words) -> bytes:
    """The tokens of these blocks, one after the other: splitmix64 of each token's position."""
    counters: Words = (hash_ids[:, None] * np.uint64(BLOCK_TOKENS) + _OFFSETS).ravel()
    return (_splitmix64(counters) % np.uint64(VOCABULARY)).astype("<i4").tobytes()


class Blocks:
    """The tokens of every block of some requests, made once: 2 KiB a block.

    Making tokens takes longer and moves more memory than most of what a bench measures; joining
    made blocks leaves the caches as a message from a socket would.
    """

    def __init__(self, requests: list[TraceRequest]) -> None:
        ids = sorted({block for request in requests for block in request.hash_ids})
        made = [
            block_tokens(np.asarray(ids[start : start + BLOCKS_AT_ONCE], dtype=np.uint64))
            for start in range(0, len(ids), BLOCKS_AT_ONCE)
        ]
        size = BLOCK_TOKENS * ID_BYTES
        self._blocks = {
            block: made[number // BLOCKS_AT_ONCE][at : at + size]
            for number, block in enumerate(ids)
            for at in [number % BLOCKS_AT_ONCE * size]
        }

    def expand(self, request: TraceRequest) -> Tokens:
        """The same as ``expand``, by joining."""
        blocks = self._blocks
        whole, rest = divmod(request.input_length, BLOCK_TOKENS)
        pieces = [blocks[block] for block in request.hash_ids[:whole]]
        if rest:
            pieces.append(blocks[request.hash_ids[whole]][: rest * ID_BYTES])
        return Tokens(b"".join(pieces))


def _splitmix64(state: Words) -> Words:
    mixed: Words = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
