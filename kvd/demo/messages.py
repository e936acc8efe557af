"""What the demo and its engine processes say to each other, each message one msgpack frame.

A request gets exactly one answer; ``EngineFailed`` is one to any of them. Logits are raw
little-endian float64, (rows, vocabulary).
"""

from __future__ import annotations

import msgspec

from kvd.demo.layout import PoolPart

DEADLINE_S = 30.0
"""Of each half of a handoff."""

ANSWER_TOKENS = 16

CHUNK_TOKENS = 64
"""Tokens of one prefill step: KV of a chunk travels while the next one is computed."""

STEP_TOKENS = 8
"""Tokens decoded between two slides: window pages are mapped so far ahead."""


class StartEngine(msgspec.Struct, frozen=True, tag="start"):
    """Attach to the daemon at ``endpoint``, if there is one. Answer: ``Started``.

    ``device``: the engine computes there, in KV memory of its own; None: in the pool itself.
    """

    endpoint: str | None
    device: str | None = None


class PrefillPrompt(msgspec.Struct, frozen=True, tag="prefill"):
    """Compute the prompt and hand its KV over under ``room``. Answer: ``Prefilled``."""

    room: int
    tokens: tuple[int, ...]
    to: str


class DecodePrompt(msgspec.Struct, frozen=True, tag="decode"):
    """Receive the prompt's KV and go on from there. Answer: ``Decoded``.

    With ``damage`` one page of that part which crossed is overwritten first: the negative control.
    """

    room: int
    tokens: tuple[int, ...]
    source: str
    damage: PoolPart | None = None


class Generate(msgspec.Struct, frozen=True, tag="generate"):
    """Do it all in this process, without kvd. Answer: ``Generated``."""

    tokens: tuple[int, ...]


Request = StartEngine | PrefillPrompt | DecodePrompt | Generate


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The model is there, the pool is mapped; ``weights`` is the digest of the parameters."""

    weights: str
    torch: str
    transformers: str


class Prefilled(msgspec.Struct, frozen=True, tag="prefilled"):
    """The handoff is over.

    ``prefix_tokens`` were in this node's own cache, ``computed_tokens`` were not (the last one is
    always computed). ``peak_window_pages`` is the most that the lease had of those at once,
    ``slides`` how often it slid. ``loaded_bytes`` and ``saved_bytes`` were copied between pages and
    blocks of the engine's own. ``handoff_s`` runs from the first page ready to be sent until the
    decode side's commit, ``tail_s`` only from the last one.
    """

    prefix_tokens: int
    computed_tokens: int
    sent_pages: int
    sent_bytes: int
    handoff_s: float
    tail_s: float
    logits: bytes
    peak_window_pages: int
    slides: int
    loaded_bytes: int = 0
    saved_bytes: int = 0


class Decoded(msgspec.Struct, frozen=True, tag="decoded"):
    """The answer, its first token included, whose logits the prefill engine has.

    ``first_token_at_s`` is the monotonic clock of this host, the same in all processes.
    """

    tokens: tuple[int, ...]
    prefix_tokens: int
    first_token_at_s: float
    logits: bytes
    peak_window_pages: int
    slides: int
    loaded_bytes: int = 0
    saved_bytes: int = 0


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    """The answer of a single process."""

    tokens: tuple[int, ...]
    logits: bytes


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The request failed; ``error`` says why in one sentence."""

    error: str


Reply = Started | Prefilled | Decoded | Generated | EngineFailed
