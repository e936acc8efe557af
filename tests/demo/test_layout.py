"""What a model's pool holds, and what of it must cross, worked out without a daemon."""

from __future__ import annotations

import msgspec
import pytest

from kvd.config import Config, load, pool_spec
from kvd.core.components.tail import most_pages, tail_start
from kvd.core.layout.spec import page_bytes
from kvd.demo.layout import LayerPlace, PoolPart, places
from kvd.demo.models import ARCHITECTURES

GEMMA = ARCHITECTURES["gemma"].pool


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_configuration_gives_each_part_the_bytes_that_were_worked_out(
    name: str, dtype: str
) -> None:
    """The figures of the demo and the daemon's own agree, through a real configuration."""
    layout = msgspec.structs.replace(ARCHITECTURES[name].pool, dtype=dtype, order="layer_first")
    settings = layout.settings({PoolPart.KV: 100, PoolPart.WINDOW: 50, PoolPart.STATE: 20})

    config = load(None, {}, [f"{key}={value}" for key, value in settings.items()])
    assert isinstance(config, Config), config
    spec = pool_spec(config)

    parts = {one.name: page_bytes(one) for one in spec.components if page_bytes(one)}
    assert parts == {part.value: layout.page_bytes(part) for part in layout.parts}
    counts = {"kv": 100, "swa": 50, "state": 20}
    assert spec.pages == tuple(counts[one.name] for one in spec.components)


def test_every_third_layer_of_gemma_looks_at_every_token() -> None:
    kv, window = PoolPart.KV, PoolPart.WINDOW

    assert places(ARCHITECTURES["gemma"].shape) == (
        LayerPlace(window, 0),
        LayerPlace(window, 1),
        LayerPlace(kv, 0),
        LayerPlace(window, 2),
        LayerPlace(window, 3),
        LayerPlace(kv, 1),
    )


@pytest.mark.parametrize("prompt", [1, 16, 96, 97, 112, 113, 340, 352, 1000])
def test_window_starts_where_the_daemons_say(prompt: int) -> None:
    assert GEMMA.window_start(prompt) == tail_start(prompt, 96, 16, cached=True)
    assert GEMMA.usable_prefix(prompt, prompt) == GEMMA.window_start(prompt)
    assert GEMMA.most_window_pages(64) == most_pages(96, 64, 16) == 11


def test_due_pages_are_the_rest_of_kv_and_the_tail_of_the_window() -> None:
    assert GEMMA.due_pages(340, 160) == {PoolPart.KV: 12, PoolPart.WINDOW: 7}
    assert GEMMA.full_pages(340) == {PoolPart.KV: 22, PoolPart.WINDOW: 22}
    each = 16 * 2 * 2 * 32 * 4
    assert GEMMA.bytes_of(GEMMA.due_pages(340, 160)) == 12 * 2 * each + 7 * 4 * each


def test_a_state_crosses_whole_whatever_is_cached() -> None:
    mamba = msgspec.structs.replace(ARCHITECTURES["mamba"].pool, dtype="float64")

    assert mamba.due_pages(340, 340) == mamba.full_pages(1) == {PoolPart.STATE: 1}
    assert mamba.page_bytes(PoolPart.STATE) == 4 * (640 * 4 + 8 * 64 * 32) * 8
    assert mamba.page_size == 1


def test_llama_needs_the_keys_that_it_always_did() -> None:
    layout = ARCHITECTURES["llama"].pool

    assert layout.settings({PoolPart.KV: 7}) == {
        "pool.family": "mha",
        "pool.order": "page_first",
        "pool.layers": "4",
        "pool.pages": "7",
        "pool.dtype": "float32",
        "pool.page_size": "16",
        "pool.heads": "2",
        "pool.head_dim": "32",
    }
    assert msgspec.structs.asdict(layout)["family"] == "mha"
