"""pool.interior, pool.tag and family raw: what the keys come to, and what is refused of them."""

from __future__ import annotations

import pytest

from kvd.config import pool_spec
from kvd.config.render import effective
from kvd.core.layout.shards import Shard
from kvd.core.layout.spec import Component, Interior, Mha, PoolSpec, Raw, State
from kvd.families.family import among
from tests.config.pools import POOLS, config_of, findings


def spec_of(*sets: str) -> PoolSpec:
    return pool_spec(config_of(*sets))


# ---- the inside of a page ------------------------------------------------------------------------


@pytest.mark.parametrize("interior", list(Interior))
@pytest.mark.parametrize(
    "sets",
    [
        [*POOLS["mha"], "pool.scale_dtype=float32", "pool.index_dim=8"],
        POOLS["swa"],
        ["pool.family=hisparse", "pool.buffer_tokens=64"],
        [*POOLS["recurrent"], "pool.scale_dtype=float32"],
    ],
    ids=lambda sets: str(sets[0]),
)
def test_all_components_of_a_pool_are_alike_inside(sets: list[str], interior: Interior) -> None:
    """Whatever its family makes; but a state, which has no tokens."""
    parts = spec_of(*sets, f"pool.interior={interior.value}").components

    assert len(parts) > 1
    for one in parts:
        expected = Interior.NHD if isinstance(one.layout, State) else interior
        assert one.interior is expected, one.name


def test_latents_may_be_opaque_but_not_by_head() -> None:
    assert spec_of(*POOLS["mla"], "pool.interior=opaque").components[0].interior is Interior.OPAQUE
    for family in ("mla", "hisparse"):
        assert findings(*POOLS[family], "pool.interior=hnd") == [
            (
                "pool.interior",
                "is refused for latents, which have no heads that could come before their tokens",
                'leave it out, or set "opaque"',
            )
        ]


def test_where_no_layer_has_kv_there_is_no_inside() -> None:
    sets = [*POOLS["recurrent"], "pool.layers=0", "pool.interior=hnd"]

    assert [key for key, _, _ in findings(*sets)] == ["pool.interior"]


@pytest.mark.parametrize(
    ("sets", "v_dims"),
    [
        (["pool.head_dim=16"], [16]),
        (["pool.head_dim=16", "pool.v_dim=8"], [8]),
        (["pool.head_dim=16", "pool.v_dim=0"], [0]),
        ([*POOLS["swa"], "pool.v_dim=0"], [0, 0]),
        ([*POOLS["swa"], "pool.v_dim=0", "pool.window_head_dim=32"], [0, 0]),
        ([*POOLS["swa"], "pool.v_dim=0", "pool.window_v_dim=32"], [0, 32]),
        ([*POOLS["swa"], "pool.v_dim=8", "pool.window_head_dim=32"], [8, 32]),
    ],
)
def test_k_and_v_of_a_head_may_be_one(sets: list[str], v_dims: list[int]) -> None:
    found = [one.layout for one in spec_of(*sets).components]

    assert [one.v_dim for one in found if isinstance(one, Mha)] == v_dims


# ---- who packs it --------------------------------------------------------------------------------


def test_a_tag_is_of_the_whole_pool() -> None:
    assert spec_of().tag == ""
    assert spec_of("pool.tag=engine 1.2, bf16 pairs").tag == "engine 1.2, bf16 pairs"


@pytest.mark.parametrize("tag", ["x" * 201, "a\nb", "\x00"])
def test_a_tag_is_something_that_can_be_shown(tag: str) -> None:
    (found,) = findings(f"pool.tag={tag}")

    assert found == (
        "pool.tag",
        "must be at most 200 printable characters",
        "name engine, version and packing, and nothing else",
    )


# ---- family raw ----------------------------------------------------------------------------------


def test_a_raw_pool_is_bytes_of_each_layer_and_what_goes_along_with_them() -> None:
    spec = spec_of(
        *POOLS["raw"], "pool.layers=3", "pool.components.scale=64", "pool.components.index=1024"
    )

    assert spec.components == (
        Component("kv", 3, Raw(4096), 16, interior=Interior.OPAQUE),
        Component("index", 3, Raw(1024), 16, interior=Interior.OPAQUE),
        Component("scale", 3, Raw(64), 16, interior=Interior.OPAQUE),
    )
    assert spec.pages[0] == 64 * 2**20 // (3 * (4096 + 1024 + 64))
    assert set(spec.pages) == {spec.pages[0]}


def test_each_rank_of_a_raw_pool_has_all_of_its_own_bytes() -> None:
    spec = spec_of(*POOLS["raw"], "pool.tp_size=4", "pool.tp_ranks=2-3")

    assert spec.components == (Component("kv", 4, Raw(4096), 16, interior=Interior.OPAQUE),)
    assert spec.held is not None
    assert spec.held.heads == 4
    assert spec.held.shards == (Shard(0, 4, 2, 3), Shard(0, 4, 3, 4))


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("components.kv=64", "pool.components.kv", "name what it holds, like scale"),
        ("components.A=64", "pool.components.A", "name what it holds, like scale"),
        ("components.scale=0", "pool.components.scale", "write the bytes of one page"),
        ("components.scale=64KiB", "pool.components.scale", "write the bytes of one page"),
        ("components.scale=1073741825", "pool.components.scale", "write the bytes of one page"),
    ],
)
def test_what_goes_along_has_a_name_and_bytes(text: str, key: str, fix: str) -> None:
    (found,) = findings(*POOLS["raw"], f"pool.{text}")

    assert found[0] == key
    assert found[2].startswith(fix)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("pool.interior=opaque", "says nothing in family raw"),
        ("pool.dtype=float16", "says nothing in family raw"),
        ("pool.heads=4", "says nothing in family raw"),
        ("pool.layers=0", "leaves nothing"),
        ("cache.mode=prefill-only", "what its pages hold is the engine's"),
    ],
)
def test_what_a_raw_pool_cannot_be_asked_is_refused(text: str, rule: str) -> None:
    assert any(rule in found for _, found, _ in findings(*POOLS["raw"], text))


def test_what_goes_along_is_neither_cut_into_shards_nor_kept() -> None:
    sets = [*POOLS["raw"], "pool.components.scale=64"]

    (sharded,) = findings(*sets, "pool.tp_size=2")
    (kept,) = findings(*sets, "pool.backing=shm")

    assert sharded[0] == kept[0] == "pool.components.scale"
    assert "only pools of one component are cut into shards" in sharded[1]
    assert "of which no checksums are kept" in kept[1]


def test_a_configuration_of_bytes_shows_no_elements() -> None:
    shown = effective(config_of(*POOLS["raw"]))

    assert "page_bytes = 4096" in shown
    assert "dtype" not in shown
    assert "interior" not in shown


def test_only_those_with_elements_say_how_they_lie() -> None:
    without = [name for name in POOLS if findings(*POOLS[name], "pool.interior=nhd")]

    assert among(without) == "raw"
