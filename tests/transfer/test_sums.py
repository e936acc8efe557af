"""Page sums where the bytes are: what was sent and arrived is good, and anything else is named.

Asked of the loopback and of real transfer processes. scenario G23.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.effects import Verify
from kvd.core.inputs import PostDone, PostFailed, Verified
from kvd.core.layout.seal import SUM_BYTES, Seal, chosen, page_sum
from kvd.transfer.orders import UNSTAMPED, Sum, Summed
from kvd.types import Pages, pack_ids
from kvd.wire.peer import Integrity
from tests.transfer.test_contract import LAST, numbers

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOURCE = [9, 2, 17, 24, 1, 12, 13, 14]
DESTINATION = [4, 23, 8, 1, 12, 20, 19, 18]
FIRST = 3
"""The delta begins at logical page 3: what is before is cached over there."""


def seal_for(integrity: Integrity = Integrity.FULL, key: bytes = b"k" * 16) -> Seal:
    return Seal(integrity, key, FIRST, FIRST + len(SOURCE))


def pieces(memory, page):
    return [memory.piece(row, page) for row in memory.shape.rows]


def joined(memory, page):
    """The bytes of a page, one after the other."""
    return np.concatenate([memory.bytes[piece] for piece in pieces(memory, page)])


def put(memory, page, content):
    at = 0
    for piece in pieces(memory, page):
        size = piece.stop - piece.start
        memory.bytes[piece] = content[at : at + size]
        at += size


async def sent(pair, region, seal):
    """Send all pages of the delta in two posts; the sums of both."""
    sender, receiver = pair
    receiver.memories[region].paint(next(numbers))
    sums = b""
    for low, high in ((0, 5), (5, len(SOURCE))):
        post = next(numbers)
        sender.post(
            post,
            receiver,
            SOURCE[low:high],
            DESTINATION[low:high],
            component=region,
            seal=seal,
            first_page=FIRST + low,
        )
        outcome = await sender.outcome(post)
        assert isinstance(outcome, PostDone), outcome
        sums += outcome.sums
    return sums


async def verified(node, region, seal, sums, pages=DESTINATION):
    ticket = next(numbers)
    node.transport.order(Verify(ticket, region, seal, Pages(pack_ids(pages)), sums))
    return await node.hears(Verified, ticket=ticket)


@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_the_sums_of_a_post_are_those_of_its_source_pages_by_place(pair, region):
    seal, memory = seal_for(), pair[0].memories[region]

    sums = await sent(pair, region, seal)

    wanted = [
        page_sum(seal, logical, [joined(memory, page)])
        for logical, page in enumerate(SOURCE, start=FIRST)
    ]
    assert np.frombuffer(sums, "<u8").tolist() == wanted


@pytest.mark.parametrize("integrity", [Integrity.FULL, Integrity.SAMPLED])
@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_what_was_sent_and_arrived_is_good(pair, region, integrity):
    seal = seal_for(integrity)

    sums = await sent(pair, region, seal)
    found = await verified(pair[1], region, seal, sums)

    assert len(sums) == SUM_BYTES * chosen(seal, seal.first, seal.end).size
    assert found == Verified(UNSTAMPED, found.ticket, ())


def swap(memory):
    """Two pages change places."""
    a, b = DESTINATION[1], DESTINATION[6]
    first, second = joined(memory, a), joined(memory, b)
    put(memory, a, second)
    put(memory, b, first)
    return [1, 6]


def shift_by_a_page(memory):
    """Every page has the content of the one before it."""
    contents = [joined(memory, page) for page in DESTINATION]
    for page, content in zip(DESTINATION[1:], contents, strict=False):
        put(memory, page, content)
    return list(range(1, len(DESTINATION)))


def shift_by_bytes(memory):
    """One page arrives four bytes late."""
    put(memory, DESTINATION[2], np.roll(joined(memory, DESTINATION[2]), 4))
    return [2]


def tear(memory):
    """The second half of a page is what was there before."""
    content = joined(memory, DESTINATION[3])
    content[content.size // 2 :] = joined(memory, 7)[content.size // 2 :]
    put(memory, DESTINATION[3], content)
    return [3]


def flip(memory):
    """One bit of the last byte of the last page."""
    content = joined(memory, DESTINATION[7])
    content[-1] ^= 1
    put(memory, DESTINATION[7], content)
    return [7]


def zero(memory):
    """A page that never came."""
    put(memory, DESTINATION[0], np.zeros_like(joined(memory, DESTINATION[0])))
    return [0]


@pytest.mark.parametrize("damage", [swap, shift_by_a_page, shift_by_bytes, tear, flip, zero])
@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_damaged_pages_are_named(pair, region, damage):
    seal = seal_for()
    sums = await sent(pair, region, seal)

    wrong = damage(pair[1].memories[region])
    found = await verified(pair[1], region, seal, sums)

    assert found == Verified(UNSTAMPED, found.ticket, tuple(FIRST + at for at in wrong))


@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_pages_of_another_handoff_are_bad_although_their_bytes_are_the_same(pair, region):
    sums = await sent(pair, region, seal_for())

    found = await verified(pair[1], region, seal_for(key=b"another handoff!"), sums)

    assert found.bad_pages == tuple(range(FIRST, FIRST + len(SOURCE)))


async def test_sampling_finds_what_moves_every_page(pair):
    seal = seal_for(Integrity.SAMPLED)
    sums = await sent(pair, "kv", seal)

    shift_by_a_page(pair[1].memories["kv"])
    found = await verified(pair[1], "kv", seal, sums)

    assert found.bad_pages == tuple(chosen(seal, FIRST + 1, seal.end).tolist())
    assert found.bad_pages[-1] == seal.end - 1


@pytest.mark.parametrize(
    ("pages", "region", "cut", "complaint"),
    [
        (DESTINATION[:-1], "kv", 0, "the pages are not those of"),
        ([LAST + 1, *DESTINATION[1:]], "kv", 0, "the pages are not those of"),
        (DESTINATION, "swa", 0, "no region 'swa'"),
        (DESTINATION, "kv", 8, "56 bytes of sums for 8 pages"),
    ],
)
async def test_what_cannot_be_summed_is_answered_with_the_reason(
    pair, pages, region, cut, complaint
):
    seal = seal_for()
    sums = await sent(pair, "kv", seal)

    found = await verified(pair[1], region, seal, sums[: len(sums) - cut], pages)

    assert complaint in found.why


async def test_a_refused_post_is_answered_once_and_its_sums_are_dropped(pair):
    sender, receiver = pair
    post, again = next(numbers), next(numbers)

    sender.post(post, receiver, [1, 2], [5, 0], seal=seal_for(), first_page=FIRST)
    assert isinstance(await sender.outcome(post), PostFailed)
    sender.post(again, receiver, [1], [5], seal=seal_for(), first_page=FIRST)
    assert isinstance(await sender.outcome(again), PostDone)

    assert not sender.heard(PostDone, post=post)


@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_pages_of_ours_are_summed_by_their_own_numbers(pair, region):
    node = pair[1]

    first = await summed(node, region, [3, 1, 2])
    again = await summed(node, region, [2, 3])
    put(node.memories[region], 3, joined(node.memories[region], 3) ^ 1)
    after = await summed(node, region, [1, 3])

    assert len(set(first)) == 3
    assert again == [first[2], first[0]]
    assert after[0] == first[1]
    assert after[1] != first[0]


@pytest.mark.parametrize(
    ("region", "pages", "why"),
    [
        ("nowhere", [1], "there is no region 'nowhere' here"),
        ("kv", [10_000], "some pages are not of 'kv'"),
    ],
)
async def test_pages_that_are_not_there_are_not_summed(pair, region, pages, why):
    ticket = next(numbers)
    pair[1].transport.order(Sum(ticket, region, Pages(pack_ids(pages))))

    assert await pair[1].hears(Summed, ticket=ticket) == Summed(ticket, b"", why)


async def summed(node, region, pages):
    ticket = next(numbers)
    node.transport.order(Sum(ticket, region, Pages(pack_ids(pages))))
    found = await node.hears(Summed, ticket=ticket)
    return np.frombuffer(found.sums, "<u8").tolist()
