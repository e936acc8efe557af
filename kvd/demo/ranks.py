"""Engines of several processes: what one rank computes, and what the ranks tell each other.

**Tensor parallel**, each rank computes its own query heads over its own heads of KV. Then the
outputs of all heads are exchanged, and every rank goes on with all of them. Sums are never split,
so the result is that of one process, to the bit where a rank has all queries of its heads of KV.
Everything but the attention is computed by every rank::

    hidden -> q, k, v of our heads -> attention -> exchange -> o_proj of all heads -> hidden

All ranks are of one session and map the same pool, each its own shard of it. Page ids are the same
in every shard, so what rank 0 says of a lease is its row of pages::

    rank 0    lease    tells: BeginLease(row)    tells: ComputeNext(tokens)    computes ...
    rank 1             begins                    computes, and exchanges heads in each layer

A rank has its KV of a layer in its pages before it gives its heads away, so when rank 0 has
computed a chunk, that chunk is in the pages of all ranks.

**Pipeline**: each rank computes its layers, and passes on what they made of the tokens. The first
ranks go on with the next chunk while the last ones are at this one::

    rank 0   tokens -> layers 0, 1 -> hidden  ------>
    rank 1                            hidden -> layers 2, 3 -> logits

**Context parallel**: the tokens of a chunk are cut zigzag: under a causal mask the ranks then have
about the same work. In each layer every rank computes K and V of its own tokens; they are gathered,
and then all ranks write the same KV to the pages of their own pools, and attend their own queries
to all keys::

    chunk of 8, 2 ranks    rank 0: tokens 0 1 6 7    rank 1: tokens 2 3 4 5
    K, V of a layer        gathered to 0 .. 7 on both; written; query 3 looks at keys 0 .. 3

A chunk of fewer tokens than twice the ranks is cut as it comes, and some ranks may have none of it.
Such a rank computes a token of padding, because a model cannot compute none; its KV goes nowhere.

Ranks with a daemon of their own lease, write and send by themselves, and no daemon knows of the
others. So they compare notes: from where all have cached the prompt, and which prefix the decode
side has. The logits are on one of them, whichever computed the last token.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NoReturn, Protocol, assert_never, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin
from typing_extensions import override

from kvd.client import join
from kvd.demo.cache import BlockTable, PagedLayer, Seen, forward
from kvd.demo.division import heads_of
from kvd.demo.layout import PoolPart
from kvd.demo.leased import Alone, Computed, Lengths, PoolViews, leased_cache
from kvd.device.collectives import Gather, agree
from kvd.device.sequence import Split, shard
from kvd.device.symmetric import open_arena

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from kvd.demo.cache import LayerViews
    from kvd.demo.division import Heads
    from kvd.demo.group import Group
    from kvd.demo.layout import ModelShape
    from kvd.demo.leased import LeasedPages, Offered

    Exchange = Callable[[torch.Tensor], torch.Tensor]
    """The outputs of a rank's heads in, those of all ranks beside each other out."""


class Per(enum.Enum):
    """What the rows of a projection are divided by."""

    QUERY = "query head"
    KV = "head of KV"


PROJECTIONS: Mapping[str, Mapping[str, Per]] = {
    "llama": {"q_proj": Per.QUERY, "k_proj": Per.KV, "v_proj": Per.KV},
    "qwen3": {"q_proj": Per.QUERY, "k_proj": Per.KV, "v_proj": Per.KV},
    # What comes before these is one latent, which every rank has.
    "deepseek_v3": {"q_b_proj": Per.QUERY, "kv_b_proj": Per.QUERY},
}
"""By the type of a model: the projections whose rows belong to heads."""


class ExchangedProjection(nn.Module):
    """The projection behind an attention, whose heads were computed by several ranks."""

    def __init__(self, projection: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.projection = projection
        self._exchange = exchange

    @override
    def forward(self, own: torch.Tensor) -> torch.Tensor:
        """Take (1, tokens, heads of this rank * head_dim); (1, tokens, hidden)."""
        hidden: torch.Tensor = self.projection(self._exchange(own))
        return hidden


def keep_heads(model: PreTrainedModel, shape: ModelShape, own: Heads, exchange: Exchange) -> None:
    """Leave ``model`` only those heads. ``shape`` is that of the whole model."""
    n_queries, n_kv = own.end_query - own.first_query, own.end_kv - own.first_kv
    for layer in model.model.layers:
        attention = layer.self_attn
        for name, per in PROJECTIONS[model.config.model_type].items():
            whole = cast("nn.Linear", attention.get_submodule(name))
            if per is Per.QUERY:
                rows = _rows(whole, shape.heads, own.first_query, own.end_query)
            else:
                rows = _rows(whole, shape.kv_heads, own.first_kv, own.end_kv)
            attention.set_submodule(name, rows)
        if not shape.latent_dim:
            attention.num_key_value_groups = n_queries // n_kv
        attention.o_proj = ExchangedProjection(attention.o_proj, exchange)


def _rows(whole: nn.Linear, heads: int, first: int, end: int) -> nn.Linear:
    """The outputs of heads ``[first, end)`` of a projection to ``heads``."""
    each = whole.out_features // heads
    part = nn.Linear(whole.in_features, (end - first) * each, bias=False, dtype=whole.weight.dtype)
    part.weight = nn.Parameter(whole.weight[first * each : end * each], requires_grad=False)
    return part


def keep_layers(model: PreTrainedModel, first: int, end: int) -> None:
    """Leave ``model`` only layers ``[first, end)``; without the last one there is no final norm."""
    decoder = model.model
    is_last = end == len(decoder.layers)
    decoder.layers = nn.ModuleList(decoder.layers[first:end])
    model.config.num_hidden_layers = end - first
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = number
    if not is_last:
        decoder.norm = nn.Identity()


class SharedSequence(Computed, Protocol):
    """The tokens of a lease that several ranks compute."""

    @property
    def last_rank(self) -> int:
        """The rank that has the logits."""


class Together:
    """As ``Sequences``, for one of several ranks that each have a daemon.

    ``make``: what computes over the pages of one lease.
    """

    def __init__(
        self, views: PoolViews, group: Group, make: Callable[[Cache, Lengths], SharedSequence]
    ) -> None:
        self.views = views
        self._group = group
        self._make = make
        self._begun: SharedSequence | None = None

    def common_prefix(self, prefix_tokens: int) -> int:
        """As ``Sequences.common_prefix``: what one of them lacks, all compute."""
        return min(self._group.numbers(prefix_tokens))

    def begin(self, lease: LeasedPages, lengths: Lengths, *, step_tokens: int) -> SharedSequence:
        """As ``Sequences.begin``; no part of such a pool slides, so ``step_tokens`` is no limit."""
        tables = {PoolPart.KV: BlockTable(lease.pages_of(PoolPart.KV.value))}
        self._begun = self._make(leased_cache(self.views, tables, lengths), lengths)
        return self._begun

    def agree(self, send: Offered) -> None:
        """As ``Sequences.agree``."""
        send.accepted()
        agree("decode_prefix_len", send.decode_prefix_len, self._group.all)

    def known(self, logits: torch.Tensor) -> torch.Tensor:
        """As ``Sequences.known``."""
        assert self._begun is not None, "something was computed"
        return self._group.spread_tensor(logits, source=self._begun.last_rank)


class StageSequence:
    """The tokens of one lease of this stage, and their KV in its layers; as ``Computed``."""

    peak_window_pages = 0
    slides = 0

    def __init__(
        self, model: PreTrainedModel, cache: Cache, lengths: Lengths, *, group: Group
    ) -> None:
        self.written_tokens = lengths.written_tokens
        self.last_rank = group.ranks - 1
        """It has the logits."""
        self._model = model
        self._cache = cache
        self._group = group

    @torch.inference_mode()
    def compute(self, tokens: Sequence[int]) -> torch.Tensor:
        """As ``Computed.compute``: zeros where another rank has the last layer."""
        rank, config = self._group.rank, self._model.config
        decoder = self._model.model
        if rank:
            hidden = torch.empty(1, len(tokens), config.hidden_size, dtype=self._model.dtype)
            dist.recv(hidden, rank - 1)
            output = forward(decoder, self._cache, inputs_embeds=hidden)
        else:
            ids = torch.tensor([list(tokens)])
            output = forward(decoder, self._cache, input_ids=ids)
        self.written_tokens += len(tokens)
        hidden = output.last_hidden_state
        if rank + 1 < self._group.ranks:
            dist.send(hidden, rank + 1)
            return torch.zeros(config.vocab_size, dtype=self._model.dtype)
        logits: torch.Tensor = self._model.lm_head(hidden[0, -1])
        return logits


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


class JoinPool(msgspec.Struct, frozen=True, tag="join"):
    """Rank 0 to the others: map the pools of this session."""

    endpoint: str
    token: bytes


class BeginLease(msgspec.Struct, frozen=True, tag="begin"):
    """Rank 0 to the others: what is computed next is of this lease."""

    pages: tuple[int, ...]
    lengths: Lengths
    step_tokens: int


class ComputeNext(msgspec.Struct, frozen=True, tag="compute"):
    """Rank 0 to the others: the next tokens of it."""

    tokens: tuple[int, ...]


Told = JoinPool | BeginLease | ComputeNext

_TOLD: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)


class PageRow(msgspec.Struct, frozen=True):
    """The pages of a lease that another process holds. Sharded pools have no windows to slide."""

    pages: tuple[int, ...]

    def pages_of(self, component: str) -> NDArray[np.int32]:
        """As ``LeasedPages.pages_of``."""
        assert component == PoolPart.KV.value, "only heads of KV are divided"
        return np.array(self.pages, dtype=np.int32)

    def slide(self, upto_tokens: int) -> None:
        """As ``LeasedPages.slide``: there is no window."""


def own_heads(model: PreTrainedModel, shape: ModelShape, group: Group) -> None:
    """Leave this rank its heads of ``model``."""
    heads = heads_of(shape, group.rank, group.ranks)
    keep_heads(model, shape, heads, group.beside)


class Led(Alone):
    """Rank 0: what it computes, all compute."""

    def __init__(self, model: PreTrainedModel, views: PoolViews, group: Group) -> None:
        super().__init__(model, views)
        self._group = group

    @override
    def begin(self, lease: LeasedPages, lengths: Lengths, *, step_tokens: int) -> Computed:
        row = tuple(lease.pages_of(PoolPart.KV.value).tolist())
        tell(self._group, BeginLease(row, lengths, step_tokens))
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
        tell(self._group, ComputeNext(tuple(tokens)))
        return self._own.compute(tokens)


def follow(model: PreTrainedModel, shape: ModelShape, group: Group) -> NoReturn:
    """Every other rank: do what rank 0 says, until it is gone.

    Raises:
        RuntimeError: it is gone.
    """
    views: PoolViews | None = None
    sequence: Computed | None = None
    while True:
        match _TOLD.decode(group.spread(b"")):
            case JoinPool(endpoint, token):
                worker = join(endpoint, token=token)
                views = PoolViews(shape, worker.pool("main"), shard=group.rank)
            case BeginLease(pages, lengths, step_tokens):
                assert views is not None, "rank 0 has connected before it leases"
                alone = Alone(model, views)
                sequence = alone.begin(PageRow(pages), lengths, step_tokens=step_tokens)
            case ComputeNext(tokens):
                assert sequence is not None, "rank 0 has begun before it computes"
                sequence.compute(tokens)
            case _ as never:
                assert_never(never)


def tell(group: Group, what: Told) -> None:
    """Rank 0 to the others."""
    group.spread(msgspec.msgpack.encode(what))
