"""Tensor-parallel ranks at real daemons: there before their engine is, and heard."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time

import pytest

import kvd.client
from kvd.client import HandoffError, KvdError
from tests.daemon.kv import digest, tokens_of, write

_keys = itertools.count(1)

RANK = """
import sys
import kvd.client

endpoint, key, rank, ranks = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
worker = kvd.client.join(endpoint, key=key, wait_s=30, rank=rank, ranks=ranks)
print(worker.session, flush=True)
for line in sys.stdin:
    lease, upto = map(int, line.split())
    worker.written(lease, upto)
    print("said", flush=True)
"""


@pytest.fixture
def key():
    return f"engine {next(_keys)}"


@pytest.fixture
def ranks(pair, key):
    """Two processes that join by the key; they are started before anybody connects with it."""
    found = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, pair.prefill.client, key, str(rank), "2"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    yield found
    for one in found:
        one.kill()
        one.wait()
        one.stdin.close()
        one.stdout.close()


def say(rank, lease, upto):
    """That process says so; what it answers."""
    rank.stdin.write(f"{lease.id} {upto}\n")
    rank.stdin.flush()
    assert rank.stdout.readline() == "said\n"


async def test_ranks_are_there_first_and_their_words_alone_move_a_handoff(engines, ranks, key):
    tokens = tokens_of(320, seed=31)
    node = await kvd.client.connect(engines.pair.prefill.client, name="tp", key=key)
    for rank in ranks:
        line = await asyncio.to_thread(rank.stdout.readline)
        assert int(line) == node.session
    room = engines.room()
    receive = await engines.d.receive(room, tokens, "p")
    lease = await node.lease(tokens)
    send = await node.send(room, tokens, lease=lease)
    await send.accepted()
    write(node, lease, tokens)

    seen = []
    for which, upto in ((0, 320), (1, 100), (1, 200)):
        await asyncio.to_thread(say, ranks[which], lease, upto)
        await asyncio.sleep(0.05)
        (room_now,) = engines.pair.prefill.snapshot().rooms
        seen.append(room_now.posted_pages)
    await asyncio.to_thread(say, ranks[1], lease, 320)
    outcome = await send.finish()
    await receive.done()

    assert seen == [0, 6, 12]
    assert outcome.committed
    assert digest(engines.d, receive.lease.pages) == digest(node, lease.pages)
    await receive.lease.release(())
    await node.close()


async def test_a_killed_rank_ends_the_sends_that_wait_for_it_and_nothing_else(engines, ranks, key):
    tokens = tokens_of(320, seed=32)
    node = await kvd.client.connect(engines.pair.prefill.client, name="tp", key=key)
    for rank in ranks:
        await asyncio.to_thread(rank.stdout.readline)
    rooms = [engines.room(), engines.room()]
    receives = [await engines.d.receive(room, tokens, "p") for room in rooms]
    leases = [await node.lease(tokens) for _ in rooms]
    sends = [
        await node.send(room, tokens, lease=lease)
        for room, lease in zip(rooms, leases, strict=True)
    ]
    write(node, leases[0], tokens, upto=160)
    await asyncio.to_thread(say, ranks[0], leases[0], 320)
    await asyncio.to_thread(say, ranks[1], leases[0], 160)

    ranks[1].kill()
    started_s = time.monotonic()
    with pytest.raises(HandoffError, match=r"client-gone: rank 1 of 2 of tp .* is gone"):
        await receives[0].done()

    assert time.monotonic() - started_s < 2
    with pytest.raises(HandoffError, match="it had written 160 of the 320 tokens"):
        await sends[0].advance(320)
    # Of the other nobody has said anything: its engine speaks for all ranks.
    write(node, leases[1], tokens)
    assert (await sends[1].finish()).committed
    await receives[1].done()
    await leases[0].release()
    assert (await node.match(tokens)).tokens == 160
    await receives[1].lease.release(())
    await node.close()


async def test_a_lease_outlives_the_engine_that_opened_it_and_ends_with_the_last_rank(
    engines, ranks, key
):
    daemon = engines.pair.prefill
    doomed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c"),
        "import sys, kvd.client; n = kvd.client.connect_sync(sys.argv[1], name='doomed', "
        "key=sys.argv[2]); print(n.lease(list(range(100)), cache=False).id, flush=True); input()",
        *(daemon.client, key),
        stdin=-1,
        stdout=-1,
    )
    number = int(await doomed.stdout.readline())
    for rank in ranks:
        await asyncio.to_thread(rank.stdout.readline)

    doomed.kill()
    await doomed.wait()
    await asyncio.sleep(0.5)
    assert number in {one.id for one in daemon.snapshot().leases}
    for rank in ranks:
        rank.kill()

    daemon.wait_for(lambda: not daemon.snapshot().leases, "still holds its lease", 2.0)


def test_a_wait_for_an_engine_that_does_not_come_ends(pair, key):
    started_s = time.monotonic()
    with pytest.raises(KvdError) as raised:
        kvd.client.join(pair.prefill.client, key=key, wait_s=0.2)

    assert 0.15 < time.monotonic() - started_s < 2
    assert raised.value.code == "deadline"
    assert raised.value.refusal.numbers["wait_s"] == 0.2


def test_two_engines_do_not_share_a_key(pair, key):
    with kvd.client.connect_sync(pair.prefill.client, name="first", key=key) as first:
        with pytest.raises(KvdError, match=r"wrong-state: the key .* is of session") as raised:
            kvd.client.connect_sync(pair.prefill.client, name="second", key=key)
        assert raised.value.refusal.numbers["session"] == first.session
    with kvd.client.connect_sync(pair.prefill.client, name="second", key=key) as second:
        assert second.session != first.session


# ---- one process ---------------------------------------------------------------------------------


@pytest.fixture
def session(pair, key):
    """An engine, and the ranks 0 and 1 of it, all in this process."""
    with kvd.client.connect_sync(pair.prefill.client, name="tp", key=key) as node:
        joined = [
            kvd.client.join(pair.prefill.client, key=key, rank=rank, ranks=2) for rank in (0, 1)
        ]
        yield node, joined
        for worker in joined:
            worker.close()


def test_the_least_of_the_ranks_is_shared(session):
    node, workers = session
    tokens = tokens_of(100, seed=33)
    lease = node.lease(tokens)

    workers[0].written(lease.id, 100)
    workers[1].written(lease.id, 40)
    lease.release(())

    assert node.match(tokens).tokens == 32


def test_bad_words_are_refused_with_numbers_and_change_nothing(session, pair, key):
    node, workers = session
    lease = node.lease(tokens_of(100, seed=34), cache=False)
    workers[0].written(lease.id, 50)
    with kvd.client.connect_sync(pair.prefill.client, name="another") as other:
        theirs = other.lease(tokens_of(20, seed=35), cache=False)
        for upto, number, code in (
            (49, lease.id, "bad-request"),
            (113, lease.id, "bad-request"),
            (-1, lease.id, "bad-request"),
            (1, theirs.id, "unknown-lease"),
            (1, 10**9, "unknown-lease"),
        ):
            with pytest.raises(KvdError) as raised:
                workers[0].written(number, upto)
            assert raised.value.code == code
            assert raised.value.refusal.numbers
        theirs.release()
    with pytest.raises(KvdError, match="bad-request: an event of 3 bytes"):
        workers[0].written(lease.id, 60, after=b"abc")
    with (
        kvd.client.join(pair.prefill.client, key=key) as silent,
        pytest.raises(KvdError, match=r"wrong-state: pid .* as no rank of it"),
    ):
        silent.written(lease.id, 60)

    workers[0].written(lease.id, 50)
    lease.release()


@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (0, 3), (2, 2)])
def test_a_rank_that_cannot_be_does_not_join(session, pair, key, rank, ranks):
    assert session
    with pytest.raises(KvdError) as raised:
        kvd.client.join(pair.prefill.client, key=key, rank=rank, ranks=ranks)
    assert raised.value.code in {"wrong-state", "bad-request"}
    assert raised.value.refusal.numbers


async def test_a_word_can_be_awaited_and_polled(engines, key):
    node = await kvd.client.connect(engines.pair.prefill.client, name="tp", key=key)
    worker = await asyncio.to_thread(
        kvd.client.join, engines.pair.prefill.client, key=key, rank=0, ranks=1
    )
    lease = await node.lease(tokens_of(320, seed=36), cache=False)

    await asyncio.gather(*[worker.begin_written(lease.id, upto) for upto in range(1, 101)])
    pending = worker.begin_written(lease.id, 120)
    for _ in range(5000):
        if pending.poll():
            break
        await asyncio.sleep(0.001)
    pending.result(0.0)
    with pytest.raises(KvdError, match="and said 120 before"):
        await worker.begin_written(lease.id, 100)

    found = engines.pair.prefill.snapshot().leases
    assert [one.written_tokens for one in found if one.id == lease.id] == [120]
    worker.close()
    with pytest.raises(KvdError, match="this worker was closed"):
        worker.written(lease.id, 200)
    await node.close()


async def test_threads_and_loops_speak_side_by_side(engines, key):
    """Each hears the answer to its own word, whoever reads it."""
    node = await kvd.client.connect(engines.pair.prefill.client, name="tp", key=key)
    worker = await asyncio.to_thread(
        kvd.client.join, engines.pair.prefill.client, key=key, rank=0, ranks=1
    )
    leases = [await node.lease(tokens_of(320, seed=40 + n), cache=False) for n in range(4)]
    refused = []

    def speak(lease):
        for upto in range(1, 200):
            worker.written(lease.id, upto)
            try:
                worker.written(lease.id, upto - 1)
            except KvdError as error:
                refused.append(error.refusal.numbers["upto_tokens"] == upto - 1)

    threads = [threading.Thread(target=speak, args=(lease,)) for lease in leases[:3]]
    for thread in threads:
        thread.start()
    for upto in range(1, 200):
        await worker.begin_written(leases[3].id, upto)
    for thread in threads:
        await asyncio.to_thread(thread.join)

    assert refused == [True] * 3 * 199
    await asyncio.to_thread(worker.close)
    await node.close()
