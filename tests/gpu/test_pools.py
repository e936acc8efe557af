"""Pools on a device from end to end: daemons, torch engines, events behind real kernels."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch

import kvd.client
from tests.cuda.test_daemons import ENGINE
from tests.daemon.conftest import Engines, settle, until
from tests.daemon.kv import PAGE, SHAPE, digest, tokens_of, write
from tests.gpu.conftest import DEVICE
from tests.support.daemons import Daemon, two_daemons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ON = {**SHAPE, "pool.saved_size": "8MiB", "transfer.integrity": "full"}
FAR = {**ON, "pool.device": f"cuda:{DEVICE}"}
BUSY_CYCLES = 2**30
"""Half a second of kernels."""

pytestmark = pytest.mark.usefixtures("sees_torch")


@pytest.fixture(scope="module", params=["gpu to gpu", "gpu to host"])
def pair(request, tmp_path_factory, cuda):
    decode = FAR if request.param == "gpu to gpu" else ON
    with two_daemons(tmp_path_factory.mktemp("gpu"), decode, prefill=FAR) as both:
        yield both


@pytest_asyncio.fixture
async def engines(pair) -> AsyncIterator[Engines]:
    async with (
        kvd.client.connect(pair.prefill.client, name="prefill-engine") as p,
        kvd.client.connect(pair.decode.client, name="decode-engine") as d,
    ):
        yield Engines(pair, p, d)
    settle(pair)


def written() -> None:
    """What was given to the device by now is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


async def test_a_prompt_arrives_as_it_was_written_and_is_verified(engines, is_double):
    tokens, room = tokens_of(1000, seed=1), engines.room()
    lease = await engines.p.lease(tokens)
    k, _ = engines.p.pool("main").layer(0)
    assert k.device.type == ("cpu" if is_double else "cuda")
    write(engines.p, lease, tokens)
    written()
    receive = await engines.d.receive(room, tokens, "p")
    send = await engines.p.send(room, tokens, lease=lease)
    outcome = await send.finish(b"first")
    await receive.done()

    assert outcome.committed
    assert digest(engines.p, lease.pages) == digest(engines.d, receive.lease.pages)
    await receive.lease.release()
    await lease.release(())


async def test_pages_are_read_after_the_kernels_before_the_event(engines, is_double):
    if is_double:
        pytest.skip("torch has no CUDA here; tests/cuda shows it with events of the double")
    tokens, room = tokens_of(960, seed=2), engines.room()
    lease = await engines.p.lease(tokens)
    views = [part for layer in range(4) for part in engines.p.pool("main").layer(layer)]
    # Both wait for the device: to copy an index there, and to load a kernel for the first time.
    # Behind the busy stream they would let the event come before the pages are promised.
    index = torch.from_numpy(lease.pages.copy()).to(views[0].device, torch.int64)
    for part in views:
        part.index_fill_(0, index, 1.0)
    write(engines.p, lease, tokens_of(960, seed=3))
    written()
    receive = await engines.d.receive(room, tokens, "p")
    send = await engines.p.send(room, tokens, lease=lease)
    await send.accepted()
    event = torch.cuda.Event(interprocess=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BUSY_CYCLES)
        for part in views:
            part.index_fill_(0, index, 3.0)
        event.record(stream)
    is_late = not event.query()

    await send.advance(480, after=event)
    outcome = await send.finish(b"", after=event)
    await receive.done()

    assert is_late, "the kernels were over before the pages were promised: nothing was shown"
    assert outcome.committed
    written()
    for layer in range(4):
        for part in engines.d.pool("main").layer(layer):
            assert bool((part[receive.lease.pages.tolist()] == 3.0).all())
    await receive.lease.release()
    await lease.release(())


async def test_a_retracted_lease_comes_back_to_the_device(engines):
    tokens = tokens_of(160, seed=5)
    lease = await engines.p.lease(tokens, cache=False)
    write(engines.p, lease, tokens)
    written()
    before = digest(engines.p, lease.pages)

    retracted = await lease.retract()
    other = await engines.p.lease(tokens_of(160, seed=6), cache=False)
    write(engines.p, other, tokens_of(160, seed=6))
    written()
    await lease.resume()

    assert retracted.saved_pages == 160 // PAGE
    assert digest(engines.p, lease.pages) == before
    await other.release(())
    await lease.release(())


def test_a_dead_engine_keeps_nothing_and_the_daemons_end_frees_the_pool(tmp_path, cuda, is_double):
    pool_bytes = 8 * 2**20
    daemon = Daemon("alone", tmp_path, FAR)
    daemon.start()
    try:
        daemon.wait_ready()
        serving = cuda.room(DEVICE).free_bytes
        command = [sys.executable, "-c", ENGINE, daemon.client]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as engine:
            assert engine.stdout.readline() == "sees 257 pages\n"
            os.kill(engine.pid, signal.SIGKILL)
        until(lambda: not daemon.snapshot().clients)
        if not is_double:
            assert cuda.room(DEVICE).free_bytes >= serving - 2**20, "a dead engine's mapping"
    finally:
        daemon.stop()
    if not is_double:
        assert cuda.room(DEVICE).free_bytes >= serving + pool_bytes
