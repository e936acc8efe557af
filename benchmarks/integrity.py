"""``benchmarks integrity``: what verifying costs, beside the same handoffs without it.

For each memory and page size three pairs of daemons serve at once, one for each mode, and take
turns, so that whatever else the machine does falls on all three; a ratio is the median of the
ratios within each repetition. The time of VERIFYING is what the decode side counts at /metrics.
CPU is that of both daemons and both transfer processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from benchmarks.harness import benchmark
from kvd.bench.engines import two_engines
from kvd.bench.memory import busy_s, when_collapsed
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable
from kvd.harness.daemons import LLAMA_8B, two_daemons
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from kvd.bench.engines import HandoffEngines
    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import Pair

PAGE_TOKENS: Final = 16
SPARE_PAGES: Final = 33
GIGA: Final = 1e9
KIB: Final = 1024
MEMORIES: Final = {"huge": "collapse", "4k": "off"}
"""``pool.huge_pages`` by what the memory is called."""

SHAPES: Final = {
    2048 * KIB: LLAMA_8B,
    64 * KIB: {"pool.layers": "4", "pool.heads": "2", "pool.head_dim": "128"},
}
"""Settings of a pool by the bytes of its pages."""

MODES: Final = (Integrity.OFF, Integrity.SAMPLED, Integrity.FULL)


class VerifiedTurns:
    """One pair of daemons, its sessions, and what its handoffs took."""

    def __init__(self, pair: Pair, engines: HandoffEngines) -> None:
        self.times_s: list[float] = []
        self.cpus_s: list[float] = []
        self.verifying_s: list[float] = []
        self._pair = pair
        self._engines = engines

    async def turn(self, *, is_counted: bool) -> None:
        """One handoff."""
        handoffs = await self._engines.meet(1)
        cpu_s, verifying_s = self._cpu_s(), self._verifying_s()
        took = await self._engines.move(handoffs)
        if is_counted:
            self.times_s.append(took.seconds)
            self.cpus_s.append(self._cpu_s() - cpu_s)
            self.verifying_s.append(self._verifying_s() - verifying_s)

    def _cpu_s(self) -> float:
        both = (self._pair.prefill, self._pair.decode)
        return sum(busy_s(daemon.pid) + busy_s(daemon.transfer_pid()) for daemon in both)

    def _verifying_s(self) -> float:
        """Seconds that parts of the decode side have spent in VERIFYING."""
        text = self._pair.decode.metrics()
        name = 'kvd_handoff_stage_seconds_sum{role="decode",stage="verify"} '
        return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))


async def _take_turns(
    pairs: dict[Integrity, Pair], prompt_tokens: int, repeats: int
) -> dict[Integrity, VerifiedTurns]:
    async with contextlib.AsyncExitStack() as up:
        turns = {}
        for mode, pair in pairs.items():
            engines = await up.enter_async_context(two_engines(pair, prompt_tokens))
            turns[mode] = VerifiedTurns(pair, engines)
        for number in range(repeats + 1):
            for of_mode in turns.values():
                await of_mode.turn(is_counted=number > 0)  # the first one warms what is cold
        return turns


def measure(memory: str, page_bytes: int, size_bytes: int, repeats: int) -> list[Measured]:
    """A row for each mode: medians over the repetitions; ``to_off``: goodput over that without."""
    n_pages = size_bytes // page_bytes
    pool_bytes = (n_pages + SPARE_PAGES) * page_bytes // 2**21 * 2**21 + 2**21
    pairs = {}
    with contextlib.ExitStack() as stack:
        for mode in MODES:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-bench-"))
            settings = {
                **SHAPES[page_bytes],
                "pool.huge_pages": MEMORIES[memory],
                "pool.size": f"{pool_bytes // 2**20}MiB",
                "transfer.integrity": mode.value,
            }
            pairs[mode] = stack.enter_context(two_daemons(Path(directory), settings))
            if memory == "huge":
                when_collapsed(pairs[mode], pool_bytes)
        found = asyncio.run(_take_turns(pairs, n_pages * PAGE_TOKENS, repeats))
    base = found[Integrity.OFF].times_s
    return [
        {
            "memory": memory,
            "page_kib": page_bytes // KIB,
            "integrity": mode.value,
            "rate_gb_s": size_bytes / statistics.median(turns.times_s) / GIGA,
            "to_off": statistics.median(o / m for o, m in zip(base, turns.times_s, strict=True)),
            "cpu_s": statistics.median(turns.cpus_s),
            "verify_ms": statistics.median(turns.verifying_s) * 1e3,
        }
        for mode, turns in found.items()
    ]


def run(told: Told, *, size_mib: int, repeats: int) -> BenchmarkResult:
    """What verifying pages costs: a handoff with integrity off, sampled and full."""
    size_bytes = size_mib * 2**20
    rows: list[Measured] = []
    for memory in MEMORIES:
        for page_bytes in SHAPES:
            told(f"{memory}, pages of {page_bytes // KIB} KiB")
            rows += measure(memory, page_bytes, size_bytes, repeats)
    title = f"A handoff of {size_mib} MiB on one host; medians of {repeats}"
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows)),),
        notes=(
            "GB/s: bytes over the time from the call of finish() to its answer; nothing was posted "
            "before, so the writer sums beside the copy and the reader when all has landed",
            "of off: median of the ratios within each repetition; CPU s: of both daemons and both "
            "transfer processes, for one handoff",
        ),
    )


COLUMNS: Final = (
    ResultColumn("memory", "memory"),
    ResultColumn("page_kib", "page KiB"),
    ResultColumn("integrity", "integrity"),
    ResultColumn("rate_gb_s", "GB/s", ".2f"),
    ResultColumn("to_off", "of off", ".2f"),
    ResultColumn("cpu_s", "CPU s", ".3f"),
    ResultColumn("verify_ms", "verifying ms", ".2f"),
)

command = benchmark(
    "integrity",
    run,
    click.option("--size-mib", default=256, show_default=True, help="Of one handoff."),
    click.option("--repeats", default=9, show_default=True, help="Handoffs per mode."),
)
