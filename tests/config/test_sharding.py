"""Which shards a node holds, from its keys; what that takes; and what it rules out."""

from __future__ import annotations

import pytest

from kvd.config import pool_spec
from kvd.core.layout.shards import Shard
from kvd.core.layout.spec import Component, Mha, Mla, PoolSpec, node_page_bytes
from kvd.families.budget import size_bytes
from kvd.pools.build import pool_memory, reserved_bytes
from tests.config.pools import POOLS, PREFILL_ONLY, config_of, findings

EIGHT = ["pool.heads=8", "pool.layers=32"]
PAGE_BYTES = 32 * 8 * 16 * 2 * 64 * 2
"""Of the whole model: layers, heads, tokens, K and V, elements, their bytes."""


def spec_of(*sets: str) -> PoolSpec:
    return pool_spec(config_of(*EIGHT, *sets))


def shards_of(*sets: str) -> tuple[Shard, ...]:
    held = spec_of(*sets).held
    assert held is not None
    assert (held.layers, held.heads) == (32, 8)
    return held.shards


@pytest.mark.parametrize(
    "sets",
    [
        [],
        ["pool.tp_size=1", "pool.tp_ranks=0", "pool.stage=0:32", "pool.replicas=1"],
    ],
)
def test_all_of_the_model_in_one_shard_is_an_ordinary_pool(sets: list[str]) -> None:
    spec = spec_of(*sets)

    assert spec.held is None
    assert spec.components == (Component("kv", 32, Mha(8, 64, 64, "bfloat16"), 16),)


@pytest.mark.parametrize(
    ("sets", "shards"),
    [
        (["pool.tp_size=2"], [Shard(0, 32, 0, 4), Shard(0, 32, 4, 8)]),
        (["pool.tp_size=4", "pool.tp_ranks=2-3"], [Shard(0, 32, 4, 6), Shard(0, 32, 6, 8)]),
        (["pool.tp_size=8", "pool.tp_ranks=5"], [Shard(0, 32, 5, 6)]),
        (["pool.tp_size=16", "pool.tp_ranks=1-3"], [Shard(0, 32, n, n + 1) for n in (0, 1, 1)]),
        (["pool.stage=16:32"], [Shard(16, 32, 0, 8)]),
        (["pool.replicas=3"], [Shard(0, 32, 0, 8)] * 3),
        (
            ["pool.tp_size=2", "pool.stage=8:12", "pool.replicas=2"],
            [Shard(8, 12, 0, 4), Shard(8, 12, 4, 8)] * 2,
        ),
    ],
)
def test_keys_say_which_layers_and_heads_each_shard_has(
    sets: list[str], shards: list[Shard]
) -> None:
    assert shards_of(*sets) == tuple(shards)


def test_components_are_as_one_shard_has_them() -> None:
    spec = spec_of("pool.tp_size=2", "pool.stage=8:12")

    assert spec.components == (Component("kv", 4, Mha(4, 64, 64, "bfloat16"), 16),)


def test_every_rank_has_the_latents() -> None:
    spec = pool_spec(config_of(*POOLS["mla"], "pool.tp_size=4"))

    assert spec.held is not None
    assert spec.held.shards == (Shard(0, 4, 0, 1),) * 4
    assert spec.components == (Component("kv", 4, Mla(512, 64, "bfloat16"), 16),)


@pytest.mark.parametrize(
    ("sets", "node_bytes"),
    [
        (["pool.tp_size=2"], PAGE_BYTES),
        (["pool.tp_size=16"], 2 * PAGE_BYTES),
        (["pool.tp_size=4", "pool.tp_ranks=0-1"], PAGE_BYTES // 2),
        (["pool.stage=0:8"], PAGE_BYTES // 4),
        (["pool.replicas=2"], 2 * PAGE_BYTES),
    ],
)
def test_the_size_of_a_pool_is_that_of_all_its_shards(sets: list[str], node_bytes: int) -> None:
    spec = spec_of("pool.size=256MiB", "pool.saved_size=64MiB", *sets)
    regions = reserved_bytes(spec)
    pool_bytes = sum(size for name, size in regions.items() if "saved" not in name)
    saved_bytes = sum(size for name, size in regions.items() if "saved" in name)

    assert node_page_bytes(spec, spec.components[0]) == node_bytes
    assert spec.pages[0] == 2**28 // node_bytes
    assert pool_bytes == spec.pages[0] * node_bytes <= (size_bytes("256MiB") or 0)
    assert saved_bytes == spec.saved_pages[0] * node_bytes <= (size_bytes("64MiB") or 0)


def test_each_shard_has_a_region_of_its_own() -> None:
    spec = spec_of("pool.tp_size=2", "pool.pages=4", "pool.saved_size=64MiB")

    assert list(reserved_bytes(spec)) == ["kv", "kv#1", "kv.saved", "kv.saved#1"]
    (kv,) = pool_memory(spec).components
    assert [(one.first_head, one.end_head) for one in kv.shards] == [(0, 4), (4, 8)]
    assert kv.total_bytes == 4 * PAGE_BYTES // 2


@pytest.mark.parametrize(
    ("sets", "key", "rule", "fix"),
    [
        (
            ["pool.tp_size=3"],
            "pool.tp_size",
            "divides no 8 heads (pool.heads) evenly: one number must divide the other",
            "the nearest that does is 2",
        ),
        (
            ["pool.tp_size=2", "pool.tp_ranks=1-2"],
            "pool.tp_ranks",
            "must be ranks from 0 to 1: there are 2 (pool.tp_size)",
            "name those of this node, or raise pool.tp_size",
        ),
        (
            ["pool.tp_ranks=3-1"],
            "pool.tp_ranks",
            "must be the first and the last rank like 0-3, or one rank",
            "write for example 0-3, the last one included",
        ),
        (
            ["pool.stage=16:33"],
            "pool.stage",
            "must end at 32 or before: the model has so many layers (pool.layers)",
            "pool.layers is of the whole model, not of this stage",
        ),
        (
            ["pool.stage=4:4"],
            "pool.stage",
            "must be the first layer and the one after the last, like 0:16",
            "write for example 0:16, the last not included",
        ),
        (
            ["pool.tp_size=16", "pool.replicas=9", "pool.size=8GiB"],
            "pool.replicas",
            "makes 144 shards on this node, at most 128 are held",
            "name the ranks of this node in pool.tp_ranks",
        ),
        (
            ["pool.tp_size=2", "pool.scale_dtype=float32"],
            "pool.scale_dtype",
            "is refused with pool.tp_size: it makes a component beside kv, and only pools of one "
            "component are cut into shards",
            "remove it, or hold the whole model in one shard",
        ),
        (
            ["pool.stage=0:8", "pool.index_dim=64"],
            "pool.index_dim",
            "is refused with pool.stage: it makes a component beside kv, and only pools of one "
            "component are cut into shards",
            "remove it, or hold the whole model in one shard",
        ),
        (
            ["pool.replicas=2", "pool.backing=shm"],
            "pool.backing",
            "is refused with pool.replicas: checksums of kept pages are of one shard, so the next "
            "daemon could not prove the others",
            'set "anon", or hold the whole model in one shard',
        ),
        (
            ["pool.tp_size=2", *PREFILL_ONLY],
            "pool.tp_size",
            'is refused with cache.mode = "prefill-only": there is no KV that could be cut',
            "remove it: tokens are counted once for all ranks",
        ),
        (
            ["pool.tp_size=2", "pool.size=1MiB", "pool.page_size=64"],
            "pool.size",
            "must hold at least 2 pages, and one page of this pool takes 4.0 MiB in its 2 shards",
            f"give at least {8 * PAGE_BYTES // 1024}KiB",
        ),
    ],
)
def test_what_makes_no_shards_is_refused_with_the_reason(
    sets: list[str], key: str, rule: str, fix: str
) -> None:
    assert findings(*EIGHT, *sets) == [(key, rule, fix)]


@pytest.mark.parametrize("family", ["swa", "hisparse", "recurrent"])
def test_only_mha_mla_and_raw_are_sharded(family: str) -> None:
    (found,) = findings(*POOLS[family], "pool.replicas=2", "pool.size=8GiB")

    assert found[0] == "pool.replicas"
    assert found[1].startswith(f"is refused with pool.family = {family}: ")
    assert found[1].endswith("; only mha, mla and raw are cut into shards")
