"""Each side killed and started again many times under load, and nobody grows old by it.

    python -m tests.fault.restarts --each 50 --seed 1
    python -m tests.fault.restarts --each 50 --seed 1 --kept

No room is stuck, no byte is wrong, no page is lost; the daemons that survive, and their transfer
processes, keep their memory and their descriptors. With ``--kept`` a pool outlives its daemon: see
``kept``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from kvd.errors import KvdError
from tests.fault import kept
from tests.fault.cluster import Cluster, cluster
from tests.fault.lives import Restarted, next_delivery
from tests.fault.load import Broken
from tests.fault.table import Figures, percentile, say, show
from tests.support.daemons import DaemonFailed

REST_EVERY = 10


async def restart_often(made: Cluster, side: str, times: int) -> Restarted:
    """Kill and start ``side`` so many times; what survives is measured after each.

    Raises:
        Broken: a promise was not kept.
    """
    found, load = Restarted(side), made.load
    first = len(load.ledger)
    for number in range(1, times + 1):
        killed_s = time.monotonic()
        await made.servers[side].restart()
        found.back_s.append(await next_delivery(made, killed_s) - killed_s)
        if number % REST_EVERY == 0 or number == times:
            load.pause()
            await load.idle()
            await made.at_rest()
            load.resume()
        found.measure(made)
    found.conclude(load.ledger[first:])
    return found


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
        rows.append((one.side, str(one.restarts), *back, str(one.rooms), str(one.delivered)))
        notes += one.told_ages()
    notes.append(f"{sum(one.pages_checked for one in found)} pages compared by digest")
    return Figures(
        title=f"kill -9 and restart under load, seed {seed}",
        headers=("side", "restarts", "next delivery p50 s", "max s", "rooms", "delivered"),
        rows=rows,
        notes=notes,
    )


def main() -> int:
    words = argparse.ArgumentParser(description="Daemons killed and restarted under load.")
    words.add_argument("--each", type=int, default=50)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--kept", action="store_true", help="each pool outlives its daemon")
    words.add_argument("--json", type=Path)
    chosen = words.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-restarts-"))
    lives = kept.run if chosen.kept else run
    try:
        found = asyncio.run(lives(directory, chosen.seed, chosen.each))
    except (Broken, DaemonFailed, KvdError) as why:
        say(f"seed {chosen.seed}: {why}\n  logs of all nodes: {directory}")
        return 1
    with contextlib.suppress(OSError):
        shutil.rmtree(directory)
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    say(show(figures(found, chosen.seed)))
    if chosen.kept:
        say(show(kept.figures(found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
