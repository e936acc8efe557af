"""``benchmarks store``: run the command of a file of ``docs/benchmarks``, and keep what it wrote.

The file says which command, and what a reader should know of it; its result, date and machine are
written here and by nobody else. A file with rows that were kept by hand loses them.
"""

from __future__ import annotations

import datetime
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import click
import msgspec

from benchmarks.harness import machine

KEPT: Final = Path(__file__).parents[1] / "docs" / "benchmarks"
PLACEHOLDERS: Final = ("--json FILE", "--trace FILE")
"""What a reader has to fill in; here it is given, or made."""

BY_HAND: Final = ("tables", "notes")

NOT_STORED: Final = {
    "control_earlier": "it is of an earlier state, which is not here any more",
    "multiturn_earlier": "it is of an earlier state, which is not here any more",
    "side_by_side": "its command prints rows and writes no result",
    "soak": "its command writes a directory, in which each part says something else",
}
"""Files that stay as they were written down, and why."""


def words_of(command: str) -> list[str]:
    """How this interpreter runs a command as the documentation writes it.

    Raises:
        ClickException: it is none of ours.
    """
    for placeholder in PLACEHOLDERS:
        command = command.replace(placeholder, "")
    match shlex.split(command):
        case ["kvd", *rest]:
            return [sys.executable, "-m", "kvd", *rest]
        case ["python", *rest]:
            return [sys.executable, *rest]
        case _:
            raise click.ClickException(f"`{command}` is no command that writes a result")


def stored(kept: dict[str, object], result: object, where: str) -> dict[str, object]:
    """What the file says from now on: ``result`` was measured ``where``.

    A command that writes nothing but its rows has those as ``rows``.
    """
    told = {name: value for name, value in kept.items() if name not in BY_HAND}
    return {
        **told,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": where,
        "result": {"rows": result} if isinstance(result, list) else result,
    }


def place_of(result: object) -> dict[str, object]:
    """When and where a result was measured, as it says itself: it may have come from afar.

    Raises:
        ClickException: it was not measured at all.
    """
    if not isinstance(result, dict):
        return {}
    if result.get("is_rehearsal"):
        raise click.ClickException("it is of a rehearsal, in which nothing was measured")
    found = {name: result[name] for name in ("date", "machine") if name in result}
    if "date" in found:
        found["date"] = str(found["date"]).partition("T")[0]
    return found


@click.command("store", context_settings={"ignore_unknown_options": True})
@click.argument("name")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--json",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Keep this result, which the command has just written here; run nothing.",
)
def command(name: str, options: tuple[str, ...], file: Path | None) -> None:
    """Run the command of docs/benchmarks/NAME.json, with OPTIONS, and keep its result there."""
    place = KEPT / f"{name}.json"
    if not place.exists():
        raise click.ClickException(f"{place} is not there: make it, with title, command and about")
    if name in NOT_STORED:
        raise click.ClickException(f"{name} stays as it is: {NOT_STORED[name]}")
    kept = msgspec.json.decode(place.read_bytes(), type=dict[str, object])
    where, elsewhere = f"{machine()}; shared with other work", file is not None
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as directory:
        if file is None:
            where += f", load average {os.getloadavg()[0]:.1f} at the start"
            file = Path(directory) / "result.json"
            words = [*words_of(str(kept["command"])), *options, "--json", str(file)]
            subprocess.run(words, check=False)
        if not file.exists():
            raise click.ClickException(f"`{kept['command']}` wrote no result; nothing was stored")
        result = msgspec.json.decode(file.read_bytes())
    found = stored(kept, result, where)
    if elsewhere:
        found |= place_of(result)
    text = msgspec.json.format(msgspec.json.encode(found), indent=1)
    place.write_bytes(text + b"\n")
    click.echo(f"{place} has it")
