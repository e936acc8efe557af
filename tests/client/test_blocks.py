"""Blocks of an engine in host memory, saved into pages and loaded from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.support.copies import WordsDaemon, numbered, raw_pool

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def daemon() -> Iterator[WordsDaemon]:
    made = WordsDaemon(raw_pool())
    yield made
    made.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_saved_is_loaded_again(daemon: WordsDaemon, threads: int) -> None:
    rng = np.random.default_rng(1)
    layers = {f"layer.{n}": numbered(rng, (20, 4096)) for n in range(3)}
    before = {name: layer.copy() for name, layer in layers.items()}
    blocks = daemon.worker.blocks(layers, block_size=16, threads=threads)
    save = blocks.begin_save(
        daemon.key(), {"kv": [3, 4, 9]}, pages={"kv": [7, 8, 2]}, first_page=2, upto_tokens=80
    )
    save.result(5)
    for number, layer in enumerate(before.values()):
        (pages,) = daemon.worker.pool("main").arrays("kv", layer=number).values()
        assert (pages[[7, 8, 2]] == layer[[3, 4, 9]]).all()
    load = blocks.begin_load(daemon.key(), {"kv": [0, 1, 2]}, pages={"kv": [7, 8, 2]}, first_page=2)
    load.result(5)
    assert load.safe()
    assert save.n_bytes == load.n_bytes == 3 * 3 * 4096
    for name, layer in layers.items():
        assert (layer[[0, 1, 2]] == before[name][[3, 4, 9]]).all()
        assert (layer[3:] == before[name][3:]).all()
    blocks.close()
