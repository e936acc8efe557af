"""The decode engine: receives a prompt's KV and decodes on from there, in the same pages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvd.demo.compute import answer, pack_logits
from kvd.demo.layout import Part
from kvd.demo.leased import Lengths
from kvd.demo.messages import ANSWER_TOKENS, DEADLINE_S, STEP_TOKENS, Decode, Decoded, FirstToken

if TYPE_CHECKING:
    from kvd.client import SyncLease, SyncNode
    from kvd.demo.sequences import Sequences


class DecodeEngine:
    """What computes, over one pool."""

    def __init__(self, sequences: Sequences, node: SyncNode) -> None:
        self._sequences = sequences
        self._node = node

    def decode(self, order: Decode) -> Decoded:
        """Receive the prompt of ``order``, answer it, keep prompt and answer cached."""
        tokens = order.tokens
        handoff = self._node.receive(
            order.room,
            tokens,
            source=order.sources,
            reserve_tokens=ANSWER_TOKENS,
            deadline_s=DEADLINE_S,
            step_tokens=STEP_TOKENS,
        )
        handoff.done()
        first = msgspec.msgpack.decode(handoff.aux, type=FirstToken)
        first_token_at_s = time.monotonic()
        lease = handoff.lease
        if order.damage is not None:
            self._damage(order.damage, lease, handoff.prefix_len)
        # The daemon committed the prompt, so its whole pages are shared now; the answer goes into
        # what is left of the last page and into the reserve.
        sequence = self._sequences.begin(
            lease, Lengths(len(tokens), len(tokens)), step_tokens=STEP_TOKENS
        )
        said, logits = answer(sequence.compute, first.token, ANSWER_TOKENS)
        lease.release(new_tokens=said[:-1])  # the last token has no KV
        return Decoded(
            tokens=tuple(said),
            prefix_tokens=handoff.prefix_len,
            first_token_at_s=first_token_at_s,
            logits=pack_logits(logits),
            peak_window_pages=sequence.peak_window_pages,
            slides=sequence.slides,
        )

    def _damage(self, part: Part, lease: SyncLease, prefix_tokens: int) -> None:
        """Spoil one page that crossed: what follows must then come out differently.

        Of a tensor-parallel engine only the shard of this rank is.
        """
        views, row = self._sequences.views, lease.pages_of(part.value)
        pages = {
            Part.KV: row[prefix_tokens // views.page_size :],
            Part.WINDOW: row[row.nonzero()[0][1:]],  # the first may lie just behind the window
            Part.STATE: row[1:],
        }
        views.damage(part, int(pages[part][0]))
