"""Copies to the saved area and back, asked of the loopback and of real transfer processes."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from kvd.core.inputs import Copied, CopyFailed, PostFailed
from kvd.transfer.orders import UNSTAMPED

pytestmark = pytest.mark.asyncio(loop_scope="module")

PATTERNS = {
    "one page": ([3], [5]),
    "a run": ([4, 5, 6, 7], [1, 2, 3, 4]),
    "scattered": ([9, 2, 17, 24, 1], [4, 3, 8, 1, 2]),
    "runs on one side": ([11, 12, 13, 14], [7, 5, 6, 8]),
    "backwards": ([20, 19, 18], [1, 2, 3]),
    "all the area": (list(range(17, 25)), list(range(1, 9))),
    "nothing": ([], []),
}

numbers = itertools.count(1)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("region", ["kv", "layered"])
async def test_pages_come_back_as_they_were_and_no_other_byte_changes(pair, region, pattern):
    node, _ = pair
    pages, slots = PATTERNS[pattern]
    pool, area = node.memories[region], node.memories[f"{region}.saved"]
    for memory in (pool, area):
        memory.paint(next(numbers))
    saved, whole = area.bytes.copy(), pool.bytes.copy()
    for here, there in zip(pool.shape.rows, area.shape.rows, strict=True):
        for page, slot in zip(pages, slots, strict=True):
            saved[area.piece(there, slot)] = pool.bytes[pool.piece(here, page)]
    size = len(pages) * pool.shape.page_bytes

    out, back = next(numbers), next(numbers)
    node.copy(out, region, pages, f"{region}.saved", slots)
    assert await node.copied(out) == Copied(UNSTAMPED, out, size)
    assert np.array_equal(area.bytes, saved)

    for row, page in itertools.product(pool.shape.rows, pages):
        pool.bytes[pool.piece(row, page)] = 0
    node.copy(back, f"{region}.saved", slots, region, pages)
    assert await node.copied(back) == Copied(UNSTAMPED, back, size)
    assert np.array_equal(pool.bytes, whole)


@pytest.mark.parametrize(
    ("source", "destination", "regions", "complaint"),
    [
        ([1], [9], ("kv", "kv.saved"), "destination page 9 is not a page of region 'kv.saved'"),
        ([25], [1], ("kv", "kv.saved"), "source page 25 is not a page of region 'kv'"),
        ([0], [1], ("kv", "kv.saved"), "source page 0 is not a page of region 'kv'"),
        ([1, 2], [1], ("kv", "kv.saved"), "2 source pages for 1 destination pages"),
        ([1], [1], ("kv", "layered.saved"), "lay both out alike"),
        ([1], [1], ("swa", "kv.saved"), "there is no region 'swa' here"),
        ([1], [1], ("kv", "swa.saved"), "there is no region 'swa.saved' here"),
    ],
)
async def test_a_copy_that_makes_no_sense_is_refused_and_writes_nothing(
    pair, source, destination, regions, complaint
):
    node, _ = pair
    before = {name: memory.bytes.copy() for name, memory in node.memories.items()}

    ticket = next(numbers)
    node.copy(ticket, regions[0], source, regions[1], destination)
    outcome = await node.copied(ticket)

    assert isinstance(outcome, CopyFailed)
    assert re.search(complaint, outcome.why)
    assert all(np.array_equal(node.memories[name].bytes, was) for name, was in before.items())


async def test_copies_of_one_size_are_done_in_the_order_in_which_they_came(pair):
    node, _ = pair
    tickets = [next(numbers) for _ in range(20)]

    for ticket in tickets:
        node.copy(ticket, "kv", [1, 2, 3], "kv.saved", [1, 2, 3])
    await node.copied(tickets[-1])

    heard = [one.ticket for one in node.reports if isinstance(one, Copied)]
    assert heard[-len(tickets) :] == tickets


async def test_a_small_copy_does_not_wait_for_the_large_ones_before_it(pair):
    node, _ = pair
    everything = list(range(1, 9))
    large = [next(numbers) for _ in range(30)]
    small = next(numbers)

    for ticket in large:
        node.copy(ticket, "kv", everything, "kv.saved", everything)
    node.copy(small, "layered", [1], "layered.saved", [2])
    for ticket in (*large, small):
        assert isinstance(await node.copied(ticket), Copied)

    ended = [one.ticket for one in node.reports if isinstance(one, Copied)]
    assert len(ended) - ended.index(small) > len(large) // 2
    assert [one for one in ended if one in large] == large


async def test_copies_that_were_cut_into_slices_are_answered_once_with_all_their_bytes(pair):
    node, _ = pair
    sizes = {next(numbers): n_pages for n_pages in (8, 1, 5, 7, 3, 8, 2)}

    for ticket, n_pages in sizes.items():
        pages = list(range(1, 1 + n_pages))
        node.copy(ticket, "kv", pages, "kv.saved", pages)
    for ticket in sizes:
        await node.copied(ticket)

    page_bytes = node.memories["kv"].shape.page_bytes
    heard = {one.ticket: one.n_bytes for one in node.reports if isinstance(one, Copied)}
    assert {ticket: heard[ticket] for ticket in sizes} == {
        ticket: n_pages * page_bytes for ticket, n_pages in sizes.items()
    }
    assert len(heard) == len([one for one in node.reports if isinstance(one, Copied)])


async def test_a_post_into_an_area_that_is_not_registered_is_refused(pair):
    sender, receiver = pair
    before = receiver.memories["kv.saved"].bytes.copy()

    post = next(numbers) + 10_000
    sender.post(post, receiver, [1], [1], component="kv.saved")

    assert isinstance(await sender.outcome(post), PostFailed)
    assert np.array_equal(receiver.memories["kv.saved"].bytes, before)
