"""From keys to tensors: what an engine sees of every layout, in both orders."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvd.client
from kvd.client import KvdError
from kvd.config import pool_spec
from tests.config.pools import POOLS, config_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.layout.spec import PoolSpec

    Serve = Callable[[PoolSpec], Any]

SMALL = ["pool.layers=2", "pool.page_size=4", "pool.pages=6"]
HEADS = ["pool.heads=2", "pool.head_dim=8", "pool.v_dim=4"]
FP8 = [*HEADS, "pool.dtype=float8_e4m3fn", "pool.scale_dtype=float32"]
LATENT = ["pool.family=mla", "pool.latent_dim=8", "pool.rope_dim=4"]
INDEX = ["pool.index_dim=12", "pool.index_dtype=uint8", "pool.index_page_size=2"]
WINDOW = [*POOLS["swa"], *HEADS, "pool.window_layers=3", "pool.window_tokens=8"]
STATE = [*POOLS["recurrent"], *HEADS, "pool.states=5"]

Seen = dict[str, tuple[tuple[int, ...], torch.dtype, int, tuple[int, ...]]]
"""By part: shape, element type, bytes from one page to the next in each order."""

VIEWS = [
    pytest.param(
        FP8,
        "kv",
        {
            "k": ((6, 4, 2, 8), torch.float8_e4m3fn, 192, 64),
            "v": ((6, 4, 2, 4), torch.float8_e4m3fn, 192, 32),
        },
        id="fp8",
    ),
    pytest.param(
        FP8,
        "scale",
        {
            "k": ((6, 4, 2, 1), torch.float32, 128, 32),
            "v": ((6, 4, 2, 1), torch.float32, 128, 32),
        },
        id="scale",
    ),
    pytest.param(LATENT, "kv", {"latent": ((6, 4, 1, 12), torch.bfloat16, 192, 96)}, id="mla"),
    pytest.param(
        [*LATENT, "pool.dtype=float8_e5m2", "pool.scale_dtype=float16"],
        "scale",
        {"latent": ((6, 4, 1, 1), torch.float16, 16, 8)},
        id="mla-scale",
    ),
    pytest.param(
        [*LATENT, *INDEX], "index", {"k": ((12, 2, 1, 12), torch.uint8, 48, 24)}, id="index"
    ),
    pytest.param(
        [*WINDOW, "pool.window_pages=9"],
        "swa",
        {
            "k": ((9, 4, 2, 8), torch.bfloat16, 576, 128),
            "v": ((9, 4, 2, 4), torch.bfloat16, 576, 64),
        },
        id="swa",
    ),
    pytest.param(
        STATE,
        "state",
        {
            "ssm": ((5, 4, 2, 8), torch.float32, 912, 256),
            "conv": ((5, 8, 3), torch.bfloat16, 912, 48),
        },
        id="state",
    ),
]


@pytest.mark.parametrize(("sets", "component", "expected"), VIEWS)
@pytest.mark.parametrize("order", ["page_first", "layer_first"])
async def test_a_component_is_seen_in_its_shape_and_strides(
    serve: Serve, sets: list[str], component: str, expected: Any, order: str
) -> None:
    daemon = serve(pool_spec(config_of(*SMALL, *sets, f"pool.order={order}")))

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        found = node.pool("main").tensors(component, layer=1)
        seen = {
            part: (tuple(one.shape), one.dtype, one.stride(0) * one.itemsize)
            for part, one in found.items()
        }
        is_dense = {part: one[0].is_contiguous() for part, one in found.items()}
        del found

    assert seen == {
        part: (shape, dtype, by_page if order == "page_first" else by_layer)
        for part, (shape, dtype, by_page, by_layer) in expected.items()
    }
    assert all(is_dense.values())


@pytest.mark.parametrize("sets", [FP8, [*LATENT, *INDEX], [*WINDOW], STATE])
@pytest.mark.parametrize("order", ["page_first", "layer_first"])
async def test_every_page_of_every_tensor_has_bytes_of_its_own(
    serve: Serve, sets: list[str], order: str
) -> None:
    """Each is filled with a byte of its own; none has touched another, and no byte is left."""
    config = config_of(*SMALL, *sets, "pool.saved_size=0KiB", f"pool.order={order}")
    daemon = serve(pool_spec(config))

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool = node.pool("main")
        for part in pool.memory.components:
            places = [(place.layer, place.part) for place in part.tensors]
            cells = [
                (pool.tensors(part.name, layer=layer)[name].view(torch.uint8)[page])
                for layer, name in places
                for page in range(part.pages)
            ]
            assert len(cells) < 256
            for number, cell in enumerate(cells):
                cell.fill_(number)

            assert all(bool((cell == number).all()) for number, cell in enumerate(cells))
            assert sum(cell.numel() for cell in cells) == part.total_bytes
            del cells, cell


@pytest.mark.parametrize("order", ["page_first", "layer_first"])
async def test_each_shard_is_seen_by_its_number_and_has_bytes_of_its_own(
    serve: Serve, order: str
) -> None:
    sets = [*SMALL, *HEADS, "pool.tp_size=2", "pool.stage=1:2", "pool.replicas=2"]
    daemon = serve(pool_spec(config_of(*sets, f"pool.order={order}")))

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool = node.pool("main")
        shards = [
            (one.first_layer, one.end_layer, one.first_head, one.end_head) for one in pool.shards
        ]
        assert shards == [(1, 2, 0, 1), (1, 2, 1, 2)] * 2
        for number in range(4):
            k, v = pool.view("kv", layer=0, shard=number)
            assert (k.shape, v.shape) == ((6, 4, 1, 8), (6, 4, 1, 4))
            k.fill_(number)
            v.fill_(number)
            del k, v
        for number in range(4):
            seen = [float(part.min()) for part in pool.view("kv", layer=0, shard=number)]
            assert seen == [number, number]
        for wrong in (4, -1):
            with pytest.raises(KvdError, match=f"main.kv has 4 shards, from 0; not {wrong}"):
                pool.view("kv", layer=0, shard=wrong)
        with pytest.raises(KvdError, match=r"has 1 layers with bytes here, from 0; .* layer 1"):
            pool.view("kv", layer=1, shard=3)


async def test_an_unsharded_pool_names_no_shards(serve: Serve) -> None:
    daemon = serve(pool_spec(config_of(*SMALL, *HEADS)))

    async with kvd.client.connect(daemon.endpoint, name="a") as node:
        pool = node.pool("main")
        assert pool.shards == ()
        assert torch.equal(pool.view("kv", layer=0, shard=0)[0], pool.layer(0)[0])
