"""Pull between real daemons: what one has cached, another gets, and no engine there takes part."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import pytest

import kvd.client
from kvd.client import HandoffError, KvdError
from tests.daemon.kv import PAGE, SHAPE, digest, tokens_of, write
from tests.daemon.test_page_keys import keys_of
from tests.support.daemons import two_daemons


async def cached(node, tokens, **address):
    """In the tree of that node, with its bytes; their digest."""
    lease = await node.lease(tokens, **address)
    write(node, lease, tokens)
    found = digest(node, lease.pages[: len(tokens) // PAGE])
    await lease.release(())
    return found


async def test_a_prompt_is_pulled_byte_for_byte_and_goes_on(engines):
    tokens = tokens_of(20 * PAGE + 5, seed=80)
    there = await cached(engines.p, tokens)
    await cached(engines.d, tokens[: 6 * PAGE])

    receive = await engines.d.receive(tokens, source="p", reserve_tokens=3 * PAGE)
    await receive.done()

    assert (receive.prefix_len, receive.n_tokens, receive.aux) == (6 * PAGE, 20 * PAGE, b"")
    lease = receive.lease
    assert (lease.kv_len, len(lease.pages)) == (20 * PAGE, 24)
    assert digest(engines.d, lease.pages[:20]) == there
    # The rest of the prompt is the engine's to compute; then it is cached like any other.
    await lease.release([*tokens[20 * PAGE :], *tokens_of(PAGE, seed=81)])
    assert (await engines.d.match(tokens)).tokens == 20 * PAGE


async def test_of_what_nobody_has_it_is_a_lease_of_nothing(engines):
    tokens = tokens_of(4 * PAGE, seed=82)
    receive = await engines.d.receive(tokens, source="p")
    await receive.done()
    assert (receive.prefix_len, receive.n_tokens, len(receive.lease.pages)) == (0, 0, 4)
    write(engines.d, receive.lease, tokens)
    await receive.lease.release(tokens)
    assert (await engines.d.match(tokens)).tokens == 4 * PAGE


async def test_keys_and_a_prompt_with_a_number_are_pulled_alike(engines):
    keys, tokens = keys_of(8, seed=83), tokens_of(8 * PAGE, seed=84)
    there = await cached(engines.p, tokens)
    lease = await engines.p.lease(keys=keys)
    write(engines.p, lease, tokens)
    await lease.release(keys=())
    by_keys = await engines.d.receive(source="p", keys=keys)
    await by_keys.done()
    by_number = await engines.d.receive(tokens=engines.d.prompt(tokens), source="p")
    await by_number.done()
    assert by_keys.n_tokens == by_number.n_tokens == 8 * PAGE
    assert digest(engines.d, by_number.lease.pages) == there
    assert digest(engines.d, by_keys.lease.pages) == there
    await by_keys.lease.release(keys=())
    await by_number.lease.release(())


async def test_many_pull_the_same_prompt_at_once(engines):
    tokens = tokens_of(12 * PAGE, seed=85)
    there = await cached(engines.p, tokens)

    async def one(number):
        async with kvd.client.connect(engines.pair.decode.client, name=f"e{number}") as node:
            receive = await node.receive(tokens, source="p")
            await receive.done()
            assert digest(node, receive.lease.pages) == there
            await receive.lease.release(())

    await asyncio.gather(*(one(number) for number in range(8)))


async def test_both_sides_say_who_pulls(engines):
    tokens = tokens_of(10 * PAGE, seed=86)
    await cached(engines.p, tokens)
    receive = await engines.d.receive(tokens, source="p")
    await receive.done()
    (lease,) = (await engines.d.snapshot()).leases
    assert (lease.reason, lease.owner) == ("pulled from p", "decode-engine")
    await receive.lease.release(())


async def test_what_cannot_be_pulled_is_refused_in_words(engines):
    with pytest.raises(KvdError) as stranger:
        await engines.d.receive([1, 2, 3], source="nobody")
    with pytest.raises(KvdError) as two:
        await engines.d.receive([1, 2, 3], source=("p", "p"))
    with pytest.raises(KvdError) as none:
        await engines.d.receive([1, 2, 3])
    codes = [one.value.code for one in (stranger, two, none)]
    assert codes == ["peer-unknown", "bad-request", "bad-request"]


def test_the_blocking_client_pulls_and_polls(pair):
    tokens = tokens_of(9 * PAGE, seed=87)
    with (
        kvd.client.connect_sync(pair.prefill.client, name="p") as p,
        kvd.client.connect_sync(pair.decode.client, name="d") as d,
    ):
        lease = p.lease(tokens)
        write(p, lease, tokens)
        there = digest(p, lease.pages)
        lease.release(())
        call = d.begin_receive(tokens, source="p")
        while (receive := call.poll()) is None:
            time.sleep(0.001)
        while (got := receive.poll()) is None:
            time.sleep(0.001)
        assert (receive.n_tokens, digest(d, got.pages)) == (9 * PAGE, there)
        got.release(())


@pytest.fixture
def own_pair(tmp_path):
    with two_daemons(tmp_path, SHAPE) as pair:
        yield pair


async def until(is_so, within_s=15.0):
    deadline_s = time.monotonic() + within_s
    while not await is_so():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.05)


async def test_a_puller_that_is_killed_is_named_until_the_source_is_free_of_it(own_pair):
    tokens = tokens_of(100 * PAGE, seed=88)
    transfer = own_pair.prefill.transfer_pid()
    async with kvd.client.connect(own_pair.prefill.client, name="p") as p:
        await cached(p, tokens)
        os.kill(transfer, signal.SIGSTOP)
        try:
            d = await kvd.client.connect(own_pair.decode.client, name="d")
            await d.receive(tokens, source="p")
            (lease,) = (await p.snapshot()).leases
            assert (lease.reason, lease.owner) == ("pull of d", "kvd")
            own_pair.decode.kill()
            await d.close()
        finally:
            os.kill(transfer, signal.SIGCONT)

        async def is_free():
            return not (await p.snapshot()).leases

        await until(is_free)
        assert (await p.match(tokens)).tokens == 100 * PAGE


async def test_a_source_that_is_killed_ends_the_pull_with_its_name(own_pair):
    tokens = tokens_of(100 * PAGE, seed=89)
    transfer = own_pair.prefill.transfer_pid()
    p = await kvd.client.connect(own_pair.prefill.client, name="p")
    await cached(p, tokens)
    async with kvd.client.connect(own_pair.decode.client, name="d") as d:
        os.kill(transfer, signal.SIGSTOP)
        receive = await d.receive(tokens, source="p")
        own_pair.prefill.kill()
        os.kill(transfer, signal.SIGKILL)
        await p.close()
        with pytest.raises(HandoffError) as caught:
            await receive.done()
        assert caught.value.code in {"peer-lost", "peer-stale"}
        assert (await d.match(tokens)).tokens == 0


async def test_pulls_that_wait_at_their_puller_leave_the_source_to_its_engines(tmp_path):
    settings = {**SHAPE, "pull.offer_s": "1.5", "pull.max_open_per_peer": "5"}
    with two_daemons(tmp_path, settings) as both:
        async with (
            kvd.client.connect(both.prefill.client, name="p") as p,
            kvd.client.connect(both.decode.client, name="d") as d,
        ):
            pages = (await p.snapshot()).pools[0].total_pages - 1
            tokens = tokens_of((pages - 8) * PAGE, seed=90)
            await cached(p, tokens)
            # So none of them can offer pages for what it pulls.
            full = await d.lease(tokens_of((pages - 8) * PAGE, seed=91))
            pulls = [asyncio.create_task(pulled(d, tokens)) for _ in range(40)]

            async def asked():
                return len(both.prefill.snapshot().rooms) == 5

            await until(asked)
            # It needs what they lock, and does not wait for their time to be over.
            lease = await p.lease(tokens_of((pages - 8) * PAGE, seed=92), deadline_s=1.0)
            assert not both.prefill.snapshot().rooms
            await lease.release()
            both.decode.kill()
            ends = await asyncio.gather(*pulls)
            assert {"no-room"} < set(ends)
            assert not both.prefill.snapshot().leases
        assert full.id


async def pulled(node, tokens):
    """How a pull ends."""
    try:
        receive = await node.receive(tokens, source="p", deadline_s=20.0)
        await receive.done()
    except KvdError as error:
        return error.code
    return "received"


async def test_a_puller_without_pages_is_waited_for_while_it_lives_and_goes_on_later(tmp_path):
    with two_daemons(tmp_path, {**SHAPE, "pull.offer_s": "0.5"}) as both:
        async with (
            kvd.client.connect(both.prefill.client, name="p") as p,
            kvd.client.connect(both.decode.client, name="d") as d,
        ):
            pages = (await p.snapshot()).pools[0].total_pages - 1
            tokens = tokens_of(40 * PAGE, seed=93)
            await cached(p, tokens)
            full = await d.lease(tokens_of(pages * PAGE, seed=94))
            waiting = asyncio.create_task(pulled(d, tokens))

            async def is_open():
                return bool(both.prefill.snapshot().rooms)

            async def is_over():
                return not both.prefill.snapshot().leases

            await until(is_open)
            await asyncio.sleep(1.5)
            assert await is_open(), "it asks again, and so is kept"
            os.kill(both.decode.pid, signal.SIGSTOP)
            await until(is_over, within_s=5.0)
            os.kill(both.decode.pid, signal.SIGCONT)
            await until(is_open, within_s=5.0)
            # The puller has room at last.
            await full.release(())
            assert await waiting == "received"
            assert (await p.match(tokens)).tokens == 40 * PAGE
