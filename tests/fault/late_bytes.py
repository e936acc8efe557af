"""Writers that die in the middle of a write over a slow link: no late byte may be seen.

    python -m tests.fault.late_bytes --attempts 200 --seed 1 --json FILE

Each attempt ends a writer while megabytes of it wait in a kernel or in the wire, and has another
lease take its pages (see ``late_trial``). A word that nobody who holds its page has written is
foreign; there must be none, and no page may stay away.

Not exercised: RDMA, and two hosts that are real.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvd.errors import KvdError
from tests.fault.late_trial import Found, Trial
from tests.fault.late_world import FAULTS, Attempt, Where, world
from tests.fault.load import Broken
from tests.fault.shuttle import Order
from tests.fault.table import Figures, percentile, say, show
from tests.support.daemons import DaemonFailed
from tests.support.netns import NoNamespaces

if TYPE_CHECKING:
    from collections.abc import Iterable


def plan(seed: int, attempts: int, only: str = "") -> list[Attempt]:
    """So many attempts, those at one place together; the same seed makes the same."""
    source = random.Random(seed)
    names = [only] if only else [name for name, one in FAULTS.items() for _ in range(one.weight)]
    planned = []
    for number in range(attempts):
        name = names[number % len(names)]
        fault = FAULTS[name]
        order = source.choice([Order.AHEAD, Order.AHEAD, Order.BEHIND, Order.DELAYED])
        rate = source.choice(fault.rates)
        window = source.choice(["wide", "wide", "wide", "wide", "narrow"])
        if order is Order.BEHIND and window == "wide" and rate < 5:
            order = Order.AHEAD  # or its peer is lost before anything is done to it
        where = Where(source.choice([1500, 9000]), window, fault.fence_after_s)
        planned.append(
            Attempt(
                number + 1,
                name,
                rate * 1e6,
                order,
                source.uniform(0.2, 1.2),
                source.uniform(0.05, 0.2) if rate <= 5 else source.uniform(0.05, 0.5),
                source.uniform(0.1, 1.0) if rate <= 2 else source.uniform(0.0, 1 / rate),
                source.uniform(0.05, 0.5),
                source.random() < 0.5,
                where,
            )
        )
    return sorted(planned, key=lambda one: one.where)


async def run(
    directory: Path, attempts: Iterable[Attempt], seed: int, most_s: float
) -> list[Found]:
    """All of them, or those that there is time for.

    Raises:
        Broken: one could not be made.
        NoNamespaces: none can be made here.
    """
    found: list[Found] = []
    began_s = time.monotonic()
    left = list(attempts)
    while left and time.monotonic() - began_s < most_s:
        where = left[0].where
        here = [one for one in left if one.where == where]
        left = [one for one in left if one.where != where]
        place = directory / f"{where.mtu}-{where.window}-{where.fence_after_s:g}"
        place.mkdir()
        async with world(place, where, seed) as made:
            for one in here:
                if time.monotonic() - began_s > most_s:
                    break
                try:
                    found.append(await Trial(made, one).run())
                except (Broken, DaemonFailed, KvdError) as why:
                    raise Broken(f"seed {seed}, {one}: {why}") from why
                say(str(found[-1]))
    return found


def figures(found: list[Found], seed: int, planned: int) -> Figures:
    """By fault and rate."""
    groups: dict[tuple[str, float], list[Found]] = {}
    for one in found:
        groups.setdefault((one.fault, one.rate), []).append(one)
    rows = []
    for (fault, rate), ones in sorted(groups.items()):
        away = [one.away_s for one in ones if not one.is_delivered] or [0.0]
        rows.append(
            (
                fault,
                f"{rate / 1e6:g}",
                str(len(ones)),
                str(sum(8 * one.foreign.words for one in ones)),
                f"{percentile([one.late_bytes / 1e6 for one in ones], 50):.1f}",
                f"{max(one.late_s for one in ones):.1f}",
                f"{percentile(away, 50):.2f}",
                f"{max(away):.2f}",
                str(sum(one.stuck_pages for one in ones)),
            )
        )
    bad = [one for one in found if one.foreign.words]
    notes = [
        f"{len(bad)} attempts with {sum(8 * one.foreign.words for one in bad)} foreign bytes in "
        f"{sum(one.foreign.pages for one in bad)} pages; "
        f"{sum(one.stuck_pages for one in found)} pages stuck; "
        f"{sum(one.is_delivered for one in found)} handoffs were delivered all the same, "
        f"{sum(one.wrong_words for one in found)} of their words wrong",
        *([f"{planned - len(found)} attempts left out for lack of time"][: planned - len(found)]),
        *sorted({f"{one.fault}: {one.why}" for one in found if one.stuck_pages}),
    ]
    headers = (
        *("fault", "MB/s", "attempts", "foreign bytes", "late MB p50", "late s max"),
        *("pages away s p50", "max", "stuck pages"),
    )
    title = f"{len(found)} writers ended over a slow link, seed {seed}"
    return Figures(title, headers, rows, notes)


def main() -> int:
    words = argparse.ArgumentParser(description="Late bytes of dead writers, over a slow link.")
    words.add_argument("--attempts", type=int, default=200)
    words.add_argument("--seed", type=int, default=1)
    words.add_argument("--only", choices=FAULTS, default="", metavar="FAULT")
    words.add_argument("--most-s", type=float, default=2400.0)
    words.add_argument("--json", type=Path)
    chosen = words.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-late-"))
    planned = plan(chosen.seed, chosen.attempts, chosen.only)
    try:
        found = asyncio.run(run(directory, planned, chosen.seed, chosen.most_s))
    except NoNamespaces as why:
        say(f"skipped, for a slow link needs two network namespaces: {why}")
        return 0
    except Broken as why:
        say(f"{why}\n  logs of both nodes: {directory}")
        return 1
    if chosen.json:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    say(show(figures(found, chosen.seed, len(planned))))
    if not all(one.is_good for one in found):
        say(f"logs of both nodes: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
