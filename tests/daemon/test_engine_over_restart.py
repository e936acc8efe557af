"""kill -9 of a real daemon under engines that run on: they go on by themselves, or say why not."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import kvd.client
from kvd.client import KvdError
from tests.daemon.kv import PAGE, SHAPE, digest, tokens_of, write
from tests.support.daemons import Daemon

PAGES = 257
JOURNAL_WORDS_AT = 4096
PROVEN = np.uint64(63)
"""The bit of a page's word in the journal that says: its content is proven."""


@pytest.fixture
def memory():
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
def kept(tmp_path, memory):
    """A daemon whose pool outlives it."""
    own = {"pool.backing": "shm", "pool.directory": str(memory)}
    daemon = Daemon("solo", tmp_path, {**SHAPE, **own})
    daemon.start()
    daemon.wait_ready()
    yield daemon
    daemon.stop()


@pytest.fixture
def fleeting(tmp_path):
    """A daemon whose pool ends with it."""
    daemon = Daemon("solo", tmp_path, SHAPE)
    daemon.start()
    daemon.wait_ready()
    yield daemon
    daemon.stop()


def crash(daemon: Daemon) -> None:
    """SIGKILL, and the next one at once."""
    daemon.kill()
    daemon.start()


def all_proven(daemon: Daemon, memory: Path, pages: int) -> None:
    """Wait until the journal proves so many pages."""

    def is_so() -> bool:
        words = np.fromfile(memory / "kvd.journal", np.uint64, PAGES, offset=JOURNAL_WORDS_AT)
        return np.count_nonzero(words >> PROVEN) == pages

    daemon.wait_for(is_so, f"has not proven {pages} pages", 10.0)


async def test_an_engine_goes_on_over_a_killed_daemon_with_its_cache_and_its_lease(kept, memory):
    """No code of the engine: the same node, the same mapping, the same hit rate."""
    prompt, running = tokens_of(20 * PAGE, seed=1), tokens_of(4 * PAGE, seed=2)
    connecting = kvd.client.connect(
        kept.client, name="decode-0", kind="decodes 1.2", return_within_s=30
    )
    async with connecting as node:
        assert kept.snapshot().clients[0].kind == "decodes 1.2"
        lease = await node.lease(prompt)
        write(node, lease, prompt)
        pages, written = lease.pages.copy(), digest(node, lease.pages)
        await lease.release(())
        held = await node.lease(running, reserve_tokens=PAGE)
        write(node, held, running)
        mine, k = digest(node, held.pages), node.pool("main").layer(0)[0]
        session, incarnation = node.session, node.incarnation
        all_proven(kept, memory, 20)

        await asyncio.to_thread(crash, kept)

        assert (await node.match(prompt)).tokens == len(prompt)
        assert node.incarnation != incarnation
        assert node.session == session
        assert node.pool("main").layer(0)[0].data_ptr() == k.data_ptr()
        again = await node.lease(prompt)
        assert (again.prefix_len, again.pages.tolist()) == (len(prompt), pages.tolist())
        assert digest(node, again.pages) == written
        with pytest.raises(KvdError, match=r"^before-restart: "):
            await held.commit()
        assert digest(node, held.pages) == mine
        assert not set(held.pages.tolist()) & set((await node.lease(running)).pages.tolist())

        await held.release()

        (state,) = kept.snapshot().pools
        assert state.held_pages == 4
        assert kept.snapshot().clients[0].kind == "decodes 1.2"
    kept.wait_for(lambda: not kept.snapshot().clients, "still has its session", 5.0)


async def test_a_worker_and_its_session_come_back_together(kept):
    node = await kvd.client.connect(kept.client, name="tp-0", return_within_s=30)
    worker = kvd.client.join(kept.client, token=node.token)
    k, _ = worker.pool("main").layer(0)
    k[1].fill_(2.5)
    lease = await node.lease([1] * PAGE)
    order = lease.key
    assert worker.owns(order)

    await asyncio.to_thread(crash, kept)
    assert not worker.owns(order)

    await node.match([1])
    kept.wait_for(lambda: worker.owns(lease.key), "has no worker", 5.0)
    assert worker.end is None
    with pytest.raises(KvdError, match=r"^before-restart: this order is for lease"):
        worker.check(order)
    assert float(node.pool("main").layer(0)[0][1].sum()) == 2.5 * k[1].numel()
    worker.close()
    await node.close()


async def test_an_engine_that_died_with_its_daemon_holds_nothing_after_the_restart(kept):
    lease = "import sys, kvd.client; n = kvd.client.connect_sync(sys.argv[1], name='doomed'); "
    program = lease + "n.lease(list(range(100)), cache=False); print('here', flush=True); input()"
    doomed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", program, kept.client), stdin=-1, stdout=-1
    )
    assert await doomed.stdout.readline() == b"here\n"
    kept.kill()
    doomed.kill()
    await doomed.wait()

    kept.start()
    await asyncio.to_thread(kept.wait_ready)

    kept.wait_for(lambda: not kept.snapshot().leases, "still holds its lease", 5.0)
    assert kept.snapshot().pools[0].held_pages == 0


async def test_a_pool_that_ended_with_its_daemon_ends_the_node_and_a_new_one_works(fleeting):
    async with kvd.client.connect(fleeting.client, name="decode-0", return_within_s=30) as node:
        lease = await node.lease(tokens_of(PAGE, seed=3))
        await asyncio.to_thread(crash, fleeting)

        with pytest.raises(KvdError, match=r"^pool-changed: .* connect anew"):
            await node.match([1])
        with pytest.raises(KvdError, match=r"^pool-changed: the session of lease 1 is over"):
            _ = lease.pages
        assert node.end is not None
        await lease.release()
    async with kvd.client.connect(fleeting.client, name="decode-0") as node:
        assert (await node.match(tokens_of(PAGE, seed=3))).tokens == 0


async def test_a_rank_speaks_again_after_a_restart_and_others_join_by_the_key(kept):
    node = await kvd.client.connect(kept.client, name="tp", return_within_s=30, key="tp")
    worker = kvd.client.join(kept.client, key="tp", rank=0, ranks=2)
    lease = await node.lease(list(range(100)), cache=False)
    worker.written(lease.id, 32)

    before = worker._attachment.attached.incarnation
    kept.kill()
    # Killed with what it was asked: it had answered all of that.
    with pytest.raises(KvdError, match=r"^unreachable: "):
        worker.written(lease.id, 32)
    kept.start()
    await asyncio.to_thread(kept.wait_ready)

    await node.match([1])
    kept.wait_for(lambda: worker._attachment.attached.incarnation != before, "has no worker", 5.0)
    other = await asyncio.to_thread(kvd.client.join, kept.client, key="tp", rank=1, ranks=2)
    again = await node.lease(list(range(100)), cache=False)
    worker.written(again.id, 64)
    other.written(again.id, 48)

    found = {one.id: one.written_tokens for one in kept.snapshot().leases}
    assert found[again.id] == 48
    for one in (worker, other):
        one.close()
    await node.close()


async def test_a_node_that_is_closed_before_it_is_back_holds_nothing(kept):
    sync = kvd.client.connect_sync(kept.client, name="sync", on_unreachable="miss")
    node = await kvd.client.connect(kept.client, name="loop")
    sync.lease(tokens_of(100, seed=1))
    await node.lease(tokens_of(100, seed=2))
    crash(kept)
    kept.wait_ready()

    sync.close()
    await node.close()
    kept.wait_for(lambda: not kept.snapshot().leases, "leases of closed nodes are held", 10)


async def test_a_node_that_is_closed_while_no_daemon_is_there_holds_nothing_of_the_next(kept):
    sync = kvd.client.connect_sync(kept.client, name="sync", on_unreachable="miss")
    node = await kvd.client.connect(kept.client, name="loop")
    sync.lease(tokens_of(100, seed=1))
    await node.lease(tokens_of(100, seed=2))
    kept.kill()

    sync.close()
    await node.close()
    kept.start()
    kept.wait_ready()
    kept.wait_for(lambda: not kept.snapshot().leases, "leases of closed nodes are held", 10)
