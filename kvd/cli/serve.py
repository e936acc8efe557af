"""``kvd serve``: the daemon in the foreground."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import click

from kvd.cli.exits import NotInstalled
from kvd.cli.options import valid_config, with_config, with_sets
from kvd.daemon.systemd import Systemd
from kvd.parts import missing
from kvd.transfer.child import WorkerChild

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
    if lacking := missing("daemon"):
        raise NotInstalled("kvd serve", "daemon", lacking)
    if paranoid:
        sets = (*sets, "audit.paranoid=true")
    # Before numpy is loaded, here or by what is started from here: it starts a thread for each
    # core, which compute nothing for a daemon and cost each process 40 ms.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    systemd = Systemd.of(os.environ, os.getpid())
    child = None
    # Before all that takes its time here. A host that has no process left for it says so later,
    # where it is wanted.
    with contextlib.suppress(OSError):
        child = WorkerChild()
    try:
        config = valid_config(config_file, sets)
        from kvd.config import load  # noqa: PLC0415 - keeps kvd --help fast
        from kvd.daemon.serve import main  # noqa: PLC0415 - a wrong configuration needs no daemon

        status = main(config, lambda: load(config_file, os.environ, sets), systemd, child)
    finally:
        if child is not None:
            child.end()
    ctx.exit(status)
