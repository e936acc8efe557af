"""The faults, as a table: each does its harm to one victim, and has undone it when it returns.

What is not undone here kvd has to get over by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from kvd.errors import KvdError
from kvd.wire import admin
from tests.fault.fleet import frozen, kill
from tests.fault.jobs import Hoard, Listen, Unruly
from tests.fault.load import Broken
from tests.fault.prompts import Prompt, choose_prompt

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncIterator, Awaitable, Callable

    import msgspec  # noqa: F401 - for readers of the signatures

    from tests.fault.cluster import Cluster

SHORT_S = (0.2, 0.6)
"""Below every limit: nobody may notice."""
LONG_S = (1.8, 2.9)
"""Beyond peers.lost_s; the longest also beyond the deadline of a room, so that writes come late."""
WEDGED_S = 10.0
"""transfer.silent_s, the time to look again, and a stop of the daemon itself meanwhile."""


class Planned(NamedTuple):
    """One fault of a schedule: after ``start_s`` of its round, to ``side``, for ``for_s``."""

    kind: str
    side: str
    start_s: float
    for_s: float
    seed: int

    def __str__(self) -> str:
        return f"{self.start_s:.2f}s {self.kind} {self.side} {self.for_s:.2f}s seed {self.seed}"


class Kind(NamedTuple):
    """``harms``: whether the node itself is hit, so that rooms of others through it may fail."""

    run: Callable[[Cluster, Planned, random.Random], Awaitable[None]]
    weight: int
    spans: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    harms: bool = False
    sides: str = "pd"
    needs_network: bool = False


@contextlib.asynccontextmanager
async def _stopped(cluster: Cluster, pid: int | None) -> AsyncIterator[None]:
    if pid is None:
        yield
        return
    with frozen(pid), cluster.stops.span(), cluster.absences.span():
        yield


def _engine(side: str) -> str:
    return f"{side}e"


async def _kill_engine(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    with cluster.absences.span():
        await cluster.engines[_engine(fault.side)].kill()


async def _kill_daemon(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    with cluster.absences.span():
        await cluster.servers[fault.side].restart()


async def _kill_transfer(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    pid = cluster.servers[fault.side].transfer_pid()
    if pid is not None:
        kill(pid)


async def _kill_recorder(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    pid = cluster.servers[fault.side].recorder_pid()
    if pid is not None:
        kill(pid)


async def _stop_recorder(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    pid = cluster.servers[fault.side].recorder_pid()
    if pid is not None:
        with frozen(pid):  # no room waits for it
            await asyncio.sleep(fault.for_s)


async def _stop_engine(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    async with _stopped(cluster, cluster.engines[_engine(fault.side)].pid):
        await asyncio.sleep(fault.for_s)


async def _stop_daemon(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    async with _stopped(cluster, cluster.servers[fault.side].daemon.pid):
        await asyncio.sleep(fault.for_s)


async def _stop_transfer(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    async with _stopped(cluster, cluster.servers[fault.side].transfer_pid()):
        await asyncio.sleep(fault.for_s)


async def _wedge_transfer(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    """Stopped for good: its daemon has to notice, and to end it.

    One that serves: one that still starts has a longer limit, for it may have much to register.
    """
    server = cluster.servers[fault.side]
    try:
        pid = server.transfer_pid() if (await server.snapshot()).generation else None
    except KvdError:
        return  # the daemon is down itself
    async with _stopped(cluster, pid):
        until_s = time.monotonic() + WEDGED_S
        while pid is not None and server.transfer_pid() == pid:
            if time.monotonic() > until_s:
                raise Broken(f"{fault.side} has left a wedged transfer process for {WEDGED_S:g} s")
            await asyncio.sleep(0.02)


async def _cut_link(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    assert cluster.network is not None
    cluster.network.cut(fault.side)
    try:
        await asyncio.sleep(fault.for_s)
    finally:
        cluster.network.join(fault.side)


async def _flapping_link(cluster: Cluster, fault: Planned, source: random.Random) -> None:
    for _ in range(4):
        await _cut_link(cluster, fault._replace(for_s=fault.for_s / 4), source)
        await asyncio.sleep(fault.for_s / 4)


async def _full_pool(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    engine = await cluster.extra_engine(fault.side)
    await engine.do(Hoard(cluster.load.next_job(), fault.for_s))


async def _slow_subscriber(cluster: Cluster, fault: Planned, _: random.Random) -> None:
    """It subscribes, is stopped while everybody goes on, and then hears all, or of the gap."""
    engine = await cluster.extra_engine(fault.side)
    listening = asyncio.create_task(engine.do(Listen(cluster.load.next_job(), fault.for_s + 0.3)))
    await asyncio.sleep(0.1)
    with frozen(engine.pid):  # nobody else's room waits for this one
        await asyncio.sleep(fault.for_s)
    report = await listening
    if report.code == "gap":
        cluster.load.broken.append(f"a slow subscriber of {fault.side}: {report.message}")


def _unruly(how: Unruly) -> Callable[[Cluster, Planned, random.Random], Awaitable[None]]:
    async def run(cluster: Cluster, _: Planned, source: random.Random) -> None:
        prompt = choose_prompt(source)
        if how is Unruly.TEARS:
            # Nobody else may meet its pages, wherever they are caught.
            prompt = Prompt(0, 0, 150, source.randrange(2**31), f"torn-{source.random()}")
        deadline_s = 0.4 if how is Unruly.NEVER_FINISHES else 2.0
        await cluster.load.room(
            cluster.victims, source, unruly=how, prompt=prompt, deadline_s=deadline_s
        )

    return run


def _operator(
    request: Callable[[Cluster], admin.AdminRequest],
) -> Callable[[Cluster, Planned, random.Random], Awaitable[None]]:
    async def run(cluster: Cluster, fault: Planned, _: random.Random) -> None:
        with contextlib.suppress(KvdError):  # it may be down at this very moment
            await cluster.servers[fault.side].ask(request(cluster))

    return run


def _some_room(cluster: Cluster) -> int:
    victims = [room for room, route in cluster.load.open.items() if route is cluster.victims]
    return min(victims, default=1)


def _hostile(what: str) -> Callable[[Cluster, Planned, random.Random], Awaitable[None]]:
    async def run(cluster: Cluster, fault: Planned, _: random.Random) -> None:
        prefix = cluster.network.prefix if cluster.network else ()
        address = cluster.servers[fault.side].daemon.peers
        command = ("-m", "tests.fault.hostile", what, address, str(fault.seed))
        process = await asyncio.create_subprocess_exec(
            *(*prefix, sys.executable, *command), stderr=asyncio.subprocess.DEVNULL
        )
        await process.wait()

    return run


KINDS = {
    "kill engine": Kind(_kill_engine, 4),
    "kill daemon": Kind(_kill_daemon, 3, harms=True),
    "kill transfer process": Kind(_kill_transfer, 3, harms=True),
    "kill recorder": Kind(_kill_recorder, 1),
    "stop recorder": Kind(_stop_recorder, 1, (SHORT_S, LONG_S)),
    "stop engine": Kind(_stop_engine, 3, (SHORT_S, LONG_S)),
    "stop daemon": Kind(_stop_daemon, 3, (SHORT_S, LONG_S), harms=True),
    "stop transfer process": Kind(_stop_transfer, 3, (SHORT_S, LONG_S), harms=True),
    "wedge transfer process": Kind(_wedge_transfer, 2, harms=True),
    "cut link": Kind(_cut_link, 4, (SHORT_S, LONG_S), harms=True, needs_network=True),
    "flapping link": Kind(_flapping_link, 2, (LONG_S,), harms=True, needs_network=True),
    "full pool": Kind(_full_pool, 3, ((0.5, 1.5),), harms=True),
    "slow subscriber": Kind(_slow_subscriber, 2, ((0.5, 1.5),)),
    "receive cancelled": Kind(_unruly(Unruly.CANCELS), 2),
    "send aborted": Kind(_unruly(Unruly.ABORTS), 2),
    "deadline passes": Kind(_unruly(Unruly.NEVER_FINISHES), 2),
    "engine leaves": Kind(_unruly(Unruly.LEAVES), 2),
    "page torn": Kind(_unruly(Unruly.TEARS), 2),
    "operator fence": Kind(_operator(lambda _: admin.Fence(1)), 2, harms=True),
    "operator flush": Kind(_operator(lambda _: admin.Flush(1)), 1),
    "operator evict": Kind(_operator(lambda _: admin.Evict(1, 40)), 1),
    "operator abort": Kind(
        _operator(lambda cluster: admin.AbortRoom(1, _some_room(cluster), "campaign")), 2
    ),
    "hostile metadata": Kind(_hostile("metadata"), 2, harms=True),
    "hostile frames": Kind(_hostile("frames"), 1),
}


def possible(*, has_network: bool) -> list[str]:
    """Kinds of faults that can be made here."""
    return [name for name, kind in KINDS.items() if has_network or not kind.needs_network]


def plan_round(source: random.Random, names: list[str], most: int) -> list[Planned]:
    """Faults of these kinds that overlap; two never take the same kind to the same side."""
    weights = [KINDS[name].weight for name in names]
    planned: dict[tuple[str, str], Planned] = {}
    for _ in range(source.randint(min(2, most), most)):
        kind = source.choices(names, weights)[0]
        side = source.choice(KINDS[kind].sides)
        for_s = source.uniform(*source.choice(KINDS[kind].spans))
        planned[kind, side] = Planned(
            kind, side, source.uniform(0, 1.0), for_s, source.randrange(10**9)
        )
    return sorted(planned.values(), key=lambda one: one.start_s)


def plan_short(source: random.Random, names: list[str], count: int) -> list[Planned]:
    """``count`` of these kinds at once, none for long."""
    return [
        Planned(
            kind,
            source.choice(KINDS[kind].sides),
            source.uniform(0, 0.5),
            source.uniform(0.1, 0.5),
            source.randrange(10**9),
        )
        for kind in sorted(source.sample(names, count))
    ]
