"""How every measurement becomes a command: a bar while it runs, tables, goals, a JSON file.

What lives here: options, printing, the end of a measurement. What must not: anything that is
measured.

The bar and the tables go to standard error and standard output respectively, so that a table can be
piped. A goal that is missed is said, never hidden; it does not make the command fail, because a
busy machine misses goals that an idle one meets.
"""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvd.errors import KvdError
from kvd.harness.child import ChildFailed
from kvd.harness.daemons import DaemonFailed
from kvd.trace import BadTrace
from kvd.transfer.process import TransportDown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Told = Callable[[str], None]
    """Called before each step with what it does."""

Cell = str | int | float | bool | None | tuple[float, ...]
Measured = dict[str, Cell]
"""One row: what was measured, by the key of its column."""


def figure(row: Measured, key: str) -> float:
    """The number in that cell."""
    value = row[key]
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return value


FAILURES: Final = (ChildFailed, DaemonFailed, KvdError, BadTrace, TransportDown)
"""What a measurement may meet: said in one line, without a traceback."""


class Goal(msgspec.Struct, frozen=True):
    """What was to be reached: ``got`` against ``wanted`` in the unit that ``name`` says."""

    name: str
    wanted: float
    got: float
    at_least: bool

    @property
    def is_met(self) -> bool:
        """Whether ``got`` is on the right side of ``wanted``."""
        return self.got >= self.wanted if self.at_least else self.got <= self.wanted


def at_least(name: str, wanted: float, got: float) -> Goal:
    """A goal that a larger figure meets."""
    return Goal(name=name, wanted=wanted, got=got, at_least=True)


def at_most(name: str, wanted: float, got: float) -> Goal:
    """A goal that a smaller figure meets."""
    return Goal(name=name, wanted=wanted, got=got, at_least=False)


class ResultColumn(msgspec.Struct, frozen=True):
    """How a figure is headed and printed; keys without a column are in the JSON file alone."""

    key: str
    heading: str
    form: str = ""

    def text_of(self, row: Measured) -> str:
        """The cell of this column."""
        value = row.get(self.key)
        match value:
            case None:
                return "-"
            case bool():
                return "yes" if value else "no"
            case tuple():
                return "+".join(format(item, self.form) for item in value)
            case _:
                return format(value, "" if isinstance(value, str) else self.form)


class ResultTable(msgspec.Struct, frozen=True):
    """A table: kvd and its references beside each other, a row for each case."""

    title: str
    columns: tuple[ResultColumn, ...]
    rows: tuple[Measured, ...]


class BenchmarkResult(msgspec.Struct, frozen=True):
    """What a benchmark found. ``wrong``: what must not be, and makes the command fail."""

    tables: tuple[ResultTable, ...]
    goals: tuple[Goal, ...] = ()
    notes: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


def show(found: BenchmarkResult) -> None:
    """Tables, notes and goals on standard output."""
    for table in found.tables:
        if table.rows:
            _show_table(table)
    console = Console(soft_wrap=True, highlight=False)
    for note in found.notes:
        console.print(f"- {note}", markup=False)
    for goal in found.goals:
        word, style = ("met   ", "green") if goal.is_met else ("MISSED", "bold red")
        sign = ">=" if goal.at_least else "<="
        console.print(
            f"[{style}]{word}[/] {goal.name}: {goal.got:.3g} (goal {sign} {goal.wanted:g})"
        )


def _show_table(table: ResultTable) -> None:
    """Texts to the left, figures to the right."""
    shown = Table(title=table.title, title_justify="left", box=None, pad_edge=False)
    rows = [[column.text_of(row) for column in table.columns] for row in table.rows]
    for number, column in enumerate(table.columns):
        is_text = all(not _is_figure(row[number]) for row in rows)
        shown.add_column(column.heading, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    # As wide as it needs to be: a folded figure cannot be read, and pipes have no width.
    Console(width=max(200, Console().width)).print(shown)


def _is_figure(text: str) -> bool:
    return text[:1].isdigit() or text[:2] in {"< ", "> "} or text == "-"


def measurement(
    name: str,
    run: Callable[..., tuple[BenchmarkResult, object]],
    options: Sequence[Callable[[click.Command], click.Command]] = (),
    *,
    steps: Callable[..., int] | None = None,
) -> click.Command:
    """The command that runs it.

    ``run`` gets ``told`` to say what it does, and the options; it returns what is shown, and what
    the JSON file says. ``steps`` gets the options, and says how often ``told`` will be called.
    """

    def perform(file: Path | None, **parameters: object) -> None:
        try:
            total = steps(**parameters) if steps is not None else None
            with _ended_by_sigterm(), bar(name, total) as told:
                found, written = run(told, **parameters)
        except FAILURES as failed:
            raise click.ClickException(str(failed)) from failed
        show(found)
        if file is not None:
            file.write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
        if found.wrong:
            raise click.ClickException("\n".join(found.wrong))

    command = click.command(name, help=run.__doc__)(perform)
    for option in options:
        command = option(command)
    written_to = click.Path(dir_okay=False, path_type=Path)
    return click.option("--json", "file", type=written_to, help="Write the result here.")(command)


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs as Ctrl-C does: the daemons that were started are stopped."""
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


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
