"""The decode engine: receives a prompt's KV and decodes on from there, in the same pages."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvd.demo.cache import layer_views, paged_cache
from kvd.demo.compute import answer, pack_logits
from kvd.demo.messages import Decode, Decoded, FirstToken

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvd.client import SyncNode


class DecodeEngine:
    """One model over one pool."""

    def __init__(self, model: PreTrainedModel, node: SyncNode) -> None:
        self._model = model
        self._node = node
        self._layers = layer_views(node.pool("main"), model.config.num_hidden_layers)

    def decode(self, order: Decode) -> Decoded:
        """Receive the prompt of ``order``, answer it, keep prompt and answer cached."""
        tokens = order.tokens
        handoff = self._node.receive(
            order.room,
            tokens,
            source=order.source,
            reserve_tokens=order.answer_tokens,
            deadline_s=order.deadline_s,
        )
        handoff.done()
        first = msgspec.msgpack.decode(handoff.aux, type=FirstToken)
        first_token_at_s = time.monotonic()
        lease = handoff.lease
        if order.damage:
            self._damage(int(lease.pages[handoff.prefix_len // self._page_size]))
        # The daemon committed the prompt, so its whole pages are shared now; the answer goes into
        # what is left of the last page and into the reserve.
        cache = paged_cache(
            self._layers, lease.pages, written_tokens=len(tokens), shared_tokens=len(tokens)
        )
        said, logits = answer(self._model, cache, first.token, order.answer_tokens)
        lease.release(new_tokens=said[:-1])  # the last token has no KV
        return Decoded(
            tokens=tuple(said),
            prefix_tokens=handoff.prefix_len,
            first_token_at_s=first_token_at_s,
            logits=pack_logits(logits),
        )

    @property
    def _page_size(self) -> int:
        """Tokens of a page."""
        size: int = self._layers[0][0].shape[1]
        return size

    def _damage(self, page: int) -> None:
        """Spoil one page that crossed: what follows must then come out differently."""
        for k, v in self._layers:
            k[page] = 0
            v[page] = 0
