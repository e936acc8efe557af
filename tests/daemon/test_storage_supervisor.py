"""A storage process that ends is reaped, told of and replaced; what it had under way is over."""

from __future__ import annotations

import asyncio

from kvd.core import inputs
from kvd.core.effects import DropNamespace, RestartStorage
from kvd.daemon import revival
from kvd.daemon.storage_supervisor import StorageSupervisor
from kvd.storage.orders import Found, Searched, StorageReady
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.process import TransportDown

LIMIT_S = 5.0
ORDER = DropNamespace("disk", "n")


class Short:
    """A storage process of a test."""

    def __init__(self, *, fails: str = "", ends_at_once: bool = False) -> None:
        self.fails = fails
        self.ends_at_once = ends_at_once
        self.orders: list[object] = []
        self.is_over = False
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def start(self, on_reports, on_exit) -> StorageReady:
        if self.fails:
            raise TransportDown(self.fails)
        self.on_reports, self.on_exit = on_reports, on_exit
        on_reports([StorageReady("short"), Found("disk", "n", b"k" * 20), Searched("disk", 0)])
        if self.ends_at_once:
            self.die()
        await asyncio.sleep(0)
        return StorageReady("short")

    def die(self) -> None:
        self.is_over = True
        self.on_exit("it was killed")

    def order(self, order) -> None:
        self.orders.append(order)

    async def stop(self) -> None:
        await self.may_end.wait()
        self.is_over = True


class Listening:
    """What a reactor is to a supervisor; ``on_ready`` is what a node does at a ``TierReady``."""

    def __init__(self) -> None:
        self.fed: list[inputs.Input] = []
        self.on_ready = lambda: None
        self._news = asyncio.Event()

    def clock(self) -> float:
        return 100.0

    def feed(self, happened: inputs.Input) -> None:
        self.fed.append(happened)
        self._news.set()
        if isinstance(happened, inputs.TierReady):
            self.on_ready()

    async def until(self, kind, times: int = 1) -> None:
        async with asyncio.timeout(LIMIT_S):
            while sum(isinstance(one, kind) for one in self.fed) < times:
                self._news.clear()
                await self._news.wait()

    def heard(self, kind) -> list[inputs.Input]:
        return [one for one in self.fed if isinstance(one, kind)]


def supervised(*lives: Short) -> tuple[StorageSupervisor, Listening]:
    reactor = Listening()
    return StorageSupervisor(reactor, lambda generation: lives[generation - 1]), reactor


async def test_what_lies_there_is_told_before_the_tier_is_ready():
    life = Short()
    storage, reactor = supervised(life)

    storage.begin()
    await reactor.until(inputs.TierReady)

    assert reactor.fed == [
        inputs.TierFound(100.0, "disk", "n", b"k" * 20),
        inputs.TierReady(100.0, "disk", 1),
    ]
    await storage.stop()
    assert life.is_over


async def test_what_the_node_orders_when_a_tier_is_ready_is_not_lost():
    """The report comes with the first one, before ``start`` has returned."""
    life = Short()
    storage, reactor = supervised(life)
    reactor.on_ready = lambda: storage.order(ORDER)

    storage.begin()
    await reactor.until(inputs.TierReady)

    assert life.orders == [ORDER]
    await storage.stop()


async def test_reports_are_stamped_with_the_time_of_the_node():
    life = Short()
    storage, reactor = supervised(life)
    storage.begin()
    await reactor.until(inputs.TierReady)

    life.on_reports([inputs.Demoted(at_s=UNSTAMPED, ticket=7, written=(0,), n_bytes=1)])

    assert reactor.fed[-1] == inputs.Demoted(at_s=100.0, ticket=7, written=(0,), n_bytes=1)
    await storage.stop()


async def test_one_that_dies_is_told_of_and_replaced():
    first, second = Short(), Short()
    storage, reactor = supervised(first, second)
    storage.begin()
    await reactor.until(inputs.TierReady)
    await asyncio.sleep(0)

    first.die()
    await reactor.until(inputs.TierReady, 2)
    storage.order(ORDER)

    assert reactor.heard(inputs.StorageGone) == [inputs.StorageGone(100.0, 1, "it was killed")]
    assert [one.generation for one in reactor.heard(inputs.TierReady)] == [1, 2]
    assert (first.orders, second.orders) == ([], [ORDER])
    await storage.stop()


async def test_a_restart_is_told_when_the_old_one_is_reaped_and_not_before():
    first, second = Short(), Short()
    storage, reactor = supervised(first, second)
    storage.begin()
    await reactor.until(inputs.TierReady)
    await asyncio.sleep(0)
    first.may_end.clear()

    storage.restart(RestartStorage("no answer for 10 s"))
    await asyncio.sleep(0.05)
    before = list(reactor.heard(inputs.StorageGone))
    first.may_end.set()
    await reactor.until(inputs.TierReady, 2)

    assert before == []
    assert reactor.heard(inputs.StorageGone) == [inputs.StorageGone(100.0, 1, "no answer for 10 s")]
    await storage.stop()


async def test_one_that_ends_as_it_gets_ready_is_told_of_and_replaced():
    first, second = Short(ends_at_once=True), Short()
    storage, reactor = supervised(first, second)

    storage.begin()
    await reactor.until(inputs.TierReady)

    kinds = [type(one).__name__ for one in reactor.fed]
    assert kinds[-3:] == ["StorageGone", "TierFound", "TierReady"]
    assert kinds.count("TierReady") == 1
    assert reactor.heard(inputs.TierReady)[0].generation == 2
    await storage.stop()


async def test_a_reason_that_stays_is_told_once(monkeypatch):
    monkeypatch.setattr(revival, "FIRST_PAUSE_S", 0.001)
    lives = [Short(fails="no directory"), Short(fails="no directory"), Short(fails="no disk")]
    storage, reactor = supervised(*lives, Short())

    storage.begin()
    await reactor.until(inputs.TierReady)

    assert [one.why for one in reactor.heard(inputs.StorageGone)] == ["no directory", "no disk"]
    await storage.stop()


async def test_a_stop_waits_for_the_end_of_one_that_is_starting():
    class Slow(Short):
        async def start(self, on_reports, on_exit):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await self.stop()
                raise

    life = Slow()
    storage, _ = supervised(life)
    storage.begin()
    await asyncio.sleep(0.01)

    await storage.stop()

    assert life.is_over
