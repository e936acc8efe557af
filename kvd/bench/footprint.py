"""``kvd bench footprint``: what a daemon costs at rest: its start, its CPU, its memory.

Start to ready runs from the fork of ``kvd serve`` until it says that it serves; the pool's memory
is reserved and registered by then, and collapsing it to huge pages goes on. A first start, which is
not counted, leaves the bytecode that an installed daemon has. CPU is measured with a
peer connected and both sending agents loaded, after the pool is in huge pages. Memory beyond the
pool is RssAnon + RssFile of the daemon, its transfer process and its recorder process; RssShmem is
the pool, and in daemon and recorder the inputs recorded so far. The
proportional figure counts a page of a library that n processes map as 1/n.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kvd.bench.memory import busy_s, proportional_bytes, resident, when_collapsed
from kvd.bench.report import (
    BenchmarkResult,
    ResultColumn,
    ResultTable,
    at_most,
    figure,
    measurement,
)
from kvd.harness.daemons import LLAMA_8B, bytecode_kept, one_daemon, two_daemons

if TYPE_CHECKING:
    from kvd.bench.report import Measured, Told
    from kvd.harness.daemons import DaemonProcess

POOL_MIB: Final = 256
RECORDED_S: Final = 60.0
SETTINGS: Final = {
    **LLAMA_8B,
    "pool.size": f"{POOL_MIB}MiB",
    "recorder.enabled": "true",
}
"""With the flight recorder, as every daemon is unless it is turned off."""


class ProcessCost(msgspec.Struct, frozen=True):
    """One process at rest; ``cpu_share`` is of one core."""

    name: str
    cpu_share: float
    resident: dict[str, int]
    proportional_bytes: int

    def row(self) -> Measured:
        """Percents and MB, for people."""
        sizes = {**self.resident, "proportional_bytes": self.proportional_bytes}
        sizes["beyond_bytes"] = sizes["anonymous_bytes"] + sizes["file_bytes"]
        megabytes = {key: size / 1e6 for key, size in sizes.items()}
        return {"name": self.name, "cpu": 100 * self.cpu_share, **megabytes}


def run(told: Told, *, starts: int, idle_s: float) -> tuple[BenchmarkResult, object]:
    """What a daemon costs at rest: time to start, CPU, memory."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory, bytecode_kept():
        begun = []
        _start(Path(directory), "first")
        for number in range(starts):
            told(f"start {number + 1}")
            begun.append(_start(Path(directory), f"start{number}"))
        told(f"at rest for {idle_s:g} s")
        processes = _at_rest(Path(directory), idle_s)
    start_s, start_cpu_s = (
        statistics.median(start[key] for start in begun) for key in ("wall_s", "cpu_s")
    )
    rows = tuple(process.row() for process in processes)
    beyond_mb = sum(figure(row, "beyond_bytes") for row in rows)
    goals = (
        at_most("start to ready in s, median", 0.6, start_s),
        at_most("CPU of all in % of a core", 0.5, sum(figure(row, "cpu") for row in rows)),
        at_most("resident beyond the pool in MB, all", 110.0, beyond_mb),
    )
    title = f"A daemon with a pool of {POOL_MIB} MiB and one peer, at rest"
    shown = BenchmarkResult(
        tables=(ResultTable(title, COLUMNS, rows),),
        notes=(
            f"start to ready: median {start_s:.2f} s of "
            + ", ".join(f"{start['wall_s']:.2f}" for start in begun)
            + f"; all processes computed {start_cpu_s:.2f} s meanwhile",
            f"CPU: over {idle_s:g} s, after the pool was collapsed to huge pages",
            "beyond pool: RssAnon + RssFile; the pool is RssShmem, mapped by the transfer process "
            "only; proportional: shared library pages divided by who maps them",
        ),
        goals=goals,
    )
    return shown, {
        "starts": begun,
        "start_s": start_s,
        "start_cpu_s": start_cpu_s,
        "idle_s": idle_s,
        "processes": processes,
        "goals": goals,
    }


def _start(directory: Path, name: str) -> dict[str, float]:
    """One start until ready: ``cpu_s`` is what all processes computed meanwhile."""
    began_s = time.monotonic()
    with one_daemon(directory, SETTINGS, name=name) as daemon:
        wall_s = time.monotonic() - began_s
        cpu_s = sum(busy_s(pid) for pid in _processes(daemon).values())
        return {"wall_s": wall_s, "cpu_s": cpu_s}


def _processes(daemon: DaemonProcess) -> dict[str, int]:
    """Process ids by what they are called."""
    return {
        "daemon": daemon.pid,
        "transfer process": daemon.transfer_pid(),
        "recorder process": daemon.recorder_pid(),
    }


def _is_recorded(daemon: DaemonProcess) -> bool:
    """Whether the recorder process is up: it takes its time when the machine is busy."""
    return daemon.snapshot().recorder.inputs > 0


def _at_rest(directory: Path, idle_s: float) -> list[ProcessCost]:
    """Each process of a daemon at rest."""
    with two_daemons(directory, SETTINGS) as pair:
        when_collapsed(pair, POOL_MIB * 2**20)
        daemon = pair.prefill
        daemon.wait_for(lambda: _is_recorded(daemon), "records nothing", RECORDED_S)
        pids = _processes(daemon)
        before = {name: busy_s(pid) for name, pid in pids.items()}
        began_s = time.monotonic()
        time.sleep(idle_s)
        took_s = time.monotonic() - began_s
        return [
            ProcessCost(
                name=name,
                cpu_share=(busy_s(pid) - before[name]) / took_s,
                resident=resident(pid),
                proportional_bytes=proportional_bytes(pid),
            )
            for name, pid in pids.items()
        ]


COLUMNS: Final = (
    ResultColumn("name", "process"),
    ResultColumn("cpu", "CPU %", ".2f"),
    ResultColumn("beyond_bytes", "beyond pool MB", ".0f"),
    ResultColumn("anonymous_bytes", "anonymous", ".0f"),
    ResultColumn("file_bytes", "files", ".0f"),
    ResultColumn("proportional_bytes", "proportional", ".0f"),
    ResultColumn("shared_bytes", "pool", ".0f"),
)

command = measurement(
    "footprint",
    run,
    (
        click.option(
            "--starts", default=5, show_default=True, help="Starts to take the median of."
        ),
        click.option(
            "--idle-s", default=10.0, show_default=True, help="Seconds to watch it at rest."
        ),
    ),
    steps=lambda starts, **_: starts + 1,
)
