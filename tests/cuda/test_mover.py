"""Blocks on a device, saved into pages of a pool in host memory and loaded from them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.client import LayerMemory, PendingCopy
from kvd.client.mover import device_lane
from kvd.device.cuda_library import VARIABLE
from tests.support.copies import WordsDaemon, numbered, raw_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from numpy.typing import NDArray

    from kvd.client import EngineBlocks
    from kvd.device.cuda import Runtime
    from tests.cuda.double import Double

LAYERS, BLOCKS, BYTES = 3, 24, 4096


class Engine:
    """Its KV cache on a device of the double, and what is in it."""

    def __init__(self, daemon: WordsDaemon, cuda: Runtime, device: int = 0) -> None:
        self.daemon, self.cuda, self.device = daemon, cuda, device
        self.size = BLOCKS * BYTES
        self.addresses = [cuda.allocate(device, self.size) for _ in range(LAYERS)]
        self.filled = numbered(np.random.default_rng(5), (LAYERS, BLOCKS, BYTES))
        for address, layer in zip(self.addresses, self.filled, strict=True):
            cuda.copy(address, layer.ctypes.data, self.size)
        cuda.synchronize()
        self.blocks = self.give()

    def give(self, **more: Any) -> EngineBlocks:
        caches = {
            number: LayerMemory(address, (BLOCKS, BYTES), (BYTES, 1), 1, f"cuda:{self.device}")
            for number, address in enumerate(self.addresses)
        }
        return self.daemon.worker.blocks(caches, block_size=16, **more)

    @property
    def lane(self) -> device_lane.DeviceLane:
        lane = self.blocks._mover.lane
        assert isinstance(lane, device_lane.DeviceLane)
        return lane

    def there(self) -> NDArray[np.uint8]:
        found = np.empty((LAYERS, BLOCKS, BYTES), np.uint8)
        for address, layer in zip(self.addresses, found, strict=True):
            self.cuda.copy(layer.ctypes.data, address, self.size)
        return found

    def pages(self) -> NDArray[np.uint8]:
        """Layer by layer."""
        pool = self.daemon.worker.pool("main")
        return np.stack(
            [next(iter(pool.arrays("kv", layer=layer).values())) for layer in range(LAYERS)]
        )

    def save(self, blocks: list[int], pages: list[int], **more: Any) -> PendingCopy:
        return self.blocks.begin_save(
            self.daemon.key(), {"kv": blocks}, pages={"kv": pages}, **more
        )

    def load(self, blocks: list[int], pages: list[int], **more: Any) -> PendingCopy:
        return self.blocks.begin_load(
            self.daemon.key(), {"kv": blocks}, pages={"kv": pages}, **more
        )


@pytest.fixture
def daemon(double: Double, monkeypatch: pytest.MonkeyPatch) -> Iterator[WordsDaemon]:
    monkeypatch.setenv(VARIABLE, str(double.path))
    made = WordsDaemon(raw_pool(layers=LAYERS, page_bytes=BYTES))
    yield made
    made.close()


@pytest.fixture
def engine(daemon: WordsDaemon, cuda: Runtime) -> Iterator[Engine]:
    made = Engine(daemon, cuda)
    yield made
    made.blocks.close()
    daemon.worker.close()
    for address in made.addresses:
        cuda.free(address)


def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    end_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.001)


def test_what_is_saved_is_loaded_again(engine: Engine) -> None:
    until(engine.lane.is_registered)
    save = engine.save([3, 4, 9], [7, 8, 2], upto_tokens=48)
    save.result(5)
    assert (engine.pages()[:, [7, 8, 2]] == engine.filled[:, [3, 4, 9]]).all()
    load = engine.load([0, 1, 2], [7, 8, 2])
    load.result(5)
    expected = engine.filled.copy()
    expected[:, [0, 1, 2]] = engine.filled[:, [3, 4, 9]]
    assert (engine.there() == expected).all()
    assert [word.device for word in engine.daemon.began.values()] == ["cuda:0", "cuda:0"]
