"""How every measurement is shown: a bar while it runs, a table, its goals, a JSON file.

What lives here: printing. What must not: anything that is measured.

The bar and the tables go to standard error and standard output respectively, so that a table can be
piped. A goal that is missed is said, never hidden; it does not make the command fail, because a
busy machine misses goals that an idle one meets.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Told = Callable[[str], None]
    """Called before each step with what it does."""

json_option = click.option(
    "--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Write the result here."
)


class Goal(msgspec.Struct, frozen=True):
    """What was to be reached: ``got`` against ``wanted`` in the unit that ``name`` says."""

    name: str
    wanted: float
    got: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether it was."""
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted


def at_least(name: str, wanted: float, got: float) -> Goal:
    """A goal that a larger figure meets."""
    return Goal(name=name, wanted=wanted, got=got, at_least=True)


def at_most(name: str, wanted: float, got: float) -> Goal:
    """A goal that a smaller figure meets."""
    return Goal(name=name, wanted=wanted, got=got, at_least=False)


def show_table(title: str, headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on standard output: texts to the left, figures to the right."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, header in enumerate(headers):
        is_text = all(not _is_figure(row[number]) for row in rows)
        table.add_column(header, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # As wide as it needs to be: a folded figure cannot be read, and pipes have no width.
    Console(width=max(200, Console().width)).print(table)


def show_notes(notes: Sequence[str]) -> None:
    """What the reader must know of how it was measured, one line each."""
    for note in notes:
        Console(soft_wrap=True, highlight=False).print(f"- {note}", markup=False)


def show_goals(goals: Sequence[Goal]) -> None:
    """The goals, met and missed."""
    console = Console(soft_wrap=True, highlight=False)
    for goal in goals:
        word, style = ("met   ", "green") if goal.is_met else ("MISSED", "bold red")
        sign = ">=" if goal.at_least else "<="
        console.print(
            f"[{style}]{word}[/] {goal.name}: {goal.got:.3g} (goal {sign} {goal.wanted:g})"
        )


def write_json(file: Path, result: msgspec.Struct) -> None:
    """The whole result, readable by programs and by people."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


@contextlib.contextmanager
def bar(title: str, steps: int | None = None) -> Iterator[Told]:
    """A progress bar on standard error; call what it yields before each of ``steps``."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=steps)
        begun = 0

        def told(what: str) -> None:
            nonlocal begun
            progress.update(task, completed=begun, description=f"{title}: {what}")
            begun += 1

        yield told


def _is_figure(text: str) -> bool:
    return text[:1].isdigit() or text[:2] in {"< ", "> "} or text == "-"
