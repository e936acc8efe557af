"""Real daemons and NIXL, and pages that are not what was sent: caught, named, and never cached.

The decode engine's mapping of the pool is what damages pages: they have landed, and the writer has
not settled. scenario G23.
"""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio
import torch

import kvd.client
from kvd.client import HandoffError
from tests.daemon.conftest import Engines, settle, until
from tests.daemon.kv import LAYERS, PAGE, PAGE_BYTES, SHAPE, tokens_of, write
from tests.daemon.test_two_daemons import hand_over, tree_tokens
from tests.support.daemons import two_daemons

N_PAGES = 6
N_TOKENS = N_PAGES * PAGE + 4
"""The last page is partial and goes with ``finish``."""

ATTEMPTS = 4


@pytest.fixture(scope="module")
def full_pair(tmp_path_factory):
    """Two daemons that verify every page."""
    settings = {**SHAPE, "transfer.integrity": "full"}
    with two_daemons(tmp_path_factory.mktemp("full"), settings) as both:
        yield both


@pytest_asyncio.fixture
async def verified(full_pair):
    """Two sessions; afterwards nothing may be held, and no invariant broken."""
    async with (
        kvd.client.connect(full_pair.prefill.client, name="prefill-engine") as p,
        kvd.client.connect(full_pair.decode.client, name="decode-engine") as d,
    ):
        yield Engines(full_pair, p, d)
    settle(full_pair)


def parts(node):
    """K and V of each layer, as bits: random bytes are also NaNs, which equal nothing."""
    pool = node.pool("main")
    return [part.view(torch.int16) for layer in range(LAYERS) for part in pool.layer(layer)]


def page_of(node, page):
    """The bytes of one page, tensor by tensor."""
    return [part[page].clone() for part in parts(node)]


def put(node, page, content):
    for part, piece in zip(parts(node), content, strict=True):
        part[page] = piece


def landed_pages(engines, lease, n_pages):
    """Where the first pages of ``lease`` have landed on the decode side."""
    theirs = parts(engines.d)
    return [
        next(
            page
            for page in range(1, theirs[0].shape[0])
            if all(
                torch.equal(a[page], b)
                for a, b in zip(theirs, page_of(engines.p, source), strict=True)
            )
        )
        for source in list(map(int, lease.pages))[:n_pages]
    ]


def swap(node, pages):
    first, second = page_of(node, pages[1]), page_of(node, pages[4])
    put(node, pages[1], second)
    put(node, pages[4], first)
    return [1, 4]


def shift(node, pages):
    contents = [page_of(node, page) for page in pages]
    for page, content in zip(pages[1:], contents, strict=False):
        put(node, page, content)
    return [1, 2, 3, 4, 5]


def tear(node, pages):
    for part in parts(node):
        part[pages[2]][PAGE // 2 :] = part[pages[3]][PAGE // 2 :]
    return [2]


def flip(node, pages):
    last = parts(node)[-1][pages[5]].view(torch.uint8).flatten()
    last[-1] ^= 1
    return [5]


def zero(node, pages):
    for part in parts(node):
        part[pages[0]] = 0
    return [0]


@pytest.mark.parametrize("damage", [swap, shift, tear, flip, zero])
async def test_damaged_pages_fail_their_room_and_are_named_and_never_cached(verified, damage):
    """scenario G23: the room fails with the pages named; the tree stays as it was."""
    engines = verified
    kept = await hand_over(engines.p, engines.d, engines.room(), tokens_of(64, seed=500))
    tree = tree_tokens(engines.pair.decode)
    tokens, room = tokens_of(N_TOKENS, seed=501), engines.room()
    lease = await engines.p.lease(tokens)
    write(engines.p, lease, tokens)
    receive = await engines.d.receive(room, tokens, "p")
    send = await engines.p.send(room, tokens, lease=lease)
    await send.accepted()
    await send.advance(N_PAGES * PAGE)
    decode = engines.pair.decode
    moved = [N_PAGES * PAGE_BYTES]
    until(lambda: [one.moved_bytes for one in decode.snapshot().rooms if one.room == room] == moved)
    pages = landed_pages(engines, lease, N_PAGES)

    wrong = damage(engines.d, pages)
    outcome = await send.finish(b"aux")
    with pytest.raises(HandoffError) as failed:
        await receive.done()

    assert failed.value.code == "corrupt"
    assert failed.value.numbers["logical_pages"] == " ".join(map(str, wrong))
    assert failed.value.numbers["pages"] == " ".join(str(pages[k]) for k in wrong)
    assert (outcome.committed, outcome.reason.code.value) == (False, "corrupt")
    assert tree_tokens(decode) == tree
    assert kept.is_exact
    await lease.release(())
    await kept.end()


async def test_the_same_prompt_is_delivered_when_it_is_sent_again(verified):
    engines = verified
    found = await hand_over(engines.p, engines.d, engines.room(), tokens_of(N_TOKENS, seed=501))

    assert found.is_exact
    await found.end()


async def test_the_cached_prefix_is_in_neither_digest(verified):
    """scenario G23: what the decode side has is not summed, whatever the prefill side has there."""
    engines = verified
    tokens = tokens_of(N_TOKENS, seed=502)
    first = await hand_over(engines.p, engines.d, engines.room(), tokens[: 4 * PAGE])
    other = [part[int(first.lease.pages[0])].clone() for part in parts(engines.p)]
    for part in parts(engines.p):
        part[int(first.lease.pages[0])] += 1

    second = await hand_over(engines.p, engines.d, engines.room(), tokens)

    assert second.receive.prefix_len == 4 * PAGE
    put(engines.p, int(first.lease.pages[0]), other)
    assert second.is_exact
    await first.end()
    await second.end()


async def test_a_page_rewritten_while_it_travels_costs_at_most_its_room(verified):
    """An engine that breaks the rule and writes on: a mixture that differs from its sum is caught.

    A writer that stops in the middle of a page may leave one mixture to both; so may chance.
    """
    engines = verified
    tokens = tokens_of(200 * PAGE, seed=503)
    lease = await engines.p.lease(tokens)
    page = int(lease.pages[150])
    for _ in range(ATTEMPTS):
        room = engines.room()
        receive = await engines.d.receive(room, tokens, "p", cache=False)
        send = await engines.p.send(room, tokens, lease=lease)
        await send.accepted()
        finishing = asyncio.ensure_future(send.finish(b"aux"))
        while not finishing.done():
            for part in parts(engines.p):
                part[page] += 1
            await asyncio.sleep(0)
        outcome = finishing.result()
        if outcome.committed:
            await receive.done()
            await receive.lease.release()
        else:
            assert outcome.reason.code.value == "corrupt"
            assert outcome.reason.numbers["logical_pages"] == "150"
    await lease.release(())
