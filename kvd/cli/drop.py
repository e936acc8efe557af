"""``kvd drop``: the memory of a pool that outlived its daemon, given back to the host."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from kvd.cli import render
from kvd.cli.exits import VerbFailed
from kvd.cli.options import valid_config, with_config, with_format, with_sets
from kvd.cli.render import TextTable, said
from kvd.daemon.warm_restart import place_of
from kvd.pools.arena import NotReserved
from kvd.pools.file_memory import left_over, open_directory
from kvd.pools.location import Backing
from kvd.types import amount

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType


@click.command()
@with_config("Find the pool through this file instead of /etc/kvd/kvd.toml.")
@with_sets
@click.option("--dry-run", "rehearsal", is_flag=True, help="Say what it would do; change nothing.")
@with_format
def drop_command(
    form: str, config_file: Path | None, sets: tuple[str, ...], rehearsal: bool
) -> None:
    """Free the memory that a stopped daemon left for the next one, and with it the cache.

    Only files stay when a daemon stops: pool.backing shm or hugetlbfs. A daemon that runs is left
    alone.
    """
    place = place_of(valid_config(config_file, sets))
    if not place.backing.file_system:
        raise VerbFailed(
            f"pool.backing = {place.backing.value} leaves no files behind: {_LEAVES[place.backing]}"
            "; for files of an earlier configuration add --set pool.backing=shm, or hugetlbfs"
        )
    try:
        path = place.path()
        files = left_over(path)
        if files and not rehearsal:
            with contextlib.closing(open_directory(place, wait_s=0.0)) as directory:
                directory.discard()
            if not place.is_chosen:
                with contextlib.suppress(OSError):
                    path.rmdir()
    except NotReserved as exc:
        raise VerbFailed(str(exc)) from exc
    dropped = {"directory": str(path), "files": files, "dry_run": rehearsal}
    render.answer(form, dropped, *_told(path, files, rehearsal=rehearsal))


_LEAVES = {
    Backing.ANON: "its memory is free when the last process that maps it has ended",
    Backing.FDSTORE: "systemd frees its memory when the unit is stopped",
}


def _told(path: Path, files: dict[str, int], *, rehearsal: bool) -> list[RenderableType]:
    if not files:
        return [said(f"there is no pool in {path}")]
    table = TextTable("FILE", "MEMORY>")
    for name, size in files.items():
        table.row(name, amount(size))
    verb = "would be freed: nothing was changed" if rehearsal else "freed"
    return [table, said(f"{amount(sum(files.values()))} in {path} {verb}")]
