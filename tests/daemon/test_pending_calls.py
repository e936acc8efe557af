"""Schedulers over real daemons: calls are begun and polled, nothing blocks, nothing stays held."""

from __future__ import annotations

import select
import statistics
import tempfile
import time

import pytest

import kvd.client
from kvd.client import KvdError, Matched
from tests.daemon.conftest import until
from tests.daemon.kv import SHAPE, digest, tokens_of, write
from tests.support.daemons import Daemon

STEP_S = 0.002
"""What a scheduler computes between two looks."""


class Decoding:
    """One request of a decode scheduler: what it waits for now."""

    def __init__(self, node, room, tokens) -> None:
        self.tokens = tokens
        self.receiving = node.begin_receive(room, tokens, "p", reserve_tokens=8)
        self.receive = None
        self.lease = None
        self.releasing = None

    def look(self) -> bool:
        """Go on as far as it is possible now; whether it is over."""
        if self.receive is None:
            self.receive = self.receiving.poll()
        elif self.lease is None:
            self.lease = self.receive.poll()
        elif self.releasing is None:
            self.releasing = self.lease.begin_release(())
        else:
            return self.releasing.poll() is not None
        return False


def test_a_scheduler_serves_many_handoffs_and_blocks_for_none_of_them(nodes, pair):
    p, d = nodes
    prompts = {2_000_000 + n: tokens_of(100 + 16 * n, seed=500 + n) for n in range(8)}
    leases = {}
    for room, tokens in prompts.items():
        leases[room] = p.lease(tokens)
        write(p.wrapped, leases[room].wrapped, tokens)
    decoding = {room: Decoding(d, room, tokens) for room, tokens in prompts.items()}
    handing = {
        room: p.begin_hand_over(room, lease=lease, aux=b"%d" % room, to="d")
        for room, lease in leases.items()
    }

    looks_s = []
    end_s = time.monotonic() + 20
    waiting = dict(decoding)
    while waiting or not all(call.is_done for call in handing.values()):
        assert time.monotonic() < end_s, "handoffs take a moment"
        began_s = time.perf_counter()
        p.pump()
        d.pump()
        for room, request in list(waiting.items()):
            if request.look():
                del waiting[room]
            elif request.lease is not None and request.releasing is None:
                assert request.receive.aux == b"%d" % room
                mine, theirs = leases[room].pages, request.lease.pages[: len(leases[room].pages)]
                assert digest(p.wrapped, mine) == digest(d.wrapped, theirs)
        looks_s.append(time.perf_counter() - began_s)
        time.sleep(STEP_S)

    assert all(call.result().committed for call in handing.values())
    for lease in leases.values():
        lease.release()
    assert statistics.median(looks_s) < 0.05


def test_a_lease_that_is_cancelled_while_it_waits_for_room_holds_nothing(nodes, pair):
    _, d = nodes
    pages = pair.decode.snapshot().pools[0].total_pages - 1
    everything = d.lease([1], reserve_tokens=16 * (pages - 1))
    waiting = d.begin_lease(tokens_of(40, seed=9))
    until(lambda: not d.pump() and pair.decode.snapshot().waiting)

    assert waiting.cancel()
    until(lambda: not d.pump() and not pair.decode.snapshot().waiting)

    everything.release()
    until(lambda: not pair.decode.snapshot().leases)


def test_leases_that_are_cancelled_as_they_come_go_back(nodes, pair):
    _, d = nodes
    calls = [d.begin_lease(tokens_of(40, seed=n)) for n in range(50)]
    for call in calls[::2]:
        call.cancel()
    d.pump()
    for call in calls[1::2]:
        assert call.cancel()

    until(lambda: not d.pump() and not pair.decode.snapshot().leases)


def test_a_scheduler_sleeps_on_the_descriptor(nodes):
    _, d = nodes
    ready = select.poll()
    ready.register(d, select.POLLIN)
    call = d.begin_match(tokens_of(40, seed=1))
    ended = []
    while not ended:
        assert ready.poll(5_000)
        ended = d.pump()

    assert ended == [call]
    assert call.result().tokens == 0
    assert not ready.poll(0)


@pytest.fixture
def kept(tmp_path):
    """A daemon whose pool outlives it."""
    with tempfile.TemporaryDirectory(prefix="kvd-test-", dir="/dev/shm") as memory:
        own = {"pool.backing": "shm", "pool.directory": memory}
        daemon = Daemon("solo", tmp_path, {**SHAPE, **own})
        daemon.start()
        daemon.wait_ready()
        yield daemon
        daemon.stop()


def test_a_scheduler_goes_on_without_its_daemon_and_with_the_next_one(kept):
    tokens = tokens_of(64, seed=3)
    with kvd.client.connect_sync(kept.client, name="s", on_unreachable="miss") as node:
        held = node.lease(tokens)
        kept.kill()
        until(lambda: node.match(tokens) == Matched(0, 0, 0) and node.is_away)
        took_s = []
        for _ in range(200):
            began_s = time.perf_counter()
            node.match(tokens)
            took_s.append(time.perf_counter() - began_s)
        with pytest.raises(KvdError, match=r"^unreachable"):
            node.lease(tokens)
        assert statistics.median(took_s) < 0.001

        kept.start()
        until(lambda: not node.pump() and not node.is_away)

        assert kept.snapshot().leases[0].id == held.id
        held.release()
        lease = node.lease(tokens)
        assert lease.pages.size == 4
        lease.release()
        until(lambda: not kept.snapshot().leases)
