"""Two nodes at the ends of a slow wire, and the faults that leave bytes of a dead writer inside.

``p`` writes into the pages of ``d``. A fault ends the writer, or the handoff, while megabytes of it
wait in the kernel of ``p`` or in the wire; what becomes of ``d``'s pages is for ``late_trial``. A
third node, ``q``, lives beside ``d``: its connection stands all the time, and nobody's pages may
wait for the end of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

import kvd.client
from kvd.errors import KvdError
from kvd.wire import admin
from tests.fault.cluster import sees
from tests.fault.fleet import Server, kill
from tests.fault.load import Broken
from tests.fault.shuttle import Command, Flow, Order
from tests.fault.slow_link import FAST, SlowLink, slow_link
from tests.fault.watched import LEASE_PAGES, Watched
from tests.support.netns import DEVICE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from kvd.client import Receive

HANDOFF_PAGES = 8 * LEASE_PAGES
SPARE_PAGES = 2 * LEASE_PAGES
CACHED_PAGES = 2 * LEASE_PAGES
PAGE_BYTES = 65_536
HANDOFF_BYTES = HANDOFF_PAGES * PAGE_BYTES

LOST_S = 4.0
"""Longer than what waits in a congested wire in front of a Ping."""
LINKED_S = 40.0
LOOK_S = 0.002
CUTS = 12
"""A cut lasts so many pauses, up to 6 s: TCP then tries again after seconds, at each try later."""

_SETTINGS = {
    "pool.layers": "4",
    "pool.heads": "2",
    "pool.head_dim": "128",
    "pool.huge_pages": "off",
    "peers.heartbeat_s": "0.2",
    "peers.suspect_s": "2",
    "peers.lost_s": f"{LOST_S:g}",
    "peers.insecure": "true",
    "admission.max_deadline_s": "120",
    "transfer.min_bytes_per_s": "0",
    "transfer.integrity": "full",
    "transfer.ucx.UCX_TLS": "tcp",
    "transfer.ucx.UCX_NET_DEVICES": DEVICE,
}

_KERNEL = {
    "tcp_congestion_control": "reno",  # fills what buffer it finds
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
    "tcp_wmem": "4096 4194304 4194304",
}
_WINDOWS = {
    "wide": "4096 4194304 8388608",
    "narrow": "4096 131072 262144",
}


class Where(NamedTuple):
    """What cannot be changed while the daemons run.

    ``window``: how much of a connection the wire may hold, "wide" for megabytes; where it is
    "narrow" the rest waits in the kernel of the writer.
    """

    mtu: int
    window: str
    fence_after_s: float = 0.0


class Attempt(NamedTuple):
    """One handoff and its fault, when ``share`` of it has arrived and ``after_s`` later.

    ``pause_s``: between the parts of a fault that has several.
    """

    number: int
    fault: str
    rate: float
    order: Order
    delay_s: float
    share: float
    after_s: float
    pause_s: float
    heals: bool
    where: Where

    @property
    def command(self) -> Command:
        """How the wire carries from shortly before the fault on."""
        return Command(self.rate, self.order, self.delay_s)


def sent_since(before: dict[str, Flow], now: dict[str, Flow]) -> int:
    """Bytes that ``p`` has sent meanwhile; a connection of before may have ended, and counts."""
    came = 0
    for name, flow in now.items():
        if name.startswith("0 "):
            known = before[name].carried_bytes if name in before else 0
            # Fewer than before: another connection of the same ports.
            is_new = flow.carried_bytes < known
            came += flow.carried_bytes - (0 if is_new else known)
    return came


class World:
    """The two daemons, the wire, and the engine that watches the pool of ``d``."""

    def __init__(self, link: SlowLink, servers: dict[str, Server]) -> None:
        self.link = link
        self.servers = servers
        self.watched: Watched | None = None

    async def start(self, seed: int) -> None:
        """Both serve and are linked; a prompt is in the cache of ``d``."""
        for server in self.servers.values():
            server.start()
        await asyncio.gather(*(server.ready() for server in self.servers.values()))
        node = await kvd.client.connect(self.servers["d"].daemon.client, name="watching")
        self.watched = Watched(node, seed)
        await self.watched.cache(CACHED_PAGES)

    async def stop(self) -> None:
        """Everything down, whatever state it is in."""
        self.link.carry(Command(FAST))
        if self.watched is not None:
            with contextlib.suppress(KvdError):
                await self.watched.node.close()
        for server in self.servers.values():
            await asyncio.to_thread(server.daemon.stop)

    async def linked(self) -> None:
        """Until each is up for the other, with a sending agent.

        Raises:
            Broken: not in time.
        """
        for name, other in ("pd", "dp", "qd"):
            until_s = time.monotonic() + LINKED_S
            while (missing := sees(await self.servers[name].snapshot(), other)) is not None:
                if time.monotonic() > until_s:
                    raise Broken(f"{name} has no link after {LINKED_S:g} s: {missing}")
                await asyncio.sleep(0.02)

    def carrying(self) -> dict[str, Flow]:
        """The connections over which ``p`` sends bytes, and which have not ended."""
        flows = self.link.look().flows
        return {
            name: flow
            for name, flow in flows.items()
            if name.startswith("0 ") and not flow.is_over and flow.carried_bytes
        }

    async def under_way(self, one: Attempt, within_s: float) -> None:
        """Let its share through, make the wire slow, and wait for the moment of the fault.

        Raises:
            Broken: nothing came.
        """
        before = self.link.look().flows
        until_s = time.monotonic() + within_s
        while True:
            came = sent_since(before, self.link.look().flows)
            if came >= one.share * HANDOFF_BYTES:
                break
            if time.monotonic() > until_s:
                raise Broken(f"{came} bytes of a handoff have come after {within_s:g} s")
            await asyncio.sleep(LOOK_S)
        self.link.carry(one.command)
        await asyncio.sleep(one.after_s)

    async def why(self, page: int) -> str:
        """What ``kvd why page`` says of it on ``d``."""
        said = await self.servers["d"].ask(admin.Why(1, "page", page))
        assert isinstance(said, admin.Because), said
        return " ".join([said.sentence, *said.facts])

    async def fence(self) -> None:
        """``kvd fence`` on ``d``."""
        await self.servers["d"].ask(admin.Fence(1))


async def _kill_transfer(world: World, _: Attempt, __: Receive) -> None:
    pid = world.servers["p"].transfer_pid()
    assert pid is not None
    kill(pid)


async def _kill_daemon(world: World, _: Attempt, __: Receive) -> None:
    await world.servers["p"].restart()


async def _abort(_: World, __: Attempt, receiving: Receive) -> None:
    """``p`` stops posting, and what it has posted lands, or is given up after 5 s."""
    with contextlib.suppress(KvdError):  # it may be delivered by now
        await receiving.cancel()


async def _abort_then_kill(world: World, one: Attempt, receiving: Receive) -> None:
    await _abort(world, one, receiving)
    await asyncio.sleep(one.pause_s)
    await _kill_transfer(world, one, receiving)


async def _kill_then_fence(world: World, one: Attempt, receiving: Receive) -> None:
    await _kill_transfer(world, one, receiving)
    await asyncio.sleep(one.pause_s)
    await world.fence()


async def _vanish(world: World, one: Attempt, _: Receive) -> None:
    world.link.carry(Command(one.rate, one.order, one.delay_s, is_cut=True))


async def _kill_behind_a_cut(world: World, one: Attempt, receiving: Receive) -> None:
    """Its kernel tries again and again, and gets through when nobody remembers the process."""
    await _vanish(world, one, receiving)
    await (_kill_daemon if one.heals else _kill_transfer)(world, one, receiving)
    await asyncio.sleep(CUTS * one.pause_s)
    world.link.carry(one.command)


class Fault(NamedTuple):
    """``rates``: megabytes a second.

    ``cuts``: the wire is cut. ``vanishes``: it is, and nothing else happens to ``p``.
    """

    run: Callable[[World, Attempt, Receive], Awaitable[None]]
    weight: int
    rates: tuple[float, ...] = (1, 2, 5, 10, 20, 50)
    fence_after_s: float = 0.0
    cuts: bool = False
    vanishes: bool = False


FAULTS = {
    "transfer process killed": Fault(_kill_transfer, 5),
    "daemon killed and restarted": Fault(_kill_daemon, 4, (1, 2, 5)),
    "agent destroyed": Fault(_abort, 2, (0.5, 1)),
    "receive aborted": Fault(_abort, 2, (5, 10, 20)),
    "aborted, then killed": Fault(_abort_then_kill, 3, (1, 2, 5, 10)),
    "killed, then fenced": Fault(_kill_then_fence, 2),
    "killed behind a cut": Fault(_kill_behind_a_cut, 3, (2, 5, 10), cuts=True),
    "host vanished": Fault(_vanish, 2, (2, 10), cuts=True, vanishes=True),
    "host vanished, fence_after_s": Fault(_vanish, 1, (2, 10), 3.0, cuts=True, vanishes=True),
}


@contextlib.asynccontextmanager
async def world(directory: Path, where: Where, seed: int) -> AsyncIterator[World]:
    """Two daemons at the ends of a wire, for as long as the block lasts.

    Raises:
        NoNamespaces: there can be no such wire here.
    """
    kernel = {**_KERNEL, "tcp_rmem": _WINDOWS[where.window]}
    with slow_link(("p", "d"), mtu=where.mtu, kernel=kernel) as link:
        of_d = {
            "pool.pages": str(HANDOFF_PAGES + SPARE_PAGES + CACHED_PAGES + 1),
            "transfer.fence_after_s": f"{where.fence_after_s:g}",
        }
        here = link.place("d")
        beside = msgspec.structs.replace(here, port=here.port + 1)
        p = Server(
            "p", directory, _SETTINGS | {"pool.pages": f"{HANDOFF_PAGES + 1}"}, link.place("p")
        )
        d = Server("d", directory, _SETTINGS | of_d, here)
        q = Server("q", directory, _SETTINGS | {"pool.pages": "2"}, beside)
        p.daemon.knows(d.daemon)
        q.daemon.knows(d.daemon)
        d.daemon.knows(p.daemon)
        servers = {"p": p, "d": d, "q": q}
        made = World(link, servers)
        try:
            await made.start(seed)
            yield made
        finally:
            await made.stop()
