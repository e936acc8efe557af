"""Options that several verbs have, and the configuration that they lead to.

Imports click alone: ``kvd serve`` takes these, and what it loads a daemon has for ever.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvd.cli.exits import Misconfigured

if TYPE_CHECKING:
    from kvd.config import Config, ConfigError

Verb = Callable[..., None]


def with_config(text: str) -> Callable[[Verb], Verb]:
    """Give a verb ``--config``, with that help, as the argument ``config_file``."""
    return click.option("--config", "config_file", type=click.Path(path_type=Path), help=text)


def with_sets(verb: Verb) -> Verb:
    """Give a verb ``--set``, as the argument ``sets``."""
    return click.option(
        "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one value."
    )(verb)


def with_format(command: Verb, *, text: str = "json goes to the standard output alone.") -> Verb:
    """Give a verb ``--format``, as the argument ``form``."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(["table", "json"]),
        default="table",
        show_default=True,
        help=text,
    )(command)


def with_printing(command: Verb) -> Verb:
    """The same, for verbs that only print."""
    return with_format(command, text="How to print.")


def valid_config(config_file: Path | None, sets: Sequence[str]) -> Config:
    """The configuration of this process's environment.

    Raises:
        Misconfigured: with one line for each error; ends the command with status 78.
    """
    from kvd.config import Config, load  # noqa: PLC0415 - not needed with --connect

    match load(config_file, os.environ, sets):
        case Config() as config:
            return config
        case errors:
            raise Misconfigured(summary(errors))


def summary(errors: Sequence[ConfigError]) -> str:
    """All errors, one a line, below their number."""
    return "\n".join([config_errors(len(errors)), *(error.sentence for error in errors)])


def config_errors(count: int) -> str:
    """How many there are."""
    return f"{'one error' if count == 1 else f'{count} errors'} in the configuration"
