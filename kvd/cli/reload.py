"""``kvd reload``: the configuration is read again, and what became of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from kvd.cli import render
from kvd.cli.exits import VerbFailed
from kvd.cli.link import CALL, Target, ask, with_target
from kvd.cli.options import with_format
from kvd.text import clean
from kvd.wire.admin import Changed, Reload, Reloaded

if TYPE_CHECKING:
    from collections.abc import Sequence


@click.command()
@with_target
@with_format
def reload_command(target: Target, form: str) -> None:
    """Have the daemon read its configuration again: files, conf.d and its own environment.

    What can change while it runs holds when this returns; what needs a restart is named. An invalid
    configuration changes nothing: its errors are printed, and the exit status is 1.
    """
    reloaded = ask(target, Reload(CALL), Reloaded)
    if form == "json":
        render.print_json(
            {
                "changed": [msgspec.structs.asdict(one) for one in reloaded.changed],
                "needs_restart": [msgspec.structs.asdict(one) for one in reloaded.needs_restart],
                "errors": reloaded.errors,
            }
        )
    elif not reloaded.errors:
        click.echo(_in_words(reloaded))
    if reloaded.errors:
        count = len(reloaded.errors)
        errors = "one error" if count == 1 else f"{count} errors"
        lines = (clean(error) for error in reloaded.errors)
        raise VerbFailed("\n".join([f"nothing was changed: {errors} in the configuration", *lines]))


def _in_words(reloaded: Reloaded) -> str:
    if not reloaded.changed and not reloaded.needs_restart:
        return "nothing has changed"
    return "\n".join(
        [
            *_listed("changed:", reloaded.changed),
            *_listed("needs a restart, and is still as before:", reloaded.needs_restart),
        ]
    )


def _listed(head: str, changes: Sequence[Changed]) -> list[str]:
    lines = [
        f"  {clean(one.key)}: {clean(one.before) or 'none'} -> {clean(one.after) or 'none'}"
        for one in changes
    ]
    return [head, *lines] if lines else []
