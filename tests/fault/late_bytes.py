"""Writers that die in the middle of a write over a slow link: no late byte may be seen.

    python -m tests.fault.late_bytes --attempts 200 --seed 1 --json FILE

Each attempt sends eight megabytes whose every word names it, and ends the writer while some of them
wait in a kernel or in the wire. The decode engine asks for every page that comes back, fills it
with another value, and watches it for as long as bytes of that writer arrive. A word that nobody
who holds its page has written is foreign; there must be none, and no page may stay away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import kvd.client
from kvd.bench.daemons import DaemonFailed
from kvd.bench.netns import NoNamespaces
from kvd.errors import KvdError
from tests.fault.late_world import (
    CACHED_PAGES,
    FAULTS,
    HANDOFF_BYTES,
    HANDOFF_PAGES,
    LOST_S,
    SPARE_PAGES,
    Attempt,
    Where,
    World,
    world,
)
from tests.fault.load import Broken
from tests.fault.shuttle import Command, Flow, Order
from tests.fault.slow_link import FAST
from tests.fault.table import Figures, percentile, say, show
from tests.fault.watched import Foreign, Watched, release, sent

if TYPE_CHECKING:
    from collections.abc import Iterable

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


async def _send(node: kvd.client.Node, tokens, attempt: int) -> None:
    with contextlib.suppress(KvdError):
        lease = await node.lease(tokens, cache=False)
        words = Watched(node, 0).words
        for page in lease.pages.tolist():
            words[page] = sent(attempt)
        sending = await node.send(attempt, tokens, lease=lease, deadline_s=DEADLINE_S)
        await sending.finish()


def plan(seed: int, attempts: int, only: str = "") -> list[Attempt]:
    """So many attempts, those at one place together; the same seed makes the same."""
    source = random.Random(seed)
    names = [only] if only else [name for name, one in FAULTS.items() for _ in range(one.weight)]
    planned = []
    for number in range(attempts):
        name = names[number % len(names)]
        fault = FAULTS[name]
        order = source.choice([Order.AHEAD, Order.AHEAD, Order.BEHIND, Order.DELAYED])
        rate = source.choice(fault.rates)
        window = source.choice(["wide", "wide", "wide", "wide", "narrow"])
        if order is Order.BEHIND and window == "wide" and rate < 5:
            order = Order.AHEAD  # or its peer is lost before anything is done to it
        where = Where(source.choice([1500, 9000]), window, fault.fence_after_s)
        planned.append(
            Attempt(
                number + 1,
                name,
                rate * 1e6,
                order,
                source.uniform(0.2, 1.2),
                source.uniform(0.05, 0.2) if rate <= 5 else source.uniform(0.05, 0.5),
                source.uniform(0.1, 1.0) if rate <= 2 else source.uniform(0.0, 1 / rate),
                source.uniform(0.05, 0.5),
                source.random() < 0.5,
                where,
            )
        )
    return sorted(planned, key=lambda one: one.where)


async def run(
    directory: Path, attempts: Iterable[Attempt], seed: int, most_s: float
) -> list[Found]:
    """All of them, or those that there is time for.

    Raises:
        Broken: one could not be made.
        NoNamespaces: none can be made here.
    """
    found: list[Found] = []
    began_s = time.monotonic()
    left = list(attempts)
    while left and time.monotonic() - began_s < most_s:
        where = left[0].where
        here = [one for one in left if one.where == where]
        left = [one for one in left if one.where != where]
        place = directory / f"{where.mtu}-{where.window}-{where.fence_after_s:g}"
        place.mkdir()
        async with world(place, where, seed) as made:
            for one in here:
                if time.monotonic() - began_s > most_s:
                    break
                try:
                    found.append(await Trial(made, one).run())
                except (Broken, DaemonFailed, KvdError) as why:
                    raise Broken(f"seed {seed}, {one}: {why}") from why
                say(str(found[-1]))
    return found


def figures(found: list[Found], seed: int, planned: int) -> Figures:
    """By fault and rate."""
    groups: dict[tuple[str, float], list[Found]] = {}
    for one in found:
        groups.setdefault((one.fault, one.rate), []).append(one)
    rows = []
    for (fault, rate), ones in sorted(groups.items()):
        away = [one.away_s for one in ones if not one.is_delivered] or [0.0]
        rows.append(
            (
                fault,
                f"{rate / 1e6:g}",
                str(len(ones)),
                str(sum(8 * one.foreign.words for one in ones)),
                f"{percentile([one.late_bytes / 1e6 for one in ones], 50):.1f}",
                f"{max(one.late_s for one in ones):.1f}",
                f"{percentile(away, 50):.2f}",
                f"{max(away):.2f}",
                str(sum(one.stuck_pages for one in ones)),
            )
        )
    bad = [one for one in found if one.foreign.words]
    notes = [
        f"{len(bad)} attempts with {sum(8 * one.foreign.words for one in bad)} foreign bytes in "
        f"{sum(one.foreign.pages for one in bad)} pages; "
        f"{sum(one.stuck_pages for one in found)} pages stuck; "
        f"{sum(one.is_delivered for one in found)} handoffs were delivered all the same, "
        f"{sum(one.wrong_words for one in found)} of their words wrong",
        *([f"{planned - len(found)} attempts left out for lack of time"][: planned - len(found)]),
        *sorted({f"{one.fault}: {one.why}" for one in found if one.stuck_pages}),
    ]
    headers = (
        *("fault", "MB/s", "attempts", "foreign bytes", "late MB p50", "late s max"),
        *("pages away s p50", "max", "stuck pages"),
    )
    title = f"{len(found)} writers ended over a slow link, seed {seed}"
    return Figures(title, headers, rows, notes)


def main() -> int:
    """The command line."""
    words = argparse.ArgumentParser(description="Late bytes of dead writers, over a slow link.")
    words.add_argument("--attempts", type=int, default=200)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", choices=FAULTS, default="", metavar="FAULT")
    words.add_argument("--most-s", type=float, default=2400.0)
    words.add_argument("--json", type=Path)
    chosen = words.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-late-"))
    planned = plan(chosen.seed, chosen.attempts, chosen.only)
    try:
        found = asyncio.run(run(directory, planned, chosen.seed, chosen.most_s))
    except NoNamespaces as why:
        say(f"skipped, for a slow link needs two network namespaces: {why}")
        return 0
    except Broken as why:
        say(f"{why}\n  logs of both nodes: {directory}")
        return 1
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    say(show(figures(found, chosen.seed, len(planned))))
    if not all(one.is_good for one in found):
        say(f"logs of both nodes: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
