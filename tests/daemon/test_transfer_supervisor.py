"""Only a transport that lives is announced, and stopping waits for every end."""

from __future__ import annotations

import asyncio

import pytest

from kvd.core import effects, inputs
from kvd.core.effects import Doubt
from kvd.core.layout.seal import Seal
from kvd.core.node import NodeState
from kvd.daemon.reactor import Reactor
from kvd.daemon.transfer_supervisor import TransferSupervisor
from kvd.observe.bus import Bus
from kvd.transfer.orders import UNSTAMPED, Alive, Order, Probe, Ready
from kvd.transfer.process import OnExit, OnReports, TransportDown
from kvd.types import Pages, pack_ids
from kvd.wire import events
from kvd.wire.peer import Integrity
from tests.core.side import settings

LIMIT_S = 5.0


class Short:
    """A transport that may end between its ``Ready`` and the resumption of ``start``."""

    def __init__(self, *, ends_at_once: bool) -> None:
        self.ends_at_once = ends_at_once
        self.orders: list[Order] = []
        self.is_over = False
        self.is_answering = True
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.starting = asyncio.Event()
        self.stopping = asyncio.Event()

    async def start(self, on_reports: OnReports, on_exit: OnExit) -> Ready:
        self.starting.set()
        try:
            await self.may_start.wait()
        except asyncio.CancelledError:
            await self.stop()
            raise
        self.on_exit = on_exit
        self.on_reports = on_reports
        if self.ends_at_once:
            self.die()
        return Ready(b"metadata", "short")

    def die(self) -> None:
        self.is_over = True
        self.on_exit("it was killed")

    def order(self, order: Order) -> None:
        self.orders.append(order)
        if isinstance(order, Probe) and self.is_answering:
            self.on_reports([Alive(order.number)])

    async def stop(self) -> None:
        self.stopping.set()
        await self.may_end.wait()
        self.is_over = True


class Site:
    """A supervisor over these transports, one generation after the other."""

    def __init__(self, *lives: Short) -> None:
        self.generations: list[int] = []
        """What was announced."""
        self.now_s = 0.0
        self._news = asyncio.Event()
        bus = Bus()
        bus.subscribe(self._take)
        node = NodeState(settings("n", 16), 0.0)
        self.bugs: list[BaseException] = []
        reactor = Reactor(
            node, bus, clock=lambda: self.now_s, on_bug=lambda _, bug: self.bugs.append(bug)
        )
        self.fed: list[inputs.Input] = []
        self.lost: list[str] = []
        reactor.record_with(lambda happened, _: self.fed.append(happened))
        self.transfer = TransferSupervisor(
            reactor,
            lambda generation: lives[generation - 1],
            silent_s=2.0,
            region="kv",
            page_bytes=4096,
            on_pool_lost=self.lost.append,
        )

    def _take(self, event: events.Event) -> None:
        if isinstance(event, events.TransferStarted):
            self.generations.append(event.generation)
            self._news.set()

    async def until_announced(self, generation: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while generation not in self.generations:
                self._news.clear()
                await self._news.wait()


async def test_the_supervisor_refuses_to_start_when_the_transport_ends_as_it_gets_ready() -> None:
    site = Site(Short(ends_at_once=True))

    with pytest.raises(TransportDown, match="it was killed as soon as it was ready"):
        await site.transfer.start("start")

    assert site.generations == []


async def test_it_goes_on_to_the_next_generation_when_a_restarted_one_ends_at_once() -> None:
    first, second, third = (Short(ends_at_once=ends) for ends in (False, True, False))
    site = Site(first, second, third)
    await site.transfer.start("start")

    first.die()
    await site.until_announced(3)
    site.transfer.order(effects.Quiesce(1, Doubt.SENT))

    assert site.generations == [1, 3]
    assert (len(second.orders), len(third.orders)) == (0, 1)
    third.die()
    assert site.bugs == []
    await site.transfer.stop()


async def test_stop_waits_for_a_start_that_it_cancelled() -> None:
    first, second = Short(ends_at_once=False), Short(ends_at_once=False)
    site = Site(first, second)
    await site.transfer.start("start")
    second.may_start.clear()
    site.transfer.restart(effects.RestartTransfer("fence"))
    async with asyncio.timeout(LIMIT_S):
        await second.starting.wait()

    await site.transfer.stop()

    assert second.is_over


async def test_stop_waits_for_the_end_of_a_transport_that_was_being_replaced() -> None:
    first = Short(ends_at_once=False)
    site = Site(first)
    await site.transfer.start("start")
    first.may_end.clear()
    site.transfer.restart(effects.RestartTransfer("fence"))
    await first.stopping.wait()

    stopping = asyncio.create_task(site.transfer.stop())
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.05, first.may_end.set)
    await stopping

    assert first.is_over
    assert site.generations == [1]


async def beat(site: Site, seconds: float) -> None:
    """Tick like the daemon does."""
    for _ in range(round(seconds / 0.05)):
        site.now_s += 0.05
        site.transfer.beat()
        await asyncio.sleep(0)


async def test_a_transport_whose_loop_stops_answering_is_replaced() -> None:
    first, second = Short(ends_at_once=False), Short(ends_at_once=False)
    site = Site(first, second)
    await site.transfer.start("start")
    await beat(site, 10)
    assert site.generations == [1]

    first.is_answering = False
    await beat(site, 2)
    assert site.generations == [1]
    await beat(site, 2)
    await site.until_announced(2)

    assert first.is_over
    await beat(site, 10)
    assert site.generations == [1, 2]
    await site.transfer.stop()


async def test_a_host_that_slept_does_not_blame_its_transport() -> None:
    first = Short(ends_at_once=False)
    site = Site(first)
    await site.transfer.start("start")
    await beat(site, 1)
    first.is_answering = False
    await beat(site, 0.6)
    site.now_s += 3600
    await beat(site, 0.6)
    first.is_answering = True
    first.on_reports([Alive(first.orders[-1].number)])
    await beat(site, 10)

    assert site.generations == [1]
    await site.transfer.stop()


async def test_the_supervisor_hands_over_what_the_core_wants_done_as_it_stands() -> None:
    transport = Short(ends_at_once=False)
    site = Site(transport)
    await site.transfer.start("start")
    seal = Seal(Integrity.FULL, b"k" * 16, 3, 9)
    four, three = Pages(pack_ids([4, 5])), Pages(pack_ids([3, 1]))
    wanted = [
        effects.Post(7, "d", 2, "index", four, three, seal, first_page=3, split=4),
        effects.Verify(8, "state", seal, three, b"sums"),
        effects.Copy(9, "kv", four, "buffer", three),
    ]

    for effect in wanted:
        site.transfer.order(effect)

    assert transport.orders == wanted
    await site.transfer.stop()


async def test_the_supervisor_stamps_what_is_reported_with_the_time_of_the_node() -> None:
    transport = Short(ends_at_once=False)
    site = Site(transport)
    await site.transfer.start("start")
    site.now_s += 3.0

    transport.on_reports([inputs.PostDone(UNSTAMPED, 7, 4096, b"sums", 0.5)])

    assert site.fed[-1] == inputs.PostDone(site.now_s, 7, 4096, b"sums", 0.5)
    await site.transfer.stop()
