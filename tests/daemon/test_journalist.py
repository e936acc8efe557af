"""The journal's place in the shell: what is asked of the transfer process, and what is proven."""

from __future__ import annotations

import asyncio
import os
import subprocess

import numpy as np
import pytest

from kvd.daemon.former_processes import process_now
from kvd.daemon.journalist import BATCH_S, Journalist
from kvd.daemon.pagesums import ORDER_BYTES, OUTSTANDING_BYTES, PageSums, Unsummed
from kvd.journal.engines import Process
from kvd.journal.layout import open_journal
from kvd.journal.reader import Reading, VerifyDepth
from kvd.journal.writer import JournalWriter
from kvd.transfer.orders import RegionPlan, Sum, Summed
from kvd.types import Pages, pack_ids, page_ids
from tests.journal.journaled import cached, freed, identity, made, read
from tests.transfer.conftest import SHAPES, Memory
from tests.transfer.loopback import Loopback

PAGE_BYTES = 4096


class Desk:
    """A journalist over a new journal; ``orders`` is what the transfer process is given."""

    def __init__(self, page_bytes: int = PAGE_BYTES, n_pages: int = 64) -> None:
        self.orders: list[Sum] = []
        self.identity = identity(pages=n_pages)
        self.buffer, self.journal = made(self.identity)
        self.sums = PageSums(self.orders.append, "kv", page_bytes)
        self.writer = JournalWriter(self.journal)
        self.journalist = Journalist(self.writer, self.sums)

    def answer(self, order: Sum) -> None:
        self.sums.summed(Summed(order.ticket, sums_of(order.pages)))

    def proven(self) -> list[int]:
        _, found = read(self.buffer, self.identity)
        return sorted(page for branch in found.branches for page in page_ids(branch.pages))


def sums_of(pages: Pages) -> bytes:
    return np.array([1000 + page for page in page_ids(pages)], dtype="<u8").tobytes()


def path(n_pages: int) -> tuple[int, ...]:
    return tuple(range(4 * n_pages))


def packed(*pages: int) -> Pages:
    return Pages(pack_ids(list(pages)))


def only_sums(sums: PageSums):
    """What the transfer does with reports of sums."""

    def take(reports) -> None:
        for report in reports:
            if isinstance(report, Summed):
                sums.summed(report)

    return take


async def turn() -> None:
    """One turn of the journalist, and what it causes."""
    await asyncio.sleep(2 * BATCH_S)


async def test_what_is_cached_in_one_turn_is_asked_for_together_and_proven():
    desk = Desk()
    desk.sums.transfer_ready()
    desk.journalist.cached(cached([3, 4], path(2)))
    desk.journalist.cached(cached([9], path(3), before=4))
    assert desk.orders == []

    await turn()
    assert desk.orders == [Sum(1, "kv", packed(3, 4, 9))]
    assert desk.proven() == []
    desk.answer(desk.orders[0])
    await turn()

    assert desk.proven() == [3, 4, 9]


async def test_a_page_that_was_freed_before_it_was_asked_for_is_not_asked_for():
    desk = Desk()
    desk.sums.transfer_ready()
    desk.journalist.cached(cached([3], path(1)))
    desk.writer.freed(freed([3]))

    await turn()

    assert desk.orders == []
    assert await desk.journalist.settle(1)


async def test_what_was_answered_in_one_turn_is_proven_together():
    desk = Desk(page_bytes=ORDER_BYTES)
    desk.sums.transfer_ready()
    desk.journalist.cached(cached([3, 4], path(2)))
    desk.journalist.cached(cached([9], path(3), before=4))
    await turn()
    desk.writer.freed(freed([9]))

    for order in reversed(desk.orders):
        desk.answer(order)
    assert desk.proven() == []
    assert not await desk.journalist.settle(0)
    desk.sums.transfer_gone()
    await turn()

    assert desk.proven() == [3, 4]
    assert await desk.journalist.settle(0.1)


async def test_a_page_that_was_freed_while_it_was_summed_is_not_proven():
    desk = Desk()
    desk.sums.transfer_ready()
    desk.journalist.cached(cached([3, 4], path(2)))
    await turn()
    desk.writer.freed(freed([4]))
    desk.answer(desk.orders[0])
    await turn()

    assert desk.proven() == [3]


async def test_nothing_is_asked_for_before_a_transfer_process_is_ready():
    desk = Desk()
    desk.journalist.cached(cached([3], path(1)))
    await turn()
    assert desk.orders == []

    desk.sums.transfer_ready()
    await turn()

    assert desk.orders == [Sum(1, "kv", packed(3))]


async def test_sums_that_a_dead_transfer_process_owes_are_asked_of_the_next():
    desk = Desk()
    desk.sums.transfer_ready()
    desk.journalist.cached(cached([3], path(1)))
    await turn()
    desk.sums.transfer_gone()
    await turn()
    assert len(desk.orders) == 1

    desk.sums.transfer_ready()
    await turn()
    desk.sums.summed(Summed(1, bytes(8)))
    assert desk.proven() == []
    desk.answer(desk.orders[1])
    await turn()

    assert desk.orders[1:] == [Sum(2, "kv", packed(3))]
    assert desk.proven() == [3]


async def test_no_more_is_outstanding_than_may_be():
    desk = Desk(page_bytes=ORDER_BYTES)
    most = OUTSTANDING_BYTES // ORDER_BYTES
    desk.sums.transfer_ready()
    desk.journalist.cached(cached(list(range(1, 21)), path(20)))

    await turn()
    assert [page_ids(order.pages) for order in desk.orders] == [[n] for n in range(1, most + 1)]
    desk.answer(desk.orders[0])
    await turn()
    assert page_ids(desk.orders[-1].pages) == [most + 1]
    for at in range(1, 20):
        desk.answer(desk.orders[at])
        await turn()

    assert desk.proven() == list(range(1, 21))


async def test_pages_that_cannot_be_summed_are_counted_and_not_proven():
    desk = Desk()
    desk.sums.transfer_ready()
    desk.journalist.cached(cached([3, 4], path(2)))
    await turn()
    desk.sums.summed(Summed(1, b"", "there is no region 'kv' here"))
    desk.journalist.cached(cached([5], (7, 7, 7, 7)))
    await turn()
    desk.sums.summed(Summed(2, bytes(7)))

    assert desk.journalist.n_unsummed_pages == 3
    assert desk.proven() == []


async def test_settling_ends_with_the_last_sum():
    desk = Desk()
    desk.sums.transfer_ready()
    desk.journalist.cached(cached([3], path(1)))
    settling = asyncio.ensure_future(desk.journalist.settle(30))
    await turn()
    await turn()
    assert not settling.done()

    desk.answer(desk.orders[0])

    assert await settling
    assert desk.proven() == [3]


async def test_settling_gives_up_in_time():
    desk = Desk()
    desk.journalist.cached(cached([3], path(1)))

    assert not await desk.journalist.settle(0)


async def test_pages_that_come_and_go_while_nobody_sums_do_not_pile_up():
    desk = Desk(n_pages=16)
    for _ in range(100):
        desk.journalist.cached(cached([3, 4], path(2)))
        desk.writer.freed(freed([3, 4]))
    desk.journalist.cached(cached([5], path(1)))
    assert desk.journalist._queued_pages <= 32

    desk.sums.transfer_ready()
    await turn()

    assert [page_ids(order.pages) for order in desk.orders] == [[5]]


async def test_what_is_read_is_checked_piece_by_piece():
    desk = Desk(page_bytes=ORDER_BYTES)
    desk.writer.cached(cached(list(range(1, 21)), path(20)))
    pages, words = desk.writer.pending(packed(*range(1, 21)))
    desk.writer.summed(pages, words, sums_of(pages))
    reading = Reading(desk.journal, VerifyDepth.ALL)

    checking = asyncio.ensure_future(desk.sums.check(reading, lambda _: None))
    answered = 0
    while not checking.done():
        await turn()
        assert len(desk.orders) - answered <= OUTSTANDING_BYTES // ORDER_BYTES
        for order in desk.orders[answered:]:
            desk.answer(order)
        answered = len(desk.orders)

    await checking
    assert answered == 20
    assert sum(len(branch.pages) for branch in reading.found().branches) == 20 * 4


async def test_a_check_ends_when_the_transfer_process_dies():
    desk = Desk()
    desk.writer.cached(cached([1], path(1)))
    pages, words = desk.writer.pending(packed(1))
    desk.writer.summed(pages, words, sums_of(pages))
    checking = asyncio.ensure_future(
        desk.sums.check(Reading(desk.journal, VerifyDepth.ALL), lambda _: None)
    )
    await turn()

    desk.sums.transfer_gone()

    with pytest.raises(Unsummed, match="gone"):
        await checking


def test_a_process_is_known_by_its_pid_and_its_start():
    with subprocess.Popen(["sleep", "60"]) as child:
        process = process_now(child.pid)
        child.kill()

    assert process.start_ticks > 1
    assert process_now(child.pid) == Process(child.pid, 1)


async def test_what_one_transfer_process_summed_the_next_one_finds_again():
    memory = Memory("kv", SHAPES["kv"])
    memory.paint(1)
    region = RegionPlan("kv", memory.fd, memory.shape)
    ours = identity(pages=memory.shape.pages)
    buffer, journal = made(ours)
    first = Loopback("first", [region])
    sums = PageSums(first.order, "kv", memory.shape.page_bytes)
    await first.start(only_sums(sums), print)
    journalist = Journalist(JournalWriter(journal), sums)
    sums.transfer_ready()
    journalist.cached(cached(list(range(1, 9)), path(8)))
    assert await journalist.settle(10)
    await first.stop()

    memory.bytes[memory.piece(memory.shape.rows[0], 6)] ^= 1
    second = Loopback("second", [region])
    sums = PageSums(second.order, "kv", memory.shape.page_bytes)
    await second.start(only_sums(sums), print)
    reading = Reading(open_journal(buffer, ours), VerifyDepth.ALL)
    await sums.check(reading, lambda _: None)
    await second.stop()

    (branch,) = reading.found().branches
    assert page_ids(branch.pages) == [1, 2, 3, 4, 5]
    assert page_ids(reading.found().unproven) == [6, 7, 8]
    os.close(memory.fd)
