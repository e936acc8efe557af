"""One rank of an engine: its part of the model, and both sides of a handoff.

A rank that has a daemon answers requests; an engine of one process is one of these. Where every
rank has a daemon, each answers every request, and what they say is made into one answer. Of tensor-
parallel ranks only the first speaks to the daemon: see ``tensor``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NoReturn, assert_never

import msgspec

from kvd.client import connect_sync
from kvd.demo.context import ContextSequence, open_gather
from kvd.demo.decode import DecodeEngine
from kvd.demo.division import Division, Way, stage_of
from kvd.demo.leased import PoolViews
from kvd.demo.messages import (
    Connect,
    Connected,
    ConnectEncoder,
    Decode,
    Embed,
    Failed,
    Generate,
    Prefill,
    Prefilled,
    Reply,
    Request,
    Start,
    decode_reply,
    decode_request,
    encode,
)
from kvd.demo.pipeline import StageSequence
from kvd.demo.prefill import PrefillEngine
from kvd.demo.reference import generate
from kvd.demo.sequences import Alone, Sequences
from kvd.demo.slicing import keep_layers
from kvd.demo.tensor import Join, Led, follow, own_heads, tell
from kvd.demo.together import Together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvd.demo.group import Group
    from kvd.demo.layout import Shape


class Rank:
    """A model, and both sides of a handoff once it has been told where its daemon is."""

    def __init__(
        self, model: PreTrainedModel, shape: Shape, division: Division, group: Group
    ) -> None:
        """Leave ``model``, which has ``shape``, what this rank computes of it."""
        self._model = model
        self._shape = shape
        self._way = division.way
        self._group = group
        self._sides: tuple[PrefillEngine, DecodeEngine] | None = None
        if self._way is Way.TENSOR:
            own_heads(model, shape, group)
        elif self._way is Way.PIPELINE:
            first, end = stage_of(shape.layers, group.rank, group.ranks)
            keep_layers(model, first, end)
            self._shape = msgspec.structs.replace(shape, layers=end - first)

    def answer(self, request: Request) -> Reply:
        """Do what ``request`` asks.

        Raises:
            KvdError: the daemon refused.
        """
        match request:
            case Start():
                return Failed("the model was built already")
            case Connect():
                return self._connect(request)
            case Generate():
                return generate(self._model, request)
            case Prefill():
                return self._attached()[0].prefill(request)
            case Decode():
                return self._attached()[1].decode(request)
            case ConnectEncoder() | Embed():
                return Failed("only an encoder embeds")
            case _:
                assert_never(request)

    def _connect(self, order: Connect) -> Connected:
        """Attach to the daemon of this rank."""
        endpoint = order.endpoints[self._group.rank]
        node = connect_sync(endpoint, name=order.name)
        views = PoolViews(self._shape, node.pool("main"))
        if self._way is Way.TENSOR:
            tell(self._group, Join(endpoint, node.token))
        sequences = self._sequences(views)
        self._sides = PrefillEngine(sequences, node), DecodeEngine(sequences, node)
        return Connected()

    def _sequences(self, views: PoolViews) -> Sequences:
        """What computes over this rank's pool."""
        model, group = self._model, self._group
        match self._way:
            case Way.ALONE:
                return Alone(model, views)
            case Way.TENSOR:
                return Led(model, views, group)
            case Way.CONTEXT:
                make = partial(ContextSequence, model, group=group, gather=open_gather(group))
                return Together(views, group, make)
            case Way.PIPELINE:
                return Together(views, group, partial(StageSequence, model, group=group))
            case _ as never:
                assert_never(never)

    def _attached(self) -> tuple[PrefillEngine, DecodeEngine]:
        """Both sides."""
        assert self._sides is not None, "the demo connects an engine before it uses it"
        return self._sides


def spokesman(
    model: PreTrainedModel, shape: Shape, division: Division, group: Group
) -> Rank | Team:
    """What answers for all ranks; the others stay in here, for as long as the first one lives.

    Raises:
        RuntimeError: another rank is gone, which ends this one.
    """
    own = Rank(model, shape, division, group)
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

    def __init__(self, own: Rank, group: Group) -> None:
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
