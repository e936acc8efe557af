"""Each side killed and started again many times under load, and nobody grows old by it.

    python -m tests.fault.restarts --each 50 --seed 1

No room is stuck, no byte is wrong, no page is lost; the daemons that survive, and their transfer
processes, keep their memory and their descriptors.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from kvd.bench.daemons import DaemonFailed
from kvd.errors import KvdError
from tests.fault.cluster import Cluster, cluster
from tests.fault.fleet import descriptors, rss_bytes
from tests.fault.load import Broken
from tests.fault.table import Figures, percentile, say, show

DELIVERED_S = 15.0
REST_EVERY = 10
WARM_UP = 10
"""Lives of the other side before memory counts: caches fill, allocators settle."""
WINDOW = 10
MOST_GROWTH = 0.10
MOST_NEW_DESCRIPTORS = 3


class Age(msgspec.Struct, frozen=True):
    """What a surviving process had after each restart of the other side."""

    process: str
    rss_bytes: list[int]
    descriptors: list[int]

    def growth(self) -> float:
        """Of the median of the last ten lives over that of the ten after warming up."""
        young = statistics.median(self.rss_bytes[WARM_UP : WARM_UP + WINDOW])
        return statistics.median(self.rss_bytes[-WINDOW:]) / young - 1

    def new_descriptors(self) -> int:
        """More of them open at the end than after warming up."""
        young = statistics.median(self.descriptors[WARM_UP : WARM_UP + WINDOW])
        return round(statistics.median(self.descriptors[-WINDOW:]) - young)


class Restarted(msgspec.Struct):
    """All restarts of one side. ``back_s``: from the kill to the next delivered room."""

    side: str
    back_s: list[float] = []
    ages: list[Age] = []
    rooms: int = 0
    delivered: int = 0
    pages_checked: int = 0


async def restart_often(made: Cluster, side: str, times: int) -> Restarted:
    """Kill and start ``side`` so many times; what survives is measured after each.

    Raises:
        Broken: a promise was not kept.
    """
    found, load = Restarted(side), made.load
    first = len(load.ledger)
    ages = {name: Age(name, [], []) for name in survivors(made, side)}
    for number in range(1, times + 1):
        killed_s = time.monotonic()
        await made.servers[side].restart()
        found.back_s.append(await _next_delivery(made, killed_s) - killed_s)
        if number % REST_EVERY == 0 or number == times:
            load.pause()
            await load.idle()
            await made.at_rest()
            load.resume()
        for name, pid in survivors(made, side).items():
            ages[name].rss_bytes.append(rss_bytes(pid))
            ages[name].descriptors.append(descriptors(pid))
        if load.broken:
            raise Broken("\n".join(load.broken))
    rooms = load.ledger[first:]
    found.rooms = len(rooms)
    found.delivered = sum(room.is_delivered for room in rooms)
    found.pages_checked = sum(room.received.checked + room.sent.checked for room in rooms)
    found.ages = list(ages.values())
    _check_ages(found)
    return found


def survivors(made: Cluster, side: str) -> dict[str, int]:
    """Processes that know the restarted node and stay, by name."""
    found = {}
    for name, server in made.servers.items():
        transfer = server.transfer_pid()
        if name != side and transfer is not None:
            found[f"{name} daemon"] = server.daemon.pid
            found[f"{name} transfer process"] = transfer
    return found


async def _next_delivery(made: Cluster, since_s: float) -> float:
    while True:
        good = [r.ended_s for r in made.load.since(since_s, "p-d") if r.is_delivered]
        if good:
            return min(good)
        if time.monotonic() - since_s > DELIVERED_S:
            raise Broken(f"no room was delivered for {DELIVERED_S:g} s after a restart")
        await asyncio.sleep(0.02)


def _check_ages(found: Restarted) -> None:
    if len(found.back_s) < WARM_UP + 2 * WINDOW:
        return  # too few lives to speak of growth
    for age in found.ages:
        if age.growth() > MOST_GROWTH:
            raise Broken(f"{age.process} grew by {age.growth():.0%}: {age.rss_bytes}")
        if age.new_descriptors() > MOST_NEW_DESCRIPTORS:
            raise Broken(f"{age.process} keeps descriptors open: {age.descriptors}")


async def run(directory: Path, seed: int, each: int) -> list[Restarted]:
    """``each`` restarts of the decode daemon, then as many of the prefill daemon.

    Raises:
        Broken: a promise was not kept.
    """
    async with cluster(directory, seed, nodes="pdh") as made:
        found = [await restart_often(made, side, each) for side in "dp"]
        await made.load.stop()
        await made.at_rest()
        return found


def figures(found: list[Restarted], seed: int) -> Figures:
    """By side, then by what survived."""
    rows, notes = [], []
    for one in found:
        back = (f"{percentile(one.back_s, 50):.2f}", f"{max(one.back_s):.2f}")
        rows.append((one.side, str(len(one.back_s)), *back, str(one.rooms), str(one.delivered)))
        notes += [
            f"{one.side} restarted: {age.process} {age.rss_bytes[-1] / 2**20:.0f} MiB "
            f"({age.growth():+.1%}), {age.descriptors[-1]} descriptors "
            f"({age.new_descriptors():+d})"
            for age in one.ages
            if len(age.rss_bytes) >= WARM_UP + 2 * WINDOW
        ]
    notes.append(f"{sum(one.pages_checked for one in found)} pages compared by digest")
    return Figures(
        title=f"kill -9 and restart under load, seed {seed}",
        headers=("side", "restarts", "next delivery p50 s", "max s", "rooms", "delivered"),
        rows=rows,
        notes=notes,
    )


def main() -> int:
    """The command line."""
    words = argparse.ArgumentParser(description="Daemons killed and restarted under load.")
    words.add_argument("--each", type=int, default=50)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--json", type=Path)
    chosen = words.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-restarts-"))
    try:
        found = asyncio.run(run(directory, chosen.seed, chosen.each))
    except (Broken, DaemonFailed, KvdError) as why:
        say(f"seed {chosen.seed}: {why}\n  logs of all nodes: {directory}")
        return 1
    with contextlib.suppress(OSError):
        shutil.rmtree(directory)
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    say(show(figures(found, chosen.seed)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
