"""Four nodes and the engines on them.

    p ──▶ d      both are the victims of every fault
    p ──▶ h      shares p with the victims: healthy as long as nothing was done to p
    g ──▶ h      nothing is ever done to these two

``p`` and ``g`` prefill, ``d`` and ``h`` decode. Where the kernel allows it each node has a network
namespace of its own on one switch; elsewhere all are on loopback, and no link can be dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from kvd.wire import admin
from tests.fault.fleet import Engine, Server
from tests.fault.load import Broken, Load, Route, Stops
from tests.fault.network import switch
from tests.fault.prompts import SHAPE
from tests.support.daemons import HERE
from tests.support.netns import DEVICE, NoNamespaces

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from kvd.wire.snapshot import Snapshot
    from tests.fault.network import Switch

SHORT_TIMERS = {
    "peers.heartbeat_s": "0.2",
    "peers.suspect_s": "0.7",
    "peers.lost_s": "1.5",
    "transfer.silent_s": "3",
    "recorder.enabled": "true",
}
"""What a campaign can wait for, and two busy cores can keep."""

INTEGRITY = {"transfer.integrity": "full"}
"""How pages are compared before they are committed."""

REST_S = 6.0
LINKED_S = 20.0
VICTIMS = ("p", "d")
ENGINES = {"pe": "p", "de": "d", "ph": "p", "he": "h", "ge": "g", "px": "p", "dx": "d"}
"""Engines by node; ``px`` and ``dx`` are for hoarding and for listening."""


class Cluster:
    """The nodes by name, the engines by name, and the workload between them."""

    def __init__(self, servers: dict[str, Server], network: Switch | None, seed: int) -> None:
        self.servers = servers
        self.network = network
        self.stops = Stops()
        self.absences = Stops()
        """Of whoever was stopped, and of whoever was killed, until it is back."""
        self.load = Load(seed, self.stops, finds_torn_pages=bool(INTEGRITY))
        self.engines = {
            name: Engine(name, servers[node]) for name, node in ENGINES.items() if node in servers
        }
        e = self.engines
        self.victims = Route("p-d", e["pe"], e["de"], "p", frozenset("pd"), 4)
        self.routes = [self.victims, Route("p-h", e["ph"], e["he"], "p", frozenset("ph"), 2)]
        if "g" in servers:
            self.routes.append(Route("g-h", e["ge"], e["he"], "g", frozenset("gh"), 2))

    async def start(self) -> None:
        """Everything up, everybody linked, rooms being opened."""
        for server in self.servers.values():
            server.start()
        await asyncio.gather(*(server.ready() for server in self.servers.values()))
        busy = {engine for route in self.routes for engine in (route.sender, route.receiver)}
        await asyncio.gather(*(engine.start() for engine in busy))
        await self.linked()
        self.load.start(self.routes)

    async def extra_engine(self, side: str) -> Engine:
        """The one on that node that no route uses."""
        engine = self.engines[f"{side}x"]
        if not engine.was_started:
            await engine.start()
        return engine

    async def stop(self) -> None:
        """Everything down, whatever state it is in."""
        for engine in self.engines.values():
            await engine.end()
        for server in self.servers.values():
            await asyncio.to_thread(server.daemon.stop)

    async def linked(self) -> None:
        """Until every route can be used, both ways.

        Raises:
            Broken: not in time.
        """
        for route in self.routes:
            names = sorted(route.nodes)
            for name, other in (names, names[::-1]):
                await self._until(name, lambda now, other=other: sees(now, other), LINKED_S)

    async def at_rest(self) -> None:
        """Nobody holds anything: every page is free or cached, nothing is locked, no finding.

        Raises:
            Broken: something is held, quarantined, locked, lost or found.
        """
        for name in self.servers:
            await self._until(name, _is_idle, REST_S)
            await self.audited(name)
            now = (await self.servers[name].snapshot()).pools[0]
            if now.locked_pages or now.evictable_pages != now.cached_pages:
                raise Broken(f"{name}: nobody holds anything, and yet pages are locked: {now}")

    async def audited(self, name: str) -> None:
        """The audit finds nothing, and pages conserve, whatever runs.

        Raises:
            Broken: it does, or they do not.
        """
        report = await self.servers[name].ask(admin.Audit(1))
        assert isinstance(report, admin.Report), report
        if report.refused:
            raise Broken(f"{name}: the audit finds {'; '.join(report.refused)}")
        snapshot = await self.servers[name].snapshot()
        now = snapshot.pools[0]
        known = 1 + now.free_pages + now.held_pages + now.cached_pages + now.quarantined_pages
        if known != now.total_pages:
            raise Broken(f"{name}: {known} of {now.total_pages} pages are accounted for: {now}")
        if snapshot.totals.violations:
            raise Broken(f"{name}: {snapshot.totals.violations} violations were counted")

    async def _until(self, name: str, is_so, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + within_s
        while (missing := is_so(now := await self.servers[name].snapshot())) is not None:
            if loop.time() > until_s:
                raise Broken(f"{name}, after {within_s:g} s: {missing}\n{told(now)}")
            await asyncio.sleep(0.02)


def told(now: Snapshot) -> str:
    """What a node holds, in lines: for whoever has to find out why."""
    rows = [
        f"  generation {now.generation}, {now.state}",
        *(
            f"  peer {p.name} {p.state} generation {p.generation} agent {p.agent}"
            for p in now.peers
        ),
        *(f"  lease {one}" for one in now.leases),
        *(f"  waiting {one}" for one in now.waiting),
    ]
    for room in now.rooms:
        rows.append(f"  room {room.room} {room.side} {room.state} {room.waiting_for}")
        rows += [f"      {line}" for line in room.story]
    return "\n".join(rows)


def _is_idle(now: Snapshot) -> str | None:
    """What is still held; None when nothing is."""
    for what, found in (("leases", now.leases), ("rooms", now.rooms), ("waiting", now.waiting)):
        if found:
            return f"{len(found)} {what} are left although no engine wants anything"
    return None


def sees(now: Snapshot, other: str) -> str | None:
    """What keeps it from exchanging KV with ``other``; None when nothing does."""
    for peer in now.peers:
        if peer.name == other and peer.state == "up" and peer.agent == "loaded":
            return None
    return f"{other} is not up with a sending agent"


def _kept_in(memory: Path | None, name: str) -> dict[str, str]:
    if memory is None:
        return {}
    place = memory / name
    place.mkdir(mode=0o700)
    return {"pool.backing": "shm", "pool.directory": str(place)}


@contextlib.asynccontextmanager
async def cluster(
    directory: Path,
    seed: int,
    *,
    nodes: str = "pdhg",
    settings: Mapping[str, str] | None = None,
    memory: Path | None = None,
) -> AsyncIterator[Cluster]:
    """A cluster under load, for as long as the block lasts.

    With ``memory``, a directory, each pool is kept below it, and outlives its daemon.
    """
    with contextlib.ExitStack() as stack:
        network = None
        chosen = {
            **SHAPE,
            **SHORT_TIMERS,
            **INTEGRITY,
            "transfer.ucx.UCX_TLS": "tcp",
            **(settings or {}),
        }
        with contextlib.suppress(NoNamespaces):
            network = stack.enter_context(switch(nodes))
            chosen |= {"transfer.ucx.UCX_NET_DEVICES": DEVICE, "peers.insecure": "true"}
        servers = {
            name: Server(
                name,
                directory,
                chosen | _kept_in(memory, name),
                network.place(name) if network else HERE,
            )
            for name in nodes
        }
        for one, other in ("dp", "pd", "hp", "hg"):
            if one in servers and other in servers:
                servers[one].daemon.knows(servers[other].daemon)
        made = Cluster(servers, network, seed)
        try:
            await made.start()
            yield made
        finally:
            await made.stop()
