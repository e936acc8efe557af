"""``kvd sim``: many nodes in one process, under faults, or on a recorded load.

What lives here: options, the progress bar, tables. What is simulated is in ``kvd.sim``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from kvd.cli.exits import VerbFailed
from kvd.cli.render import show
from kvd.core.settings import Demotion
from kvd.sim.cluster import HEADS, LAYERS, ROUTINGS, NodeShape, Replay, Routed, replay
from kvd.sim.drive import PROBE_S, DriveShape
from kvd.sim.profile import MIXED, PROFILES
from kvd.sim.runner import Ending, SimPlan, again, run_seed
from kvd.trace import BadTrace, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MOST_FAILURES = 5
"""Seeds that may fail before the rest is not looked at."""

DEFAULT_SEEDS = "0:100"
TRACE_NODES = 8


class Tally(msgspec.Struct):
    """What all seeds came to."""

    plan: SimPlan
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


_RATE = click.FloatRange(min=0.0, min_open=True)


@click.command("sim")
@click.option(
    "--nodes",
    type=click.IntRange(min=2),
    metavar="N",
    help=f"Nodes; by default each seed draws 2 to 6, and a trace has {TRACE_NODES}.",
)
@click.option("--seeds", metavar="A:B", help=f"A to B-1.  [default: {DEFAULT_SEEDS}]")
@click.option("--seed", type=click.IntRange(min=0), metavar="N", help="One seed alone.")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=2000,
    show_default=True,
    metavar="N",
    help="Node.step calls of each seed before it calms down.",
)
@click.option(
    "--audit-steps",
    type=click.IntRange(min=1),
    default=250,
    show_default=True,
    metavar="N",
    help="How often everything is checked; 1 is slow and exact.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="M",
    help="Go on with further seeds for so long.",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0.0, min_open=True),
    metavar="H",
    help="Go on with further seeds until so much time was simulated.",
)
@click.option(
    "--profile",
    type=click.Choice([MIXED, *PROFILES]),
    default=MIXED,
    show_default=True,
    help="What goes wrong.",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Replay this load in Mooncake's format instead: routings compared.",
)
@click.option(
    "--pool-tokens",
    type=click.IntRange(min=1024),
    default=500_000,
    show_default=True,
    help="Tokens in each node's pool.",
)
@click.option(
    "--disk-tokens",
    type=click.IntRange(min=1024),
    metavar="N",
    help="Tokens in a tier below each pool; none by default.",
)
@click.option(
    "--disk-rate",
    type=_RATE,
    default=20_000.0,
    show_default=True,
    help="Tokens a second that each tier reads or writes.",
)
@click.option(
    "--store-tokens",
    type=click.IntRange(min=1024),
    metavar="N",
    help="Tokens in a store that all nodes share; none by default.",
)
@click.option(
    "--store-rate",
    type=_RATE,
    default=20_000.0,
    show_default=True,
    help="Tokens a second that each node reads from the store or writes there.",
)
@click.option(
    "--store-demote",
    type=click.Choice([one.value for one in Demotion]),
    default=Demotion.SECOND_USE.value,
    show_default=True,
    help="What is written there, as tiers.store.demote.",
)
@click.option(
    "--page",
    type=click.IntRange(1, 512),
    default=16,
    show_default=True,
    help="Tokens per page.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Requests; all by default.")
@click.option(
    "--prefill-rate",
    type=_RATE,
    default=10_000.0,
    show_default=True,
    help="Tokens a second that each node takes in.",
)
@click.option(
    "--decode-rate",
    type=_RATE,
    default=50.0,
    show_default=True,
    help="Tokens a second of each request.",
)
@click.option(
    "--speed",
    type=_RATE,
    default=1.0,
    show_default=True,
    help="How much faster than recorded requests arrive.",
)
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Result.")
def sim_command(  # noqa: PLR0913 - one parameter for each option
    *,
    nodes: int | None,
    seeds: str | None,
    seed: int | None,
    steps: int,
    audit_steps: int,
    minutes: float | None,
    hours: float | None,
    profile: str,
    trace: Path | None,
    pool_tokens: int,
    disk_tokens: int | None,
    disk_rate: float,
    store_tokens: int | None,
    store_rate: float,
    store_demote: str,
    page: int,
    limit: int | None,
    prefill_rate: float,
    decode_rate: float,
    speed: float,
    file: Path | None,
) -> None:
    """Real nodes under a seeded network, engines and faults; 1 if anything is violated.

    With --trace instead: a recorded load over a cluster, and what each way of routing reuses.
    """
    if [seeds, seed, trace].count(None) < 2:
        raise click.UsageError("--seeds, --seed and --trace exclude each other")
    if trace is not None:
        shape = NodeShape(
            nodes=nodes or TRACE_NODES,
            pool_tokens=pool_tokens,
            page_tokens=page,
            prefill_tokens_per_s=prefill_rate,
            decode_tokens_per_s=decode_rate,
            speed=speed,
            drive=DriveShape(disk_tokens, disk_rate) if disk_tokens else None,
            store=DriveShape(
                store_tokens, store_rate, demotion=Demotion(store_demote), is_shared=True
            )
            if store_tokens
            else None,
        )
        _write(file, _replay_trace(trace, shape, limit))
        return
    first, last = (seed, seed + 1) if seed is not None else _range(seeds or DEFAULT_SEEDS)
    tally = Tally(SimPlan(steps=steps, nodes=nodes or 0, profile=profile, audit_steps=audit_steps))
    _run(tally, _seeds(tally, first, last, minutes=minutes, hours=hours), file)
    _report(tally)
    if tally.failures:
        raise SystemExit(1)


def _write(file: Path | None, result: msgspec.Struct) -> None:
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise click.BadParameter(f"{text!r} is no A:B with A below B", param_hint="--seeds")
    return int(first), int(last)


def _run(tally: Tally, seeds: Iterator[int], file: Path | None) -> None:
    """All of them; after each ``file`` has what they came to, for a run that is stopped."""
    outcomes: Counter[str] = Counter()
    edges: set[str] = set()
    begun_s = time.process_time()
    for seed in seeds:
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
        tally.cpu_s = time.process_time() - begun_s
        tally.steps_per_minute = 60 * tally.steps / tally.cpu_s
        tally.outcomes = dict(outcomes.most_common())
        tally.edges = tuple(sorted(edges))
        _write(file, tally)
        if len(tally.failures) == MOST_FAILURES:
            break


def _seeds(
    tally: Tally, first: int, last: int, *, minutes: float | None, hours: float | None
) -> Iterator[int]:
    """The seeds, with a bar; with ``minutes`` or ``hours`` they go on above ``last`` until then."""
    until_s = time.monotonic() + 60 * minutes if minutes else math.inf
    simulated_s = 3600 * hours if hours else math.inf
    is_open = minutes is not None or hours is not None
    with _progress(MofNCompleteColumn()) as progress:
        task = progress.add_task("seeds", total=None if is_open else last - first)
        seed = first
        while is_open or seed < last:
            if time.monotonic() >= until_s or tally.simulated_s >= simulated_s:
                break
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


def _tell(failure: Ending, plan: SimPlan) -> None:
    lines: Iterable[str] = (
        "",
        f"VIOLATION in seed {failure.seed} ({failure.profile}, {failure.nodes} nodes) "
        f"{failure.violation}",
        *(f"  {line}" for line in failure.last_inputs),
        f"again: {again(failure, plan)}",
    )
    for line in lines:
        click.echo(line)


def _progress(column: ProgressColumn) -> Progress:
    """A bar on the standard error, gone when it is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), column, TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


# ---- a recorded load -----------------------------------------------------------------------------

GB = 1e9

HEADINGS = (
    "routing",
    "requests",
    "refused",
    "reuse",
    "from tiers",
    "GB saved",
    "requests max/mean",
    "variation",
    "sent tokens max/mean",
    "variation",
    "wait p50 s",
    "p99",
    "mean",
)


def _replay_trace(trace: Path, shape: NodeShape, limit: int | None) -> Replay:
    """Replay the file and print what came of it.

    Raises:
        VerbFailed: it is no trace.
    """
    try:
        requests = read_trace(trace, limit)
    except BadTrace as error:
        raise VerbFailed(str(error)) from error
    with _progress(TaskProgressColumn()) as progress:
        task = progress.add_task("requests", total=len(requests) * len(ROUTINGS))
        result = replay(
            trace.name,
            requests,
            shape,
            lambda routing: progress.update(task, advance=1, description=routing),
        )
    _show_replay(result)
    return result


def _show_replay(result: Replay) -> None:
    shape = result.shape
    table = Table(
        title=(
            f"{result.trace}: {result.requests} requests, {result.prompt_tokens} prompt tokens, "
            f"{shape.speed:g} times as fast as recorded; {shape.nodes} nodes of "
            f"{shape.pool_tokens} tokens in pages of {shape.page_tokens}"
            + (f", on disk {shape.drive.tokens}" if shape.drive else "")
            + (f", in a store {shape.store.tokens}" if shape.store else "")
        ),
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading == "routing" else "right")
    for routed in result.routings:
        table.add_row(*_row(routed))
    show(table)
    of_tiers: list[str] = []
    if (drive := shape.drive) is not None:
        of_tiers.append(
            f"what is about to leave a pool is written to its disk at {drive.tokens_per_s:g} "
            "tokens a second, after what is read; a request waits "
            f"{drive.wait_s:g} s for its pages from there"
        )
    if (store := shape.store) is not None:
        of_tiers.append(
            f"the store is one for all nodes, and each reads and writes there at "
            f"{store.tokens_per_s:g} tokens a second; demote = {store.demotion.value}; what was "
            f"written longest ago goes first; it answers what it has after {1000 * PROBE_S:g} ms"
        )
    for note in (
        "each node: the real tree, lease table and admission of a node; plain leases instead of "
        "handoffs",
        f"what a node lacks of a prompt comes in at {shape.prefill_tokens_per_s:g} tokens a "
        "second, one request after the other; wait: from arrival to that turn",
        f"each request then decodes at {shape.decode_tokens_per_s:g} tokens a second; its output "
        "is held, and not cached, because the trace does not say what it was",
        *of_tiers,
        f"bytes saved: KV of {LAYERS} layers and {HEADS} heads in bfloat16",
    ):
        click.echo(f"- {note}")


def _row(routed: Routed) -> tuple[str, ...]:
    balances = (routed.balance_requests, routed.balance_sent_tokens)
    return (
        routed.routing,
        f"{routed.requests}",
        f"{routed.refused}",
        f"{routed.reuse:.2%}",
        f"{routed.promoted:.2%}",
        f"{routed.saved_bytes / GB:.1f}",
        *(f"{x:.2f}" for balance in balances for x in (balance.max_over_mean, balance.variation)),
        f"{routed.wait_p50_s:.3f}",
        f"{routed.wait_p99_s:.3f}",
        f"{routed.wait_mean_s:.3f}",
    )
