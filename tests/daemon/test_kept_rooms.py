"""A send that its engine keeps, received more than once, over two real daemons and NIXL."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from kvd.client import KvdError, room_of
from tests.daemon.kv import digest, tokens_of, write


def test_one_send_is_received_twice_after_its_engine_let_go(nodes):
    p, d = nodes
    tokens = tokens_of(1000, seed=71)
    room = room_of("kept-1")
    lease = p.lease(tokens)
    write(p, lease, tokens)
    source = digest(p, lease.pages)

    outcome = p.hand_over(room, lease=lease, aux=b"first", ttl_s=20.0, release=True)

    assert (outcome.committed, outcome.reason, outcome.kept_s) == (False, None, 20.0)
    for _ in range(2):
        receive = d.receive(room, tokens, "p", cache=False)
        receive.done()
        assert digest(d, receive.lease.pages) == source
        assert receive.aux == b"first"
        receive.lease.release()
    kept = p.keep_room(room, 30.0)
    assert (kept.takers, [one.peer for one in kept.taken]) == (2, ["d", "d"])
    assert 20.0 < kept.left_s <= 30.0
    p.keep_room(room, 0.0)
    with pytest.raises(KvdError) as raised:
        d.receive(room, tokens, "p", cache=False).done()
    assert raised.value.numbers["served_to"] == "d"


def test_a_receive_asked_again_waits_for_the_same_room(nodes):
    """As a router does that has heard nothing of its first try."""
    p, d = nodes
    tokens = tokens_of(500, seed=72)
    room = room_of("again-1")
    first = d.receive(room, tokens, "p", request_id="again-1")
    again = d.receive(room, tokens, "p", request_id="again-1")
    assert again.id == first.id
    lease = p.lease(tokens)
    write(p, lease, tokens)
    send = p.send(room, tokens, lease=lease, takers=1, request_id="again-1")
    assert p.send(room, tokens, lease=lease, takers=1, request_id="again-1").id == send.id

    assert send.finish().kept_s > 0

    again.done()
    first.done()
    assert digest(d, again.lease.pages) == digest(p, lease.pages)
    again.lease.release()
    lease.release(())


def test_the_lease_that_a_retry_brings_ends_as_it_says(nodes, pair):
    """As an engine does that has computed a prompt again, because its router asked again."""
    p, d = nodes
    tokens, other = tokens_of(500, seed=73), tokens_of(500, seed=74)
    room = room_of("again-2")
    how = {"request_id": "again-2", "ttl_s": 20.0, "release": True}
    leases = [p.lease(one, reserve_tokens=256) for one in (tokens, tokens, other)]
    for lease, one in zip(leases, (tokens, tokens, other), strict=True):
        write(p, lease, one)
    p.hand_over(room, lease=leases[0], **how)

    assert p.hand_over(room, lease=leases[1], **how).kept_s > 0
    with pytest.raises(KvdError) as raised:
        p.hand_over(room, lease=leases[2], **how)

    assert raised.value.code == "prompt-mismatch"
    assert [one.is_released for one in leases] == [True, True, False]
    # The first is held by its room, with the prompt's last page and no reserve; the second is over.
    held = {one.id: one.held_pages for one in pair.prefill.snapshot().leases}
    assert held == {leases[0].id: 1, leases[2].id: len(leases[2].pages)}
    receive = d.receive(room, tokens, "p")
    receive.done()
    receive.lease.release()
    leases[2].release(())
    p.keep_room(room, 0.0)


async def gone(call):
    """A caller that has asked again, and goes away before the answer."""
    task = asyncio.ensure_future(call)
    await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_who_asks_again_and_goes_away_takes_nothing_from_who_asked_first(engines):
    p, d = engines.p, engines.d
    tokens = tokens_of(500, seed=75)
    lease = await p.lease(tokens)
    write(p, lease, tokens)
    for room in (7501, 7502):
        how = {"request_id": "again-3", "cache": False}
        receive = await d.receive(room, tokens, "p", **how)
        await gone(d.receive(room, tokens, "p", **how))
        send = await p.send(room, lease=lease, request_id="again-3")
        await gone(p.send(room, lease=lease, request_id="again-3"))
        assert (await send.finish()).committed
        await receive.done()
        assert digest(d, receive.lease.pages) == digest(p, lease.pages)
        await receive.lease.release()
    how = {"lease": lease, "ttl_s": 20.0, "request_id": "again-4"}
    assert (await p.hand_over(7503, **how)).kept_s > 0
    await gone(p.hand_over(7503, **how))
    assert (await p.keep_room(7503, 5.0)).left_s > 0
    await p.keep_room(7503, 0.0)
    await lease.release()
