"""Real daemons with pools on devices: what is slow is said, and copies that end in the middle."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import kvd.client
from kvd.client import KvdError
from tests.cuda.double import holders, memory_of_devices
from tests.cuda.test_daemons import ON, ended, lone
from tests.daemon.conftest import until
from tests.daemon.kv import PAGE, digest, tokens_of, write
from tests.support.daemons import two_daemons

if TYPE_CHECKING:
    from kvd.client import Node

pytestmark = pytest.mark.usefixtures("kernels", "nixl")


@pytest.fixture
def environment(double, monkeypatch) -> pytest.MonkeyPatch:
    """Of every process that is started here, which finds the double."""
    for name, value in double.environment.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


async def handed_over(p: Node, d: Node, room: int) -> None:
    """A prompt goes from one to the other, and arrives as it was written."""
    tokens = tokens_of(200, seed=room)
    lease = await p.lease(tokens)
    write(p, lease, tokens)
    receive = await d.receive(room, tokens, "p")
    send = await p.send(room, tokens, lease=lease)
    assert (await send.finish(b"")).committed
    await receive.done()
    assert digest(p, lease.pages) == digest(d, receive.lease.pages)
    await receive.lease.release()
    await lease.release(())


def said(*words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "kvd", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


async def test_a_way_that_ucx_emulates_is_said_wherever_somebody_looks(environment, tmp_path):
    environment.setenv("NIXL_DOUBLE_SOCKETS", "emulated")
    environment.setenv("COLUMNS", "1000")
    with two_daemons(tmp_path, ON, prefill={**ON, "pool.device": "cuda:0"}) as pair:
        async with (
            kvd.client.connect(pair.prefill.client, name="prefill-engine") as p,
            kvd.client.connect(pair.decode.client, name="decode-engine") as d,
        ):
            await handed_over(p, d, 7001)
            await handed_over(p, d, 7002)
        (peer,) = pair.prefill.snapshot().peers
        assert peer.path.startswith("host to host: same-host; device to host: emulated")
        what = "device to host: emulated"
        fix = "keep the pool in host memory (no pool.device) and let engines move blocks"
        log = pair.prefill.quoted_log()
        assert log.count("slow-path") == 1
        for words in (log, peer.slow_path):
            assert what in words
            assert fix in words
        socket = ("--connect", pair.prefill.admin)
        for verb in (("status",), ("peers",), ("why", "peer", "d")):
            words = " ".join((await asyncio.to_thread(said, *verb, *socket)).split())
            assert what in words, verb
            assert fix in words, verb
        assert not pair.decode.snapshot().peers[0].slow_path, "it has sent nothing"
        assert "slow-path" not in pair.decode.quoted_log()


async def test_between_devices_that_copy_by_themselves_nothing_is_slow(environment, tmp_path):
    """In large pieces from the second handoff on, which arrive as they were written."""
    environment.setenv("NIXL_DOUBLE_SOCKETS", "emulated")
    devices = ({**ON, "pool.device": f"cuda:{number}"} for number in (1, 0))
    decode, prefill = devices
    with two_daemons(tmp_path, decode, prefill=prefill) as pair:
        async with (
            kvd.client.connect(pair.prefill.client, name="prefill-engine") as p,
            kvd.client.connect(pair.decode.client, name="decode-engine") as d,
        ):
            for room in (7003, 7004, 7005):
                await handed_over(p, d, room)
        (peer,) = pair.prefill.snapshot().peers
        assert "device to device: same-host" in peer.path
        assert not peer.slow_path
        assert "slow-path" not in pair.prefill.quoted_log()


async def saved_and_back(node: Node, seed: int) -> None:
    tokens = tokens_of(160, seed=seed)
    lease = await node.lease(tokens, cache=False)
    write(node, lease, tokens)
    before = digest(node, lease.pages)
    assert (await lease.retract()).saved_pages == 160 // PAGE
    other = await node.lease(tokens_of(160, seed=seed + 1), cache=False)
    write(node, other, tokens_of(160, seed=seed + 1))
    await lease.resume()
    assert digest(node, lease.pages) == before
    await other.release(())
    await lease.release(())


async def test_saved_memory_is_pinned_and_said_to_be(environment, tmp_path):
    with lone(tmp_path, **{"log.level": "info"}) as daemon:
        daemon.wait_ready()
        until(lambda: "pinned" in daemon.quoted_log())
        assert "kv.saved" in daemon.quoted_log()
        async with kvd.client.connect(daemon.client, name="engine") as node:
            await saved_and_back(node, 70)
        assert not daemon.snapshot().slow_path


async def test_memory_that_cannot_be_pinned_is_said_and_copied_all_the_same(environment, tmp_path):
    stages = 2 * 4 * 2**20 * (2 + max(1, min(4, len(os.sched_getaffinity(0)) - 1)))
    environment.setenv("DOUBLE_PINNABLE", str(stages))
    with lone(tmp_path) as daemon:
        daemon.wait_ready()
        until(lambda: "slow-path" in daemon.quoted_log())
        found = daemon.snapshot().slow_path
        assert "region kv.saved: 0.00 of 0.01 GiB are registered with CUDA" in found
        assert "lower pool.saved_size" in found
        async with kvd.client.connect(daemon.client, name="engine") as node:
            await saved_and_back(node, 72)


@pytest.mark.parametrize("end", ["killed", "its device breaks"])
async def test_a_process_that_ends_in_the_middle_of_a_copy_takes_the_pool_along(
    environment, tmp_path, end
):
    """Its bytes are anything, so nobody gets them: engines are told, and the daemon ends."""
    environment.setenv("DOUBLE_OUTLIVES", "1")
    if end == "killed":
        environment.setenv("DOUBLE_LATE_US", "3000000")
        environment.setenv("DOUBLE_SEED", "5")
    else:
        environment.setenv("DOUBLE_BREAKS", str(70_000))
    with lone(tmp_path) as daemon:
        daemon.wait_ready()
        memory = memory_of_devices(daemon.transfer_pid())
        async with kvd.client.connect(daemon.client, name="engine") as node:
            tokens = tokens_of(1600, seed=74)
            lease = await node.lease(tokens, cache=False)
            write(node, lease, tokens)
            retracting = asyncio.ensure_future(lease.retract())
            if end == "killed":
                await asyncio.to_thread(
                    until, lambda: daemon.snapshot().leases[0].state == "saving"
                )
                os.kill(daemon.transfer_pid(), signal.SIGKILL)
            assert await asyncio.to_thread(ended, daemon) == 1
            with pytest.raises(KvdError):
                await retracting
        why = "was killed by SIGKILL" if end == "killed" else "thread copier ended by CudaError"
        assert why in daemon.quoted_log()
        if end != "killed":
            assert "cudaErrorLaunchFailure (719)" in daemon.quoted_log()
    until(lambda: not holders(memory))


def test_a_pool_in_host_memory_loads_no_cuda_where_there_is_one(environment, tmp_path):
    with lone(tmp_path, **{"pool.device": "cpu"}) as daemon:
        daemon.wait_ready()
        for pid in (daemon.pid, daemon.transfer_pid()):
            assert "libcudart" not in Path(f"/proc/{pid}/maps").read_text()
        assert not daemon.snapshot().pinned_bytes
