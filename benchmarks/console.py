"""``benchmarks console``: what consoles cost the daemon, and what the console costs itself.

One daemon with a million pages, tens of thousands of tree nodes and ten thousand leases, under
requests that come and go. Rounds without consoles and rounds with ``--links`` of them alternate;
the difference is theirs. A link asks for what one screen shows, and decodes it, but paints nothing.
Then one real console runs on a pseudo-terminal of 180 x 50, screen by screen, and at last it is
stopped (SIGSTOP), which must cost nothing.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
import uvloop

import kvd.client
from benchmarks.console_links import consoles
from benchmarks.console_load import SETTINGS, churn, fill
from benchmarks.console_screen import Screen, Terminal
from kvd.bench.memory import busy_s
from kvd.bench.report import Goal, at_most, bar, show_goals, show_notes, show_table, write_json
from kvd.harness.daemons import one_daemon
from kvd.wire.admin import ShowTree, Tree

if TYPE_CHECKING:
    from benchmarks.console_links import Console
    from kvd.bench.report import Told
    from kvd.harness.daemons import Daemon

ROUNDS: Final = 3
HZ: Final = 10.0
STEPS: Final = 5


class Links(msgspec.Struct, frozen=True):
    """Consoles without a screen. ``share`` is of one core, theirs alone; ages are of the tables."""

    links: int
    share: float
    frames_per_s: float
    frame_bytes: float
    wait_p50_s: float
    wait_p99_s: float
    age_p50_s: float
    age_p99_s: float


class ConsoleResult(msgspec.Struct, frozen=True):
    """What ``benchmarks console`` reports. Shares are of one core."""

    pages: int
    nodes: int
    leases: int
    quiet_share: float
    links: Links
    screens: tuple[Screen, ...]
    first_frame_s: float
    console_share: float
    stopped_share: float
    goals: tuple[Goal, ...]


class Load(msgspec.Struct, frozen=True):
    """How much there is to look at, and for how long each thing is measured."""

    pages: int
    leases: int
    links: int
    seconds: float


async def run(load: Load, told: Told) -> ConsoleResult:
    """Fill a daemon, then measure it with and without consoles."""
    settings = {**SETTINGS, "pool.pages": str(load.pages)}
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory,
        one_daemon(Path(directory), settings) as daemon,
    ):
        async with kvd.client.connect(daemon.client, name="load") as node:
            told("filling")
            await fill(node, load.leases)
            async with churn(node):
                return await _measure(daemon, load, told)


async def _measure(daemon: Daemon, load: Load, told: Told) -> ConsoleResult:
    told(f"{load.links} links")
    quiet, busy, rounds = [], [], []
    for _ in range(ROUNDS):
        quiet.append(await _share(daemon, load.seconds))
        async with consoles(daemon.admin, load.links, HZ) as links:
            rounds.append(links)
            await asyncio.sleep(1.0)
            busy.append(await _share(daemon, load.seconds))
    theirs = _links(rounds[-1], statistics.median(busy) - statistics.median(quiet), load)
    told("a real console, screen by screen")
    with Terminal(daemon.admin) as terminal:
        first_frame_s = await terminal.first_frame()
        screens = await terminal.screens(load.seconds)
        told("a real console at work")
        working = await _share(daemon, load.seconds)
        terminal.pause()
        await asyncio.sleep(1.0)
        told("a stopped console")
        stopped = await _share(daemon, load.seconds)
    rest = statistics.median([*quiet, await _share(daemon, load.seconds)])
    shot = daemon.snapshot()
    worst = max(screens, key=lambda one: one.frame_ms)
    return ConsoleResult(
        pages=load.pages,
        nodes=_nodes(daemon),
        leases=len(shot.leases),
        quiet_share=rest,
        links=theirs,
        screens=screens,
        first_frame_s=first_frame_s,
        console_share=working - rest,
        stopped_share=stopped - rest,
        goals=(
            at_most(f"{load.links} links, % of a core of the daemon", 5.0, 100 * theirs.share),
            at_most("one real console, % of a core of the daemon", 5.0, 100 * (working - rest)),
            at_most("a stopped console, % of a core of the daemon", 0.5, 100 * (stopped - rest)),
            at_most(f"CPU per frame of the console in ms, {worst.name}", 10.0, worst.frame_ms),
            at_most("first frame of the console in s", 1.0, first_frame_s),
        ),
    )


async def _share(daemon: Daemon, seconds: float) -> float:
    """Of one core that the daemon's process takes now."""
    before, began_s = busy_s(daemon.pid), time.monotonic()
    await asyncio.sleep(seconds)
    return (busy_s(daemon.pid) - before) / (time.monotonic() - began_s)


def _links(links: list[Console], share: float, load: Load) -> Links:
    frames = sum(link.frames for link in links)
    waits = sorted(wait for link in links for wait in link.waits_s)
    ages = sorted(age for link in links for age in link.ages_s)
    return Links(
        links=len(links),
        share=share,
        frames_per_s=frames / (load.seconds + 1.0),
        frame_bytes=sum(link.received_bytes for link in links) / frames,
        wait_p50_s=waits[len(waits) // 2],
        wait_p99_s=waits[len(waits) * 99 // 100],
        age_p50_s=ages[len(ages) // 2],
        age_p99_s=ages[len(ages) * 99 // 100],
    )


def _nodes(daemon: Daemon) -> int:
    return daemon.ask(ShowTree(1, 0), Tree).total


@click.command("console")
@click.option("--pages", default=1_000_001, show_default=True, help="Pages of the pool.")
@click.option("--leases", default=10_000, show_default=True, help="Leases that stay.")
@click.option("--links", default=20, show_default=True, help="Consoles without a screen.")
@click.option("--seconds", default=5.0, show_default=True, help="Of each measurement.")
@click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)
def command(pages: int, leases: int, links: int, seconds: float, file: Path | None) -> None:
    """What consoles cost the daemon, and what a console costs itself, screen by screen."""
    load = Load(pages, leases, links, seconds)
    with bar("console", STEPS) as told:
        result = uvloop.run(run(load, told))
    rows = [
        [one.name, f"{one.frame_ms:.1f}", f"{one.frames}", f"{one.terminal_bytes / 1e3:.1f}"]
        for one in result.screens
    ]
    title = (
        f"kvd-tui, {result.pages:,} pages, {result.nodes:,} nodes, {result.leases:,} leases, "
        "180 x 50"
    )
    show_table(title, ["screen", "CPU ms/frame", "frames", "kB/frame to the terminal"], rows)
    one = result.links
    show_notes(
        [
            f"the daemon without consoles: {100 * result.quiet_share:.1f} % of a core",
            f"{one.links} links at {HZ:g} Hz: {100 * one.share:.1f} % more; "
            f"{one.frames_per_s:.0f} frames/s of {one.frame_bytes / 1e3:.1f} kB, answered in "
            f"{1e3 * one.wait_p50_s:.1f} ms (p99 {1e3 * one.wait_p99_s:.1f}); tables are "
            f"{one.age_p50_s:.2f} s old (p99 {one.age_p99_s:.2f})",
            f"one console on a terminal: {100 * result.console_share:.1f} % more, stopped "
            f"{100 * result.stopped_share:.1f} %; its first frame after "
            f"{result.first_frame_s:.2f} s",
        ]
    )
    show_goals(result.goals)
    if file is not None:
        write_json(file, result)
