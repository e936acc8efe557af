"""Pages that a real daemon promises: cached KV stays in them until their engine needs them."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import kvd.client
from kvd.client import KvdError
from kvd.wire import admin
from tests.daemon.kv import PAGE, digest, tokens_of, write
from tests.daemon.test_pull import cached

POOL_PAGES = 256


async def test_cached_pages_are_found_until_the_promised_tokens_are_written(engines):
    """All of the pool is promised, token by token what was cached gives way, and never too late."""
    engines.pair.prefill.ask(admin.Flush(1), admin.Report)
    tokens = tokens_of(200 * PAGE, seed=400)
    there = await cached(engines.p, tokens)
    prompt = tokens_of(PAGE, seed=401)

    lease = await engines.p.lease(prompt, promise_tokens=(POOL_PAGES - 1) * PAGE)
    write(engines.p, lease, prompt)

    assert len(lease.pages) == 1
    assert (await engines.p.match(tokens)).tokens == 200 * PAGE
    (pool,) = engines.pair.prefill.snapshot().pools
    assert (pool.promised_pages, pool.cached_pages, pool.held_pages) == (255, 200, 1)
    # The hit itself cannot be locked: its pages are spoken for.
    with pytest.raises(KvdError, match="of them promised to leases") as raised:
        await engines.p.lease(tokens, hold="prefix")
    assert raised.value.code == "no-room"

    answer = tokens_of(255 * PAGE, seed=402)
    found = {(await engines.p.match(tokens)).tokens}
    for step in range(0, 255, 15):
        part = answer[step * PAGE : (step + 15) * PAGE]
        if step % 2:
            await lease.extend(len(part))
        else:
            await lease.commit(extend=len(part))
        known = [*prompt.tolist(), *answer[: (step + 15) * PAGE].tolist()]
        write(engines.p, lease, np.asarray(known, np.int32))
        await lease.commit(part)
        found.add((await engines.p.match(tokens)).tokens)
    assert {200 * PAGE, 0} <= found, "it was there first, and then it gave way"
    assert len(lease.pages) == POOL_PAGES
    with pytest.raises(KvdError) as raised:
        await lease.extend(1)
    assert raised.value.code == "no-room"
    written = digest(engines.p, lease.pages)
    assert written != there
    await lease.release(())
    again = await engines.p.lease(known)
    assert again.prefix_len == POOL_PAGES * PAGE
    assert digest(engines.p, again.pages) == written
    await again.release()


async def test_who_is_kept_waiting_by_a_promise_hears_of_it_and_goes_on_when_it_ends(engines):
    engines.pair.prefill.ask(admin.Flush(1), admin.Report)
    async with kvd.client.connect(engines.pair.prefill.client, name="greedy") as greedy:
        lease = await greedy.lease([1], promise_tokens=250 * PAGE)
        with pytest.raises(KvdError) as raised:
            await engines.p.lease(tokens_of(40 * PAGE, seed=403), deadline_s=0.0)
        assert raised.value.code == "deadline"
        assert "250 are promised to leases" in str(raised.value)
        assert f"lease {lease.id} of greedy" in str(raised.value)
        assert "250 promised" in str(raised.value)
        waiting = asyncio.create_task(engines.p.lease(tokens_of(40 * PAGE, seed=403)))
        why = engines.pair.prefill.ask(admin.Why(1, "lease", lease.id), admin.Because)
        assert any("promised pages for its first 4001 tokens: 250 of" in one for one in why.facts)
    # Its session is over, and so is its promise.
    lease = await waiting
    assert len(lease.pages) == 40
    await lease.release()


async def test_a_receive_is_promised_room_for_its_answer(engines):
    engines.pair.decode.ask(admin.Flush(1), admin.Report)
    tokens, room = tokens_of(100, seed=404), engines.room()
    receive = await engines.d.receive(room, tokens, "p", promise_tokens=240 * PAGE)
    with pytest.raises(KvdError):
        await engines.d.lease(tokens_of(20 * PAGE, seed=405), deadline_s=0.0)
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, tokens)
    await engines.p.hand_over(room, lease=lease, release=True)

    await receive.done()

    await receive.lease.extend(240 * PAGE)
    assert len(receive.lease.pages) == 7 + 240
    await receive.lease.release()
