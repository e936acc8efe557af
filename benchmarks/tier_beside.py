"""``benchmarks tier_beside``: handoffs to a node whose disk has all that it can do, and without.

Two daemons on this host; the decode one has a tier. Handoffs of 16 MiB go to it one after the
other, in turns: with nothing else to do, and while another engine, in a process of its own, leases
one prompt after the other. Half of these were evicted before, so that their pages are read from the
disk; half are new, so that others are written to it. It computes nothing: what it takes of the
machine is what the tier takes, and its own messages. Two more daemons take their turns, whose tier
makes way for no handoff.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.bench.rounds import CallKind
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import two_daemons

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from multiprocessing.synchronize import Event

    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import Pair

PAGE_TOKENS: Final = 16
POOL_PAGES: Final = 600
SHAPE: Final = {
    "pool.layers": "4",
    "pool.heads": "8",
    "pool.head_dim": "128",
    "pool.pages": str(POOL_PAGES + 1),
}
HANDED_PAGES: Final = 64
PROMPT_PAGES: Final = 90
PROMPTS: Final = 8
"""More than the pool has room for: each has left it when its turn comes."""
HANDED_SEED: Final = 2**31
REST_S: Final = 60.0
ALONE, BESIDE, UNYIELDING = "alone", "beside the tier", "beside one that makes no way"
NO_WAY_MADE: Final = {"tiers.disk.share_beside_handoffs": "1"}

COLUMNS: Final = (
    ResultColumn("way", "handoffs"),
    ResultColumn("p50_ms", "p50 ms", ".2f"),
    ResultColumn("p99_ms", "p99 ms", ".2f"),
    ResultColumn("p50_ratio", "p50 over alone", ".2f"),
    ResultColumn("p99_ratio", "p99", ".2f"),
    ResultColumn("read_gb_s", "read GB/s", ".2f"),
    ResultColumn("written_gb_s", "written GB/s", ".2f"),
)


def churn(endpoint: str, to_run: Event, is_at_rest: Event) -> None:
    """The other engine: leases while it is ``to_run``, until it is killed."""
    with kvd.client.connect_sync(endpoint, name="others") as node:
        seeds = count(PROMPTS)

        def have(seed: int) -> None:
            lease = node.lease(_prompt(seed, PROMPT_PAGES), deadline_s=60.0)
            lease.commit()
            lease.release()

        for seed in range(PROMPTS):
            have(seed)
            time.sleep(0.5)  # and it is written before the next needs its pages
        for known in cycle(range(PROMPTS)):
            is_at_rest.set()
            to_run.wait()
            is_at_rest.clear()
            have(known)
            have(next(seeds))


def _prompt(seed: int, pages: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 50_000, pages * PAGE_TOKENS, dtype=np.int32)


class Others:
    """The other engine's process, and what the tier did for it."""

    def __init__(self, pair: Pair) -> None:
        context = multiprocessing.get_context("spawn")
        self._daemon = pair.decode
        self._to_run, self._is_at_rest = context.Event(), context.Event()
        self._process = context.Process(
            target=churn, args=(self._daemon.client, self._to_run, self._is_at_rest), daemon=True
        )
        self._process.start()
        self.read_bytes = self.written_bytes = 0
        self.seconds = 0.0

    async def rest(self) -> None:
        """Return when it does nothing.

        Raises:
            ChildFailed: it does not come to rest.
        """
        self._to_run.clear()
        if not await asyncio.to_thread(self._is_at_rest.wait, REST_S):
            raise ChildFailed(f"the other engine is not at rest after {REST_S:g} s")

    @contextlib.asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """It has the tier do all that it can, for as long as the block lasts."""
        (before,) = self._daemon.snapshot().tiers
        began_s = time.perf_counter()
        self._to_run.set()
        yield
        await self.rest()
        self.seconds += time.perf_counter() - began_s
        (after,) = self._daemon.snapshot().tiers
        self.read_bytes += after.read_bytes - before.read_bytes
        self.written_bytes += after.written_bytes - before.written_bytes

    def end(self) -> None:
        """Kill it."""
        self._process.kill()
        self._process.join()


class Handoffs:
    """Two engines of a pair of daemons, which hand one prompt over again and again."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._rooms = count(1)

    async def begin(self, up: AsyncExitStack) -> Others:
        """Attach them, and the other engine; return when that is at rest."""
        self._p = await up.enter_async_context(
            kvd.client.connect(self._pair.prefill.client, name="p")
        )
        self._d = await up.enter_async_context(
            kvd.client.connect(self._pair.decode.client, name="d")
        )
        self._tokens = _prompt(HANDED_SEED, HANDED_PAGES)
        self._lease = await self._p.lease(self._tokens)
        await self._lease.commit()
        await self.hand_over(0)
        others = Others(self._pair)
        up.callback(others.end)
        await others.rest()
        return others

    async def hand_over(self, _: int) -> None:
        """One of them."""
        room = next(self._rooms)
        receive = await self._d.receive(room, self._tokens, "p", cache=False)
        await self._p.hand_over(room, lease=self._lease)
        await receive.done()
        await receive.lease.release()


async def measure(pairs: dict[str, Pair], rounds: int, calls: int, told: Told) -> list[Measured]:
    """All ways, in turns; ``pairs``: those of either tier, by the way beside it."""
    async with AsyncExitStack() as up:
        kinds: dict[str, CallKind] = {}
        others: dict[str, Others] = {}
        for way, pair in pairs.items():
            told(f"prompts that the other engine will want, {way}")
            handoffs = Handoffs(pair)
            others[way] = await handoffs.begin(up)
            kinds[way] = CallKind(handoffs.hand_over, {})
            kinds.setdefault(ALONE, CallKind(handoffs.hand_over, {}))
            await kinds[way].take_turn(calls, 1)
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}")
            for way in list(kinds)[:: 1 if number % 2 else -1]:
                async with others[way].busy() if way in others else contextlib.nullcontext():
                    kinds[way].turns.append(await kinds[way].take_turn(calls, 1))
        return [_row(kinds, way, others.get(way)) for way in (ALONE, *pairs)]


def _row(kinds: dict[str, CallKind], way: str, others: Others | None) -> Measured:
    """One way, beside the handoffs that were alone."""
    kind, alone = kinds[way], kinds[ALONE]
    gigabytes_s = 0.0 if others is None else 1e9 * others.seconds
    return {
        "way": way,
        "p50_ms": kind.quantile_us(50) / 1000,
        "p99_ms": kind.quantile_us(99) / 1000,
        "p50_ratio": kind.quantile_us(50) / alone.quantile_us(50),
        "p99_ratio": kind.quantile_us(99) / alone.quantile_us(99),
        "read_gb_s": others.read_bytes / gigabytes_s if others is not None else 0.0,
        "written_gb_s": others.written_bytes / gigabytes_s if others is not None else 0.0,
    }


def run(told: Told, *, rounds: int, calls: int, directory: str | None) -> BenchmarkResult:
    """Handoffs to a node whose disk is busy, with and without making way, or is at rest."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as name, ExitStack() as up:
        pairs: dict[str, Pair] = {}
        for way, more in ((BESIDE, {}), (UNYIELDING, NO_WAY_MADE)):
            place = Path(name, str(len(pairs)))
            place.mkdir()
            with_tier = {
                **SHAPE,
                "tiers.disk.directory": f"{place}/disk",
                "tiers.disk.size": "2GiB",
                "tiers.disk.wait_s": "30",
                **more,
            }
            pairs[way] = up.enter_context(two_daemons(place, with_tier, prefill=SHAPE))
        rows = asyncio.run(measure(pairs, rounds, calls, told))
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"Handoffs of {HANDED_PAGES} pages of 256 KiB",
                columns=COLUMNS,
                rows=tuple(rows),
            ),
        ),
        goals=(
            at_most("p99 beside a busy tier over p99 alone", 1.2, figure(rows[1], "p99_ratio")),
        ),
        notes=("daemons, engines and tier share the processors: on two, all wait for each other",),
    )


command = benchmark(
    "tier_beside",
    run,
    click.option("--rounds", default=20, show_default=True, help="Turns of each."),
    click.option("--calls", default=20, show_default=True, help="In a turn."),
    click.option("--directory", help="Where the disk is; the usual temporary one if not."),
)
