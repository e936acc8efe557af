"""``kvd demo``: the command line of the demo, and how its progress is shown.

Importing this loads neither torch nor transformers; the engines do, in their own processes.
Progress is a bar on a terminal, plain lines anywhere else; both go to the standard error, for the
standard output is for the result alone.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kvd.cli.exits import NotInstalled
from kvd.demo.layout import PoolPart
from kvd.demo.models import ARCHITECTURES
from kvd.demo.processes import DemoFailed
from kvd.demo.report import DemoReport, ProgressLines, controls_told, legend_of, table_of, verdict
from kvd.demo.runner import run
from kvd.parts import missing

if TYPE_CHECKING:
    from kvd.demo.models import Architecture

MOST_TURNS = 100
"""More would outgrow the positions of the models."""

TABLE_COLUMNS = 110
"""Width of the table where no terminal says how wide it may be."""


@click.command()
@click.option(
    "--model",
    type=click.Choice(sorted(ARCHITECTURES)),
    default="llama",
    show_default=True,
    help="Architecture, from Hugging Face transformers; the weights are random.",
)
@click.option(
    "--turns",
    type=click.IntRange(1, MOST_TURNS),
    default=5,
    show_default=True,
    help="Turns of the first conversation; a second one and a repetition follow.",
)
@click.option(
    "--device",
    metavar="DEVICE",
    help="cpu, cuda:0, ...: the engines compute there, in KV memory of their own, and copy it to "
    "and from the pools. Left out: on the CPU, in the pools themselves.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write what was measured to this file.",
)
@click.pass_context
def demo_command(
    ctx: click.Context, *, model: str, turns: int, device: str | None, json_file: Path | None
) -> None:
    """Hand prompts from a prefill node to a decode node, with a real model, on this machine.

    Two daemons, a prefill engine and a decode engine run as processes; KV travels by NIXL, only
    what the decode node lacks. Every answer is compared with that of a single process; at last a
    page is damaged on purpose, which the comparison must notice.
    """
    _need_parts()
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise click.BadParameter(f"{json_file.parent} is no directory", param_hint="--json")
    # A signal to end unwinds, which stops the processes.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if device is not None:
        _check_device(device, ARCHITECTURES[model])
    report = _perform(model, turns, device)
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    _show(report)
    ctx.exit(0 if report.ok else 1)


def _need_parts() -> None:
    """Refuse at once where the engines could not even start."""
    if lacking := [*missing("demo"), *missing("daemon")]:
        raise NotInstalled("kvd demo, which runs a Hugging Face model,", "demo", lacking)


def _check_device(device: str, architecture: Architecture) -> None:
    """Refuse what no engine could do; whether torch has the device, they say."""
    if not re.fullmatch(r"cpu|cuda:\d+", device):
        raise click.BadParameter(f"{device!r} is neither cpu nor cuda:N", param_hint="--device")
    if PoolPart.STATE in architecture.pool.parts:
        why = f"{architecture.name} keeps states, which it computes in the pool: leave --device out"
        raise click.BadParameter(why, param_hint="--device")


def _perform(model: str, turns: int, device: str | None) -> DemoReport:
    """The demo, with its progress on the standard error."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    try:
        with shown as progress:
            return run(ARCHITECTURES[model], turns, ProgressLines(progress), device)
    except DemoFailed as failure:
        raise click.ClickException(str(failure)) from failure


def _show(report: DemoReport) -> None:
    """Table and verdict on the standard output."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=TABLE_COLUMNS)
    console.print(table_of(report))
    click.secho(legend_of(report), dim=True)
    for line in (*controls_told(report), *report.problems[1:]):
        click.echo(line)
    click.secho(verdict(report), fg="green" if report.ok else "red", bold=True)
