"""``kvd bench footprint``: what a daemon costs at rest: its start, its CPU, its memory.

Start to ready runs from the fork of ``kvd serve`` until it says that it serves; the pool's memory
is reserved and registered by then, and collapsing it to huge pages goes on. CPU is measured with a
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

from kvd.bench.memory import Resident, busy_s, proportional_bytes, resident, when_collapsed
from kvd.bench.report import Goal, at_most, bar, show_goals, show_notes, show_table, write_json
from kvd.harness.daemons import LLAMA_8B, one_daemon, two_daemons

if TYPE_CHECKING:
    from kvd.bench.report import Told
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
    resident: Resident
    proportional_bytes: int


class DaemonStart(msgspec.Struct, frozen=True):
    """One start until ready: ``cpu_s`` is what all processes computed meanwhile."""

    wall_s: float
    cpu_s: float


class FootprintResult(msgspec.Struct, frozen=True):
    """What ``kvd bench footprint`` reports."""

    starts: tuple[DaemonStart, ...]
    start_s: float
    start_cpu_s: float
    idle_s: float
    processes: tuple[ProcessCost, ...]
    goals: tuple[Goal, ...]


def run(starts: int, idle_s: float, told: Told) -> FootprintResult:
    """Start a daemon ``starts`` times, then watch one for ``idle_s`` seconds."""
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
        begun = []
        for number in range(starts):
            told(f"start {number + 1}")
            begun.append(_start(Path(directory), f"start{number}"))
        told(f"at rest for {idle_s:g} s")
        processes = _at_rest(Path(directory), idle_s)
    start_s = statistics.median(one.wall_s for one in begun)
    beyond_mb = sum(one.resident.beyond_pool_bytes for one in processes) / 1e6
    return FootprintResult(
        starts=tuple(begun),
        start_s=start_s,
        start_cpu_s=statistics.median(one.cpu_s for one in begun),
        idle_s=idle_s,
        processes=processes,
        goals=(
            at_most("start to ready in s, median", 1.5, start_s),
            at_most("CPU of all in % of a core", 1.0, 100 * sum(p.cpu_share for p in processes)),
            at_most("resident beyond the pool in MB, all", 150.0, beyond_mb),
        ),
    )


def _start(directory: Path, name: str) -> DaemonStart:
    began_s = time.monotonic()
    with one_daemon(directory, SETTINGS, name=name) as daemon:
        wall_s = time.monotonic() - began_s
        return DaemonStart(wall_s, sum(busy_s(pid) for pid in _processes(daemon).values()))


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


def _at_rest(directory: Path, idle_s: float) -> tuple[ProcessCost, ...]:
    with two_daemons(directory, SETTINGS) as pair:
        when_collapsed(pair, POOL_MIB * 2**20)
        daemon = pair.prefill
        daemon.wait_for(lambda: _is_recorded(daemon), "records nothing", RECORDED_S)
        pids = _processes(daemon)
        before = {name: busy_s(pid) for name, pid in pids.items()}
        began_s = time.monotonic()
        time.sleep(idle_s)
        took_s = time.monotonic() - began_s
        return tuple(
            ProcessCost(
                name=name,
                cpu_share=(busy_s(pid) - before[name]) / took_s,
                resident=resident(pid),
                proportional_bytes=proportional_bytes(pid),
            )
            for name, pid in pids.items()
        )


@click.command("footprint")
@click.option("--starts", default=5, show_default=True, help="Starts to take the median of.")
@click.option("--idle-s", default=10.0, show_default=True, help="Seconds to watch it at rest.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)
def command(starts: int, idle_s: float, file: Path | None) -> None:
    """What a daemon costs at rest: time to start, CPU, memory."""
    with bar("footprint", starts + 1) as told:
        result = run(starts, idle_s, told)
    rows = [
        [
            one.name,
            f"{100 * one.cpu_share:.2f}",
            f"{one.resident.beyond_pool_bytes / 1e6:.0f}",
            f"{one.resident.anonymous_bytes / 1e6:.0f}",
            f"{one.resident.file_bytes / 1e6:.0f}",
            f"{one.proportional_bytes / 1e6:.0f}",
            f"{one.resident.shared_bytes / 1e6:.0f}",
        ]
        for one in result.processes
    ]
    headers = ["process", "CPU %", "beyond pool MB", "anonymous", "files", "proportional", "pool"]
    show_table(f"A daemon with a pool of {POOL_MIB} MiB and one peer, at rest", headers, rows)
    show_notes(
        [
            f"start to ready: median {result.start_s:.2f} s of "
            + ", ".join(f"{one.wall_s:.2f}" for one in result.starts)
            + f"; all processes computed {result.start_cpu_s:.2f} s meanwhile",
            f"CPU: over {result.idle_s:g} s, after the pool was collapsed to huge pages",
            "beyond pool: RssAnon + RssFile; the pool is RssShmem, mapped by the transfer process "
            "only; proportional: shared library pages divided by who maps them",
        ]
    )
    show_goals(result.goals)
    if file is not None:
        write_json(file, result)
