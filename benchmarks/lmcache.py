"""``benchmarks lmcache``: LMCache's calls of a tier, kvd's beside its own files in host memory.

Each tier in a process of its own, one after the other and in turns, in an environment that has
LMCache (``KVD_LMCACHE_PYTHON``): 32 objects of 1 MiB a call. Its own tier is ``fs`` in
``/dev/shm``, which copies bytes to host memory and back as kvd does, and keeps them by name. The
processor time is of LMCache's process: the daemon's is not in it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks.harness import benchmark
from kvd.bench.report import BenchmarkResult, ResultColumn, ResultTable, at_most, figure
from kvd.harness.daemons import one_daemon

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.bench.report import Measured, Told

ROOT: Final = Path(__file__).parents[1]
CALLS: Final = ("store", "look up", "load")
COLUMNS: Final = (
    ResultColumn("what", "what"),
    ResultColumn("p50_ms", "p50 ms", ".1f"),
    ResultColumn("best_ms", "best ms", ".1f"),
    ResultColumn("processor_ms", "processor p50 ms", ".1f"),
    ResultColumn("processor_best_ms", "processor best ms", ".1f"),
)
GOAL: Final = 1.5


def measured(python: str, spec: Mapping[str, object], objects: int, kib: int, rounds: int) -> Any:
    """What ``lmcache_calls`` says of that tier."""
    quiet = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    numbers = map(str, (objects, kib, rounds))
    # -P: the folder of the script has a transformers.py too, which is not LMCache's.
    done = subprocess.run(
        [python, "-P", "benchmarks/lmcache_calls.py", json.dumps(spec), *numbers],
        cwd=ROOT,
        env={**os.environ, **quiet, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise click.ClickException(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def run(told: Told, *, objects: int, kib: int, rounds: int, turns: int) -> BenchmarkResult:
    """Measure both, in turns."""
    python = os.environ.get("KVD_LMCACHE_PYTHON", "").partition(":")[0]
    if not python:
        raise click.ClickException("KVD_LMCACHE_PYTHON names no environment that has LMCache")
    pages = objects * (rounds + 2)
    settings = {"family": "raw", "layers": "1", "page_size": "256", "page_bytes": str(kib << 10)}
    pool = {f"pool.{key}": value for key, value in (settings | {"pages": str(pages)}).items()}
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    wrong: list[str] = []
    for turn in range(turns):
        with (
            tempfile.TemporaryDirectory(prefix="kvd-bench-") as name,
            tempfile.TemporaryDirectory(dir="/dev/shm") as files,
            one_daemon(Path(name), pool) as daemon,
        ):
            kvd = {
                "type": "plugin",
                "module_path": "kvd.connectors.lmcache",
                "class_name": "KvdL2Adapter",
                "adapter_params": {"endpoint": daemon.client},
            }
            for tier, spec in (("kvd", kvd), ("fs", {"type": "fs", "base_path": files})):
                told(f"turn {turn + 1} of {turns}: {tier}")
                answer = measured(python, spec, objects, kib, rounds)
                wrong += [f"{tier}: {flaw}" for flaw in answer["wrong"]]
                for call, times in answer["times"].items():
                    found.setdefault((tier, call), []).extend(times)
    rows = {key: _row(f"{key[1]}, {key[0]}", times) for key, times in found.items()}
    title = f"{objects} objects of {kib} KiB a call"
    return BenchmarkResult(
        tables=(ResultTable(title=title, columns=COLUMNS, rows=tuple(rows.values())),),
        goals=tuple(
            at_most(
                f"{call}, over LMCache's own files, processor time",
                GOAL,
                figure(rows["kvd", call], "processor_best_ms")
                / figure(rows["fs", call], "processor_best_ms"),
            )
            for call in CALLS
        ),
        wrong=tuple(wrong),
    )


def _row(what: str, found: list[tuple[float, float]]) -> Measured:
    walls, processors = zip(*found, strict=True)
    return {
        "what": what,
        "p50_ms": statistics.median(walls),
        "best_ms": min(walls),
        "processor_ms": statistics.median(processors),
        "processor_best_ms": min(processors),
    }


command = benchmark(
    "lmcache",
    run,
    click.option("--objects", default=32, show_default=True, help="Of a call."),
    click.option("--kib", default=1024, show_default=True, help="Of an object."),
    click.option("--rounds", default=5, show_default=True, help="Of each process."),
    click.option("--turns", default=2, show_default=True, help="Processes of each."),
)
