"""One writer that ends over a slow link, and the pages that it was writing.

Its handoff is of eight megabytes whose every word names it. The decode engine asks for every page
that comes back, fills it with another value, and watches it for as long as bytes of that writer
arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

import msgspec

import kvd.client
from kvd.errors import KvdError
from tests.fault.late_world import (
    CACHED_PAGES,
    FAULTS,
    HANDOFF_BYTES,
    HANDOFF_PAGES,
    LOST_S,
    SPARE_PAGES,
    Attempt,
    World,
)
from tests.fault.load import Broken
from tests.fault.shuttle import Command, Flow
from tests.fault.slow_link import FAST
from tests.fault.watched import Foreign, Watched, release, sent

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvd.client import Receive

DEADLINE_S = 100.0
START_S = 15.0
LOOK_EVERY_S = 0.05
STUCK_S = 20.0
"""Beyond the time that everything which was sent takes over the wire."""
QUIET_S = 0.5
"""Without a byte, while a connection has not ended: longer than a retransmission takes."""
QUIET_AFTER_CUT_S = 5.0
LEFT_ALONE_S = 2.0
"""How long after ``lost_s`` it is looked whether a host that vanished keeps its pages."""

ALL_PAGES = SPARE_PAGES + HANDOFF_PAGES


class Found(msgspec.Struct, frozen=True):
    """What came of an attempt; seconds are counted from its fault."""

    number: int
    fault: str
    rate: float
    order: str
    mtu: int
    window: str
    late_s: float
    """When the last byte of that writer arrived at the host."""
    late_bytes: int
    away_s: float
    """When all of its pages could be leased again."""
    foreign: Foreign
    is_delivered: bool = False
    wrong_words: int = 0
    """Of a delivered prompt."""
    stuck_pages: int = 0
    why: str = ""
    """What ``kvd why page`` said of a page that was away for long."""

    @property
    def is_good(self) -> bool:
        """Whether nothing is wrong with it."""
        return not (self.foreign.words or self.wrong_words or self.stuck_pages)

    def __str__(self) -> str:
        """A line for whoever watches."""
        flags = " DELIVERED" if self.is_delivered else ""
        if self.foreign.words:
            flags += (
                f"  FOREIGN in {self.foreign.pages} pages ({self.foreign.cached_pages} cached), "
                f"of attempts {self.foreign.attempts}"
            )
        if self.stuck_pages:
            flags += f"  STUCK: {self.stuck_pages} pages: {self.why}"
        if self.wrong_words:
            flags += f"  WRONG: {self.wrong_words} words of a delivered prompt"
        return (
            f"{self.number:3d}  {self.fault:28s} {self.rate / 1e6:4g} MB/s  {self.order:15s} "
            f"mtu {self.mtu} {self.window:6s}  late {self.late_bytes / 1e6:5.2f} MB until "
            f"{self.late_s:5.2f} s  pages away {self.away_s:5.2f} s  "
            f"foreign bytes {8 * self.foreign.words}{flags}"
        )


class Trial:
    """One attempt, while it runs."""

    def __init__(self, made: World, one: Attempt) -> None:
        assert made.watched is not None
        self._world = made
        self._one = one
        self._fault = FAULTS[one.fault]
        self._watched: Watched = made.watched
        self._old: dict[str, Flow] = {}
        self._fault_s = 0.0
        self._why = ""
        self._wrong_words = 0
        self._delivered = False

    async def run(self) -> Found:
        """From the handoff to the last late byte.

        Raises:
            Broken: it could not be made, or ended neither way.
        """
        made, one, watched = self._world, self._one, self._watched
        await made.linked()
        node = await kvd.client.connect(
            made.servers["p"].daemon.client, name="prefill", return_within_s=1.0
        )
        tokens = watched.prompt(HANDOFF_PAGES)
        tasks = set()
        try:
            receiving = await watched.node.receive(
                one.number, tokens, "p", deadline_s=DEADLINE_S, cache=False
            )
            watched.want(SPARE_PAGES, START_S)
            if not await watched.had(SPARE_PAGES, START_S):
                raise Broken(f"d has no {SPARE_PAGES} pages beside a handoff")
            watched.want(HANDOFF_PAGES, DEADLINE_S)
            tasks |= {
                asyncio.create_task(self._receive(receiving)),
                asyncio.create_task(_send(node, tokens, one.number)),
            }
            await made.under_way(one, START_S)
            self._old = made.carrying()
            self._fault_s = time.monotonic()
            hurt = asyncio.create_task(self._fault.run(made, one, receiving))
            tasks.add(hurt)
            if self._fault.vanishes:
                await self._leave_alone()
            away_s = await self._pages_back()
            stuck = await self._stuck()
            await hurt
            await self._last_byte()
            return self._found(away_s, stuck)
        finally:
            made.link.carry(Command(FAST))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await watched.forget()
            with contextlib.suppress(KvdError):
                await node.close()

    async def _receive(self, receiving: Receive) -> None:
        with contextlib.suppress(KvdError):
            await receiving.done()
            self._delivered = True
            self._wrong_words = self._watched.held(receiving.lease, self._one.number)
            await release([receiving.lease])

    async def _leave_alone(self) -> None:
        """A host that says nothing any more: either the policy ends it, or ``kvd why`` says what.

        Raises:
            Broken: it does not.
        """
        made = self._world
        is_back = await self._watched.had(ALL_PAGES, LOST_S + LEFT_ALONE_S)
        if is_back or self._one.where.fence_after_s:
            return
        self._why = await made.why(self._watched.missing_page(ALL_PAGES + CACHED_PAGES))
        if "fence" not in self._why:
            raise Broken(f"a host has vanished, and `kvd why` names no fence: {self._why}")
        if self._one.heals:
            made.link.carry(self._one.command)
        else:
            await made.fence()

    async def _pages_back(self) -> float:
        """Seconds until every page could be leased, or until that has taken too long."""
        until_s = time.monotonic() + STUCK_S + HANDOFF_BYTES / self._one.rate
        while not await self._watched.had(ALL_PAGES, LOOK_EVERY_S):
            self._watched.look()
            if time.monotonic() > until_s:
                break
        return time.monotonic() - self._fault_s

    async def _stuck(self) -> int:
        """How many are away for too long; a fence must bring them back.

        Raises:
            Broken: it does not.
        """
        missing = ALL_PAGES - self._watched.hoarded_pages
        if missing:
            self._why = await self._world.why(self._watched.missing_page(ALL_PAGES + CACHED_PAGES))
            await self._world.fence()
            if not await self._watched.had(ALL_PAGES, START_S):
                raise Broken(f"a fence did not give pages back; before it: {self._why}")
        return missing

    async def _last_byte(self) -> None:
        """Watch until nothing of that writer can come any more."""
        link, watched = self._world.link, self._watched
        if self._fault.cuts:
            link.carry(self._one.command)
        quiet_s = QUIET_AFTER_CUT_S if self._fault.cuts else QUIET_S
        healed_s = time.monotonic()
        until_s = healed_s + STUCK_S + HANDOFF_BYTES / self._one.rate
        while (now_s := time.monotonic()) < until_s:
            watched.look()
            seen = link.look()
            old = [seen.flows[name] for name in self._old]
            rested_s = now_s - max([healed_s, *(flow.last_s for flow in old)])
            is_over = all(flow.is_over for flow in old)
            if rested_s > (LOOK_EVERY_S if is_over else quiet_s) and not seen.waiting_bytes[0]:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        watched.look()

    def _found(self, away_s: float, stuck: int) -> Found:
        one, flows = self._one, self._world.link.look().flows
        late = [
            (flows[name].last_s - self._fault_s, flows[name].carried_bytes - flow.carried_bytes)
            for name, flow in self._old.items()
        ]
        return Found(
            number=one.number,
            fault=one.fault,
            rate=one.rate,
            order=one.order.value,
            mtu=one.where.mtu,
            window=one.where.window,
            late_s=max([0.0, *(last_s for last_s, _ in late)]),
            late_bytes=sum(size for _, size in late),
            away_s=away_s,
            foreign=self._watched.foreign(),
            is_delivered=self._delivered,
            wrong_words=self._wrong_words,
            stuck_pages=stuck,
            why=self._why,
        )


async def _send(node: kvd.client.Node, tokens: NDArray[np.int32], attempt: int) -> None:
    with contextlib.suppress(KvdError):
        lease = await node.lease(tokens, cache=False)
        words = Watched(node, 0).words
        for page in lease.pages.tolist():
            words[page] = sent(attempt)
        sending = await node.send(attempt, tokens, lease=lease, deadline_s=DEADLINE_S)
        await sending.finish()
