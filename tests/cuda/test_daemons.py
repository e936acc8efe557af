"""Pools on devices from end to end: real daemons and engines, doubles of the CUDA runtime and NIXL.

The prefill daemon has its pool on cuda:0, the decode daemon on cuda:1; what engines see is memory
of the transfer processes, opened by IPC handles. No process of kvd's reaches it by the processor:
engines alone do, whose torch stands for their kernels.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
import torch

import kvd.client
from kvd.client import HandoffError, KvdError
from kvd.errors import Code
from kvd.wire import admin
from tests.cuda.double import holders, memory_of_devices
from tests.daemon.conftest import Engines, settle, until
from tests.daemon.kv import PAGE, PAGE_BYTES, SHAPE, digest, tokens_of, write
from tests.gpu.face import ILLEGAL_ADDRESS
from tests.support.daemons import Daemon, two_daemons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tests.cuda.double import Double

pytestmark = pytest.mark.usefixtures("kernels")

ROOT = Path(__file__).parents[2]
ON = {**SHAPE, "pool.saved_size": "8MiB", "transfer.integrity": "full"}


@pytest.fixture(scope="module")
def with_double(double, nixl) -> Iterator[Double]:
    """Every process that is started here finds the double, and this one does."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in double.environment.items():
            environment.setenv(name, value)
        yield double


@pytest.fixture(scope="module")
def pair(with_double, tmp_path_factory):
    p, d = ({**ON, "pool.device": f"cuda:{number}"} for number in (0, 1))
    with two_daemons(tmp_path_factory.mktemp("cuda"), d, prefill=p) as both:
        yield both


@pytest_asyncio.fixture
async def engines(pair) -> AsyncIterator[Engines]:
    async with (
        kvd.client.connect(pair.prefill.client, name="prefill-engine") as p,
        kvd.client.connect(pair.decode.client, name="decode-engine") as d,
    ):
        yield Engines(pair, p, d)
    settle(pair)


async def test_a_prompt_goes_from_one_device_to_another_and_is_verified(engines, cuda):
    cuda.use(0)
    tokens = tokens_of(100, seed=1)
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, tokens)
    receive = await engines.d.receive(9001, tokens, "p")
    send = await engines.p.send(9001, tokens, lease=lease)
    outcome = await send.finish(b"first")
    await receive.done()

    assert outcome.committed
    assert outcome.sent_bytes == 7 * PAGE_BYTES
    assert digest(engines.p, lease.pages) == digest(engines.d, receive.lease.pages)
    assert cuda._number("cudaGetDevice", "") == 0, "as the engine had chosen"
    view = engines.d.pool("main").layer(0)[0]
    with pytest.raises(KvdError, match="still seen by a tensor") as found:
        engines.d.pool("main").close()
    assert found.value.refusal.code is Code.WRONG_STATE
    kept = view[int(receive.lease.pages[0])].view(torch.int16).clone()
    del view
    engines.d.pool("main").close()
    again = engines.d.pool("main").layer(0)[0]
    found = again[int(receive.lease.pages[0])].view(torch.int16)
    assert torch.equal(found, kept), "opened again"
    await receive.lease.release()
    await lease.release(())


async def test_pages_are_sent_as_they_are_when_the_event_comes(engines, cuda, with_double):
    """The engine has given its kernels to a stream: their bytes come late, and are what arrives."""
    tokens, old = tokens_of(96, seed=2), tokens_of(96, seed=3)
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, old)
    receive = await engines.d.receive(9002, tokens, "p")
    send = await engines.p.send(9002, tokens, lease=lease)
    await send.accepted()
    event = Recorded(with_double)

    await send.advance(64, after=event)
    await send.advance(80, after=event.ipc_handle())
    assert engines.pair.prefill.snapshot().rooms
    write(engines.p, lease, tokens)
    with_double.let_come(event.event)
    outcome = await send.finish(b"", after=event)
    await receive.done()

    assert outcome.committed
    assert digest(engines.p, lease.pages) == digest(engines.d, receive.lease.pages)
    await receive.lease.release()
    await lease.release(())
    cuda.destroy(event.event)


async def test_pages_of_several_ranks_are_sent_when_the_event_of_each_has_come(
    engines, cuda, with_double
):
    """The ranks speak, each with its event; their engine only opens the send, and ends it."""
    endpoint, tokens, old = (
        engines.pair.prefill.client,
        tokens_of(96, seed=7),
        tokens_of(96, seed=8),
    )
    workers = [
        await asyncio.to_thread(
            functools.partial(kvd.client.join, endpoint, token=engines.p.token, rank=rank, ranks=2)
        )
        for rank in (0, 1)
    ]
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, old)
    receive = await engines.d.receive(9007, tokens, "p")
    send = await engines.p.send(9007, tokens, lease=lease)
    await send.accepted()
    events = [Recorded(with_double), Recorded(with_double)]

    for worker, event in zip(workers, events, strict=True):
        await worker.begin_written(lease.id, 96, after=event)
    with_double.let_come(events[0].event)
    await asyncio.sleep(0.1)
    (room,) = engines.pair.prefill.snapshot().rooms
    assert room.moved_bytes == 0
    write(engines.p, lease, tokens)
    with_double.let_come(events[1].event)
    engines.pair.prefill.wait_for(
        lambda: engines.pair.prefill.snapshot().leases[0].written_tokens == 96,
        "does not know that the KV behind the events is written",
        5.0,
    )
    outcome = await send.finish()
    await receive.done()

    assert outcome.committed
    assert digest(engines.p, lease.pages) == digest(engines.d, receive.lease.pages)
    await receive.lease.release()
    await lease.release(())
    for worker in workers:
        await asyncio.to_thread(worker.close)
    for event in events:
        cuda.destroy(event.event)


async def test_a_handoff_whose_kernels_fail_fails_alone(engines, cuda, with_double):
    tokens = tokens_of(96, seed=4)
    lease = await engines.p.lease(tokens)
    receive = await engines.d.receive(9003, tokens, "p")
    send = await engines.p.send(9003, tokens, lease=lease)
    await send.accepted()
    event = Recorded(with_double)
    await send.advance(64, after=event)
    with_double.break_event(event.event)

    with pytest.raises(HandoffError, match="cudaErrorLaunchFailure"):
        await receive.done()
    outcome = await send.finish(b"")
    assert outcome.reason.code is Code.POST_FAILED
    await lease.release(())
    cuda.destroy(event.event)


async def test_a_retracted_lease_leaves_the_device_and_comes_back(engines):
    tokens = tokens_of(160, seed=5)
    lease = await engines.d.lease(tokens, cache=False)
    write(engines.d, lease, tokens)
    before = digest(engines.d, lease.pages)

    retracted = await lease.retract()
    assert retracted.saved_pages == 160 // PAGE
    other = await engines.d.lease(tokens_of(160, seed=6), cache=False)
    write(engines.d, other, tokens_of(160, seed=6))
    await lease.resume()

    assert digest(engines.d, lease.pages) == before
    await other.release(())
    await lease.release(())


def test_an_engine_without_a_torch_for_cuda_is_told_so_and_touches_nothing(pair):
    """Its processor does not reach the pool: an engine that did would be dead."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, pair.decode.client],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 1, done.stderr
    assert "has no CUDA: install a CUDA build of torch" in done.stderr
    settle(pair)


async def test_tensors_are_let_go_of_in_silence_when_the_device_has_failed(engines, with_double):
    """Whoever drops the last one could not do anything about it."""
    told = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", told.append)
        patch.setattr(sys, "excepthook", lambda *words: told.append(words))
        engines.d.pool("main").layer(0)
        with_double.poison(ILLEGAL_ADDRESS)
        try:
            engines.d.pool("main").close()
        finally:
            with_double.poison(0)

    assert not told, told
    engines.d.pool("main").layer(0)


async def test_an_engine_that_does_not_see_the_device_is_told_so(engines, monkeypatch):
    monkeypatch.setenv("DOUBLE_DEVICES", "1")
    with pytest.raises(KvdError, match="which this process does not see") as found:
        engines.d.pool("main").layer(0)
    assert found.value.refusal.code is Code.NOT_SUPPORTED
    monkeypatch.setenv("CUDART_LIBRARY", "/nowhere")
    with pytest.raises(KvdError, match="the pool lies on a device: no CUDA device can be used"):
        engines.d.pool("main").layer(0)


class Recorded:
    """As ``torch.cuda.Event(interprocess=True)``, recorded in a stream that has not come to it."""

    def __init__(self, double) -> None:
        cuda = double.runtime
        self.event = cuda.event(0)
        cuda.record(self.event, double.held())
        self._cuda = cuda

    def ipc_handle(self) -> bytes:
        return self._cuda.share_event(self.event)


# ---- ends ----------------------------------------------------------------------------------------


@contextmanager
def lone(tmp_path, **settings) -> Iterator[Daemon]:
    daemon = Daemon("alone", tmp_path, {**ON, "pool.device": "cuda:1", **settings})
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def ended(daemon: Daemon) -> int:
    """Its exit status, when it has ended by itself."""
    until(lambda: not daemon.is_running, 20.0)
    return daemon._process.returncode


@pytest.mark.parametrize("end", ["its transfer process is killed", "it is fenced"])
def test_the_pool_ends_with_its_transfer_process_and_the_daemon_with_both(
    with_double, tmp_path, end
):
    with lone(tmp_path) as daemon:
        daemon.wait_ready()
        memory = memory_of_devices(daemon.transfer_pid())
        assert memory
        if end == "it is fenced":
            daemon.ask(admin.Fence(1), admin.Report)
            why = "fenced: an operator fenced this node"
        else:
            os.kill(daemon.transfer_pid(), signal.SIGKILL)
            why = "was killed by SIGKILL"

        assert ended(daemon) == 1
        assert "the pool on cuda:1 was memory of the transfer process" in daemon.quoted_log()
        assert why in daemon.quoted_log()
    assert not holders(memory)


async def test_engines_come_back_to_the_pool_of_the_next_daemon(with_double, tmp_path):
    tokens = tokens_of(64, seed=9)
    with lone(tmp_path) as daemon:
        daemon.wait_ready()
        async with kvd.client.connect(daemon.client, name="engine") as node:
            lease = await node.lease(tokens)
            write(node, lease, tokens)
            os.kill(daemon.transfer_pid(), signal.SIGKILL)
            assert ended(daemon) == 1
            daemon.start()
            daemon.wait_ready()

            with pytest.raises(KvdError, match="so drop every tensor of it unread") as found:
                await node.lease(tokens)
        assert found.value.refusal.code is Code.POOL_CHANGED
        async with kvd.client.connect(daemon.client, name="engine") as node:
            lease = await node.lease(tokens)
            assert lease.prefix_len == 0
            assert not bool(node.pool("main").layer(0)[0].view(torch.int16).any())


def test_a_daemon_that_is_stopped_leaves_nothing_on_the_device_nor_does_a_dead_engine(
    with_double, tmp_path
):
    with lone(tmp_path) as daemon:
        daemon.wait_ready()
        memory = memory_of_devices(daemon.transfer_pid())
        with engine_of(daemon) as engine:
            assert engine.stdout.readline() == "sees 257 pages\n"
            assert holders(memory) == {daemon.transfer_pid(), engine.pid}
            engine.kill()
            engine.wait()
            until(lambda: not daemon.snapshot().clients)
            assert holders(memory) == {daemon.transfer_pid()}
        with engine_of(daemon) as engine:
            assert engine.stdout.readline() == "sees 257 pages\n"
    assert not holders(memory)


ENGINE = """
import asyncio, sys, kvd.client
async def main():
    async with kvd.client.connect(sys.argv[1], name="engine") as node:
        pool = node.pool("main")
        for layer in range(4):
            k, v = pool.layer(layer)
            k[1], v[1] = 1, 2
        print("sees", len(k), "pages", flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


@contextmanager
def engine_of(daemon: Daemon) -> Iterator[subprocess.Popen[str]]:
    """A process that has opened the pool of a daemon."""
    with subprocess.Popen(
        [sys.executable, "-c", ENGINE, daemon.client],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "DOUBLE_MEMORY": "reachable"},
    ) as child:
        yield child
        child.stdin.close()


@pytest.mark.parametrize(
    ("settings", "environment", "status", "why"),
    [
        ({"pool.device": "cuda:2"}, {}, 78, "needs cuda:2; here are cuda:0 to cuda:1"),
        ({}, {"CUDART_LIBRARY": "/nowhere"}, 78, "no CUDA device can be used here: /nowhere:"),
        ({}, {"DOUBLE_COUNT_ERROR": "100"}, 1, "counting devices: cudaErrorNoDevice (100)"),
        ({}, {"DOUBLE_BYTES": "4194304"}, 1, "lower pool.pages or pool.size"),
        ({}, {"PYTHONPATH": str(ROOT)}, 1, "nixl-cu12 or nixl-cu13"),
        ({"pool.backing": "shm"}, {}, 78, "is refused with pool.backing = shm: memory of a device"),
        (
            {"pool.tp_size": "2", "pool.device": "cuda:1"},
            {},
            78,
            "needs cuda:2, one for each shard from cuda:1 on; here are cuda:0 to cuda:1",
        ),
    ],
)
def test_a_daemon_that_cannot_have_its_pool_there_says_what_to_do(
    with_double, tmp_path, monkeypatch, settings, environment, status, why
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with lone(tmp_path, **settings) as daemon:
        assert ended(daemon) == status
        assert why in daemon.quoted_log()
