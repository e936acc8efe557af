"""Pages found by keys, and by tokens with extra keys, between real engines and daemons."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

import kvd.client
from kvd.client import KvdError
from kvd.wire import admin
from kvd.wire.page_address import in_words
from tests.daemon.kv import PAGE, digest, tokens_of, write


def keys_of(count, seed, size=32):
    """As an engine chains them: each stands for its page and all before it."""
    keys, last = [], seed.to_bytes(8, "little")
    for _ in range(count):
        last = hashlib.blake2b(last, digest_size=size).digest()
        keys.append(last)
    return keys


async def test_what_one_engine_caches_by_keys_another_finds_and_tokens_do_not(engines):
    keys, tokens = keys_of(20, seed=1), tokens_of(20 * PAGE, seed=101)
    lease = await engines.p.lease(keys=keys[:18])
    assert (lease.prefix_len, len(lease.pages)) == (0, 18)
    write(engines.p, lease, tokens, upto=18 * PAGE)
    await lease.extend(2 * PAGE)
    await lease.commit(keys=keys[18:], upto_tokens=19 * PAGE)

    async with kvd.client.connect(engines.pair.prefill.client, name="another") as other:
        assert (await other.match(keys=keys)).tokens == 19 * PAGE
        assert (await other.match(keys=keys[1:])).tokens == 0
        assert (await other.match(tokens)).tokens == 0
        reader = await other.lease(keys=[*keys[:10], *keys_of(3, seed=2)])
        assert reader.prefix_len == 10 * PAGE
        assert digest(other, reader.pages[:10]) == digest(engines.p, lease.pages[:10])
        await reader.release(upto_tokens=0)
    await lease.release(keys=())
    assert (await engines.p.match(keys=keys)).tokens == 19 * PAGE


@pytest.mark.parametrize("size", [16, 32, 64])
async def test_a_prompt_of_keys_is_handed_over(engines, size):
    keys, tokens = keys_of(12, seed=3, size=size), tokens_of(12 * PAGE, seed=103)
    have = await engines.d.lease(keys=keys[:5])
    await have.release(keys=())
    lease = await engines.p.lease(keys=keys)
    write(engines.p, lease, tokens)
    receive = await engines.d.receive(30 + size, None, "p", keys=keys)
    assert receive.prefix_len == 5 * PAGE
    outcome = await engines.p.hand_over(30 + size, keys=keys, lease=lease)
    await receive.done()

    assert (outcome.committed, outcome.sent_pages) == (True, 7)
    assert digest(engines.d, receive.lease.pages[5:]) == digest(engines.p, lease.pages[5:])
    assert (await engines.d.match(keys=keys)).tokens == 12 * PAGE
    await receive.lease.release()
    await lease.release()


async def test_two_images_behind_equal_tokens_are_two_prompts(engines):
    """The page that the prompt leaves half full is completed under its image."""
    tokens = tokens_of(3 * PAGE + 5, seed=4)
    answer = tokens_of(2 * PAGE, seed=5)
    whole = [*tokens.tolist(), *answer.tolist()]
    cat, dog = ({1: b"cat", 3: b"cat"}, {1: b"dog", 3: b"dog"})
    lease = await engines.p.lease(tokens, extra_keys=cat, reserve_tokens=len(answer))
    await lease.commit(answer[:3])
    await lease.release(answer[3:])

    found = [(await engines.p.match(whole, extra_keys=image)).tokens for image in (cat, dog, None)]
    assert found == [5 * PAGE, PAGE, PAGE]


async def test_a_salt_isolates_every_page(engines):
    tokens = tokens_of(4 * PAGE, seed=6)
    lease = await engines.p.lease(tokens, extra_keys=b"salt a", reserve_tokens=PAGE)
    await lease.commit(tokens[:PAGE])
    await lease.release(())
    turn = [*tokens.tolist(), *tokens[:PAGE].tolist()]

    found = [
        (await engines.p.match(turn, extra_keys=salt)).tokens for salt in (b"salt a", b"b", None)
    ]
    assert found == [5 * PAGE, 0, 0]


async def test_what_does_not_fit_together_is_refused_and_nothing_is_held(engines):
    keys = keys_of(2, seed=7)
    before = (await engines.p.match(keys=keys)).free
    for call in (
        engines.p.lease(),
        engines.p.lease([1, 2], keys=keys),
        engines.p.lease(keys=keys, extra_keys=b"x"),
        engines.p.lease(keys=[b"short"]),
        engines.p.lease([1, 2], extra_keys={1: b"x"}),
    ):
        with pytest.raises(KvdError) as caught:
            await call
        assert caught.value.code == "bad-keys"
    by_keys = await engines.p.lease(keys=keys)
    by_tokens = await engines.p.lease([1, 2, 3])
    for call in (by_keys.commit([1]), by_tokens.commit(keys=keys), by_keys.release([1])):
        with pytest.raises(KvdError) as caught:
            await call
        assert caught.value.code == "bad-keys"
    await by_keys.release()
    await by_tokens.release()
    assert (await engines.p.match(keys=keys)).free == before


async def test_the_tree_names_keys(engines):
    keys = keys_of(2, seed=8)
    lease = await engines.p.lease(keys=keys)
    await lease.release(keys=())
    tree = engines.pair.prefill.ask(admin.ShowTree(1, limit=1000), admin.Tree)
    shown = [in_words(np.array(node.first_tokens, "<i4").tobytes()) for node in tree.nodes]
    assert f"key {keys[0][:8].hex()}" in shown


async def test_a_prefix_is_held_by_key_and_goes_on_under_its_extra_keys(engines):
    tokens = tokens_of(3 * PAGE, seed=9)
    image = {1: b"owl", 2: b"owl"}
    first = await engines.p.lease(tokens, extra_keys=image)
    await first.commit(upto_tokens=2 * PAGE)
    await first.release()

    hit = await engines.p.lease(tokens, extra_keys=image, hold="prefix")
    assert (hit.prefix_len, len(hit.pages)) == (2 * PAGE, 2)
    await hit.extend(PAGE)
    await hit.release(tokens[2 * PAGE :])

    assert (await engines.p.match(tokens, extra_keys=image)).tokens == 3 * PAGE
    nothing = await engines.p.lease(keys=keys_of(3, seed=9), hold="prefix")
    assert (nothing.prefix_len, len(nothing.pages)) == (0, 0)
    await nothing.release()
    with pytest.raises(KvdError) as caught:
        await engines.p.lease(tokens, hold="prefix", reserve_tokens=1)
    assert caught.value.code == "bad-request"
