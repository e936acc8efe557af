"""The prefill engine: leases pages, computes a prompt in chunks, streams its KV meanwhile.

This and ``decode`` are all that an engine must do with kvd. Every line that is not about kvd is a
call of the model.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvd.demo.cache import layer_views, paged_cache
from kvd.demo.compute import greedy, last_logits, pack_logits
from kvd.demo.messages import FirstToken, Prefill, Prefilled
from kvd.errors import HandoffError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from kvd.client import SyncLease, SyncNode, SyncSend


class PrefillEngine:
    """One model over one pool."""

    def __init__(self, model: PreTrainedModel, node: SyncNode) -> None:
        self._model = model
        self._node = node
        self._layers = layer_views(node.pool("main"), model.config.num_hidden_layers)

    def prefill(self, order: Prefill) -> Prefilled:
        """Compute the prompt of ``order`` and hand its KV to whoever receives its room."""
        tokens = order.tokens
        lease = self._node.lease(tokens, deadline_s=order.deadline_s)
        send = self._node.send(order.room, tokens, lease=lease, deadline_s=order.deadline_s)
        began_s = time.monotonic()
        send.advance(lease.prefix_len)
        logits = self._compute(order, lease, send)
        computed_s = time.monotonic()
        first = FirstToken(greedy(logits), float(logits.log_softmax(-1).max()))
        result = send.finish(aux=msgspec.msgpack.encode(first))
        ended_s = time.monotonic()
        lease.release(())
        if result.reason is not None:
            raise HandoffError(result.reason)
        return Prefilled(
            prefix_tokens=lease.prefix_len,
            computed_tokens=len(tokens) - _first_computed(lease, len(tokens)),
            decode_prefix_len=result.decode_prefix_len,
            sent_pages=result.sent_pages,
            sent_bytes=result.sent_bytes,
            handoff_s=ended_s - began_s,
            tail_s=ended_s - computed_s,
            logits=pack_logits([logits]),
        )

    def _compute(self, order: Prefill, lease: SyncLease, send: SyncSend) -> torch.Tensor:
        """Compute what is not cached, chunk by chunk; (vocabulary,) logits of the last token."""
        tokens = order.tokens
        at = _first_computed(lease, len(tokens))
        cache = paged_cache(
            self._layers, lease.pages, written_tokens=at, shared_tokens=lease.prefix_len
        )
        while True:
            chunk = tokens[at : at + order.chunk_tokens]
            logits = last_logits(self._model, chunk, cache)
            at += len(chunk)
            send.advance(at)
            if at == len(tokens):
                return logits


def _first_computed(lease: SyncLease, prompt_tokens: int) -> int:
    """Where to start: the last token is always computed, because its logits are needed.

    After a full hit its KV is cached and stays as it is: the cache writes nothing below
    ``shared_tokens``.
    """
    return min(lease.prefix_len, prompt_tokens - 1)
