"""A group of verbs that imports a verb's module only when that verb runs.

The table holds the short help too, so listing the verbs imports none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from typing_extensions import override

from kvd.cli.exits import VerbFailed
from kvd.parts import is_of_an_extra

if TYPE_CHECKING:
    from collections.abc import Mapping


class Verb(NamedTuple):
    """One row: ``place`` is ``module:attribute``; ``section`` groups verbs in the help."""

    place: str
    summary: str
    section: str = "Verbs"


class LazyGroup(click.Group):
    """A group whose verbs are the rows of ``verbs``."""

    def __init__(self, *, verbs: Mapping[str, Verb], **settings: Any) -> None:
        # Any: click passes on what the decorator was given.
        super().__init__(**settings)
        self._verbs = verbs

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._verbs)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = self._verbs.get(cmd_name)
        if verb is None:
            return None
        module, _, attribute = verb.place.partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as exc:
            if isinstance(exc, ImportError) and is_of_an_extra(exc):
                raise  # ``kvd.parts.needed`` says which one
            raise VerbFailed(
                f"{ctx.command_path} {cmd_name} cannot be loaded ({exc}): install kvd again"
            ) from exc
        assert isinstance(command, click.Command)
        return command

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, verb in self._verbs.items():
            sections.setdefault(verb.section, []).append((name, verb.summary))
        for section, rows in sections.items():
            with formatter.section(section):
                formatter.write_dl(rows)
