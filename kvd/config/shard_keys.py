"""The keys of [pool] that say which shards of the model a node holds; ``sharding`` reads them."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

TpSize = Annotated[
    int,
    Meta(
        ge=1,
        le=4096,
        description="Tensor-parallel ranks among which the heads of the model are divided, on all "
        "nodes together. Each rank has a shard of the pool in memory of its own; where there are "
        "more ranks than heads, neighbours have the same head. Families mha and mla only, as "
        "tp_ranks, stage and replicas.",
    ),
]
TpRanks = Annotated[
    str,
    Meta(
        description="Which of the pool.tp_size ranks are on this node. Left out: all.",
        extra={"rule": "the first and the last rank like 0-3, or one rank"},
        examples=["0-3"],
    ),
]
Stage = Annotated[
    str,
    Meta(
        description="Which of pool.layers are on this node, where a pipeline has the others "
        "elsewhere. Left out: all.",
        extra={"rule": "the first layer and the one after the last, like 0:16"},
        examples=["0:16"],
    ),
]
Replicas = Annotated[
    int,
    Meta(
        ge=1,
        le=128,
        description="Equal copies of each shard on this node, where ranks share a prompt (context "
        "parallel) and each has gathered all of its KV. Each copy sends a part of the pages.",
    ),
]
