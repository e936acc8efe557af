"""``benchmarks sglang``: pages of SGLang's host pool to kvd and back, beside SGLang's own files.

One daemon, and a process of SGLang's own classes: its host pools, its controller and its file
backend, on the CPU. What is timed are the calls that the controller's threads make, for pages that
nobody has yet; how many pages of conversations are found must be the same with both.

Needs ``KVD_SGLANG_PYTHON``, an environment with SGLang.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_least, at_most, figure
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told

ROOT: Final = Path(__file__).parent.parent

PAGE_BYTES: Final = 2 * 32 * 8 * 128 * 2 * 16
"""K and V, layers, heads, their size, 16 bits, tokens: of Llama 3.1 8B."""

COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("layout", "layout"),
    ResultColumn("backend", "backend"),
    ResultColumn("gb_per_s", "GB/s best", ".2f"),
    ResultColumn("ms", "p50 ms", ".2f"),
    ResultColumn("processor_us", "processor us a page", ".0f"),
)


def run(told: Told, *, pages: int, rounds: int) -> BenchmarkResult:
    """Measure both in turns."""
    python = os.environ.get("KVD_SGLANG_PYTHON")
    if not python:
        raise ChildFailed("KVD_SGLANG_PYTHON names no environment with SGLang")
    settings = {
        "pool.family": "raw",
        "pool.layers": "1",
        "pool.page_size": "16",
        "pool.page_bytes": str(PAGE_BYTES),
        "pool.pages": str(pages * (rounds + 1) + 200),
    }
    told(f"{rounds} rounds of {pages} pages, in two layouts")
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
        one_daemon(Path(name), settings) as daemon,
    ):
        numbers = [str(number) for number in (daemon.pid, pages, rounds)]
        child = subprocess.run(
            [python, "-m", "tests.connectors.sglang.measured", daemon.client, *numbers],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if child.returncode:
        raise ChildFailed(child.stderr[-2000:])
    found = json.loads(child.stdout.splitlines()[-1])
    rows: list[Measured] = found["rows"]
    hits = found["hits"]
    wrong = [] if hits["kvd"] == hits["file"] else [f"pages that were found differ: {hits}"]
    return BenchmarkResult(
        tables=(
            ResultTable(
                title=f"{pages} pages of {PAGE_BYTES / 2**20:.0f} MiB a call",
                columns=COLUMNS,
                rows=tuple(rows),
            ),
        ),
        goals=(
            at_least("read, over files, page_first", 1.0, _over(rows, "read", "gb_per_s")),
            at_least("stored, over files, page_first", 1.0, _over(rows, "stored", "gb_per_s")),
            at_most(
                "processor of a page read, over files", 1.0, _over(rows, "read", "processor_us")
            ),
        ),
        notes=(f"of conversations both found {sum(hits['file'])} pages",),
        wrong=tuple(wrong),
    )


def _over(rows: list[Measured], what: str, key: str) -> float:
    ours, files = (
        next(
            figure(row, key)
            for row in rows
            if (row["backend"], row["what"], row["layout"]) == (backend, what, "page_first")
        )
        for backend in ("kvd", "file")
    )
    return ours / files


command = benchmark(
    "sglang",
    run,
    click.option("--pages", default=48, show_default=True, help="Of each call."),
    click.option("--rounds", default=3, show_default=True, help="To take the median of."),
)
