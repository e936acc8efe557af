"""The life of the storage process: start it, order, translate its reports, restart it.

As with the transfer process, the next one starts only when the old one is reaped and its memory map
is gone: what it had under way is over then, and the node is told. Nothing of a daemon waits for it:
a node without a storage process has no tiers for a while, and serves.

A tier that cannot be used (its directory is somebody else's, or another daemon's) looks to the node
like a process that ended: it is told why once, and tried again after a pause that grows.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from kvd.core import inputs
from kvd.daemon.revival import Revival
from kvd.storage.orders import Found, Searched, StorageReady
from kvd.transfer.orders import Dying
from kvd.transfer.process import TransportDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.effects import RestartStorage, StorageOrder
    from kvd.daemon.reactor import Reactor
    from kvd.storage.orders import StorageReports
    from kvd.storage.process import StorageProcess

LONGEST_PAUSE_S = 60.0
ENDING_S = 5.0
"""Of a process that is killed: usually some milliseconds."""


class StorageSupervisor:
    """One storage process after the other."""

    def __init__(self, reactor: Reactor, make: Callable[[int], StorageProcess]) -> None:
        """``make``: the process of a generation."""
        self._reactor = reactor
        self._make = make
        self._generation = 0
        self._process: StorageProcess | None = None
        self._revival = Revival(reactor.clock, LONGEST_PAUSE_S)
        self._why_down = ""
        self._starting: asyncio.Task[None] | None = None
        self._found: deque[Found | Searched] = deque()
        """Still to be told to the node."""

    def begin(self) -> None:
        """Start the first one; nobody waits for it."""
        self._starting = asyncio.get_running_loop().create_task(self._revive())

    async def stop(self) -> None:
        """Kill and reap, if the kernel ends it in time.

        One whose disk does not answer ends when that does. So long it keeps the daemon's lock, and
        what it may still write to the pool's memory is of no daemon.
        """
        ending = asyncio.get_running_loop().create_task(self._end())
        await asyncio.wait([ending], timeout=ENDING_S)

    async def _end(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        # Off first: what is ordered while it ends is dropped.
        process, self._process = self._process, None
        if process is not None:
            await process.stop()

    def order(self, order: StorageOrder) -> None:
        """Carry out an effect; forgotten where none serves, for then nothing is under way."""
        if self._process is not None:
            self._process.order(order)

    def restart(self, effect: RestartStorage) -> None:
        """Carry out ``RestartStorage``: a fence."""
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._replace(effect.why))

    # ---- reports -----------------------------------------------------------------------------

    def _on_reports(self, reports: list[StorageReports]) -> None:
        now_s = self._reactor.clock()
        for report in reports:
            match report:
                case Found() | Searched():
                    if not self._found:
                        asyncio.get_running_loop().call_soon(self._tell)
                    self._found.append(report)
                case StorageReady() | Dying():
                    pass  # of the process itself, no input of the node
                case _:
                    self._reactor.feed(msgspec.structs.replace(report, at_s=now_s))

    def _tell(self) -> None:
        """Tell the node the next of what was found: one a turn of the loop, which others share."""
        if not self._found:
            return  # its process is gone
        now_s = self._reactor.clock()
        match self._found.popleft():
            case Found(tier, namespace, keys):
                self._reactor.feed(
                    inputs.TierFound(at_s=now_s, tier=tier, namespace=namespace, keys=keys)
                )
            case Searched(tier, n_removed, why):
                self._reactor.feed(
                    inputs.TierReady(
                        at_s=now_s,
                        tier=tier,
                        generation=self._generation,
                        n_removed=n_removed,
                        removed_why=why,
                    )
                )
        if self._found:
            asyncio.get_running_loop().call_soon(self._tell)

    def _on_exit(self, why: str) -> None:
        """The process that serves ended by itself, and is reaped."""
        self._process = None
        self._is_gone(why)
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._revive())

    def _is_gone(self, why: str) -> None:
        self._why_down = why
        self._found.clear()
        self._reactor.feed(inputs.StorageGone(self._reactor.clock(), self._generation, why))

    async def _replace(self, why: str) -> None:
        if self._process is not None:
            # Reaped, and its map gone, before the node hears of it: only that makes it a fence.
            await self._process.stop()
            # Before the node is told: what it orders then is for a process that is gone.
            self._process = None
            self._is_gone(why)
        await self._revive()

    async def _revive(self) -> None:
        """Start until it serves."""
        await self._revival.until_up(self._start)
        # Last: until it serves, a second restart would start a second process.
        self._starting = None

    async def _start(self) -> bool:
        """Start the next generation; whether it serves."""
        self._generation += 1
        process = self._make(self._generation)
        ended: list[str] = []

        def on_exit(why: str) -> None:
            # Of one that is still starting it is this function's to handle.
            if self._starting is None:
                self._on_exit(why)
            else:
                ended.append(why)

        # Before it is ready: what follows its first report may come with it, and be answered by an
        # order.
        self._process = process
        try:
            await process.start(self._on_reports, on_exit)
            why = ended[0] if ended else ""
        except TransportDown as down:
            why = str(down)
        if not why:
            self._why_down = ""
            self._revival.came_up()
            return True
        self._process = None
        # A reason that stays is told once.
        if ended or why != self._why_down:
            self._is_gone(why)
        return False
