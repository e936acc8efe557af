"""``kvd serve``: the daemon in the foreground."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from kvd.cli.options import valid_config, with_config, with_sets

if TYPE_CHECKING:
    from pathlib import Path


@click.command()
@with_config("Read this file instead of /etc/kvd/kvd.toml.")
@with_sets
@click.option(
    "--paranoid",
    is_flag=True,
    help="Ask every invariant after every step (audit.paranoid): slow, for a hunt for a bug.",
)
@click.pass_context
def serve_command(
    ctx: click.Context, config_file: Path | None, sets: tuple[str, ...], paranoid: bool
) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT; SIGHUP is kvd reload.

    With no configuration at all it serves a small CPU pool on loopback.
    """
    if paranoid:
        sets = (*sets, "audit.paranoid=true")
    config = valid_config(config_file, sets)
    from kvd.config import load  # noqa: PLC0415 - keeps kvd --help fast
    from kvd.daemon.serve import main  # noqa: PLC0415 - a wrong configuration needs no daemon

    ctx.exit(main(config, lambda: load(config_file, os.environ, sets)))
