"""Requests of a Mooncake-format trace, and the tokens they stand for.

A line of a trace is one request: ``timestamp`` (ms), ``input_length``, ``output_length`` and
``hash_ids``, one per block of 512 input tokens; equal ids mean equal blocks. The tokens behind a
block are not in the trace, so they are made from its id, the same on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.types import Tokens

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

BLOCK_TOKENS = 512
VOCABULARY = 128256
"""Llama 3's; the ids only have to look like tokens."""

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
    blocks = np.asarray(request.hash_ids, dtype=np.uint64)[:, None] * np.uint64(BLOCK_TOKENS)
    counters: Words = (blocks + _OFFSETS).ravel()[: request.input_length]
    return Tokens((_splitmix64(counters) % np.uint64(VOCABULARY)).astype("<i4").tobytes())


def _splitmix64(state: Words) -> Words:
    mixed: Words = state + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
