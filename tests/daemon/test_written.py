"""Engines that say how far they are, over real sockets: nothing unwritten is ever shared."""

from __future__ import annotations

import numpy as np
import pytest

import kvd.client
from kvd.client import KvdError
from tests.daemon.kv import PAGE, digest, tokens_of, write


async def test_chunks_of_a_running_prefill_are_shared_as_they_are_done(engines):
    tokens = tokens_of(320, seed=1)
    async with kvd.client.connect(engines.pair.prefill.client, name="another") as other:
        lease = await engines.p.lease(tokens)
        found = []
        for upto in (100, 200, 320):
            write(engines.p, lease, tokens, upto=upto // PAGE * PAGE)
            await lease.written(upto)
            await lease.commit()
            found.append((await other.match(tokens)).tokens)

        reader = await other.lease(tokens)
        assert found == [96, 192, 320]
        assert digest(other, reader.pages) == digest(engines.p, lease.pages)
        await reader.release()
        await lease.release()


async def test_a_commit_after_a_failed_step_poisons_nothing(engines):
    tokens = tokens_of(320, seed=2)
    lease = await engines.p.lease(tokens)
    await lease.written(0)

    await lease.commit()
    found = (await engines.p.match(tokens)).tokens
    await lease.release(())

    assert (found, (await engines.p.match(tokens)).tokens) == (0, 0)


async def test_an_aborted_prefill_keeps_what_it_had_written(engines):
    tokens = tokens_of(320, seed=3)
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, tokens, upto=192)
    await lease.written(192)
    ours = digest(engines.p, lease.pages[:12])

    await lease.release()

    again = await engines.p.lease(tokens)
    assert again.prefix_len == 192
    assert digest(engines.p, again.pages[:12]) == ours
    await again.release(upto_tokens=0)


async def test_going_back_and_going_too_far_are_refused_with_numbers(engines):
    lease = await engines.p.lease(tokens_of(100, seed=4))
    await lease.written(50)

    for verb in (
        lease.written(49),
        lease.written(113),
        lease.commit(upto_tokens=101),
        lease.commit(upto_tokens=-1),
        lease.release(upto_tokens=101),
    ):
        with pytest.raises(KvdError) as raised:
            await verb
        assert raised.value.code == "bad-request"
        assert raised.value.refusal.numbers
    await lease.release()


async def test_the_last_of_several_ranks_counts(engines):
    tokens = tokens_of(100, seed=5)
    lease = await engines.p.lease(tokens)
    await lease.written(100, rank=0, ranks=2)
    await lease.written(40, rank=1, ranks=2)

    await lease.release(())

    assert (await engines.p.match(tokens)).tokens == 32


async def test_pages_are_swapped_when_the_engine_is_ready_for_it(engines):
    tokens = tokens_of(64, seed=6)
    first, second = await engines.p.lease(tokens), await engines.p.lease(tokens)
    write(engines.p, first, tokens)
    write(engines.p, second, tokens)
    await first.commit()
    mine, theirs = second.pages, first.pages

    kept = await second.commit(swap=False)
    assert second.pages.tolist() == mine.tolist()
    swapped = await second.commit()

    assert kept.shape == (0, 2)
    assert swapped.tolist() == np.column_stack((mine, theirs)).tolist()
    assert second.pages.tolist() == theirs.tolist()
    await first.release()
    await second.release()


def test_the_blocking_client_says_how_far_it_is(pair):
    tokens = tokens_of(100, seed=7)
    with kvd.client.connect_sync(pair.prefill.client, name="blocking") as node:
        lease = node.lease(tokens)
        lease.written(50)
        assert lease.commit().tolist() == []
        assert node.match(tokens).tokens == 48
        lease.commit(upto_tokens=80, swap=False)
        assert node.match(tokens).tokens == 80
        with pytest.raises(KvdError, match="bad-request"):
            lease.written(79)
        lease.release(upto_tokens=96)
        assert node.match(tokens).tokens == 96
