"""Engines of the demo with KV memory on a device of the double: the way of ``--device cuda:0``.

Torch has no CUDA here, so a processor computes and stands for kernels, in a second mapping of the
device memory: at the addresses that the mover gets, none reaches it. Streams, marks, registration
and batches are the mover's own. Not shown: how torch allocates on a device, and that a mark is
behind its kernels.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from kvd.client import LayerMemory
from kvd.demo.cache import Lengths
from kvd.demo.layout import PoolPart, places
from kvd.demo.leased import LeasedSequence, last_logits
from kvd.demo.own_blocks import BlockLease, OwnBlocks
from kvd.device.cuda_library import VARIABLE
from tests.demo.played import PAGE, Played
from tests.demo.reference import ROUNDING, model_of, own_cache, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.client.worker import Worker
    from kvd.demo.layout import ModelShape
    from tests.cuda.double import Double


def on_double(double: Double, taken: list[int], shape: ModelShape, worker: Worker) -> OwnBlocks:
    """As ``own_blocks`` with a device, which torch does not have here; it adds to ``taken``."""
    pool = worker.pool("main")
    tensors: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    caches: dict[str, dict[int, tuple[LayerMemory, ...]]] = {}
    for place in places(shape):
        made, given = {}, []
        for part, like in pool.tensors(place.part.value, layer=place.layer).items():
            size = math.prod(like.shape) * like.element_size()
            address = double.runtime.allocate(0, size)
            taken.append(address)
            reached = double.reached(address, size)
            made[part] = torch.frombuffer(reached, dtype=like.dtype).view(like.shape)
            given.append(
                LayerMemory(
                    address, tuple(like.shape), made[part].stride(), like.element_size(), "cuda:0"
                )
            )
        tensors[place.part.value, place.layer] = made
        caches.setdefault(place.part.value, {})[place.layer] = tuple(given)
    return OwnBlocks(pool.page_size, tensors, worker.blocks(caches, block_size=pool.page_size))


@pytest.fixture(params=["llama", "deepseek", "gemma"])
def played(request, double, monkeypatch) -> Iterator[Played]:
    monkeypatch.setenv(VARIABLE, str(double.path))
    taken: list[int] = []
    made = Played(request.param, lambda *of: on_double(double, taken, *of))
    yield made
    made.own.copied.close()
    made.daemon.close()
    for address in taken:
        double.runtime.free(address)


def test_a_sequence_that_was_saved_from_a_device_goes_on_from_other_blocks_there(
    played, monkeypatch
):
    monkeypatch.setenv("DOUBLE_LATE_US", "3000")
    model, prompt = model_of(played.row.name), tokens(160)[0].tolist()
    lease = played.lease(10)
    first = played.saved_in_chunks(model, lease, prompt)
    first.close()
    for views in played.views.layers:
        for tensor in views:
            tensor[:] = float("nan")

    second = BlockLease(played.own, lease, kept_tokens=96)
    again = LeasedSequence(model, played.views, second, Lengths(100, 96), step_tokens=400)
    second.load(100)
    found = again.compute(prompt[100:])
    second.save(160)
    second.close()

    assert {word.device for word in played.begun()} == {"cuda:0"}
    theirs = own_cache(model)
    last_logits(model, prompt[:100], theirs)
    assert (found - last_logits(model, prompt[100:], theirs)).abs().max() <= ROUNDING


def test_a_damaged_page_of_the_pool_reaches_the_blocks_on_the_device(played):
    model, prompt = model_of(played.row.name), tokens(96)[0].tolist()
    lease = played.lease(6)
    first = BlockLease(played.own, lease, kept_tokens=0)
    sequence = LeasedSequence(model, played.views, first, Lengths(0, 0), step_tokens=400)
    sequence.compute(prompt[:80])
    first.save(80)
    first.close()
    played.pool.damage(PoolPart.KV, int(lease.pages_of("kv")[1]))

    second = BlockLease(played.own, lease, kept_tokens=80)
    again = LeasedSequence(model, played.views, second, Lengths(80, 80), step_tokens=400)
    second.load(80)
    found = again.compute(prompt[80:])
    second.close()

    theirs = own_cache(model)
    last_logits(model, prompt[:80], theirs)
    assert 80 % PAGE == 0
    assert (found - last_logits(model, prompt[80:], theirs)).abs().max() > 0.05
