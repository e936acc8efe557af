"""``benchmarks tier_beside``: handoffs to a node whose disk has all that it can do, and without.

Two daemons on this host; the decode one has a tier. Handoffs of 16 MiB go to it one after the
other, in turns: with nothing else to do, and while another engine, in a process of its own, leases
one prompt after the other. Half of these were evicted before, so that their pages are read from the
disk; half are new, so that others are written to it. It computes nothing: what it takes of the
machine is what the tier takes, and its own messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import tempfile
import time
from contextlib import AsyncExitStack
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
ALONE, BESIDE = "alone", "beside the tier"

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


async def measure(pair: Pair, rounds: int, calls: int, told: Told) -> list[Measured]:
    """Both ways, in turns."""
    async with AsyncExitStack() as up:
        p = await up.enter_async_context(kvd.client.connect(pair.prefill.client, name="p"))
        d = await up.enter_async_context(kvd.client.connect(pair.decode.client, name="d"))
        tokens = _prompt(HANDED_SEED, HANDED_PAGES)
        lease = await p.lease(tokens)
        await lease.commit()
        rooms = count(1)

        async def handed_over(_: int) -> None:
            room = next(rooms)
            receive = await d.receive(room, tokens, "p", cache=False)
            await p.hand_over(room, lease=lease)
            await receive.done()
            await receive.lease.release()

        kinds = {way: CallKind(handed_over, {}) for way in (ALONE, BESIDE)}
        await kinds[ALONE].take_turn(calls, 1)
        told("prompts that the other engine will want")
        others = Others(pair)
        up.callback(others.end)
        await others.rest()
        for number in range(rounds):
            told(f"round {number + 1} of {rounds}")
            for way in (ALONE, BESIDE)[:: 1 if number % 2 else -1]:
                async with others.busy() if way == BESIDE else contextlib.nullcontext():
                    kinds[way].turns.append(await kinds[way].take_turn(calls, 1))
        return [_row(kinds, way, others) for way in (ALONE, BESIDE)]


def _row(kinds: dict[str, CallKind], way: str, others: Others) -> Measured:
    """One way, beside the handoffs that were alone."""
    kind, alone = kinds[way], kinds[ALONE]
    share = float(way == BESIDE)
    return {
        "way": way,
        "p50_ms": kind.quantile_us(50) / 1000,
        "p99_ms": kind.quantile_us(99) / 1000,
        "p50_ratio": kind.quantile_us(50) / alone.quantile_us(50),
        "p99_ratio": kind.quantile_us(99) / alone.quantile_us(99),
        "read_gb_s": share * others.read_bytes / others.seconds / 1e9,
        "written_gb_s": share * others.written_bytes / others.seconds / 1e9,
    }


def run(told: Told, *, rounds: int, calls: int, directory: str | None) -> BenchmarkResult:
    """Handoffs to a node whose disk is busy, and to the same node with a disk at rest."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as name:
        with_tier = {
            **SHAPE,
            "tiers.disk.directory": f"{name}/disk",
            "tiers.disk.size": "2GiB",
            "tiers.disk.wait_s": "30",
        }
        with two_daemons(Path(name), with_tier, prefill=SHAPE) as pair:
            rows = asyncio.run(measure(pair, rounds, calls, told))
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"Handoffs of {HANDED_PAGES} pages of 256 KiB",
                columns=COLUMNS,
                rows=tuple(rows),
            ),
        ),
        goals=(
            at_most("p99 beside a busy tier over p99 alone", 1.2, figure(rows[-1], "p99_ratio")),
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
