"""``benchmarks recorder``: what the flight recorder takes of the daemon's own time.

One daemon with it and one without, in turns on the same requests: a lease and its release, one at a
time. The ring is small, so that it has been filled once before anything is measured: the first way
round the kernel still has to find the pages. What is compared is the processor time of the daemon,
the recorder process left out.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import numpy as np

import kvd.client
from benchmarks.harness import benchmark
from kvd.bench.memory import busy_s
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import DaemonProcess

RING_BYTES: Final = 8 * 2**20
SHAPE: Final = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "8", "pool.pages": "32768"}
RECORDED: Final = {**SHAPE, "recorder.enabled": "true", "recorder.max_bytes": str(RING_BYTES)}
PROMPT_TOKENS: Final = (200, 2000, 13_000)
PROMPTS: Final = 20
RECORD_BYTES: Final = 300
"""Of an input beside its tokens, or more."""

COLUMNS: Final = (
    ResultColumn("prompt_tokens", "prompt tokens"),
    ResultColumn("without_us", "without us", ".0f"),
    ResultColumn("with_us", "with us", ".0f"),
    ResultColumn("ratio", "ratio", ".2f"),
)


async def cycle_us(
    daemon: DaemonProcess, node: kvd.client.Node, prompts: list[np.ndarray], times: int
) -> float:
    """Lease and release so often; the daemon's processor time for one, in microseconds."""
    before_s = busy_s(daemon.pid)
    for number in range(times):
        lease = await node.lease(prompts[number % len(prompts)])
        await lease.release()
    return (busy_s(daemon.pid) - before_s) / times * 1e6


async def measure(
    daemons: list[DaemonProcess], rounds: int, cycles: int, told: Told
) -> list[Measured]:
    """The daemon without the recorder, then the one with it, in turns; medians of the rounds."""
    rng = np.random.default_rng(1)
    rows: list[Measured] = []
    async with AsyncExitStack() as up:
        nodes = [
            await up.enter_async_context(kvd.client.connect(one.client, name="bench"))
            for one in daemons
        ]
        sides = list(zip(daemons, nodes, strict=True))
        for n_tokens in PROMPT_TOKENS:
            told(f"{n_tokens} tokens")
            prompts = [rng.integers(0, 50_000, n_tokens, dtype=np.int32) for _ in range(PROMPTS)]
            once_round = RING_BYTES // (4 * n_tokens + 2 * RECORD_BYTES) + PROMPTS
            for side in sides:
                await cycle_us(*side, prompts, once_round)
            took = [
                [await cycle_us(*side, prompts, cycles) for side in sides] for _ in range(rounds)
            ]
            without, having = (statistics.median(column) for column in zip(*took, strict=True))
            row = {"prompt_tokens": n_tokens, "without_us": without, "with_us": having}
            rows.append({**row, "ratio": having / without})
    return rows


def run(told: Told, *, rounds: int, cycles: int) -> BenchmarkResult:
    """What the flight recorder takes of the daemon's own time."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name, ExitStack() as up:
        daemons = [
            up.enter_context(one_daemon(Path(name), settings, name=kind))
            for kind, settings in (("without", SHAPE), ("with", RECORDED))
        ]
        rows = asyncio.run(measure(daemons, rounds, cycles, told))
    title = "Processor time of the daemon for a lease and its release"
    worst = max(figure(row, "ratio") for row in rows)
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        goals=(at_most("processor time with it over without, worst", 1.15, worst),),
    )


command = benchmark(
    "recorder",
    run,
    click.option("--rounds", default=5, show_default=True, help="To take medians of."),
    click.option("--cycles", default=2000, show_default=True, help="Leases in a round."),
)
