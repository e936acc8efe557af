"""An engine process of the demo: ``python -m kvd.demo.engine NAME``, driven over standard streams.

Which role it plays follows from what it is asked: ``PrefillPrompt``, ``DecodePrompt`` or
``Generate``; the name is for whoever lists processes. How many processes it is it learns with its
model; the first of them speaks for all. It ends when its standard input does, so it cannot outlive
the demo.

``PrefillEngine`` and ``DecodeEngine`` are all that an engine must do with kvd: every line of them
that is not about kvd is a call of the model. Where every rank has a daemon, each answers every
request, and what they say is made into one answer. Of tensor-parallel ranks only the first speaks
to the daemon: see ``ranks``.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, NoReturn, assert_never

import msgspec
import torch
import transformers
from transformers import DynamicCache

from kvd.client import connect_sync
from kvd.demo.division import Division, DivisionWay, SentPages, stage_of
from kvd.demo.encoder import EncoderEngine
from kvd.demo.group import fork
from kvd.demo.layout import PoolPart
from kvd.demo.leased import (
    Alone,
    Lengths,
    PoolViews,
    Sequences,
    answer,
    greedy,
    last_logits,
    pack_logits,
)
from kvd.demo.messages import (
    ANSWER_TOKENS,
    CHUNK_TOKENS,
    DEADLINE_S,
    STEP_TOKENS,
    Connected,
    ConnectEncoder,
    ConnectEngine,
    Decoded,
    DecodePrompt,
    Embed,
    EngineFailed,
    FirstToken,
    Generate,
    Generated,
    Prefilled,
    PrefillPrompt,
    Reply,
    Request,
    Started,
    StartEngine,
    decode_reply,
    decode_request,
    encode,
    frame,
    read_request,
)
from kvd.demo.models import ARCHITECTURES, ENCODERS, build_model, weight_digest
from kvd.demo.ranks import (
    ContextSequence,
    JoinPool,
    Led,
    StageSequence,
    Together,
    follow,
    keep_layers,
    open_gather,
    own_heads,
    tell,
)
from kvd.errors import HandoffError, KvdError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvd.client import SyncLease, SyncNode, SyncSend
    from kvd.demo.group import Group
    from kvd.demo.layout import ModelShape
    from kvd.demo.leased import Computed


def generate(model: PreTrainedModel, order: Generate) -> Generated:
    """Prefill the whole prompt in one pass into the model's own cache, then decode greedily."""
    compute = partial(last_logits, model, cache=DynamicCache(config=model.config))
    prompt = compute(order.tokens)
    said, logits = answer(compute, greedy(prompt), ANSWER_TOKENS)
    return Generated(tokens=tuple(said), logits=pack_logits([prompt, *logits]))


class PrefillEngine:
    """What computes, over one pool."""

    def __init__(self, sequences: Sequences, node: SyncNode) -> None:
        self._sequences = sequences
        self._node = node

    def prefill(self, order: PrefillPrompt) -> Prefilled:
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
            sent=(SentPages(result.sent_pages, result.sent_bytes),),
            handoff_s=ended_s - began_s,
            tail_s=ended_s - computed_s,
            logits=pack_logits([logits]),
            peak_window_pages=sequence.peak_window_pages,
            slides=sequence.slides,
        )


def _compute(order: PrefillPrompt, sequence: Computed, send: SyncSend) -> torch.Tensor:
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


class DecodeEngine:
    """What computes, over one pool."""

    def __init__(self, sequences: Sequences, node: SyncNode) -> None:
        self._sequences = sequences
        self._node = node

    def decode(self, order: DecodePrompt) -> Decoded:
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

    def _damage(self, part: PoolPart, lease: SyncLease, prefix_tokens: int) -> None:
        """Spoil one page that crossed: what follows must then come out differently.

        Of a tensor-parallel engine only the shard of this rank is.
        """
        views, row = self._sequences.views, lease.pages_of(part.value)
        pages = {
            PoolPart.KV: row[prefix_tokens // views.page_size :],
            PoolPart.WINDOW: row[row.nonzero()[0][1:]],  # the first may lie just behind the window
            PoolPart.STATE: row[1:],
        }
        views.damage(part, int(pages[part][0]))


class EngineRank:
    """A model, and both sides of a handoff once it has been told where its daemon is."""

    def __init__(
        self, model: PreTrainedModel, shape: ModelShape, division: Division, group: Group
    ) -> None:
        """Leave ``model``, which has ``shape``, what this rank computes of it."""
        self._model = model
        self._shape = shape
        self._way = division.way
        self._group = group
        self._sides: tuple[PrefillEngine, DecodeEngine] | None = None
        if self._way is DivisionWay.TENSOR:
            own_heads(model, shape, group)
        elif self._way is DivisionWay.PIPELINE:
            first, end = stage_of(shape.layers, group.rank, group.ranks)
            keep_layers(model, first, end)
            self._shape = msgspec.structs.replace(shape, layers=end - first)

    def answer(self, request: Request) -> Reply:
        """Do what ``request`` asks.

        Raises:
            KvdError: the daemon refused.
        """
        match request:
            case StartEngine():
                return EngineFailed("the model was built already")
            case ConnectEngine():
                return self._connect(request)
            case Generate():
                return generate(self._model, request)
            case PrefillPrompt():
                return self._attached()[0].prefill(request)
            case DecodePrompt():
                return self._attached()[1].decode(request)
            case ConnectEncoder() | Embed():
                return EngineFailed("only an encoder embeds")
            case _:
                assert_never(request)

    def _connect(self, order: ConnectEngine) -> Connected:
        """Attach to the daemon of this rank."""
        endpoint = order.endpoints[self._group.rank]
        node = connect_sync(endpoint, name=order.name)
        views = PoolViews(self._shape, node.pool("main"))
        if self._way is DivisionWay.TENSOR:
            tell(self._group, JoinPool(endpoint, node.token))
        sequences = self._sequences(views)
        self._sides = PrefillEngine(sequences, node), DecodeEngine(sequences, node)
        return Connected()

    def _sequences(self, views: PoolViews) -> Sequences:
        """What computes over this rank's pool."""
        model, group = self._model, self._group
        match self._way:
            case DivisionWay.ALONE:
                return Alone(model, views)
            case DivisionWay.TENSOR:
                return Led(model, views, group)
            case DivisionWay.CONTEXT:
                make = partial(ContextSequence, model, group=group, gather=open_gather(group))
                return Together(views, group, make)
            case DivisionWay.PIPELINE:
                return Together(views, group, partial(StageSequence, model, group=group))
            case _ as never:
                assert_never(never)

    def _attached(self) -> tuple[PrefillEngine, DecodeEngine]:
        """Both sides."""
        assert self._sides is not None, "the demo connects an engine before it uses it"
        return self._sides


def spokesman(
    model: PreTrainedModel, shape: ModelShape, division: Division, group: Group
) -> EngineRank | Team:
    """What answers for all ranks; the others stay in here, for as long as the first one lives.

    Raises:
        RuntimeError: another rank is gone, which ends this one.
    """
    own = EngineRank(model, shape, division, group)
    if division.daemons == 1 and group.rank:
        follow(model, shape, group)
    if division.daemons == 1:
        return own
    team = Team(own, group)
    if group.rank:
        team.follow()
    return team


class Team:
    """Ranks that each have a daemon: all of them answer, and the first one says it."""

    def __init__(self, own: EngineRank, group: Group) -> None:
        self._own = own
        self._group = group

    def answer(self, request: Request) -> Reply:
        """Have all ranks do what ``request`` asks.

        Raises:
            KvdError: the daemon of this rank refused.
            RuntimeError: another rank is gone.
        """
        self._group.spread(encode(request))
        return self.said(request)

    def follow(self) -> NoReturn:
        """On the others: answer the same, for as long as the first one lives."""
        while True:
            self.said(decode_request(self._group.spread(b"")))

    def said(self, request: Request) -> Reply:
        """What all ranks answer."""
        replies = self._group.gathered(encode(self._own.answer(request)))
        return together([decode_reply(reply) for reply in replies])


def together(replies: Sequence[Reply]) -> Reply:
    """What several ranks answered to one request, as one answer.

    Of a prefill: what all of them sent, and the longest that one took.
    """
    prefilled = [one for one in replies if isinstance(one, Prefilled)]
    if len(prefilled) < len(replies):
        return next(one for one in replies if not isinstance(one, Prefilled))
    return msgspec.structs.replace(
        prefilled[0],
        sent=tuple(sent for one in prefilled for sent in one.sent),
        handoff_s=max(one.handoff_s for one in prefilled),
        tail_s=max(one.tail_s for one in prefilled),
    )


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until there are no more."""
    torch.set_num_threads(1)
    order = read_request(requests)
    if order is None:
        return
    assert isinstance(order, StartEngine), f"the first request is Start, not {order}"
    is_encoder = order.model in ENCODERS
    architecture = (ENCODERS if is_encoder else ARCHITECTURES)[order.model]
    model = build_model(architecture, seed=order.seed, dtype=order.dtype)
    started = Started(weight_digest(model), str(torch.__version__), transformers.__version__)
    if is_encoder:
        engine: EncoderEngine | EngineRank | Team = EncoderEngine(model)
    else:
        group = fork(order.division.ranks)
        if group.rank:
            requests.close()
            replies.close()  # so that the demo hears when the first rank ends
        engine = spokesman(model, architecture.shape, order.division, group)
    _send(replies, started)
    while (request := read_request(requests)) is not None:
        try:
            reply = engine.answer(request)
        except KvdError as refusal:
            reply = EngineFailed(str(refusal))
        _send(replies, reply)


def _send(replies: BinaryIO, reply: Reply) -> None:
    """Write one answer, now."""
    replies.write(frame(reply))
    replies.flush()


def main() -> None:
    """Serve on the standard streams; whatever libraries print goes to the standard error."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
