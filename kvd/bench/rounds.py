"""Calls in small rounds: whatever else the machine does falls on all that is compared.

What lives here: how calls take turns, what each turn took of every process, and what is made of
many turns. What must not: which calls, goals, tables.

A turn is so many calls of one kind, some of them at a time. In a round every kind has one turn, in
the other order each time. Rates are medians over the turns, ratios medians over the rounds: a turn
in which somebody else had the machine counts as one among many.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvd.bench.memory import busy_s, switches

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Call = Callable[[int], Awaitable[None]]
"""One call; it is told its number."""


class Turn(NamedTuple):
    """What a turn took: each call, all of them, and of each process per call."""

    latencies_s: list[float]
    seconds: float
    cpu_us: dict[str, float]
    switches: float

    @property
    def p50_us(self) -> float:
        """The median call."""
        return statistics.median(self.latencies_s) * 1e6

    @property
    def per_s(self) -> float:
        """Calls per second."""
        return len(self.latencies_s) / self.seconds


class CallKind:
    """One kind of call, and its turns. ``processes``: whose time it takes, by name."""

    def __init__(self, call: Call, processes: Mapping[str, int]) -> None:
        self._call = call
        self.processes = processes
        self.turns: list[Turn] = []

    async def take_turn(self, calls: int, in_flight: int) -> Turn:
        """``calls`` calls, ``in_flight`` at a time."""
        numbers = iter(range(calls))
        latencies_s: list[float] = []

        async def one_after_the_other() -> None:
            for number in numbers:
                began_s = time.perf_counter()
                await self._call(number)
                latencies_s.append(time.perf_counter() - began_s)

        pids = self.processes
        switched = sum(switches(pid) for pid in pids.values())
        before = {name: busy_s(pid) for name, pid in pids.items()}
        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_the_other() for _ in range(in_flight)))
        seconds = time.perf_counter() - began_s
        cpu_us = {name: (busy_s(pid) - before[name]) / calls * 1e6 for name, pid in pids.items()}
        switched = sum(switches(pid) for pid in pids.values()) - switched
        return Turn(
            latencies_s=latencies_s, seconds=seconds, cpu_us=cpu_us, switches=switched / calls
        )

    @property
    def per_s(self) -> float:
        """The median rate of the turns."""
        return statistics.median(turn.per_s for turn in self.turns)

    @property
    def switches(self) -> float:
        """Times that a call makes a core change from one thread to another."""
        return statistics.fmean(turn.switches for turn in self.turns)

    def quantile_us(self, q: float) -> float:
        """A quantile over the calls of all turns."""
        return float(np.percentile([s for turn in self.turns for s in turn.latencies_s], q)) * 1e6

    def cpu_us(self, name: str) -> float:
        """Processor time of that process per call, of all turns: some work comes in bursts."""
        return statistics.fmean(turn.cpu_us[name] for turn in self.turns)


class Spread(NamedTuple):
    """The median of some ratios, and between which half of them lie."""

    median: float
    low: float
    high: float


def spread(ratios: Sequence[float]) -> Spread:
    """Of these ratios."""
    low, median, high = np.percentile(ratios, [25, 50, 75]).tolist()
    return Spread(median, low, high)


class ComparedCalls(NamedTuple):
    """Kinds of calls that are compared: ``calls`` of each in a turn, ``in_flight`` at a time."""

    what: str
    in_flight: int
    calls: int
    kinds: dict[str, CallKind]

    async def warm_up(self) -> None:
        """A turn of each that does not count."""
        for kind in self.kinds.values():
            await kind.take_turn(self.calls, self.in_flight)

    async def play_round(self, number: int) -> None:
        """A turn of each."""
        for kind in list(self.kinds.values())[:: 1 if number % 2 else -1]:
            kind.turns.append(await kind.take_turn(self.calls, self.in_flight))

    def ratio(self, ours: str, theirs: str, figure: Callable[[Turn], float]) -> Spread:
        """Of that figure, in the turns of each round."""
        pairs = zip(self.kinds[ours].turns, self.kinds[theirs].turns, strict=True)
        return spread([figure(mine) / figure(other) for mine, other in pairs])
