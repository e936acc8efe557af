"""Engines of several ranks, for real: ``python -m tests.demo.divided CASE``, a ``Case`` as JSON.

A prefill engine is divided in one of three ways, a decode engine is tensor parallel::

    tensor      a rank has some heads of every layer     one daemon, a shard for each rank
    context     a rank computes some of the tokens       a daemon for each rank, with all KV
    pipeline    a rank has some of the layers            a daemon for each rank, with its layers

**tensor**: each rank computes its query heads over its own heads of KV; then the outputs of all
heads are exchanged, and every rank goes on with all of them. Rank 0 leases, and its row of pages is
that of all shards. A rank has its KV in its pages before it gives its heads away, so what rank 0
has computed is in the pages of all.

**context**: a chunk is cut zigzag. In each layer every rank computes K and V of its own tokens;
they are gathered, all ranks write the same KV to their own pools, and attend their own queries to
all keys. A rank without tokens computes one of padding, whose KV goes nowhere.

**pipeline**: each rank passes on what its layers made of the tokens.

The prompts and the answers of one process are worked out first; then all ranks of both engines are
forked, and each knows what comes.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from transformers import Cache, DynamicCache

from kvd.client import connect_sync, join
from kvd.core.layout.shards import page_share, tp_shards
from kvd.demo.cache import BlockTable, LatentLayer, Lengths, PagedLayer, Seen, forward
from kvd.demo.conversation import write_script
from kvd.demo.layout import PoolPart
from kvd.demo.leased import PoolViews, answer, greedy, last_logits, leased_cache
from kvd.demo.messages import ANSWER_TOKENS, CHUNK_TOKENS, DEADLINE_S
from kvd.demo.models import ARCHITECTURES, build_model
from kvd.demo.processes import end_with_parent
from kvd.device.collectives import Gather, agree
from kvd.device.sequence import Split, shard
from kvd.device.symmetric import open_arena

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.demo.layout import ModelShape


class Case(msgspec.Struct, frozen=True):
    """How the prefill engine is divided, the ranks of both, and the endpoints of their daemons."""

    model: str
    way: str
    ranks: int
    decode_ranks: int
    page_size: int
    prefill: tuple[str, ...]
    decode: str
    directory: str


class Found(msgspec.Struct):
    """Of one rank, for each prompt: what it sent, and how it compares with one process."""

    sent: list[tuple[int, int]] = []
    differences: list[float] = []
    tokens_equal: list[bool] = []


class Turn(NamedTuple):
    prompt: tuple[int, ...]
    answer: list[int]
    logits: torch.Tensor
    """Of one process, (tokens of the answer, vocabulary)."""


# ---- what one rank has of a model ----------------------------------------------------------------

PROJECTIONS = {
    "llama": (["q_proj"], ["k_proj", "v_proj"]),
    "qwen3": (["q_proj"], ["k_proj", "v_proj"]),
    # What comes before these is one latent, which every rank has.
    "deepseek_v3": (["q_b_proj", "kv_b_proj"], []),
}
"""By the type of a model: whose rows belong to query heads, and whose to heads of KV."""


class ExchangedProjection(nn.Module):
    """The projection behind an attention whose heads were computed by several ranks."""

    def __init__(self, projection: nn.Module, ranks: int) -> None:
        super().__init__()
        self.projection, self._ranks = projection, ranks

    def forward(self, own: torch.Tensor) -> torch.Tensor:
        pieces = [torch.empty_like(own) for _ in range(self._ranks)]
        dist.all_gather(pieces, own.contiguous())
        return self.projection(torch.cat(pieces, dim=-1))


def keep_heads(model: Any, shape: ModelShape, rank: int, ranks: int) -> None:
    """Leave ``model`` the heads of one rank."""
    kv_heads = 1 if shape.latent_dim else shape.kv_heads
    own = tp_shards(kv_heads, ranks, (rank, rank + 1), (0, shape.layers))[0]
    each = shape.heads // ranks
    by_query, by_kv = PROJECTIONS[model.config.model_type]
    for layer in model.model.layers:
        attention = layer.self_attn
        for name in by_query:
            keep_rows(attention, name, shape.heads, rank * each, (rank + 1) * each)
        for name in by_kv:
            keep_rows(attention, name, kv_heads, own.first_head, own.end_head)
        if not shape.latent_dim:
            attention.num_key_value_groups = each // (own.end_head - own.first_head)
        attention.o_proj = ExchangedProjection(attention.o_proj, ranks)


def keep_rows(attention: nn.Module, name: str, heads: int, first: int, end: int) -> None:
    """Leave one of its projections, to ``heads``, the outputs of heads ``[first, end)``."""
    whole = attention.get_submodule(name)
    each = whole.out_features // heads
    part = nn.Linear(whole.in_features, (end - first) * each, bias=False)
    part.weight = nn.Parameter(whole.weight[first * each : end * each], requires_grad=False)
    attention.set_submodule(name, part)


def keep_layers(model: Any, first: int, end: int) -> None:
    """Leave ``model`` layers ``[first, end)``; without the last one there is no final norm."""
    decoder = model.model
    if end < len(decoder.layers):
        decoder.norm = nn.Identity()
    decoder.layers = nn.ModuleList(decoder.layers[first:end])
    model.config.num_hidden_layers = end - first
    for number, layer in enumerate(decoder.layers):
        layer.self_attn.layer_idx = number


# ---- what one rank computes of a lease -----------------------------------------------------------


class Sequence:
    """The tokens of one lease, which all ranks compute."""

    last_rank = 0
    """Which rank has the logits."""

    def __init__(self, model: Any, cache: Cache, written: int) -> None:
        self.model, self.cache, self.written = model, cache, written

    @torch.inference_mode()
    def compute(self, tokens: Any) -> torch.Tensor:
        """(vocabulary,) after the last of the next tokens; zeros where another rank has them."""
        logits = self.computed(tokens)
        self.written += len(tokens)
        return logits

    def computed(self, tokens: Any) -> torch.Tensor:
        return last_logits(self.model, tokens, self.cache)


class StageSequence(Sequence):
    def computed(self, tokens: Any) -> torch.Tensor:
        rank, last, config = dist.get_rank(), dist.get_world_size() - 1, self.model.config
        self.last_rank = last
        given = {"input_ids": torch.tensor([list(tokens)])}
        if rank:
            hidden = torch.empty(1, len(tokens), config.hidden_size)
            dist.recv(hidden, rank - 1)
            given = {"inputs_embeds": hidden}
        hidden = forward(self.model.model, self.cache, **given).last_hidden_state
        if rank == last:
            return self.model.lm_head(hidden[0, -1])
        dist.send(hidden, rank + 1)
        return torch.zeros(config.vocab_size)


class Chunk:
    """What one rank computes of a chunk of ``tokens`` that begins at token ``first``."""

    def __init__(self, first: int, tokens: int) -> None:
        self.sharding = shard(Split.ZIGZAG, (tokens,), dist.get_world_size())
        own = torch.from_numpy(self.sharding.rows(dist.get_rank()))
        self.own_tokens = len(own)
        """Those whose KV this rank has to give."""
        self.rows = own if len(own) else torch.zeros(1, dtype=torch.int64)
        self.positions = first + self.rows
        gaps = (self.positions.diff() != 1).nonzero()[:, 0] + 1
        self.runs = list(self.positions.tensor_split(gaps))
        every = [self.sharding.rows(rank) for rank in range(self.sharding.ranks)]
        self.last_rank = next(at for at, rows in enumerate(every) if tokens - 1 in rows[-1:])


class Gathered:
    """A layer that is given the KV of one rank's tokens of ``chunk``, and stores that of all."""

    chunk: Chunk
    gather: Gather

    def update(self, key_states, value_states, *_, **__):
        pending = [
            # (rows, kv_heads, head_dim), without padding.
            self.gather.start(own[0].transpose(0, 1)[: self.chunk.own_tokens], self.chunk.sharding)
            for own in (key_states, value_states)
        ]
        super().update(*(one.wait().transpose(0, 1)[None] for one in pending))
        return key_states, value_states

    def seen(self) -> Seen:
        """Every run of this rank looks at the same pages, as far as it goes."""
        pages, runs = super().seen().pages, self.chunk.runs
        starts = torch.tensor([0, *(len(run) for run in runs)]).cumsum(0, dtype=torch.int32)
        ends = torch.tensor([int(run[-1]) + 1 for run in runs], dtype=torch.int32)
        table = pages.block_table.expand(len(runs), -1)
        return Seen(msgspec.structs.replace(pages, block_table=table, lengths=ends), starts)


class GatheredPages(Gathered, PagedLayer):
    """K and V."""


class GatheredLatents(Gathered, LatentLayer):
    """Latents."""


class ContextSequence(Sequence):
    def computed(self, tokens: Any) -> torch.Tensor:
        chunk = Chunk(self.written, len(tokens))
        for layer in self.cache.layers:
            layer.chunk = chunk
        output = forward(
            self.model,
            self.cache,
            input_ids=torch.tensor([list(tokens)])[:, chunk.rows],
            position_ids=chunk.positions[None],
            logits_to_keep=1,
        )
        self.last_rank = chunk.last_rank
        return output.logits[0, -1]


# ---- one rank of an engine -----------------------------------------------------------------------


class EngineRank:
    """One of several ranks that are divided ``way``; those with a daemon have a ``node``."""

    def __init__(self, case: Case, way: str, rank: int, ranks: int, endpoints: tuple[str, ...]):
        self._model, self._shape = model_of(case.model), ARCHITECTURES[case.model].shape
        self._way, self.rank, self._ranks = way, rank, ranks
        shape = self._shape
        if way == "tensor" and ranks > 1:
            keep_heads(self._model, shape, rank, ranks)
        if way == "pipeline":
            first, end = page_share(0, shape.layers, rank, ranks)
            keep_layers(self._model, first, end)
            shape = msgspec.structs.replace(shape, layers=end - first)
        own = way != "tensor" or rank == 0
        self.node = connect_sync(endpoints[rank], name=f"{way}-{rank}") if own else None
        if way == "tensor":
            token = self._of_first(self.node and self.node.token)
            joined = self.node or join(endpoints[0], token=token)
            self.views = PoolViews(shape, joined.pool("main"), shard=rank)
        else:
            self.views = PoolViews(shape, self.node.pool("main"))
        if way == "context":
            world = dist.group.WORLD
            self._gather = Gather(world, open_arena(world, torch.device("cpu")))

    def _of_first(self, value: Any) -> Any:
        """What rank 0 has, on every rank."""
        found = [value]
        if self._ranks > 1:
            dist.broadcast_object_list(found, 0)
        return found[0]

    def _begin(self, row: list[int], lengths: Lengths) -> Sequence:
        table = BlockTable(row)
        if self._way == "context":
            kind = GatheredLatents if self._shape.latent_dim else GatheredPages
            layers = [kind(one, table, lengths) for one in self.views.layers]
            for layer in layers:
                layer.gather = self._gather
            return ContextSequence(self._model, Cache(layers=layers), lengths.written_tokens)
        kind = StageSequence if self._way == "pipeline" else Sequence
        cache = leased_cache(self.views, {PoolPart.KV: table}, lengths)
        return kind(self._model, cache, lengths.written_tokens)

    def prefill(self, room: int, tokens: tuple[int, ...]) -> tuple[torch.Tensor, Any]:
        """Compute a prompt and hand its KV over; logits, and what was sent from here."""
        prefix, row = 0, []
        if self.node:
            lease = self.node.lease(tokens, deadline_s=DEADLINE_S)
            send = self.node.send(room, tokens, lease=lease, deadline_s=DEADLINE_S, to="d")
            prefix, row = lease.prefix_len, lease.pages.tolist()
            send.advance(prefix)
        if self._way == "tensor":
            prefix, row = self._of_first((prefix, row))
        cached = torch.tensor(prefix)
        if self._ranks > 1:
            # What one of them lacks, all compute.
            dist.all_reduce(cached, dist.ReduceOp.MIN)
        sequence = self._begin(row, Lengths(min(int(cached), len(tokens) - 1), prefix))
        while sequence.written < len(tokens):
            logits = sequence.compute(tokens[sequence.written :][:CHUNK_TOKENS])
            if self.node:
                send.advance(sequence.written)
        if self._ranks > 1:
            dist.broadcast(logits, sequence.last_rank)
        if not self.node:
            return logits, None
        if self._way != "tensor":
            # They never send for two different offers.
            send.accepted()
            agree("decode_prefix_len", send.decode_prefix_len, dist.group.WORLD)
        outcome = send.finish(aux=str(greedy(logits)).encode())
        assert outcome.committed, outcome.reason
        lease.release(())
        return logits, (outcome.sent_pages, outcome.sent_bytes)

    def decode(
        self, room: int, tokens: tuple[int, ...], sources: list[str], *, damages: bool
    ) -> tuple[list[int], torch.Tensor]:
        """Receive a prompt and answer it; with ``damages`` a page of the last shard is zeroed."""
        told = None
        if self.node:
            handoff = self.node.receive(
                room, tokens, source=sources, reserve_tokens=ANSWER_TOKENS, deadline_s=DEADLINE_S
            )
            handoff.done()
            told = int(handoff.aux), handoff.lease.pages.tolist(), handoff.prefix_len
        first, row, prefix = self._of_first(told)
        if damages and self.rank == self._ranks - 1:
            self.views.damage(PoolPart.KV, row[prefix // self.views.page_size])
        sequence = self._begin(row, Lengths(len(tokens), len(tokens)))
        said, logits = answer(sequence.compute, first, ANSWER_TOKENS)
        if self.node:
            handoff.lease.release(new_tokens=said[:-1])
        return said, torch.stack(logits)


# ---- the case ------------------------------------------------------------------------------------

models: dict[str, Any] = {}


def model_of(name: str) -> Any:
    """Built before the ranks are forked, so all have the same one."""
    if name not in models:
        models[name] = build_model(ARCHITECTURES[name])
    return models[name]


def turns_of(case: Case) -> list[Turn]:
    """The prompts of a conversation, of a second one, of a repetition, and of the control."""
    script = write_script(turns=1, vocabulary=2048, page_size=case.page_size, seed=1)
    said: dict[str, tuple[int, ...]] = {}
    turns = []
    for turn in (*script.turns, *script.controls):
        prompt = said.get(turn.conversation, script.system) + turn.message
        model = model_of(case.model)
        cache = DynamicCache(config=model.config)
        logits = last_logits(model, prompt, cache)
        tokens, more = answer(
            lambda ids, cache=cache: last_logits(model_of(case.model), ids, cache),
            greedy(logits),
            ANSWER_TOKENS,
        )
        said[turn.conversation] = (*prompt, *tokens)
        turns.append(Turn(prompt, tokens, torch.stack([logits, *more])))
    return turns


def prefill_rank(case: Case, rank: int, turns: list[Turn]) -> Found:
    engine = EngineRank(case, case.way, rank, case.ranks, case.prefill)
    found = Found()
    for room, turn in enumerate(turns, start=1):
        logits, sent = engine.prefill(room, turn.prompt)
        found.differences.append(float((logits - turn.logits[0]).abs().max()))
        found.sent.append(sent or (0, 0))
    return found


def decode_rank(case: Case, rank: int, turns: list[Turn]) -> Found:
    engine = EngineRank(case, "tensor", rank, case.decode_ranks, (case.decode,))
    sources = [f"p{number}" for number in range(len(case.prefill))]
    found = Found()
    for room, turn in enumerate(turns, start=1):
        said, logits = engine.decode(room, turn.prompt, sources, damages=room == len(turns))
        pairs = zip(said, turn.answer, strict=True)
        # Behind the first token that differs the contexts do too.
        same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(logits))
        found.differences.append(float((logits[:same] - turn.logits[1:][:same]).abs().max()))
        found.tokens_equal.append(said == turn.answer)
    return found


def fork(name: str, ranks: int, case: Case, work: Callable[[int], Found]) -> list[int]:
    """So many processes, which meet and write what they find to ``name-RANK``."""
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1]:
            continue
        try:
            end_with_parent()
            meeting = f"file://{case.directory}/{name}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ranks)
            found = msgspec.json.encode(work(rank))
            Path(case.directory, f"{name}-{rank}").write_bytes(found)
            os._exit(0)
        except BaseException:  # noqa: BLE001 - whatever it is, the others must not go on
            traceback.print_exc()
            os._exit(1)
    return children


def main() -> None:
    torch.set_num_threads(1)
    case = msgspec.json.decode(sys.argv[1], type=Case)
    turns = turns_of(case)
    children = [
        *fork("prefill", case.ranks, case, lambda rank: prefill_rank(case, rank, turns)),
        *fork("decode", case.decode_ranks, case, lambda rank: decode_rank(case, rank, turns)),
    ]
    while children:
        ended, status = os.wait()
        children.remove(ended)
        if status:
            for child in children:
                os.kill(child, signal.SIGKILL)
            sys.exit("a rank has failed")


if __name__ == "__main__":
    main()
