"""Kill -9 under load of daemons whose pools outlive them, at the worst instants there are.

Engines run on with the leases that they have. A life ends in the middle of load, or 0 to 30 ms into
a burst of commits and evictions; some end again before they serve. After each the pages and leases
that were taken over are counted. Every few lives, at rest,

* each cached page is compared by digest, and they are as many as the daemon says;
* nothing is held, every page is free or cached, and the audit finds nothing;
* the journal notes exactly the cached pages, proven all of them;

and in some of these the memory of a page was damaged while nobody had it: cached, it is gone then,
with what follows it, and is never served.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.wire.admin import EventPage, ListEvents
from kvd.wire.events import Adopted
from tests.fault.cluster import cluster
from tests.fault.fleet import kill
from tests.fault.jobs import Burst, Check, Hold, Known
from tests.fault.lives import Restarted, next_delivery
from tests.fault.load import Broken
from tests.fault.prompts import choose_prompt
from tests.fault.table import Figures, percentile

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tests.fault.cluster import Cluster
    from tests.fault.fleet import Server
    from tests.fault.jobs import Report

REST_EVERY = 5
DAMAGED_EVERY = 2
"""Of the lives that begin at rest."""
PAGES = 193
PAGE_BYTES = 32 * 1024
SETTINGS = {"pool.pages": str(PAGES), "recorder.enabled": "false"}
"""So few that something is evicted with nearly every prompt."""

MOST_DELAY_S = 0.03
BURST = 24
AGAIN = 0.3
"""How often a daemon is killed again before it serves."""
MOST_START_S = 1.2
WORDS_AT = 4096
PROVEN = np.uint64(2**63)
PROVEN_WITHIN_S = 5.0
CHECKED_AT_ONCE = 200
JOURNAL, ARENA = "kvd.journal", "kvd.kv"


class Kept(Restarted):
    """What was found in addition, over all lives of one side.

    ``again``: how often a daemon was killed before it served. ``pages``, ``leases``: taken over, by
    life. ``former``: leases that an engine held over a restart, and looked through after it.
    ``compared``: cached pages at rest. ``damaged``: pages that were written while nobody had them;
    ``gone``: as many were cached, and are no more. ``back_s`` is of lives that ended under load.
    """

    again: int = 0
    pages: list[int] = msgspec.field(default_factory=list)
    leases: list[int] = msgspec.field(default_factory=list)
    unproven: int = 0
    former: int = 0
    looks: int = 0
    compared: int = 0
    damaged: int = 0
    gone: int = 0
    ready_s: list[float] = msgspec.field(default_factory=list)


class Lives:
    """One side of a cluster, life after life."""

    def __init__(self, made: Cluster, side: str, memory: Path, seed: int) -> None:
        self._made = made
        self._side = side
        self._server: Server = made.servers[side]
        self._memory = memory / side
        self._source = random.Random(f"{seed} {side} kept")
        self._known: list[Known] = []
        self._n_seen = 0
        self._jobs: set[asyncio.Task[Report]] = set()
        self.found = Kept(side)

    async def lives(self, times: int, rest_every: int = REST_EVERY) -> Kept:
        """So many of them, each ended by a kill.

        Raises:
            Broken: a promise was not kept.
        """
        made, found = self._made, self.found
        first, n_rests = len(made.load.ledger), 0
        for number in range(1, times + 1):
            is_rest = number % rest_every == 0 or number == times
            if is_rest:
                n_rests += 1
                await self._rest()
                damaged = n_rests % DAMAGED_EVERY == 1
                await self._life_from_rest(is_damaged=damaged)
                made.load.resume()
                await next_delivery(made, time.monotonic())
            else:
                killed_s = await self._life_under_load()
                found.back_s.append(await next_delivery(made, killed_s) - killed_s)
            found.measure(made)
        await self._rest()
        await self._look()
        found.conclude(made.load.ledger[first:])
        made.load.resume()
        return found

    # ---- one life --------------------------------------------------------------------------------

    async def _life_under_load(self) -> float:
        """Ended while engines hold leases, and commit; when that was."""
        source = self._source
        extra = await self._made.extra_engine(self._side)
        for _ in range(2):
            job = Hold(self._next(), choose_prompt(source), source.random(), most_s=6.0)
            self._known.append(Known(job.prompt))
            self._jobs.add(asyncio.create_task(extra.do(job)))
        await asyncio.sleep(source.uniform(0.1, 0.6))
        if source.random() < 0.5:
            prompts = [choose_prompt(source) for _ in range(BURST)]
            self._known += map(Known, prompts)
            self._jobs.add(asyncio.create_task(extra.do(Burst(self._next(), prompts))))
            await asyncio.sleep(source.uniform(0, MOST_DELAY_S))
        return await self._restart(source.choice(["all", "sampled"]))

    async def _life_from_rest(self, *, is_damaged: bool) -> None:
        """Ended when nobody holds anything; all that is cached is looked at after it."""
        before = (await self._server.snapshot()).pools[0].cached_pages
        await self._proven(before)
        await self._restart("all" if is_damaged else "sampled", is_damaged=is_damaged)
        pages = self.found.pages[-1]
        if not is_damaged and pages != before:
            raise Broken(f"{before} pages were cached and proven, {pages} were taken over")
        await self._look()

    async def _restart(self, verify: str, *, is_damaged: bool = False) -> float:
        """Kill it, once or twice, and start it; when it was killed first."""
        server, found = self._server, self.found
        server.daemon._settings["pool.verify"] = verify
        killed_s = time.monotonic()
        kill(server.daemon.pid)
        server.daemon.kill()
        cached = self._damage() if is_damaged else set()
        if self._source.random() < AGAIN:
            found.again += 1
            server.start()
            await asyncio.sleep(self._source.uniform(0, MOST_START_S))
            kill(server.daemon.pid)
            server.daemon.kill()
        server.start()
        await server.ready()
        found.ready_s.append(time.monotonic() - killed_s)
        event = await self._adopted()
        found.pages.append(event.pages)
        found.leases.append(event.leases)
        found.unproven += event.unproven_pages
        served = cached & self._noted()
        if served:
            raise Broken(f"{self._side}: pages {served} were damaged, and are cached")
        found.gone += len(cached)
        return killed_s

    async def _adopted(self) -> Adopted:
        reply = await self._server.ask(ListEvents(1, 0))
        assert isinstance(reply, EventPage), reply
        events = [event for event in reply.events if isinstance(event, Adopted)]
        if len(events) != 1:
            log = self._server.daemon.quoted_log()
            raise Broken(f"{self._side}: {len(events)} times something was taken over\n{log}")
        return events[0]

    def _damage(self) -> set[int]:
        """Change one byte of a free page and of a cached one; which of them was cached."""
        noted = self._noted()
        free = sorted(set(range(1, PAGES)) - noted)
        cached = self._source.choice(sorted(noted))
        arena = self._memory / ARENA
        with arena.open("r+b") as memory:
            for page in (cached, *free[:1]):
                memory.seek(page * PAGE_BYTES + self._source.randrange(PAGE_BYTES))
                byte = memory.read(1)
                memory.seek(-1, 1)
                memory.write(bytes([byte[0] ^ 0x5A]))
                self.found.damaged += 1
        return {cached}

    # ---- at rest ---------------------------------------------------------------------------------

    async def _rest(self) -> None:
        """Nobody holds anything, on any side."""
        load = self._made.load
        load.pause()
        await load.idle()
        for job in list(self._jobs):
            self._heard(await job)
        self._jobs.clear()
        await self._made.at_rest()

    def _heard(self, report: Report) -> None:
        if report.wrong:
            raise Broken(f"{self._side}: {report.message}")
        self.found.former += report.former
        self.found.looks += report.checked

    async def _look(self) -> None:
        """Compare all that is cached."""
        ledger = self._made.load.ledger
        new = [room.known for room in ledger[self._n_seen :]]
        new += [Known(known.prompt) for known in new if known.grow]
        self._n_seen = len(ledger)
        self._known += new
        wanted = (await self._server.snapshot()).pools[0].cached_pages
        pages = await self._compared(self._known)
        if len(pages) != wanted:
            raise Broken(
                f"{self._side}: {wanted} pages are cached, {len(pages)} of them are of prompts "
                f"that an engine had; {sorted(self._noted() - pages)} are not"
            )
        self.found.compared += len(pages)
        await self._made.at_rest()
        await self._proven(wanted)

    async def _compared(self, known: list[Known]) -> set[int]:
        extra = await self._made.extra_engine(self._side)
        pages: set[int] = set()
        alive: list[Known] = []
        for start in range(0, len(known), CHECKED_AT_ONCE):
            some = known[start : start + CHECKED_AT_ONCE]
            report = await extra.do(Check(self._next(), some))
            if report.wrong or report.code:
                raise Broken(f"{self._side}: {report.code} {report.message}")
            pages.update(report.pages)
            alive += [some[place] for place in report.places]
        self._known = alive
        return pages

    def _words(self) -> NDArray[np.uint64]:
        words = np.fromfile(self._memory / JOURNAL, np.uint64, PAGES, offset=WORDS_AT)
        words[0] = 0
        return words

    def _noted(self) -> set[int]:
        """The pages that the journal says are cached, proven."""
        return set(np.flatnonzero(self._words() >= PROVEN).tolist())

    async def _proven(self, cached: int) -> None:
        """The journal proves as many pages as are cached, and knows of nothing else."""
        until_s = time.monotonic() + PROVEN_WITHIN_S
        while True:
            words = self._words()
            proven = int(np.count_nonzero(words >= PROVEN))
            others = int(np.count_nonzero(words)) - proven
            if (proven, others) == (cached, 0):
                return
            if time.monotonic() > until_s:
                raise Broken(
                    f"{self._side}: {cached} pages are cached at rest; the journal proves {proven} "
                    f"and notes {others} others"
                )
            await asyncio.sleep(0.02)

    def _next(self) -> int:
        return self._made.load.next_job()


async def run(
    directory: Path, seed: int, each: int, *, sides: str = "dp", rest_every: int = REST_EVERY
) -> list[Restarted]:
    """``each`` lives of each of ``sides``, one side after the other.

    Raises:
        Broken: a promise was not kept.
    """
    memory = Path(tempfile.mkdtemp(prefix="kvd-kept-", dir="/dev/shm"))
    try:
        async with cluster(directory, seed, nodes="pdh", settings=SETTINGS, memory=memory) as made:
            found: list[Restarted] = [
                await Lives(made, side, memory, seed).lives(each, rest_every) for side in sides
            ]
            await made.load.stop()
            await made.at_rest()
            return found
    finally:
        shutil.rmtree(memory)


def figures(found: list[Restarted]) -> Figures:
    """What was taken over, by side."""
    rows, notes = [], []
    for one in found:
        assert isinstance(one, Kept)
        rows.append(
            (
                one.side,
                str(one.again),
                f"{percentile(one.ready_s, 50):.2f}",
                str(sum(one.pages)),
                f"{min(one.pages)} to {max(one.pages)}",
                str(sum(one.leases)),
                str(one.former),
                str(one.compared),
            )
        )
        notes.append(
            f"{one.side}: {one.damaged} pages damaged, {one.gone} of them cached and gone; "
            f"{one.looks} pages of held leases compared; {one.unproven} unproven pages kept"
        )
    return Figures(
        title=f"pools of {PAGES} pages that outlive their daemons",
        headers=(
            "side",
            "killed again",
            "ready p50 s",
            "pages adopted",
            "each",
            "leases",
            "held over",
            "compared",
        ),
        rows=rows,
        notes=notes,
    )
