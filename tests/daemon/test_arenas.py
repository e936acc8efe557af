"""Zero copy between real daemons: KV that engines place themselves, over NIXL."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

import kvd.client
from kvd.client import HandoffError, KvdError
from tests.daemon.kv import PAGE, digest, tokens_of, write_pages


async def test_from_one_engines_pages_into_anothers_byte_for_byte(engines):
    tokens = tokens_of(20 * PAGE + 5, seed=90)
    source, target = await engines.p.arena(64), await engines.d.arena(64)
    order = np.random.default_rng(9).permutation(64)
    mine, theirs = source.pages[order[:21]], target.pages[order[30:51]]
    write_pages(engines.p, mine, tokens)
    write_pages(engines.d, theirs[:6], tokens)  # what the decode engine has of it already

    receive = await target.receive(1, tokens, "p", pages=theirs[6:], have_tokens=6 * PAGE)
    sent = await source.hand_over(1, tokens, pages=mine, aux=b"first token")
    await receive.done()

    assert (sent.committed, sent.decode_prefix_len, sent.sent_pages) == (True, 6 * PAGE, 15)
    assert receive.aux == b"first token"
    assert receive.is_safe
    assert digest(engines.d, theirs) == digest(engines.p, mine)
    with pytest.raises(KvdError, match="pages of an arena"):
        _ = receive.lease
    for one in (source, target):
        await one.close()
        await one.close()
    assert source.is_closed


async def test_pages_are_posted_as_they_are_written_to_a_node_that_leases(engines):
    tokens = tokens_of(12 * PAGE, seed=91)
    arena = await engines.p.arena(16)
    send = await arena.send(2, tokens, pages=arena.pages[:12], to="d")
    receive = await engines.d.receive(2, tokens, "p")
    for upto in (4, 8, 12):
        write_pages(engines.p, arena.pages[:upto], tokens[: upto * PAGE])
        await send.advance(upto * PAGE)
    assert (await send.finish()).committed
    await receive.done()
    assert digest(engines.d, receive.lease.pages) == digest(engines.p, arena.pages[:12])
    await receive.lease.release(())
    assert (await engines.d.match(tokens)).tokens == 12 * PAGE
    # Of an arena nothing is cached.
    assert (await engines.p.match(tokens)).tokens == 0
    await arena.close()


async def test_what_was_given_up_is_safe_before_its_pages_are_used_again(engines):
    tokens = tokens_of(8 * PAGE, seed=92)
    source, target = await engines.p.arena(8), await engines.d.arena(16)
    write_pages(engines.p, source.pages, tokens)
    send = await source.send(3, tokens, pages=source.pages)
    receive = await target.receive(3, tokens, "p", pages=target.pages[:8])
    await receive.cancel()
    with pytest.raises(HandoffError):
        await receive.done()
    await asyncio.wait_for(receive.safe(), 10)
    assert receive.is_safe
    await send.abort("given up over there")
    # They are its own again.
    receive = await target.receive(4, tokens, "p", pages=target.pages[:8])
    await source.hand_over(4, tokens, pages=source.pages)
    await receive.done()
    assert digest(engines.d, target.pages[:8]) == digest(engines.p, source.pages)
    await source.close()
    await target.close()


async def test_the_tables_name_it_and_refusals_have_numbers(engines):
    arena = await engines.d.arena(32)
    (lease,) = (await engines.d.snapshot()).leases
    assert (lease.reason, lease.owner, lease.held_pages) == ("arena", "decode-engine", 32)
    with pytest.raises(KvdError) as none:
        await engines.d.arena(240)
    assert none.value.code == "no-room"
    assert none.value.numbers["longest_run"] == 224
    with pytest.raises(KvdError) as never:
        await engines.d.arena(1000)
    assert never.value.code == "too-large"
    tokens = tokens_of(PAGE, seed=93)
    with pytest.raises(KvdError) as foreign:
        await arena.receive(5, tokens, "p", pages=[int(arena.pages[-1]) + 1])
    assert foreign.value.code == "bad-request"
    await arena.close()


def test_the_blocking_client_polls(pair):
    tokens = tokens_of(9 * PAGE, seed=94)
    with (
        kvd.client.connect_sync(pair.prefill.client, name="p") as p,
        kvd.client.connect_sync(pair.decode.client, name="d") as d,
    ):
        source, target = p.arena(9), d.arena(12)
        write_pages(p, source.pages, tokens)
        receive = target.receive(6, tokens, "p", pages=target.pages[3:])
        assert receive.poll() is False
        assert not receive.is_safe
        call = source.begin_hand_over(6, tokens, pages=source.pages)
        until_s = time.monotonic() + 10
        while not (receive.poll() and call.poll()):
            assert time.monotonic() < until_s
            time.sleep(0.001)
        assert receive.is_safe
        receive.safe()
        assert digest(d, target.pages[3:]) == digest(p, source.pages)
        target.close()
        # Dead processes close theirs by themselves: the session ends with the block.
    with kvd.client.connect_sync(pair.prefill.client, name="p") as p:
        assert not p.snapshot().leases


def test_a_killed_engine_leaves_nothing(pair):
    with kvd.client.connect_sync(pair.decode.client, name="d") as d:
        target = d.arena(12)
        target.begin_receive(7, tokens_of(PAGE, seed=95), "p", pages=target.pages[:1])
        d.pump()
    with kvd.client.connect_sync(pair.decode.client, name="d") as d:
        until_s = time.monotonic() + 10
        while d.snapshot().leases:
            assert time.monotonic() < until_s
            time.sleep(0.01)
