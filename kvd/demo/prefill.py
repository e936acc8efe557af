"""The prefill engine: leases pages, computes a prompt in chunks, streams its KV meanwhile.

This and ``decode`` are all that an engine must do with kvd. Every line that is not about kvd is a
call of the model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvd.demo.compute import greedy, pack_logits
from kvd.demo.division import Sent
from kvd.demo.leased import Lengths
from kvd.demo.messages import CHUNK_TOKENS, DEADLINE_S, FirstToken, Prefill, Prefilled
from kvd.errors import HandoffError

if TYPE_CHECKING:
    import torch

    from kvd.client import SyncNode, SyncSend
    from kvd.demo.sequences import Computed, Sequences


class PrefillEngine:
    """What computes, over one pool."""

    def __init__(self, sequences: Sequences, node: SyncNode) -> None:
        self._sequences = sequences
        self._node = node

    def prefill(self, order: Prefill) -> Prefilled:
        """Compute the prompt of ``order`` and hand its KV to the node that receives its room."""
        tokens = order.tokens
        lease = self._node.lease(tokens, deadline_s=DEADLINE_S, step_tokens=CHUNK_TOKENS)
        send = self._node.send(order.room, tokens, lease=lease, deadline_s=DEADLINE_S, to=order.to)
        began_s = time.monotonic()
        send.advance(lease.prefix_len)
        cached = self._sequences.common_prefix(lease.prefix_len)
        first_computed = _first_computed(cached, len(tokens))
        sequence = self._sequences.begin(
            lease, Lengths(first_computed, lease.prefix_len), step_tokens=CHUNK_TOKENS
        )
        logits = self._sequences.known(_compute(order, sequence, send))
        computed_s = time.monotonic()
        self._sequences.agree(send)
        first = FirstToken(greedy(logits), float(logits.log_softmax(-1).max()))
        result = send.finish(aux=msgspec.msgpack.encode(first))
        ended_s = time.monotonic()
        lease.release(())
        if result.reason is not None:
            raise HandoffError(result.reason)
        return Prefilled(
            prefix_tokens=cached,
            computed_tokens=len(tokens) - first_computed,
            decode_prefix_len=result.decode_prefix_len,
            sent=(Sent(result.sent_pages, result.sent_bytes),),
            handoff_s=ended_s - began_s,
            tail_s=ended_s - computed_s,
            logits=pack_logits([logits]),
            peak_window_pages=sequence.peak_window_pages,
            slides=sequence.slides,
        )


def _compute(order: Prefill, sequence: Computed, send: SyncSend) -> torch.Tensor:
    """Compute what is not cached, chunk by chunk; (vocabulary,) logits of the last token."""
    tokens = order.tokens
    while True:
        chunk = tokens[sequence.written_tokens :][:CHUNK_TOKENS]
        logits = sequence.compute(chunk)
        send.advance(sequence.written_tokens)
        if sequence.written_tokens == len(tokens):
            return logits


def _first_computed(cached_tokens: int, prompt_tokens: int) -> int:
    """Where to start: the last token is always computed, because its logits are needed.

    After a full hit its KV is cached and stays as it is: the cache writes nothing below
    ``shared_tokens``.
    """
    return min(cached_tokens, prompt_tokens - 1)
