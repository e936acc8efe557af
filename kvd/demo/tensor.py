"""A tensor-parallel engine: rank 0 speaks to the daemon, the others compute what it tells them.

All ranks are of one session and map the same pool, each its own shard of it. Page ids are the same
in every shard, so what rank 0 says of a lease is its row of pages::

    rank 0     lease    tells: Begin(row, lengths)    tells: Compute(tokens)    computes ...
    rank 1              begins                        computes, and exchanges heads in each layer

A rank has its KV of a layer in its pages before it gives its heads away, so when rank 0 has
computed a chunk, that chunk is in the pages of all ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, assert_never

import msgspec
import numpy as np
from typing_extensions import override

from kvd.client import join
from kvd.demo.division import heads_of
from kvd.demo.layout import Part
from kvd.demo.leased import Lengths, PoolViews
from kvd.demo.sequences import Alone
from kvd.demo.slicing import keep_heads

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvd.demo.group import Group
    from kvd.demo.layout import Shape
    from kvd.demo.leased import Leased
    from kvd.demo.sequences import Computed


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Rank 0 to the others: map the pools of this session."""

    endpoint: str
    token: bytes


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Rank 0 to the others: what is computed next is of this lease."""

    pages: tuple[int, ...]
    lengths: Lengths
    step_tokens: int


class Compute(msgspec.Struct, frozen=True, tag="compute"):
    """Rank 0 to the others: the next tokens of it."""

    tokens: tuple[int, ...]


Told = Join | Begin | Compute

_TOLD: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


class Row(msgspec.Struct, frozen=True):
    """The pages of a lease that another process holds. Sharded pools have no windows to slide."""

    pages: tuple[int, ...]

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """As ``Leased.pages_of``."""
        assert component == Part.KV.value, "only heads of KV are divided"
        return np.array(self.pages, dtype=np.int32)

    def slide(self, upto_tokens: int) -> None:
        """As ``Leased.slide``: there is no window."""


def own_heads(model: PreTrainedModel, shape: Shape, group: Group) -> None:
    """Leave this rank its heads of ``model``."""
    heads = heads_of(shape, group.rank, group.ranks)
    keep_heads(model, shape, heads, group.beside)


class Led(Alone):
    """Rank 0: what it computes, all compute."""

    def __init__(self, model: PreTrainedModel, views: PoolViews, group: Group) -> None:
        super().__init__(model, views)
        self._group = group

    @override
    def begin(self, lease: Leased, lengths: Lengths, *, step_tokens: int) -> Computed:
        row = tuple(lease.pages_of(Part.KV.value).tolist())
        tell(self._group, Begin(row, lengths, step_tokens))
        return _LedSequence(self._group, super().begin(lease, lengths, step_tokens=step_tokens))


class _LedSequence:
    """Tokens of a lease that all ranks compute; as ``Computed``."""

    def __init__(self, group: Group, own: Computed) -> None:
        self._group = group
        self._own = own
        self.peak_window_pages, self.slides = own.peak_window_pages, own.slides

    @property
    def written_tokens(self) -> int:
        return self._own.written_tokens

    def compute(self, tokens: Sequence[int]) -> torch.Tensor:
        tell(self._group, Compute(tuple(tokens)))
        return self._own.compute(tokens)


def follow(model: PreTrainedModel, shape: Shape, group: Group) -> NoReturn:
    """Every other rank: do what rank 0 says, until it is gone.

    Raises:
        RuntimeError: it is gone.
    """
    views: PoolViews | None = None
    sequence: Computed | None = None
    while True:
        match _TOLD.decode(group.spread(b"")):
            case Join(endpoint, token):
                worker = join(endpoint, token=token)
                views = PoolViews(shape, worker.pool("main"), shard=group.rank)
            case Begin(pages, lengths, step_tokens):
                assert views is not None, "rank 0 has connected before it leases"
                alone = Alone(model, views)
                sequence = alone.begin(Row(pages), lengths, step_tokens=step_tokens)
            case Compute(tokens):
                assert sequence is not None, "rank 0 has begun before it computes"
                sequence.compute(tokens)
            case _ as never:
                assert_never(never)


def tell(group: Group, what: Told) -> None:
    """Rank 0 to the others."""
    group.spread(msgspec.msgpack.encode(what))
