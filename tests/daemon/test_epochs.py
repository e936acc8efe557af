"""Flushes and new weights, said by engines of real daemons."""

from __future__ import annotations

import pytest

import kvd.client
from kvd.client import HandoffError, KvdError
from tests.daemon.kv import PAGE, tokens_of, write


async def test_an_engine_flushes_its_namespace_and_no_other(engines):
    tokens = tokens_of(6 * PAGE, seed=70)
    for namespace in ("one", "two"):
        await (await engines.p.lease(tokens, namespace=namespace)).release(())
    held = await engines.p.lease(tokens[: 2 * PAGE], namespace="one")
    done = await engines.p.flush("one")
    assert (done.freed_pages, done.kept_pages) == (4, 2)
    assert f"lease {held.id}" in done.kept[0]
    assert (await engines.p.match(tokens, namespace="two")).tokens == 6 * PAGE
    await held.release()


async def test_two_nodes_hand_over_in_one_epoch_and_in_two_they_do_not(engines):
    tokens = tokens_of(5 * PAGE, seed=71)
    await engines.p.new_epoch("weights", 1)

    async def hand_over(room):
        lease = await engines.p.lease(tokens, namespace="weights")
        write(engines.p, lease, tokens)
        receive = await engines.d.receive(room, tokens, "p", namespace="weights", deadline_s=5)
        outcome = await engines.p.hand_over(
            room, lease=lease, namespace="weights", deadline_s=5, release=True
        )
        await receive.done()
        await receive.lease.release()
        return outcome.committed

    with pytest.raises((HandoffError, KvdError)) as caught:
        await hand_over(7101)
    assert caught.value.code == "prompt-mismatch"
    await engines.d.new_epoch("weights", 1)
    assert await hand_over(7102)
    assert (await engines.d.match(tokens, namespace="weights")).tokens == 5 * PAGE
    await engines.d.new_epoch("weights", 2)
    assert (await engines.d.match(tokens, namespace="weights")).tokens == 0


def test_the_blocking_client_says_it_too(pair):
    with kvd.client.connect_sync(pair.prefill.client, name="trainer") as node:
        assert node.new_epoch("sync", 4).freed_pages == 0
        assert node.begin_flush("sync").result().kept == ()
        with pytest.raises(KvdError) as caught:
            node.new_epoch("sync", 3)
        assert caught.value.code == "wrong-state"
        assert node.snapshot().epochs["sync"] == 4
