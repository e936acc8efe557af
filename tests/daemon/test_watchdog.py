"""The watchdog is fed by a daemon that does its work, and starves when it does not."""

from __future__ import annotations

import pytest

from kvd.core.inputs import Tick
from kvd.core.node import NodeState
from kvd.daemon.reactor import Reactor
from kvd.daemon.systemd import Systemd
from kvd.daemon.transfer_supervisor import TransferSupervisor
from kvd.daemon.watchdog import Watchdog
from kvd.observe.bus import Bus
from kvd.observe.log import EventLog, Fed, Unfed
from kvd.transfer.orders import Ready
from kvd.transfer.process import TransportDown
from tests.core.side import settings
from tests.daemon.manager import Manager

LIMIT_S = 9.0
FEED_S = 3.0


class Lines(EventLog):
    """A log that keeps what is written."""

    def __init__(self):
        self.written = []

    def write(self, event):
        self.written.append(event)


class Mortal:
    """A transport that comes up if it may, and dies when it is told to."""

    def __init__(self, rig):
        self.rig = rig

    async def start(self, on_reports, on_exit):
        if not self.rig.may_start:
            raise TransportDown("no memory may be registered")
        self.on_exit = on_exit
        self.rig.transport = self
        return Ready(b"metadata", "mortal")

    def order(self, order):
        pass

    async def stop(self):
        pass


class Rig:
    """A watchdog with a clock that is set by hand."""

    def __init__(self, address):
        self.now_s = 100.0
        self.may_start = True
        self.log = Lines()
        self.supervisor = Systemd(address, watchdog_s=LIMIT_S, clock=lambda: self.now_s)
        node = NodeState(settings("d", 64), self.now_s)
        self.reactor = Reactor(
            node, Bus(), clock=lambda: self.now_s, on_bug=lambda task, error: None
        )
        self.transfer = TransferSupervisor(
            self.reactor,
            lambda generation: Mortal(self),
            1e9,
            region="kv",
            page_bytes=4096,
            on_pool_lost=print,
        )
        self.watchdog = Watchdog(
            self.supervisor, self.reactor, self.transfer, self.log, lambda: "serving"
        )

    def beat(self, *, lag_s=0.0, ticks=True):
        if ticks:
            self.reactor.feed(Tick(self.now_s))
        self.watchdog.beat(self.now_s, lag_s)
        self.now_s += FEED_S


@pytest.fixture
def manager(tmp_path):
    with Manager.at(tmp_path) as one:
        yield one


@pytest.fixture
def rig(manager):
    return Rig(manager.address)


def feeds(manager, rig):
    rig.supervisor.barrier()
    return sum("WATCHDOG" in one.lines for one in manager.told)


def test_healthy_daemon_feeds_at_a_third_of_the_limit(manager, rig):
    for _ in range(4):
        rig.beat()
    rig.now_s -= FEED_S  # no time has passed since the last look
    rig.beat()

    assert feeds(manager, rig) == 4
    assert rig.log.written == []


def test_late_beat_starves_it_once_and_says_so(manager, rig):
    rig.beat()
    rig.beat(lag_s=5.0)
    rig.beat(lag_s=6.0)
    rig.beat()

    assert feeds(manager, rig) == 2
    assert rig.log.written == [
        Unfed(why="a beat of the event loop was 5.0 s late"),
        Fed(unfed_s=6.0),
    ]
    statuses = [one.lines["STATUS"] for one in manager.told if "STATUS" in one.lines]
    assert statuses[1].startswith("watchdog not fed: a beat of the event loop was 5.0 s late; serv")
    assert statuses[-1].startswith("serving; ")


def test_core_that_steps_no_tick_starves_it(manager, rig):
    rig.beat()
    rig.beat(ticks=False)

    assert feeds(manager, rig) == 1
    assert rig.log.written == [Unfed(why="the core does not step its ticks: the log has the bug")]


def test_bug_in_every_tick_starves_it(manager, rig):
    rig.beat()
    rig.reactor.node.step = lambda happened: 1 / 0
    rig.reactor.node.out.drain()
    rig.beat()

    assert feeds(manager, rig) == 1


async def test_transfer_process_that_is_down_starves_it_only_after_the_limit(manager, rig):
    await rig.transfer.start("start")
    rig.beat()
    rig.may_start = False
    rig.transport.on_exit("it was killed")

    for _ in range(4):  # 0, 3, 6 and 9 s after
        rig.beat()
    fed = feeds(manager, rig)
    rig.beat()

    assert (fed, feeds(manager, rig)) == (5, 5)
    assert rig.log.written == [
        Unfed(why="no transfer process has come up for 9 s: it was killed"),
    ]
    await rig.transfer.stop()


async def test_transfer_process_that_is_back_feeds_it_on(manager, rig):
    await rig.transfer.start("start")
    rig.transport.on_exit("it was killed")
    rig.now_s += 20.0
    await rig.transfer.start("it was killed")

    rig.beat()

    assert feeds(manager, rig) == 1
    await rig.transfer.stop()


def test_daemon_that_is_not_watched_keeps_its_status_line_only(manager):
    rig = Rig(manager.address)
    rig.watchdog = Watchdog(
        Systemd(manager.address), rig.reactor, rig.transfer, rig.log, lambda: "serving"
    )

    rig.beat(lag_s=1e3, ticks=False)

    assert feeds(manager, rig) == 0
    assert manager.told[0].lines == {
        "STATUS": "serving; peers 0/0 up, clients 0, pages 0 cached 63 free, handoffs 0 in flight"
    }
