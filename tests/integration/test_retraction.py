"""A running lease gives its pages to others and comes back: every byte is as it was.

scenario A34, with a real daemon and its real transfer process, for both orders of memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import kvd.client
from kvd.client import KvdError
from kvd.wire import admin
from tests.support.daemons import one_daemon

PAGE = 16
LAYERS = 2
POOL = 23
PAGE_BYTES = LAYERS * 2 * 2 * 16 * 2 * PAGE
SETTINGS = {
    "pool.layers": str(LAYERS),
    "pool.heads": "2",
    "pool.head_dim": "16",
    "pool.pages": str(POOL + 1),
    "pool.saved_size": "64KiB",
}
SAVED = 64 * 1024 // PAGE_BYTES - 1
PROMPT = list(range(1, 101))
OUTPUT = list(range(5000, 5029))
"""29 of 30 output tokens have KV: 129 tokens in all, and the last of 9 pages holds one."""
SETTLE_S = 10.0
DEATH_S = 1.0

DOOMED = """
import asyncio, sys
import kvd.client

async def main():
    async with kvd.client.connect(sys.argv[1], name="doomed") as node:
        lease = await node.lease(list(range(900, 1000)))
        print("leased", flush=True)
        await lease.retract()
        print("retracted", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture(scope="module", params=["page_first", "layer_first"])
def daemon(request, tmp_path_factory):
    settings = {**SETTINGS, "pool.order": request.param}
    with one_daemon(tmp_path_factory.mktemp(request.param), settings) as own:
        yield own


@pytest.fixture
def engine(daemon):
    """Starts an engine process that is ended with the test."""
    started = []

    def start(until):
        process = subprocess.Popen(
            [sys.executable, "-c", DOOMED, daemon.client], stdout=subprocess.PIPE
        )
        started.append(process)
        while process.stdout.readline().decode().strip() != until:
            assert process.poll() is None
        return process

    yield start

    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture(autouse=True)
def at_rest(daemon):
    """Every test leaves nothing behind, and no invariant broken."""
    yield
    daemon.wait_for(lambda: not daemon.snapshot().leases, "still holds something", SETTLE_S)
    assert daemon.ask(admin.Audit(1), admin.Report).refused == ()
    daemon.ask(admin.Flush(1), admin.Report)
    pool = daemon.snapshot().pools[0]
    assert (pool.free_pages, pool.saved_pages) == (POOL, 0)


@contextlib.contextmanager
def suspended(daemon):
    """The transfer process does nothing meanwhile, so a copy is under way for as long as it takes.

    It may be killed inside the block.
    """
    pid = daemon.transfer_pid()
    os.kill(pid, signal.SIGSTOP)
    yield pid
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def tensors(node):
    pool = node.pool("main")
    return [part for layer in range(LAYERS) for part in pool.layer(layer)]


def scribble(node, pages, seed):
    """Random bytes over everything these pages hold."""
    source = np.random.default_rng(seed)
    for part in tensors(node):
        for page in map(int, pages):
            raw = source.integers(0, 256, part[page].numel() * 2, dtype=np.uint8)
            part[page] = torch.from_numpy(raw).view(torch.bfloat16).view(part[page].shape)


def bytes_of(node, pages):
    """What each of these pages holds, in their order."""
    return [
        b"".join(part[page].view(torch.uint8).numpy().tobytes() for part in tensors(node))
        for page in map(int, pages)
    ]


async def until(is_so):
    """Look until ``is_so``, while what this process has asked for goes on."""
    deadline_s = time.monotonic() + SETTLE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.002)


async def running(node):
    """A lease with KV of 129 tokens, 64 of them cached by others in two nodes of the tree."""
    for seed, upto in enumerate((32, 64)):
        before = await node.lease(PROMPT[:upto])
        scribble(node, before.pages[before.prefix_len // PAGE :], seed)
        await before.release(())
    lease = await node.lease(PROMPT, reserve_tokens=30)
    assert lease.prefix_len == 64
    scribble(node, lease.pages[4:], 7)
    return lease


async def take_pool(node, n_pages):
    """Others run: so many pages are held and overwritten, whatever was cached there."""
    lease = await node.lease(list(range(20_000, 20_000 + n_pages * PAGE)), cache=False)
    scribble(node, lease.pages, 99)
    await lease.release()


async def test_kv_comes_back_byte_for_byte_when_others_had_the_pages_meanwhile(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        was = bytes_of(node, lease.pages)
        before = daemon.snapshot().totals

        kept = await lease.retract(OUTPUT)
        assert kept == kvd.client.Retraction(9, 9 * PAGE_BYTES)
        away = daemon.snapshot()
        assert (away.pools[0].held_pages, away.pools[0].saved_pages) == (0, 9)
        assert [(one.state, one.owner, one.saved_pages) for one in away.leases] == [
            ("retracted", "decode-0", 9)
        ]
        await take_pool(node, POOL - 2)  # 2 pages of the prefix give way, and 2 stay

        back = await lease.resume()
        assert back == kvd.client.Resumption(prefix_len=32, restored_tokens=97, kv_len=129)
        assert (lease.prefix_len, lease.kv_len, len(lease.pages)) == (32, 129, 9)
        assert bytes_of(node, lease.pages) == was
        after = daemon.snapshot().totals
        assert after.restored_bytes - before.restored_bytes == 7 * PAGE_BYTES
        assert after.spared_bytes - before.spared_bytes == 2 * PAGE_BYTES
        await lease.release()


async def test_nothing_of_a_prefix_that_is_still_cached_is_restored(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        was = bytes_of(node, lease.pages)
        before = daemon.snapshot().totals

        await lease.retract(OUTPUT)
        back = await lease.resume()

        assert back == kvd.client.Resumption(prefix_len=64, restored_tokens=65, kv_len=129)
        assert bytes_of(node, lease.pages) == was
        after = daemon.snapshot().totals
        assert after.restored_bytes - before.restored_bytes == 5 * PAGE_BYTES
        assert after.spared_bytes - before.spared_bytes == 4 * PAGE_BYTES
        await lease.commit([5029])
        assert (await node.match([*PROMPT, *OUTPUT])).tokens == 128
        await lease.release()


async def test_without_the_bytes_kv_ends_where_the_cache_does(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)

        assert await lease.retract(OUTPUT, keep="nothing") == kvd.client.Retraction(0, 0)
        back = await lease.resume()

        assert back == kvd.client.Resumption(prefix_len=64, restored_tokens=0, kv_len=64)
        assert len(lease.pages) == 9
        await lease.release()


async def test_a_new_request_waits_behind_a_lease_that_resumes(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        await lease.retract(OUTPUT)
        held = await node.lease(list(range(20_000, 20_000 + (POOL - 3) * PAGE)), cache=False)

        resuming = asyncio.create_task(lease.resume())
        waits = asyncio.create_task(node.lease([1, 2, 3], priority=9))
        await until(lambda: len(daemon.snapshot().waiting) == 2)
        assert [one.kind for one in daemon.snapshot().waiting] == ["resume", "lease"]

        await held.release()
        assert (await resuming).kv_len == 129
        for one in (await waits, lease):
            await one.release()


async def test_a_full_saved_area_refuses_with_the_numbers_and_the_lease_runs_on(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        first = await node.lease(list(range(100, 100 + 10 * PAGE)))
        await first.retract()
        second = await node.lease(list(range(300, 300 + 10 * PAGE)))

        with pytest.raises(KvdError) as refused:
            await second.retract()

        assert refused.value.code == "no-room"
        assert refused.value.numbers == {"needed_pages": 10, "free_pages": SAVED - 10}
        assert "of decode-0" in str(refused.value)
        assert len(second.pages) == 10
        await first.release()
        await second.retract()
        await second.release()


async def test_a_transfer_process_that_dies_while_it_saves_leaves_the_lease_running(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        was = bytes_of(node, lease.pages)

        with suspended(daemon) as pid:
            saving = asyncio.create_task(lease.retract(OUTPUT))
            await until(lambda: daemon.snapshot().leases[0].state == "saving")
            with pytest.raises(KvdError, match="is saving"):
                await lease.commit()
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(KvdError) as cut:
                await saving

        assert cut.value.code == "aborted"
        assert bytes_of(node, lease.pages) == was
        await until(lambda: daemon.snapshot().state == "serving")
        await lease.retract(OUTPUT)
        await lease.resume()
        assert bytes_of(node, lease.pages) == was
        await lease.release()


async def test_a_transfer_process_that_dies_while_it_restores_is_followed_by_one_that_does(daemon):
    async with kvd.client.connect(daemon.client, name="decode-0") as node:
        lease = await running(node)
        was = bytes_of(node, lease.pages)
        await lease.retract(OUTPUT)
        await take_pool(node, POOL)

        with suspended(daemon) as pid:
            resuming = asyncio.create_task(lease.resume())
            await until(lambda: daemon.snapshot().leases[0].state == "restoring")
            os.kill(pid, signal.SIGKILL)
            back = await resuming

        assert back == kvd.client.Resumption(prefix_len=0, restored_tokens=129, kv_len=129)
        assert bytes_of(node, lease.pages) == was
        await lease.release()


def test_what_is_saved_of_a_killed_engine_is_free_within_a_second(daemon, engine):
    doomed = engine("retracted")
    assert daemon.snapshot().pools[0].saved_pages == 7

    doomed.kill()
    killed_s = time.monotonic()
    daemon.wait_for(lambda: not daemon.snapshot().leases, "still holds something", SETTLE_S)

    assert time.monotonic() - killed_s < DEATH_S
    assert daemon.snapshot().pools[0].saved_pages == 0


def test_pages_of_a_killed_engine_are_kept_until_the_copy_that_reads_them_is_over(daemon, engine):
    with suspended(daemon):
        doomed = engine("leased")
        daemon.wait_for(
            lambda: [one.state for one in daemon.snapshot().leases] == ["saving"],
            "is not saving",
            SETTLE_S,
        )

        doomed.kill()
        daemon.wait_for(lambda: not daemon.snapshot().clients, "knows the dead", SETTLE_S)

        now = daemon.snapshot()
        assert [(one.state, one.holders) for one in now.leases] == [("saving", ("save",))]
        assert (now.pools[0].held_pages, now.pools[0].saved_pages) == (7, 7)
