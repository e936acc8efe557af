"""``kvd sim``: many nodes in one process, under faults, or on a recorded load.

What lives here: options, the progress bar, tables. What is simulated is in ``kvd.sim``.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvd.cli.render import show
from kvd.sim.profile import MIXED, PROFILES
from kvd.sim.runner import Ending, Plan, again, run_seed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_FAILURES = 5
"""Seeds that may fail before the rest is not looked at."""

DEFAULT_SEEDS = "0:100"


class Tally(msgspec.Struct):
    """What all seeds came to."""

    plan: Plan
    seeds: int = 0
    steps: int = 0
    cpu_s: float = 0.0
    steps_per_minute: float = 0.0
    """Of one core: steps over the processor time that they took, checks included."""
    simulated_s: float = 0.0
    messages: int = 0
    lost_messages: int = 0
    faults: int = 0
    outcomes: dict[str, int] = {}
    edges: tuple[str, ...] = ()
    """Transitions that some seed took."""
    failures: list[Ending] = []


@click.command("sim")
@click.option("--seeds", metavar="A:B", help=f"Seeds A to B-1.  [default: {DEFAULT_SEEDS}]")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="This seed alone.")
@click.option(
    "--nodes",
    type=click.IntRange(min=2),
    metavar="N",
    help="Nodes; by default each seed draws 2 to 6.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    metavar="N",
    help="Node.step calls of each seed before it calms down.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="M",
    help="Go on with further seeds for so long.",
)
@click.option(
    "--profile",
    type=click.Choice([MIXED, *PROFILES]),
    default=MIXED,
    show_default=True,
    help="What goes wrong.",
)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Result.")
def sim_command(  # noqa: PLR0913 - one parameter for each option
    *,
    seeds: str | None,
    seed: int | None,
    nodes: int | None,
    steps: int,
    minutes: float | None,
    profile: str,
    file: Path | None,
) -> None:
    """Real nodes under a seeded network, engines and faults; 1 if anything is violated."""
    if seeds is not None and seed is not None:
        raise click.UsageError("--seeds and --seed exclude each other")
    first, last = (seed, seed + 1) if seed is not None else _range(seeds or DEFAULT_SEEDS)
    tally = Tally(Plan(steps, nodes or 0, profile))
    _run(tally, first, last, minutes)
    _report(tally)
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(tally)) + b"\n")
    if tally.failures:
        raise SystemExit(1)


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise click.BadParameter(f"{text!r} is no A:B with A below B", param_hint="--seeds")
    return int(first), int(last)


def _run(tally: Tally, first: int, last: int, minutes: float | None) -> None:
    outcomes: Counter[str] = Counter()
    edges: set[str] = set()
    begun_s = time.process_time()
    for seed in _seeds(first, last, minutes):
        ending = run_seed(seed, tally.plan)
        tally.seeds += 1
        tally.steps += ending.steps
        tally.simulated_s += ending.simulated_s
        tally.messages += ending.messages
        tally.lost_messages += ending.lost_messages
        tally.faults += ending.faults
        outcomes.update(ending.outcomes)
        edges.update(ending.edges)
        if ending.violation:
            tally.failures.append(ending)
            if len(tally.failures) == MOST_FAILURES:
                break
    tally.cpu_s = time.process_time() - begun_s
    tally.steps_per_minute = 60 * tally.steps / tally.cpu_s
    tally.outcomes = dict(outcomes.most_common())
    tally.edges = tuple(sorted(edges))


def _seeds(first: int, last: int, minutes: float | None) -> Iterator[int]:
    """The seeds, with a bar; with ``minutes`` they go on above ``last`` until the time is over."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    until_s = time.monotonic() + 60 * minutes if minutes else None
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("seeds", total=None if minutes else last - first)
        seed = first
        while time.monotonic() < until_s if until_s is not None else seed < last:
            yield seed
            seed += 1
            progress.advance(task)


def _report(tally: Tally) -> None:
    plan = tally.plan
    rows = {
        "seeds": f"{tally.seeds}",
        "steps": f"{tally.steps}, {tally.steps_per_minute / 1e6:.2f} million a minute of one core",
        "simulated": f"{tally.simulated_s / 3600:.1f} h",
        "messages": f"{tally.messages}, {tally.lost_messages} lost",
        "faults": f"{tally.faults} of hosts and links",
        "transitions": f"{len(tally.edges)} different ones",
        "jobs": ", ".join(f"{many} {how}" for how, many in tally.outcomes.items()),
        "violations": f"{len(tally.failures)}",
    }
    nodes = plan.nodes or "2 to 6"
    table = Table(
        title=f"{plan.profile} weather, {nodes} nodes, {plan.steps} steps before the calm",
        title_justify="left",
        show_header=False,
        box=None,
        pad_edge=False,
    )
    for name, figure in rows.items():
        table.add_row(name, figure)
    show(table)
    for failure in tally.failures:
        _tell(failure, plan)


def _tell(failure: Ending, plan: Plan) -> None:
    lines: Iterable[str] = (
        "",
        f"VIOLATION in seed {failure.seed} ({failure.profile}, {failure.nodes} nodes) "
        f"{failure.violation}",
        *(f"  {line}" for line in failure.last_inputs),
        f"again: {again(failure, plan)}",
    )
    for line in lines:
        click.echo(line)
