"""Blocks of an engine on a device: what a mark is behind, by real kernels and a real daemon.

The double shows the same with streams that are held (``tests/cuda/test_mover.py``); there torch
computes nothing on a device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch

import kvd.client
from tests.gpu.conftest import DEVICE
from tests.support.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from kvd.client import EngineBlocks, SyncLease, SyncNode

PAGE, LAYERS, BLOCKS, PIECE = 16, 4, 64, 2**16
BUSY_CYCLES = 2**29
"""A quarter of a second of kernels."""
WITHIN_S = 20.0

pytestmark = pytest.mark.usefixtures("sees_torch")


class Engine(NamedTuple):
    """Its tensors lie on the device."""

    node: SyncNode
    layers: list[torch.Tensor]
    blocks: EngineBlocks
    stream: torch.cuda.Stream

    def lease(self, pages: int, seed: int) -> SyncLease:
        tokens = np.random.default_rng(seed).integers(0, 2**31, pages * PAGE, np.int32)
        return self.node.lease(tokens, cache=False)

    def page(self, lease: SyncLease, number: int) -> NDArray[np.uint8]:
        """Of all layers."""
        pool, page = self.node.pool("main"), int(lease.pages_of("kv")[number])
        found = [next(iter(pool.arrays("kv", layer=one).values()))[page] for one in range(LAYERS)]
        return np.stack([part.reshape(-1) for part in found])


@pytest.fixture(scope="module")
def engine(cuda, is_double, tmp_path_factory) -> Iterator[Engine]:
    if is_double:
        pytest.skip("torch has no CUDA here; tests/cuda shows it with streams of the double")
    settings = {
        "pool.family": "raw",
        "pool.layers": str(LAYERS),
        "pool.page_size": str(PAGE),
        "pool.page_bytes": str(PIECE),
        "pool.pages": "200",
    }
    with (
        one_daemon(tmp_path_factory.mktemp("gpu"), settings) as daemon,
        kvd.client.connect_sync(daemon.client, name="engine") as node,
    ):
        device = torch.device("cuda", DEVICE)
        layers = [
            torch.zeros(BLOCKS, PIECE, dtype=torch.uint8, device=device) for _ in range(LAYERS)
        ]
        with node.blocks(dict(enumerate(layers)), block_size=PAGE) as blocks:
            made = Engine(node, layers, blocks, torch.cuda.Stream(device))
            # What is loaded at its first use would wait for the stream that is busy.
            with torch.cuda.stream(made.stream):
                torch.cuda._sleep(1)
                for layer in layers:
                    layer[0].fill_(1)
                    layer[1].copy_(layer[0])
            made.stream.synchronize()
            yield made


def test_a_save_takes_what_kernels_before_it_write(engine):
    lease = engine.lease(1, seed=1)
    with torch.cuda.stream(engine.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for layer in engine.layers:
            layer[0].fill_(3)
        save = engine.blocks.begin_save(lease, {"kv": [0]}, upto_tokens=PAGE)
    was_busy = not engine.stream.query()

    save.result(WITHIN_S)

    assert was_busy, "the kernels were over before the order: nothing was shown"
    assert engine.stream.query()
    assert (engine.page(lease, 0) == 3).all()
    lease.release()


def test_a_load_lets_kernels_before_it_read_what_was_there(engine):
    lease = engine.lease(1, seed=2)
    for layer in engine.layers:
        layer[2].fill_(9)
    engine.blocks.begin_save(lease, {"kv": [2]}, upto_tokens=PAGE).result(WITHIN_S)
    for layer in engine.layers:
        layer[2].fill_(5)
    torch.cuda.synchronize()
    with torch.cuda.stream(engine.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for layer in engine.layers:
            layer[3].copy_(layer[2])
        load = engine.blocks.begin_load(lease, {"kv": [2]})
    was_busy = not engine.stream.query()

    load.result(WITHIN_S)
    torch.cuda.synchronize()

    assert was_busy, "the kernels were over before the order: nothing was shown"
    for layer in engine.layers:
        assert bool((layer[3] == 5).all())
        assert bool((layer[2] == 9).all())
    lease.release()


def test_a_stream_of_the_engine_does_not_wait_for_copies(engine):
    """An order whose mark has not come, and kernels in another stream that are done before it."""
    lease, other = engine.lease(1, seed=3), torch.cuda.Stream(engine.layers[0].device)
    with torch.cuda.stream(engine.stream):
        torch.cuda._sleep(BUSY_CYCLES)
        save = engine.blocks.begin_save(lease, {"kv": [4]}, upto_tokens=PAGE)
    with torch.cuda.stream(other):
        engine.layers[0][5].fill_(6)
    other.synchronize()

    assert not save.is_over
    save.result(WITHIN_S)
    lease.release()


def test_a_graph_is_captured_while_copies_move(engine):
    lease = engine.lease(BLOCKS, seed=4)
    every = list(range(BLOCKS))
    engine.blocks.begin_save(lease, {"kv": every}, upto_tokens=BLOCKS * PAGE).result(WITHIN_S)
    out = torch.zeros(1024, device=engine.layers[0].device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(engine.stream):
        out.add_(1)
    engine.stream.synchronize()
    loads = [engine.blocks.begin_load(lease, {"kv": [block]}, first_page=block) for block in every]
    with torch.cuda.graph(graph, stream=engine.stream, capture_error_mode="thread_local"):
        for _ in range(64):
            out.add_(1)
    for load in loads:
        load.result(WITHIN_S)
    graph.replay()
    torch.cuda.synchronize()

    assert bool((out == 65).all())
    lease.release()


def test_a_mark_while_a_graph_is_captured_is_refused(engine):
    graph = torch.cuda.CUDAGraph()
    out = torch.zeros(16, device=engine.layers[0].device)
    with torch.cuda.graph(graph, stream=engine.stream, capture_error_mode="thread_local"):
        out.add_(1)
        with pytest.raises(kvd.client.KvdError, match="being captured"):
            engine.blocks.mark()
    graph.replay()
    torch.cuda.synchronize()

    assert bool((out == 1).all())
