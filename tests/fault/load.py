"""Handoffs all the time, along routes: each is one room, and the ledger knows how it ended.

A worker opens one room after the other. Both engines report; a room that has not concluded by its
deadline and a small bound is *stuck*, which is what must never happen. Time in which a process of
the campaign was stopped does not count against a room.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tests.fault.jobs import ENGINE_DIED, Known, Receive, Report, Send, Unruly
from tests.fault.prompts import Prompt, choose_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.fault.fleet import Engine

DEADLINE_S = 2.5
BOUND_S = 4.0
"""How much later than its deadline a room may end; two busy cores included."""

THINK_S = 0.03
LOOK_EVERY_S = 0.05


class Broken(Exception):
    """kvd did not keep a promise; the message says which."""


class Route(NamedTuple):
    """Who sends to whom. ``nodes``: the daemons it runs through."""

    name: str
    sender: Engine
    receiver: Engine
    source: str
    nodes: frozenset[str]
    workers: int


class Room(msgspec.Struct, frozen=True):
    """One room of the ledger: what both engines said, and what they may have cached."""

    room: int
    route: str
    unruly: Unruly
    deadline_s: float
    opened_s: float
    ended_s: float
    sent: Report
    received: Report
    known: Known

    @property
    def is_delivered(self) -> bool:
        """Whether the decode engine has the prompt."""
        return not self.received.code

    @property
    def conclusion(self) -> str:
        """What concluded it, in one word."""
        codes = [code for code in (self.received.code, self.sent.code) if code != ENGINE_DIED]
        return codes[0] or "delivered" if codes else ENGINE_DIED

    @property
    def latency_s(self) -> float:
        """What the decode engine waited, all of it."""
        return self.received.ended_s - self.received.began_s


class Stops:
    """When any process of the campaign was stopped, or was not there."""

    def __init__(self) -> None:
        self._spans: list[list[float]] = []

    @contextlib.contextmanager
    def span(self) -> Iterator[None]:
        """One is, for as long as the block lasts."""
        span = [time.monotonic(), float("inf")]
        self._spans.append(span)
        try:
            yield
        finally:
            span[1] = time.monotonic()

    def since(self, start_s: float) -> float:
        """Seconds since ``start_s`` in which one was; overlapping ones count once."""
        total, reached = 0.0, start_s
        for begin, end in sorted(self._spans):
            until = min(end, time.monotonic())
            if until > reached:
                total += until - max(begin, reached)
                reached = until
        return total


class Load:
    """The workload and its ledger."""

    def __init__(self, seed: int, stops: Stops, *, finds_torn_pages: bool) -> None:
        self.ledger: list[Room] = []
        self.open: dict[int, Route] = {}
        self.broken: list[str] = []
        self._seed = seed
        self._stops = stops
        self._finds_torn_pages = finds_torn_pages
        self._jobs = itertools.count(1)
        self._rooms = itertools.count(1)
        self._may_open = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, routes: list[Route]) -> None:
        self._may_open.set()
        for route in routes:
            for number in range(route.workers):
                source = random.Random(f"{self._seed} {route.name} {number}")
                self._tasks.append(asyncio.create_task(self._work(route, source)))

    async def stop(self) -> None:
        """No further room; return when none is left open."""
        self.pause()
        await self.idle()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def pause(self) -> None:
        """Open no further room."""
        self._may_open.clear()

    def resume(self) -> None:
        self._may_open.set()

    async def idle(self) -> None:
        """Return when no room is open.

        Raises:
            Broken: one is stuck, or something else was found.
        """
        while self.open:
            if self.broken:
                raise Broken("\n".join(self.broken))
            await asyncio.sleep(LOOK_EVERY_S)

    def next_job(self) -> int:
        """A number for a job outside the workload."""
        return next(self._jobs)

    def since(self, start_s: float, route: str) -> Iterator[Room]:
        """Rooms of a route that were opened after ``start_s``, newest first."""
        for room in reversed(self.ledger):
            if room.ended_s < start_s:
                return
            if room.opened_s >= start_s and room.route == route:
                yield room

    async def room(
        self,
        route: Route,
        source: random.Random,
        *,
        unruly: Unruly = Unruly.NO,
        prompt: Prompt | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> Room:
        """Open one room, and wait until both engines have reported."""
        number, opened_s = next(self._rooms), time.monotonic()
        chosen = prompt or choose_prompt(source)
        is_sender = (unruly not in {Unruly.CANCELS} and source.random() < 0.5) or (
            unruly in {Unruly.ABORTS, Unruly.NEVER_FINISHES, Unruly.TEARS}
        )
        sending = Send(
            self.next_job(),
            number,
            chosen,
            deadline_s,
            steps=source.randint(1, 4),
            pause_s=source.choice([0.0, 0.002, 0.01]),
            unruly=unruly if is_sender else Unruly.NO,
            to=min(route.nodes - {route.source}) if number % 2 else None,
        )
        receiving = Receive(
            self.next_job(),
            number,
            chosen,
            route.source,
            deadline_s,
            grow=source.choice([0, 0, 20]),
            unruly=Unruly.NO if is_sender else unruly,
            is_torn=unruly is Unruly.TEARS,
        )
        self.open[number] = route
        both = [
            asyncio.create_task(route.sender.do(sending)),
            asyncio.create_task(route.receiver.do(receiving)),
        ]
        await self._concluded(both, number, route, opened_s, deadline_s)
        sent, received = (task.result() for task in both)
        made = Room(
            number,
            route.name,
            unruly,
            deadline_s,
            opened_s,
            time.monotonic(),
            sent,
            received,
            Known(chosen, receiving.grow, number),
        )
        self._judge(made)
        self.ledger.append(made)
        del self.open[number]
        return made

    async def _concluded(
        self,
        both: list[asyncio.Task[Report]],
        number: int,
        route: Route,
        opened_s: float,
        deadline_s: float,
    ) -> None:
        is_told = False
        while True:
            _, waiting = await asyncio.wait(both, timeout=0.5)
            if not waiting:
                return
            late_s = time.monotonic() - opened_s - deadline_s - self._stops.since(opened_s)
            if late_s > BOUND_S and not is_told:
                is_told = True
                silent = [e.name for e, t in zip(route[1:3], both, strict=True) if t in waiting]
                self.broken.append(
                    f"room {number} ({route.name}) is stuck: {late_s:.1f} s after its deadline "
                    f"there is no word from {', '.join(silent)}"
                )

    def _judge(self, room: Room) -> None:
        """What is wrong with how a room ended, whatever the faults were."""
        for side, report in (("sender", room.sent), ("receiver", room.received)):
            if report.wrong and room.unruly is not Unruly.TEARS:
                self.broken.append(f"room {room.room} ({room.route}), {side}: {report.message}")
            if report.code and report.code != ENGINE_DIED and not report.message:
                self.broken.append(f"room {room.room}, {side}: {report.code} without a reason")
        is_torn = room.unruly is Unruly.TEARS and room.received.wrong
        if is_torn and room.is_delivered and self._finds_torn_pages:
            self.broken.append(f"room {room.room}: a torn page was delivered and committed")

    async def _work(self, route: Route, source: random.Random) -> None:
        while True:
            await self._may_open.wait()
            await self.room(route, source)
            await asyncio.sleep(source.random() * 2 * THINK_S)
