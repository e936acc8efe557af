"""``benchmarks tiers``: what a storage process writes and reads, beside bare NIXL.

Over a directory (``benchmarks.disk_tier``), and over a store (``benchmarks.store_tier``) where
SeaweedFS is installed; where it is not, that is left out, and told.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from benchmarks import disk_tier, store_tier
from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, figure
from kvd.harness.store import ABSENT, weed
from kvd.storage.worker import NICENESS

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told

COLUMNS: Final = (
    ResultColumn("way", "way"),
    ResultColumn("page_kib", "page KiB"),
    ResultColumn("kvd_gb_s", "kvd GB/s", ".2f"),
    ResultColumn("raw_gb_s", "bare NIXL GB/s", ".2f"),
    ResultColumn("ratio", "kvd over bare", ".2f"),
)


def run(
    told: Told, *, mib: int, store_mib: int, rounds: int, directory: str | None
) -> BenchmarkResult:
    """What a storage process writes and reads, beside bare NIXL."""
    rows: list[Measured] = []
    os.nice(NICENESS)  # as the storage process is: on a busy machine it would have less otherwise
    ways = disk_tier.WAYS if mib else ()
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir=directory) as name:
        for page_bytes in (2**16, 2**19, 2**21) if mib else ():
            rows += asyncio.run(
                disk_tier.measure(Path(name), page_bytes, mib * 2**20, rounds, told)
            )
        if store_mib and weed() is not None:
            rows += asyncio.run(store_tier.measure_all(Path(name), store_mib, rounds, told))
            ways = (*ways, *store_tier.WAYS)
        elif store_mib:
            told(f"no store: {ABSENT}")
    large = {row["way"]: figure(row, "ratio") for row in rows if row["page_kib"] == 2048}
    return BenchmarkResult(
        tables=(ResultTable(title="Tiers on this host", columns=COLUMNS, rows=tuple(rows)),),
        goals=tuple(
            at_least(f"pages of 2 MiB, {way}, over bare NIXL", 0.9, large[way]) for way in ways
        ),
    )


command = benchmark(
    "tiers",
    run,
    click.option("--mib", default=512, show_default=True, help="Moved at a time on a disk; or 0."),
    click.option(
        "--store-mib", default=64, show_default=True, help="Moved at a time on a store; or 0."
    ),
    click.option("--rounds", default=5, show_default=True, help="To take medians of."),
    click.option("--directory", help="On the disk to measure; the usual temporary one if not."),
)
