"""How one engine is divided among several processes, its ranks: arithmetic, and nothing else.

    tensor parallel     each rank has some heads of every layer     one daemon, a shard for each
    context parallel    each rank computes some of the new tokens   a daemon for each, with all KV
    pipeline            each rank has some of the layers            a daemon for each, with its own

Tensor parallel, 8 query heads over 4 heads of KV. Neighbours share a head of KV where there are
more ranks than heads of it; a latent is one head, so every rank has it::

    2 ranks    rank 0: queries 0..4, KV 0..2      rank 1: queries 4..8, KV 2..4
    8 ranks    rank 0: query 0, KV 0    rank 1: query 1, KV 0    rank 2: query 2, KV 1 ...

Invariant: a rank has the KV of every query head that it has.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from kvd.core.layout.shards import page_share, tp_shards
from kvd.demo.layout import PoolPart

if TYPE_CHECKING:
    from kvd.demo.layout import ModelShape, PoolLayout


class DivisionWay(enum.Enum):
    """What the ranks of an engine have their own share of."""

    ALONE = "alone"
    TENSOR = "tensor"
    CONTEXT = "context"
    PIPELINE = "pipeline"


class Division(msgspec.Struct, frozen=True):
    """An engine of so many ranks."""

    way: DivisionWay = DivisionWay.ALONE
    ranks: int = 1

    @property
    def daemons(self) -> int:
        """How many daemons it has: one for each rank that has a pool of its own."""
        return self.ranks if self.way in (DivisionWay.CONTEXT, DivisionWay.PIPELINE) else 1

    @property
    def told(self) -> str:
        """For people."""
        names = {DivisionWay.TENSOR: "TP", DivisionWay.CONTEXT: "CP", DivisionWay.PIPELINE: "PP"}
        return f"{names[self.way]} {self.ranks}" if self.way in names else "one process"


ALONE = Division()


class Heads(msgspec.Struct, frozen=True):
    """The heads of one tensor-parallel rank: half-open ranges of the model's numbers."""

    first_query: int
    end_query: int
    first_kv: int
    end_kv: int


def kv_heads(shape: ModelShape) -> int:
    """Heads that KV is kept of: a latent is one."""
    return 1 if shape.latent_dim else shape.kv_heads


def heads_of(shape: ModelShape, rank: int, ranks: int) -> Heads:
    """What ``rank`` of ``ranks`` computes, and keeps the KV of.

    Raises:
        ValueError: the heads cannot be divided so.
    """
    if shape.heads % ranks:
        raise ValueError(f"{shape.heads} query heads cannot be divided among {ranks} ranks")
    own = tp_shards(kv_heads(shape), ranks, (rank, rank + 1), (0, shape.layers))[0]
    each = shape.heads // ranks
    return Heads(
        first_query=rank * each,
        end_query=(rank + 1) * each,
        first_kv=own.first_head,
        end_kv=own.end_head,
    )


def kv_copies(shape: ModelShape, ranks: int) -> int:
    """How many tensor-parallel ranks keep the same head of KV."""
    return max(1, ranks // kv_heads(shape))


def stage_of(layers: int, rank: int, ranks: int) -> tuple[int, int]:
    """The layers ``[first, end)`` of one stage of a pipeline; the first stages have one more."""
    return page_share(0, layers, rank, ranks)


def need_divisible(shape: ModelShape, parts: tuple[PoolPart, ...], division: Division) -> None:
    """Return if a model whose pool has ``parts`` can be divided so.

    Raises:
        ValueError: it cannot; why.
    """
    if division.way is not DivisionWay.ALONE and parts != (PoolPart.KV,):
        raise ValueError("only KV of layers that look at every token can be on several ranks")
    if division.way is DivisionWay.TENSOR:
        for rank in range(division.ranks):
            heads_of(shape, rank, division.ranks)
    if division.way is DivisionWay.PIPELINE and division.ranks > shape.layers:
        raise ValueError(f"{shape.layers} layers are too few for {division.ranks} stages")


def pool_settings(shape: ModelShape, division: Division, daemon: int) -> dict[str, str]:
    """What the configuration of one of the daemons says beyond the model's pool."""
    match division.way:
        case DivisionWay.TENSOR:
            return {"pool.tp_size": str(division.ranks)}
        case DivisionWay.PIPELINE:
            first, end = stage_of(shape.layers, daemon, division.ranks)
            return {"pool.stage": f"{first}:{end}"}
        case DivisionWay.ALONE | DivisionWay.CONTEXT:
            return {}


class SentPages(msgspec.Struct, frozen=True):
    """What one prefill daemon sends of a handoff."""

    pages: int
    bytes: int


def due_of_each(
    pool: PoolLayout, pages: dict[PoolPart, int], prefill: Division, decode: Division
) -> tuple[SentPages, ...]:
    """What each prefill daemon must send where ``pages`` of the decode node's must be filled.

    A decode side that keeps a head on several ranks is sent it as often.
    """
    kv, size = pages.get(PoolPart.KV, 0), pool.bytes_of(pages)
    if decode.way is DivisionWay.TENSOR:
        size *= kv_copies(pool.shape, decode.ranks)
    match prefill.way:
        case DivisionWay.CONTEXT:
            each = size // max(1, kv)
            shares = [page_share(0, kv, rank, prefill.ranks) for rank in range(prefill.ranks)]
            return tuple(SentPages(end - first, (end - first) * each) for first, end in shares)
        case DivisionWay.PIPELINE:
            layers = pool.shape.layers
            cuts = [stage_of(layers, rank, prefill.ranks) for rank in range(prefill.ranks)]
            return tuple(SentPages(kv, size * (end - first) // layers) for first, end in cuts)
        case DivisionWay.ALONE | DivisionWay.TENSOR:
            return (SentPages(kv, size),)
