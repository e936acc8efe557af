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
from typing import TYPE_CHECKING

import click
import msgspec
import numpy as np

import kvd.client
from kvd.bench.memory import busy_s
from kvd.bench.report import Goal, at_most, bar, show_goals, show_table, write_json
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from kvd.bench.report import Told
    from kvd.harness.daemons import Daemon

RING_BYTES = 8 * 2**20
SHAPE = {"pool.layers": "1", "pool.heads": "1", "pool.head_dim": "8", "pool.pages": "32768"}
ON = {**SHAPE, "recorder.enabled": "true", "recorder.max_bytes": str(RING_BYTES)}
PROMPT_TOKENS = (200, 2000, 13_000)
PROMPTS = 20
RECORD_BYTES = 300
"""Of an input beside its tokens, or more."""
GOAL_RATIO = 1.15


class Cost(msgspec.Struct, frozen=True):
    """Processor time of the daemon for one lease and its release, medians of the rounds."""

    prompt_tokens: int
    without_us: float
    with_us: float
    ratio: float


class RecorderResult(msgspec.Struct, frozen=True):
    """What ``benchmarks recorder`` reports."""

    rounds: int
    cycles: int
    costs: tuple[Cost, ...]
    goals: tuple[Goal, ...]


class Side:
    """One daemon and an engine of it."""

    def __init__(self, daemon: Daemon, node: kvd.client.Node) -> None:
        self._daemon = daemon
        self._node = node

    async def cycle(self, prompts: list[np.ndarray], times: int) -> float:
        """Lease and release so often; the daemon's processor time for one, in microseconds."""
        before_s = busy_s(self._daemon.pid)
        for number in range(times):
            lease = await self._node.lease(prompts[number % len(prompts)])
            await lease.release()
        return (busy_s(self._daemon.pid) - before_s) / times * 1e6


async def measure(
    daemons: tuple[Daemon, Daemon], rounds: int, cycles: int, told: Told
) -> list[Cost]:
    """The daemon without the recorder, then the one with it, in turns."""
    rng = np.random.default_rng(1)
    costs = []
    async with AsyncExitStack() as up:
        sides = [
            Side(one, await up.enter_async_context(kvd.client.connect(one.client, name="bench")))
            for one in daemons
        ]
        for n_tokens in PROMPT_TOKENS:
            told(f"{n_tokens} tokens")
            prompts = [rng.integers(0, 50_000, n_tokens, dtype=np.int32) for _ in range(PROMPTS)]
            once_round = RING_BYTES // (4 * n_tokens + 2 * RECORD_BYTES) + PROMPTS
            for side in sides:
                await side.cycle(prompts, once_round)
            took = [[await side.cycle(prompts, cycles) for side in sides] for _ in range(rounds)]
            without, having = (statistics.median(column) for column in zip(*took, strict=True))
            costs.append(Cost(n_tokens, round(without), round(having), round(having / without, 3)))
    return costs


def run(rounds: int, cycles: int, told: Told) -> RecorderResult:
    """Start both daemons and measure."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as name, ExitStack() as up:
        daemons = tuple(
            up.enter_context(one_daemon(Path(name), settings, name=kind))
            for kind, settings in (("without", SHAPE), ("with", ON))
        )
        costs = asyncio.run(measure((daemons[0], daemons[1]), rounds, cycles, told))
    worst = max(one.ratio for one in costs)
    return RecorderResult(
        rounds,
        cycles,
        tuple(costs),
        (at_most("processor time with it over without, worst", GOAL_RATIO, worst),),
    )


@click.command("recorder")
@click.option("--rounds", default=5, show_default=True, help="Rounds to take the median of.")
@click.option("--cycles", default=2000, show_default=True, help="Leases in a round.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)
def command(rounds: int, cycles: int, file: Path | None) -> None:
    """What the flight recorder takes of the daemon's own time."""
    with bar("recorder", len(PROMPT_TOKENS)) as told:
        result = run(rounds, cycles, told)
    rows = [
        [str(one.prompt_tokens), f"{one.without_us:.0f}", f"{one.with_us:.0f}", f"{one.ratio:.2f}"]
        for one in result.costs
    ]
    headers = ("prompt tokens", "without us", "with us", "ratio")
    show_table("Processor time of the daemon for a lease and its release", headers, rows)
    show_goals(result.goals)
    if file is not None:
        write_json(file, result)
