"""A context-parallel prefill: each rank computes some of the new tokens, and keeps the KV of all.

The tokens of a chunk are cut zigzag: under a causal mask the ranks then have about the same work.
In each layer every rank computes K and V of its own tokens; they are gathered, and then all ranks
write the same KV to the pages of their own pools, and attend their own queries to all keys::

    chunk of 8, 2 ranks    rank 0: tokens 0 1 6 7    rank 1: tokens 2 3 4 5
    K, V of a layer        gathered to 0 .. 7 on both; written; query 3 looks at keys 0 .. 3

A chunk of fewer tokens than twice the ranks is cut as it comes, and some ranks may have none of it.
Such a rank computes a token of padding, because a model cannot compute none; its KV goes nowhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvd.demo.cache import PagedLayer
from kvd.demo.paged import Seen, forward
from kvd.device.collectives import Gather
from kvd.device.sequence import Split, shard
from kvd.device.symmetric import open_arena

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

    from kvd.demo.cache import LayerViews
    from kvd.demo.group import Group
    from kvd.demo.leased import Lengths


class Chunk:
    """What one rank computes of a chunk of ``tokens`` that begins at token ``first``."""

    def __init__(self, first: int, tokens: int, group: Group) -> None:
        self.sharding = shard(Split.ZIGZAG, (tokens,), group.ranks)
        own = torch.from_numpy(self.sharding.rows(group.rank))
        self.own_tokens = len(own)
        """Those whose KV this rank has to give."""
        self.rows = own if len(own) else torch.zeros(1, dtype=torch.int64)
        """What it computes, counted from the begin of the chunk; its own, or one of padding."""
        self.positions = first + self.rows
        """The same, counted from the begin of the sequence."""

    @property
    def last_rank(self) -> int:
        """The rank that has the last token; it is the last of its own."""
        rows = [self.sharding.rows(rank) for rank in range(self.sharding.ranks)]
        last = self.sharding.tokens - 1
        return next(rank for rank, own in enumerate(rows) if last in own[-1:])

    @property
    def runs(self) -> list[torch.Tensor]:
        """The positions that it computes, cut where they do not follow each other."""
        gaps = (self.positions.diff() != 1).nonzero()[:, 0] + 1
        return list(self.positions.tensor_split(gaps))


class GatheredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer that is given the KV of one rank's tokens, and stores that of all.

    ``chunk`` is what is computed now.
    """

    is_sliding = False

    def __init__(self, whole: PagedLayer, gather: Gather) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.chunk: Chunk | None = None
        self._whole = whole
        self._gather = gather
        self.is_initialized = True

    @override
    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the memory is the daemon's and exists."""

    @override
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> LayerViews:
        """As ``PagedLayer.update``, with (1, kv_heads, rows of this rank, head_dim)."""
        chunk = self.chunk
        assert chunk is not None, "a chunk is computed"
        pending = [
            # (rows, kv_heads, head_dim), without padding.
            self._gather.start(own[0].transpose(0, 1)[: chunk.own_tokens], chunk.sharding)
            for own in (key_states, value_states)
        ]
        keys, values = (one.wait().transpose(0, 1)[None] for one in pending)
        self._whole.update(keys, values)
        return key_states, value_states

    def seen(self) -> Seen:
        """As ``Paged.seen``: every run of this rank looks at the same pages, as far as it goes."""
        assert self.chunk is not None, "a chunk is computed"
        pages, runs = self._whole.seen().pages, self.chunk.runs
        starts = torch.tensor([0, *(len(run) for run in runs)]).cumsum(0, dtype=torch.int32)
        ends = torch.tensor([int(run[-1]) + 1 for run in runs], dtype=torch.int32)
        table = pages.block_table.expand(len(runs), -1)
        return Seen(msgspec.structs.replace(pages, block_table=table, lengths=ends), starts)

    @override
    def get_seq_length(self) -> int:
        return self._whole.get_seq_length()

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._whole.get_mask_sizes(query_length)

    @override
    def get_max_length(self) -> int:
        return self._whole.get_max_length()


class ContextSequence:
    """The tokens of one lease of this rank, which all ranks compute; as ``Computed``."""

    peak_window_pages = 0
    slides = 0

    def __init__(
        self,
        model: PreTrainedModel,
        cache: Cache,
        lengths: Lengths,
        *,
        group: Group,
        gather: Gather,
    ) -> None:
        self.written_tokens = lengths.written_tokens
        self.last_rank = 0
        """Which rank has the logits of the last chunk."""
        self._model = model
        self._group = group
        paged = [layer for layer in cache.layers if isinstance(layer, PagedLayer)]
        self._layers = [GatheredLayer(layer, gather) for layer in paged]
        self._cache = Cache(layers=[*self._layers])

    @torch.inference_mode()
    def compute(self, tokens: Sequence[int]) -> torch.Tensor:
        """As ``Computed.compute``."""
        chunk = Chunk(self.written_tokens, len(tokens), self._group)
        for layer in self._layers:
            layer.chunk = chunk
        output = forward(
            self._model,
            self._cache,
            input_ids=torch.tensor([list(tokens)])[:, chunk.rows],
            position_ids=chunk.positions[None],
            logits_to_keep=1,
        )
        self.written_tokens += len(tokens)
        self.last_rank = chunk.last_rank
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def open_gather(group: Group) -> Gather:
    """What gathers K and V of all ranks of ``group``, in host memory."""
    return Gather(group.all, open_arena(group.all, torch.device("cpu")))
