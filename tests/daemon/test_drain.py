"""Draining and stopping real daemons under load: whoever waits hears, nobody hangs."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import signal
import time

import pytest

import kvd.client
from kvd.client import KvdError
from kvd.wire import admin
from tests.daemon.conftest import until
from tests.daemon.kv import SHAPE, digest, tokens_of, write
from tests.daemon.test_two_daemons import hand_over
from tests.support.daemons import one_daemon, two_daemons

QUICK = {**SHAPE, "admission.drain_s": "1"}


@pytest.fixture
def both(tmp_path):
    with two_daemons(tmp_path, QUICK) as pair:
        yield pair


def engine_of(daemon):
    return kvd.client.connect(daemon.client, name=f"engine of {daemon.name}")


def get(daemon, path):
    link = http.client.HTTPConnection("127.0.0.1", daemon.http_port, timeout=5)
    with contextlib.closing(link):
        link.request("GET", path)
        answer = link.getresponse()
        return answer.status, answer.read().decode()


async def half_done(p, d, room, tokens):
    """A handoff that both sides have joined; its engine computes still."""
    lease = await p.lease(tokens)
    write(p, lease, tokens, upto=16)
    receive = await d.receive(room, tokens, "p")
    send = await p.send(room, tokens, lease=lease)
    await send.accepted()
    await send.advance(16)
    return lease, receive, send


async def code_of(call):
    with pytest.raises(KvdError) as raised:
        await asyncio.wait_for(call, 5.0)
    return raised.value.code


def status_of(daemon):
    """Its exit status, once it has ended."""
    daemon._process.wait(10.0)
    return daemon._process.returncode


async def test_a_drained_node_ends_what_runs_refuses_what_is_new_and_serves_again(both):
    p, d = both.prefill, both.decode
    async with engine_of(p) as ours, engine_of(d) as theirs:
        tokens = tokens_of(64, seed=1)
        lease, receive, send = await half_done(ours, theirs, 1, tokens)
        kept = await ours.lease(tokens_of(20, seed=2))

        report = p.ask(admin.Drain(1, "root", "new switch"), admin.Report)

        assert report.changed["sends_under_way"] == 1
        assert p.snapshot().state == "draining"
        status, said = get(p, "/readyz")
        assert (status, "by root (new switch)" in said) == (503, True)
        assert "kvd_draining 1.0" in get(p, "/metrics")[1]
        assert await code_of(ours.lease(tokens)) == "draining"
        assert await code_of(ours.send(2, tokens, lease=lease)) == "draining"
        until(lambda: d.snapshot().peers[0].drain != "")
        began_s = time.monotonic()
        assert await code_of(theirs.receive(2, tokens, "p")) == "peer-draining"
        assert time.monotonic() - began_s < 1.0

        write(ours, lease, tokens)
        outcome = await send.finish(b"aux")
        await receive.done()
        assert outcome.committed
        assert digest(ours, lease.pages) == digest(theirs, receive.lease.pages)
        until(lambda: p.snapshot().state == "drained")

        p.ask(admin.Undrain(1), admin.Report)
        until(lambda: d.snapshot().peers[0].drain == "")
        assert get(p, "/readyz") == (200, "ready\n")
        await (await hand_over(ours, theirs, 3, tokens_of(40, seed=3))).end()
        await kept.release()


async def test_a_drain_gives_up_at_its_deadline_and_both_engines_hear(both):
    p, d = both.prefill, both.decode
    async with engine_of(p) as ours, engine_of(d) as theirs:
        lease, receive, send = await half_done(ours, theirs, 1, tokens_of(64, seed=1))

        d.ask(admin.Drain(1, "root", "", 0.3), admin.Report)

        assert await code_of(receive.done()) == "draining"
        assert not (await asyncio.wait_for(send.finish(b""), 5.0)).committed
        until(lambda: d.snapshot().state == "drained")
        await lease.release()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_stop_lets_the_handoffs_under_way_end(both, side):
    """The other engines' requests that come meanwhile are refused at once."""
    p, d = both.prefill, both.decode
    async with engine_of(p) as ours, engine_of(d) as theirs:
        tokens = tokens_of(64, seed=1)
        lease, receive, send = await half_done(ours, theirs, 1, tokens)
        stopped = getattr(both, side)

        stopped._process.send_signal(signal.SIGTERM)

        until(lambda: stopped.snapshot().state == "stopping")
        write(ours, lease, tokens)
        outcome, _ = await asyncio.gather(send.finish(b"aux"), receive.done())
        assert outcome.committed
        assert status_of(stopped) == 0
        if side == "prefill":
            began_s = time.monotonic()
            assert await code_of(theirs.receive(2, tokens, "p")) == "peer-draining"
            assert time.monotonic() - began_s < 1.0
            until(lambda: d.snapshot().peers[0].state == "lost")  # its last word may be later


async def test_a_stop_gives_up_at_its_deadline_and_nobody_hangs(both):
    p, d = both.prefill, both.decode
    async with engine_of(p) as ours, engine_of(d) as theirs:
        halves = [await half_done(ours, theirs, room, tokens_of(64, room)) for room in range(1, 9)]
        waiting = [asyncio.ensure_future(code_of(receive.done())) for _, receive, _ in halves]

        began_s = time.monotonic()
        p._process.send_signal(signal.SIGTERM)

        assert await asyncio.gather(*waiting) == ["peer-draining"] * 8
        assert status_of(p) == 0
        assert time.monotonic() - began_s < 5.0
        until(lambda: d.snapshot().rooms == ())
        assert sum(pool.quarantined_pages for pool in d.snapshot().pools) == 0


async def test_a_second_signal_ends_it_at_once(both):
    p, d = both.prefill, both.decode
    async with engine_of(p) as ours, engine_of(d) as theirs:
        await half_done(ours, theirs, 1, tokens_of(64, seed=1))
        p._process.send_signal(signal.SIGTERM)
        until(lambda: p.snapshot().state == "stopping")

        p._process.send_signal(signal.SIGINT)

        assert status_of(p) == 1


async def test_engines_that_only_hold_leases_do_not_delay_a_stop(tmp_path):
    with one_daemon(tmp_path, {**SHAPE, "admission.drain_s": "20"}) as solo:
        async with engine_of(solo) as engine:
            await engine.lease(tokens_of(64, seed=1))
            began_s = time.monotonic()

            solo._process.send_signal(signal.SIGTERM)

            assert status_of(solo) == 0
            assert time.monotonic() - began_s < 3.0
