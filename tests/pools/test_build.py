"""From a specification to arenas, and to what engines are told."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.layout.geometry import geometry
from kvd.core.layout.shards import tp_shards
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Device,
    HeldShards,
    Host,
    Mha,
    Nowhere,
    PageOrder,
    PoolSpec,
    Raw,
)
from kvd.pools.arena import HUGE_PAGE_BYTES, NotReserved
from kvd.pools.build import device_bytes, pool_memory, reserved_bytes
from kvd.wire.memory import ComponentMemory, PoolMemory, TensorPlace
from tests.support.descriptors import none_left
from tests.support.pools import build_pool

KV = Component("kv", 2, Mha(2, 8, 4, "bfloat16"), 4)
INDEX = Component("index", 1, Raw(64), 4)
GHOST = Component("ghost", 1, Raw(64), 4, tier=Nowhere())


def spec(*components: Component, pages: int = 10) -> PoolSpec:
    return PoolSpec(
        "main", "mha", PageOrder.PAGE_FIRST, components, tuple(pages for _ in components)
    )


def test_build_reserves_one_arena_for_each_component_with_bytes() -> None:
    placed = build_pool(spec(KV, GHOST, INDEX))

    assert [(one.name, one.geometry, one.arena.size_bytes) for one in placed] == [
        ("kv", geometry(KV, pages=10, order=PageOrder.PAGE_FIRST), HUGE_PAGE_BYTES),
        ("index", geometry(INDEX, pages=10, order=PageOrder.PAGE_FIRST), HUGE_PAGE_BYTES),
    ]
    for one in placed:
        one.arena.close()


def test_build_takes_nothing_when_it_cannot_take_all() -> None:
    with none_left(), pytest.raises(NotReserved, match=r"lower pool.pages"):
        build_pool(spec(KV, Component("big", 1, Raw(2**50), 4)))


def test_what_lies_on_a_device_takes_nothing_of_the_host_but_what_is_saved_of_it() -> None:
    far = Component("far", 1, Raw(64), 4, tier=Device("cuda:3"))
    pool = msgspec.structs.replace(spec(KV, far), saved_pages=(0, 5))

    placed = build_pool(pool)

    assert [(one.device, one.arena) for one in placed[1:2]] == [(3, None)]
    assert [one.name for one in placed] == ["kv", "far", "far.saved"]
    assert list(reserved_bytes(pool)) == ["kv", "far.saved"]
    assert device_bytes(pool) == {3: HUGE_PAGE_BYTES}
    for one in (placed[0], placed[2]):
        one.arena.close()


def test_each_shard_lies_on_a_device_of_its_own() -> None:
    far = Component("far", 2, Mha(2, 8, 4, "bfloat16"), 4, tier=Device("cuda:2"))
    held = HeldShards(layers=2, heads=4, shards=tp_shards(4, 2, (0, 2), (0, 2)))

    placed = build_pool(msgspec.structs.replace(spec(far), held=held))

    assert [(one.name, one.device, one.arena) for one in placed] == [
        ("far", 2, None),
        ("far#1", 3, None),
    ]


def test_pool_memory_says_every_offset_and_stride() -> None:
    layer = 4 * 2 * (8 + 4) * 2
    half = 4 * 2 * 8 * 2

    assert pool_memory(spec(KV, GHOST)) == PoolMemory(
        name="main",
        family="mha",
        order="page_first",
        match_page_tokens=4,
        components=(
            ComponentMemory(
                name="kv",
                pages=10,
                page_size=4,
                page_bytes=2 * layer,
                total_bytes=20 * layer,
                tensors=(
                    TensorPlace(0, "k", "bfloat16", 0, 2 * layer, (4, 2, 8)),
                    TensorPlace(0, "v", "bfloat16", half, 2 * layer, (4, 2, 4)),
                    TensorPlace(1, "k", "bfloat16", layer, 2 * layer, (4, 2, 8)),
                    TensorPlace(1, "v", "bfloat16", layer + half, 2 * layer, (4, 2, 4)),
                ),
            ),
            ComponentMemory("ghost", 10, 4, 0, 0, (), "nowhere"),
        ),
    )


def test_each_component_with_bytes_has_a_saved_area_beside_it_that_is_no_part_of_the_pool() -> None:
    placed = build_pool(msgspec.structs.replace(spec(KV, GHOST), saved_pages=(3, 0)))

    assert [(one.name, one.geometry, one.is_pool) for one in placed] == [
        ("kv", geometry(KV, pages=10, order=PageOrder.PAGE_FIRST), True),
        ("kv.saved", geometry(KV, pages=3, order=PageOrder.PAGE_FIRST), False),
    ]
    for one in placed:
        one.arena.close()


def test_a_buffer_is_mapped_by_engines_and_hidden_from_peers() -> None:
    host = msgspec.structs.replace(KV, tier=Host())
    buffer = msgspec.structs.replace(KV, name="buffer", extent=Buffer(16))
    made = msgspec.structs.replace(spec(host, INDEX, buffer), saved_pages=(3, 3, 0))

    placed = build_pool(made)

    assert [(one.name, one.is_pool, one.is_registered) for one in placed] == [
        ("kv", True, True),
        ("index", True, True),
        ("buffer", True, False),
        ("kv.saved", False, False),
        ("index.saved", False, False),
    ]
    for one in placed:
        one.arena.close()
    assert [(one.tier, one.extent, one.extent_tokens) for one in pool_memory(made).components] == [
        ("host", "whole", 0),
        ("device", "whole", 0),
        ("device", "buffer", 16),
    ]


def test_a_component_without_layers_takes_no_memory() -> None:
    empty = msgspec.structs.replace(KV, layers=0, tier=Nowhere())

    (placed,) = build_pool(spec(empty, INDEX))
    placed.arena.close()

    assert placed.name == "index"
    assert pool_memory(spec(empty)).components == (
        ComponentMemory("kv", 10, 4, 0, 0, (), "nowhere"),
    )
