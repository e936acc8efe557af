"""An engine process of the demo: ``python -m kvd.demo.engine NAME MODEL LINK``.

Which role it plays follows from what it is asked: ``PrefillPrompt``, ``DecodePrompt`` or
``Generate``; the name is for whoever lists processes. LINK is the file descriptor on which it is
asked. It ends when the other end does, so it cannot outlive the demo.

``Engine.prefill`` and ``Engine.decode`` are all that an engine must do with kvd: every line of them
that is not about kvd is a call of the model.
"""

from __future__ import annotations

import contextlib
import sys
import time
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, assert_never

import msgspec
import torch
import transformers
from transformers import DynamicCache

from kvd.client import connect_sync
from kvd.demo.cache import Lengths
from kvd.demo.layout import PoolPart
from kvd.demo.leased import LeasedSequence, PoolViews, answer, greedy, last_logits
from kvd.demo.messages import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    DEADLINE_S,
    STEP_TOKENS,
    Decoded,
    DecodePrompt,
    EngineFailed,
    Generate,
    Generated,
    Prefilled,
    PrefillPrompt,
    Reply,
    Request,
    Started,
    StartEngine,
)
from kvd.demo.models import ARCHITECTURES, build_model, weight_digest
from kvd.demo.own_blocks import BlockLease, PoolLease, own_blocks
from kvd.errors import Code, HandoffError, KvdError, Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.client import SyncLease, SyncNode
    from kvd.demo.models import Architecture
    from kvd.demo.own_blocks import OwnBlocks, SeenLease


class Engine:
    """A model, and both sides of a handoff once it has been told where its daemon is."""

    def __init__(self, name: str, architecture: Architecture) -> None:
        self._name = name
        self._shape = architecture.shape
        self._model = build_model(architecture)
        self._node: SyncNode | None = None
        self._views: PoolViews | None = None
        """Where the model computes."""
        self._own: OwnBlocks | None = None

    def answer(self, request: Request) -> Reply:
        """Do what ``request`` asks.

        Raises:
            KvdError: the daemon refused.
        """
        match request:
            case StartEngine():
                return self.start(request)
            case Generate():
                return self.generate(request)
            case PrefillPrompt():
                return self.prefill(request)
            case DecodePrompt():
                return self.decode(request)
            case _:
                assert_never(request)

    def start(self, order: StartEngine) -> Started:
        """Attach to the daemon, map its pool, and have memory of our own, where that is asked."""
        if order.device is not None:
            torch.nn.Module.to(self._model, _device(order.device))
        if order.endpoint is not None:
            self._node = connect_sync(order.endpoint, name=self._name, kind="kvd demo")
            if order.device is not None:
                self._own = own_blocks(self._shape, self._node, order.device)
            self._views = PoolViews(self._shape, self._own or self._node.pool("main"))
        return Started(weight_digest(self._model), str(torch.__version__), transformers.__version__)

    def prefill(self, order: PrefillPrompt) -> Prefilled:
        """Compute the prompt of ``order`` and hand its KV to the node that receives its room."""
        node, views = self._attached()
        tokens = order.tokens
        lease = node.lease(tokens, deadline_s=DEADLINE_S, step_tokens=CHUNK_TOKENS)
        send = node.send(order.room, tokens, lease=lease, deadline_s=DEADLINE_S, to=order.to)
        began_s = time.monotonic()
        send.advance(lease.prefix_len)
        seen = self._seen(lease, kept_tokens=lease.prefix_len)
        # The last token is always computed, because its logits are needed. After a full hit its KV
        # is cached and stays as it is: the cache writes nothing below ``shared_tokens``.
        first_computed = min(lease.prefix_len, len(tokens) - 1)
        sequence = LeasedSequence(
            self._model,
            views,
            seen,
            Lengths(first_computed, lease.prefix_len),
            step_tokens=CHUNK_TOKENS,
        )
        loaded_bytes = seen.load(lease.prefix_len)
        while True:
            logits = sequence.compute(tokens[sequence.written_tokens :][:CHUNK_TOKENS])
            seen.save(sequence.written_tokens)
            send.advance(max(seen.saved_tokens, lease.prefix_len))
            if sequence.written_tokens == len(tokens):
                break
        computed_s = time.monotonic()
        saved_bytes = seen.close()
        result = send.finish(aux=msgspec.msgpack.encode(greedy(logits)))
        ended_s = time.monotonic()
        lease.release(())
        if result.reason is not None:
            raise HandoffError(result.reason)
        return Prefilled(
            prefix_tokens=lease.prefix_len,
            computed_tokens=len(tokens) - first_computed,
            sent_pages=result.sent_pages,
            sent_bytes=result.sent_bytes,
            handoff_s=ended_s - began_s,
            tail_s=ended_s - computed_s,
            logits=_pack_logits([logits]),
            peak_window_pages=sequence.peak_window_pages,
            slides=sequence.slides,
            loaded_bytes=loaded_bytes,
            saved_bytes=saved_bytes,
        )

    def decode(self, order: DecodePrompt) -> Decoded:
        """Receive the prompt of ``order``, answer it, keep prompt and answer cached."""
        node, views = self._attached()
        tokens = order.tokens
        handoff = node.receive(
            order.room,
            tokens,
            source=order.source,
            reserve_tokens=ANSWER_TOKENS,
            deadline_s=DEADLINE_S,
            step_tokens=STEP_TOKENS,
        )
        handoff.done()
        first_token = msgspec.msgpack.decode(handoff.aux, type=int)
        first_token_at_s = time.monotonic()
        lease = handoff.lease
        if order.damage is not None:
            _damage(
                PoolViews(self._shape, node.pool("main")), order.damage, lease, handoff.prefix_len
            )
        seen = self._seen(lease, kept_tokens=len(tokens))
        # The daemon committed the prompt, so its whole pages are shared now; the answer goes into
        # what is left of the last page and into the reserve.
        sequence = LeasedSequence(
            self._model, views, seen, Lengths(len(tokens), len(tokens)), step_tokens=STEP_TOKENS
        )
        loaded_bytes = seen.load(len(tokens))
        said, logits = answer(sequence.compute, first_token, ANSWER_TOKENS)
        seen.save(sequence.written_tokens)
        saved_bytes = seen.close()
        lease.release(new_tokens=said[:-1])  # the last token has no KV
        return Decoded(
            tokens=tuple(said),
            prefix_tokens=handoff.prefix_len,
            first_token_at_s=first_token_at_s,
            logits=_pack_logits(logits),
            peak_window_pages=sequence.peak_window_pages,
            slides=sequence.slides,
            loaded_bytes=loaded_bytes,
            saved_bytes=saved_bytes,
        )

    def generate(self, order: Generate) -> Generated:
        """Prefill the whole prompt in one pass into the model's own cache, then decode greedily."""
        compute = partial(last_logits, self._model, cache=DynamicCache(config=self._model.config))
        prompt = compute(order.tokens)
        said, logits = answer(compute, greedy(prompt), ANSWER_TOKENS)
        return Generated(tokens=tuple(said), logits=_pack_logits([prompt, *logits]))

    def _attached(self) -> tuple[SyncNode, PoolViews]:
        """The session, and where the model computes."""
        assert self._node is not None, "the demo connects an engine before it uses it"
        assert self._views is not None
        return self._node, self._views

    def _seen(self, lease: SyncLease, *, kept_tokens: int) -> SeenLease:
        """Where the model computes, of this lease."""
        if self._own is None:
            return PoolLease(lease)
        return BlockLease(self._own, lease, kept_tokens=kept_tokens)


def _device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        KvdError: ``not-supported`` where torch does not have it.
    """
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        why = f"torch {torch.__version__} finds {torch.cuda.device_count()} CUDA devices, no {name}"
        raise KvdError(Refusal(Code.NOT_SUPPORTED, why, side="client"))
    return device


def _damage(views: PoolViews, part: PoolPart, lease: SyncLease, prefix_tokens: int) -> None:
    """Spoil one page that crossed: what follows must then come out differently."""
    row = lease.pages_of(part.value)
    pages = {
        PoolPart.KV: row[prefix_tokens // views.page_size :],
        PoolPart.WINDOW: row[row.nonzero()[0][1:]],  # the first may lie just behind the window
        PoolPart.STATE: row[1:],
    }
    views.damage(part, int(pages[part][0]))


def _pack_logits(logits: Sequence[torch.Tensor]) -> bytes:
    """Rows of logits as they travel: little-endian float64."""
    packed: bytes = torch.stack(list(logits)).double().numpy().astype("<f8").tobytes()
    return packed


def main() -> None:
    """Build the model, then answer requests until there are no more."""
    torch.set_num_threads(1)
    _, name, model, link = sys.argv
    engine = Engine(name, ARCHITECTURES[model])
    with Connection(int(link)) as demo, contextlib.suppress(EOFError):
        while True:
            request = msgspec.msgpack.decode(demo.recv_bytes(), type=Request)
            try:
                reply = engine.answer(request)
            except KvdError as refusal:
                reply = EngineFailed(str(refusal))
            demo.send_bytes(msgspec.msgpack.encode(reply))


if __name__ == "__main__":
    main()
