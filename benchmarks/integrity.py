"""``benchmarks integrity``: what verifying costs, beside the same handoffs without it.

For each memory and page size three pairs of daemons serve at once, one for each mode, and take
turns, so that whatever else the machine does falls on all three; a ratio is the median of the
ratios within each repetition. The time of VERIFYING is what the decode side counts at /metrics.
CPU is that of both daemons and both transfer processes. Beside it: how fast one core sums the same
number of bytes in memory that is not shared with anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import numpy as np

import kvd.client
from kvd.bench.engines import Engines, Side
from kvd.bench.memory import busy_s, when_collapsed
from kvd.bench.report import Goal, bar, show_notes, show_table, write_json
from kvd.bench.sites import HUGE, SMALL, shared_host
from kvd.bench.stream import json_option
from kvd.core.seal import Seal, page_sum
from kvd.harness.daemons import LLAMA_8B, two_daemons
from kvd.wire.peer import Integrity

if TYPE_CHECKING:
    from kvd.bench.report import Told
    from kvd.harness.daemons import Pair

PAGE_TOKENS: Final = 16
SPARE_PAGES: Final = 33
GIGA: Final = 1e9
KIB: Final = 1024

SHAPES: Final = {
    2048 * KIB: LLAMA_8B,
    64 * KIB: {"pool.layers": "4", "pool.heads": "2", "pool.head_dim": "128"},
}
"""Settings of a pool by the bytes of its pages."""

MODES: Final = (Integrity.OFF, Integrity.SAMPLED, Integrity.FULL)


class ModeResult(msgspec.Struct, frozen=True):
    """One row: medians over the repetitions; ``to_off`` is goodput where without it is 1."""

    memory: str
    page_bytes: int
    mode: str
    rate_gb_s: float
    to_off: float
    cpu_s: float
    verify_s: float


class IntegrityResult(msgspec.Struct, frozen=True):
    """What ``benchmarks integrity`` reports."""

    handoff_bytes: int
    repeats: int
    modes: tuple[ModeResult, ...]
    sum_gb_s: dict[str, float]
    """Of one core, by the bytes of a page."""
    goals: tuple[Goal, ...] = ()


class _Turns:
    """One pair of daemons, its sessions, and what its handoffs took."""

    def __init__(self, pair: Pair, engines: Engines) -> None:
        self.pair = pair
        self.times_s: list[float] = []
        self.cpus_s: list[float] = []
        self.verifying_s: list[float] = []
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
        both = (self.pair.prefill, self.pair.decode)
        return sum(busy_s(one.pid) + busy_s(one.transfer_pid()) for one in both)

    def _verifying_s(self) -> float:
        """Seconds that parts of the decode side have spent in VERIFYING."""
        link = http.client.HTTPConnection("127.0.0.1", self.pair.decode.http_port)
        try:
            link.request("GET", "/metrics", headers={"Connection": "close"})
            text = link.getresponse().read().decode()
        finally:
            link.close()
        name = 'kvd_handoff_stage_seconds_sum{role="decode",stage="verify"} '
        return sum(float(line[len(name) :]) for line in text.splitlines() if line.startswith(name))


async def _measure(
    pairs: dict[Integrity, Pair], prompt_tokens: int, repeats: int
) -> dict[Integrity, _Turns]:
    async with contextlib.AsyncExitStack() as stack:
        turns = {}
        for mode, pair in pairs.items():
            p, d = pair.prefill, pair.decode
            at_p = await stack.enter_async_context(kvd.client.connect(p.client, name="bench-p"))
            at_d = await stack.enter_async_context(kvd.client.connect(d.client, name="bench-d"))
            turns[mode] = _Turns(pair, Engines(Side(p, at_p), Side(d, at_d), prompt_tokens))
        for number in range(repeats + 1):
            for one in turns.values():
                await one.turn(is_counted=number > 0)  # the first one warms what is cold
        return turns


def _case(
    memory: str, page_bytes: int, size_bytes: int, repeats: int, told: Told
) -> list[ModeResult]:
    n_pages = size_bytes // page_bytes
    pool_bytes = (n_pages + SPARE_PAGES) * page_bytes // 2**21 * 2**21 + 2**21
    told(f"{memory}, pages of {page_bytes // KIB} KiB")
    pairs = {}
    with contextlib.ExitStack() as stack:
        for mode in MODES:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-bench-"))
            settings = {
                **SHAPES[page_bytes],
                **shared_host(memory).settings,
                "pool.size": f"{pool_bytes // 2**20}MiB",
                "transfer.integrity": mode.value,
            }
            pair = stack.enter_context(two_daemons(Path(directory), settings))
            if memory == HUGE:
                when_collapsed(pair, pool_bytes)
            pairs[mode] = pair
        found = asyncio.run(_measure(pairs, n_pages * PAGE_TOKENS, repeats))
    base = found[Integrity.OFF].times_s
    return [
        ModeResult(
            memory=memory,
            page_bytes=page_bytes,
            mode=mode.value,
            rate_gb_s=size_bytes / statistics.median(one.times_s) / GIGA,
            to_off=statistics.median(o / m for o, m in zip(base, one.times_s, strict=True)),
            cpu_s=statistics.median(one.cpus_s),
            verify_s=statistics.median(one.verifying_s),
        )
        for mode, one in found.items()
    ]


def sum_rate(page_bytes: int, total_bytes: int) -> float:
    """How fast one core sums pages of this size, in bytes per second; the best of five."""
    memory = np.random.default_rng(1).integers(0, 256, total_bytes, dtype=np.uint8)
    pages = memory.reshape(-1, page_bytes)
    seal = Seal(Integrity.FULL, b"k" * 16, 0, len(pages))
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        for number, page in enumerate(pages):
            page_sum(seal, number, (page.data,))
        best_s = min(best_s, time.perf_counter() - began_s)
    return total_bytes / best_s


def run(size_mib: int, repeats: int, told: Told) -> IntegrityResult:
    """Measure every mode on both memories and page sizes."""
    size_bytes = size_mib * 2**20
    modes: list[ModeResult] = []
    for memory in (HUGE, SMALL):
        for page_bytes in SHAPES:
            modes += _case(memory, page_bytes, size_bytes, repeats, told)
    told("sums in memory")
    rates = {str(size): sum_rate(size, size_bytes) / GIGA for size in SHAPES}
    return IntegrityResult(size_bytes, repeats, tuple(modes), rates)


@click.command("integrity")
@click.option("--size-mib", default=256, show_default=True, help="Bytes of one handoff.")
@click.option("--repeats", default=9, show_default=True, help="Handoffs per mode.")
@json_option
def command(size_mib: int, repeats: int, file: Path | None) -> None:
    """What verifying pages costs: a handoff with integrity off, sampled and full."""
    with bar("integrity", 2 * len(SHAPES) + 1) as told:
        result = run(size_mib, repeats, told)
    show_table(
        f"A handoff of {size_mib} MiB on one host; medians of {repeats}",
        ("memory", "page KiB", "integrity", "GB/s", "of off", "CPU s", "verifying ms"),
        [
            [
                one.memory,
                f"{one.page_bytes // KIB}",
                one.mode,
                f"{one.rate_gb_s:.2f}",
                f"{one.to_off:.2f}",
                f"{one.cpu_s:.3f}",
                f"{one.verify_s * 1e3:.2f}",
            ]
            for one in result.modes
        ],
    )
    show_notes(
        [
            "GB/s: bytes over the time from the call of finish() to its answer; nothing was posted "
            "before, so the writer sums beside the copy and the reader when all has landed",
            "of off: median of the ratios within each repetition; CPU s: of both daemons and both "
            "transfer processes, for one handoff",
            "one core sums "
            + ", ".join(
                f"{rate:.1f} GB/s in pages of {int(size) // KIB} KiB"
                for size, rate in result.sum_gb_s.items()
            ),
        ]
    )
    if file is not None:
        write_json(file, result)
