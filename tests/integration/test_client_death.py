"""Engines that die by kill -9, whatever they were doing: within a second nothing is held for them.

What they had committed stays cached, the engine on the other side is told why, no page is lost.
"""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import kvd.client
from kvd.client import HandoffError
from kvd.wire import admin
from tests.support.daemons import two_daemons

SHAPE = {"pool.layers": "4", "pool.heads": "2", "pool.head_dim": "64", "pool.pages": "257"}
LIMIT_S = 1.0
SETTLE_S = 5.0

ENGINE = """
import asyncio, sys
import kvd.client

role, endpoint, seed, room = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
tokens = list(range(seed, seed + 100))

async def main():
    async with kvd.client.connect(endpoint, name="doomed") as node:
        kept = []
        if role == "waiter":
            print("about to wait", flush=True)
            kept.append(await node.receive(room, tokens, "p"))
        if role == "holder":
            for n in range(5):
                kept.append(await node.lease([t + 1000 * n for t in tokens], reserve_tokens=50))
            await kept[0].commit()
        if role == "writer":
            kept.append(await node.lease(tokens))
            await kept[0].written(70)
        if role == "receiver":
            kept.append(await node.receive(room, tokens, "p"))
        if role == "sender":
            lease = await node.lease(tokens)
            kept.append(await node.send(room, tokens, lease=lease))
            await kept[0].advance(40)
            await kept[0].accepted()
        print("ready", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""

WORKER = """
import sys, time
import kvd.client

worker = kvd.client.join(sys.argv[1], token=bytes.fromhex(sys.argv[2]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    with two_daemons(tmp_path_factory.mktemp("pair"), SHAPE) as both:
        yield both


@pytest.fixture
def engine(pair):
    """Starts engine processes; whatever is left of them is ended with the test."""
    started = []

    def start(program, *arguments, until="ready"):
        process = subprocess.Popen(
            [sys.executable, "-c", program, *map(str, arguments)], stdout=subprocess.PIPE
        )
        started.append(process)
        assert process.stdout.readline().decode().strip() == until
        return process

    yield start

    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    for daemon in (pair.prefill, pair.decode):
        daemon.wait_for(lambda one=daemon: is_at_rest(one), "still holds something", SETTLE_S)
        assert daemon.ask(admin.Audit(1), admin.Report).refused == ()


def is_at_rest(daemon):
    now = daemon.snapshot()
    return not (now.clients or now.leases or now.rooms or now.waiting)


def kill(process, daemon, is_over):
    """Kill -9; seconds until the daemon's snapshot says that it is over."""
    process.kill()
    killed_s = time.monotonic()
    daemon.wait_for(lambda: is_over(daemon.snapshot()), "still holds something", SETTLE_S)
    return time.monotonic() - killed_s


def has_no_lease(now):
    return not now.leases


async def cached_tokens(daemon, seed):
    async with kvd.client.connect(daemon.client, name="asking") as node:
        return (await node.match(list(range(seed, seed + 100)))).tokens


async def test_leases_of_a_killed_engine_are_released_and_what_it_committed_stays(pair, engine):
    holder = engine(ENGINE, "holder", pair.decode.client, 10_000, 0)
    before = pair.decode.snapshot()

    took_s = kill(holder, pair.decode, has_no_lease)

    assert [len(before.leases), before.pools[0].cached_pages] == [5, 6]
    assert took_s < LIMIT_S
    after = pair.decode.snapshot().pools[0]
    assert (after.held_pages, after.cached_pages, after.locked_pages) == (0, 6, 0)
    assert await cached_tokens(pair.decode, 10_000) == 96


async def test_what_a_killed_engine_had_said_to_be_written_stays(pair, engine):
    writer = engine(ENGINE, "writer", pair.decode.client, 15_000, 0)

    kill(writer, pair.decode, has_no_lease)

    assert await cached_tokens(pair.decode, 15_000) == 64


async def test_prefill_engine_is_told_when_the_receiving_engine_is_killed(pair, engine):
    """scenario A26: the pages are quarantined until the writer settles, then free."""
    receiver = engine(ENGINE, "receiver", pair.decode.client, 20_000, 21)
    tokens = list(range(20_000, 20_100))
    async with kvd.client.connect(pair.prefill.client, name="prefill-engine") as p:
        lease = await p.lease(tokens)
        send = await p.send(21, tokens, lease=lease)
        await send.accepted()
        await send.advance(40)

        took_s = kill(receiver, pair.decode, has_no_lease)
        outcome = await send.finish()

        assert took_s < LIMIT_S
        assert not outcome.committed
        assert outcome.reason is not None
        assert "client-gone" in outcome.reason.message
        await lease.release(())
    assert await cached_tokens(pair.prefill, 20_000) == 96
    assert await cached_tokens(pair.decode, 20_000) == 0


async def test_decode_engine_is_told_when_the_sending_engine_is_killed(pair, engine):
    """scenario B11: at once, not when a deadline passes; what came is not cached."""
    tokens = list(range(30_000, 30_100))
    async with kvd.client.connect(pair.decode.client, name="decode-engine") as d:
        receive = await d.receive(31, tokens, "p")
        sender = engine(ENGINE, "sender", pair.prefill.client, 30_000, 31)

        took_s = kill(sender, pair.prefill, has_no_lease)
        killed_s = time.monotonic()
        with pytest.raises(HandoffError) as told:
            await receive.done()

        assert (took_s < LIMIT_S, time.monotonic() - killed_s < LIMIT_S) == (True, True)
        assert told.value.code == "client-gone"
        assert "doomed" in str(told.value)
        assert not pair.decode.snapshot().leases
    assert await cached_tokens(pair.decode, 30_000) == 0


async def test_waiting_request_of_a_killed_engine_leaves_the_queue(pair, engine):
    """The next in the queue is admitted, not kept waiting behind a dead one."""
    everything = 16 * 256
    async with kvd.client.connect(pair.decode.client, name="holder") as d:
        all_pages = await d.lease(list(range(everything)), cache=False)
        waiting = engine(ENGINE, "waiter", pair.decode.client, 40_000, 41, until="about to wait")
        pair.decode.wait_for(
            lambda: bool(pair.decode.snapshot().waiting), "has nobody waiting", SETTLE_S
        )

        took_s = kill(waiting, pair.decode, lambda now: not now.waiting and len(now.clients) == 1)

        assert took_s < LIMIT_S
        await all_pages.release()


async def test_session_outlives_its_first_process_while_a_worker_maps_the_pool(pair, engine):
    """Product: when the *last* process of a session has died, its leases are released."""
    async with kvd.client.connect(pair.decode.client, name="tp") as node:
        lease = await node.lease(list(range(50_000, 50_100)))
        worker = engine(WORKER, pair.decode.client, node.token.hex())
        [session] = pair.decode.snapshot().clients
    async with kvd.client.connect(pair.decode.client, name="later"):
        pass  # whoever attaches later is served after the hang-up was seen
    held = [one.id for one in pair.decode.snapshot().leases]

    took_s = kill(worker, pair.decode, has_no_lease)

    assert len(session.pids) == 2
    assert held == [lease.id]
    assert took_s < LIMIT_S
