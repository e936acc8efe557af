"""Which shards of the model a node holds, from its keys: pool.tp_size, tp_ranks, stage, replicas.

Shard ``i`` is that of rank ``i % ranks`` in copy ``i // ranks``: all ranks of one copy, then all of
the next. What makes the keys mean nothing is told by ``kvd.config.refusals``; here such keys hold
nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvd.core.layout.shards import MAX_SHARDS, Shard, tp_shards
from kvd.core.layout.spec import HeldShards

if TYPE_CHECKING:
    from kvd.families.keys import PoolSection

SHARD_KEYS = ("tp_size", "tp_ranks", "stage", "replicas")
"""Keys of [pool] that say which shards there are."""

_RANKS = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
_STAGE = re.compile(r"([0-9]{1,6}):([0-9]{1,6})")


def ranks_of(text: str) -> tuple[int, int] | None:
    """``[first, end)`` of ``4-7`` or ``4``; None if it is not written so, or holds no rank."""
    match = _RANKS.fullmatch(text)
    if match is None:
        return None
    first, last = int(match[1]), int(match[2] or match[1])
    return (first, last + 1) if first <= last else None


def layers_of(text: str) -> tuple[int, int] | None:
    """``[first, end)`` of ``0:16``; None if it is not written so, or holds no layer."""
    match = _STAGE.fullmatch(text)
    if match is None:
        return None
    first, end = int(match[1]), int(match[2])
    return (first, end) if first < end else None


def ranks_here(pool: PoolSection) -> tuple[int, int]:
    """The tensor-parallel ranks ``[first, end)`` of this node."""
    return (pool.tp_ranks and ranks_of(pool.tp_ranks)) or (0, pool.tp_size)


def layers_here(pool: PoolSection) -> tuple[int, int]:
    """The layers ``[first, end)`` of the model on this node."""
    return (pool.stage and layers_of(pool.stage)) or (0, pool.layers)


def held(pool: PoolSection) -> HeldShards | None:
    """What this node holds; None where that is all of the model in one shard, or no sense."""
    heads, ranks, layers = pool.model_heads, ranks_here(pool), layers_here(pool)
    is_even = not (heads % pool.tp_size and pool.tp_size % heads)
    is_there = ranks[1] <= pool.tp_size and layers[1] <= pool.layers
    if not is_even or not is_there or shard_count(pool) > MAX_SHARDS:
        return None
    shards = tp_shards(heads, pool.tp_size, ranks, layers) * pool.replicas
    if shards == (Shard(first_layer=0, end_layer=pool.layers, first_head=0, end_head=heads),):
        return None
    return HeldShards(pool.layers, heads, shards)


def shard_count(pool: PoolSection) -> int:
    """Shards of this node, each with memory of its own."""
    first, end = ranks_here(pool)
    return (end - first) * pool.replicas
