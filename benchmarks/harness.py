"""One harness for all benchmarks: parameters in; tables, goals and a JSON file out.

What lives here: how a benchmark becomes a command, and what its file says beside its figures (date,
machine, versions, parameters). What must not: anything that is measured. A benchmark is a function
of its parameters that measures kvd and its reference in the same run.
"""

from __future__ import annotations

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kvd.bench.report import Goal, bar, json_option, show_goals, show_notes, show_table, write_json
from kvd.errors import KvdError
from kvd.harness.daemons import DaemonFailed
from kvd.trace import BadTrace
from kvd.transfer.process import TransportDown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


Cell = str | int | float | bool | None | tuple[float, ...]
Parameter = str | int | float | bool | tuple[int, ...] | None
Measured = dict[str, Cell]
"""One row: what was measured, by the key of its column."""


def figure(row: Measured, key: str) -> float:
    """The number in that cell."""
    value = row[key]
    assert isinstance(value, int | float), f"{key} is {value!r}"
    return value


PACKAGES: Final = ("kvd", "numpy", "torch", "nixl", "pyzmq", "uvloop", "msgspec")


class BenchmarkFailed(Exception):
    """A process of the benchmark ended, or said that it cannot go on; the message quotes it."""


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
                return "+".join(format(one, self.form) for one in value)
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


class BenchmarkFile(msgspec.Struct, frozen=True):
    """The JSON file: what was found, of what, where, when, with what."""

    name: str
    date: str
    machine: str
    cpus: int
    python: str
    versions: dict[str, str]
    parameters: dict[str, Parameter]
    found: BenchmarkResult


def benchmark(
    name: str,
    run: Callable[..., BenchmarkResult],
    options: Sequence[Callable[[click.Command], click.Command]] = (),
) -> click.Command:
    """The command that runs it: ``run`` gets the options, and ``told`` to say what it does."""

    def perform(file: Path | None, **parameters: Parameter | Path) -> None:
        try:
            with bar(name) as told:
                found = run(told, **parameters)
        except (BenchmarkFailed, DaemonFailed, KvdError, BadTrace, TransportDown) as failed:
            raise click.ClickException(str(failed)) from failed
        show(found)
        if file is not None:
            given = {
                key: str(one) if isinstance(one, Path) else one for key, one in parameters.items()
            }
            write_json(file, written(name, given, found))
        if found.wrong:
            raise click.ClickException("\n".join(found.wrong))

    command = click.command(name, help=run.__doc__)(perform)
    for option in options:
        command = option(command)
    return json_option(command)


def show(found: BenchmarkResult) -> None:
    """Tables, notes and goals on standard output."""
    for table in found.tables:
        rows = [[column.text_of(row) for column in table.columns] for row in table.rows]
        show_table(table.title, [column.heading for column in table.columns], rows)
    show_notes(found.notes)
    show_goals(found.goals)


def written(
    name: str,
    parameters: dict[str, Parameter],
    found: BenchmarkResult,
) -> BenchmarkFile:
    """What the JSON file of a benchmark says."""
    return BenchmarkFile(
        name=name,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        machine=f"{_processor()}, {platform.platform()}",
        cpus=len(os.sched_getaffinity(0)),
        python=platform.python_version(),
        versions={one: metadata.version(one) for one in PACKAGES},
        parameters=parameters,
        found=found,
    )


def _processor() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
