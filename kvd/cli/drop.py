"""``kvd drop``: the memory of a pool that outlived its daemon, given back to the host."""

from __future__ import annotations

import contextlib
from pathlib import Path

import click
import msgspec

from kvd.cli import render
from kvd.cli.config import valid_config
from kvd.cli.exits import Failed
from kvd.cli.link import with_format
from kvd.cli.sheet import Sheet, said
from kvd.daemon.pool_memory import place_of
from kvd.pools.arena import NotReserved
from kvd.pools.file_memory import left_over, open_directory
from kvd.pools.location import Backing, PoolLocation
from kvd.text import amount


class Dropped(msgspec.Struct, frozen=True):
    """What ``kvd drop --format json`` prints: the bytes that each file took."""

    directory: str
    files: dict[str, int]
    dry_run: bool


@click.command()
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Find the pool through this file instead of /etc/kvd/kvd.toml.",
)
@click.option(
    "--set", "sets", multiple=True, metavar="SECTION.KEY=VALUE", help="Override one value."
)
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
        raise Failed(
            f"pool.backing = {place.backing.value} leaves no files behind: {_LEAVES[place.backing]}"
            "; for files of an earlier configuration add --set pool.backing=shm, or hugetlbfs"
        )
    try:
        path = place.path()
        files = left_over(path)
        if files and not rehearsal:
            _discard(place, path)
    except NotReserved as exc:
        raise Failed(str(exc)) from exc
    if form == "json":
        render.print_json(Dropped(str(path), files, rehearsal))
    else:
        _show(path, files, rehearsal=rehearsal)


_LEAVES = {
    Backing.ANON: "its memory is free when the last process that maps it has ended",
    Backing.FDSTORE: "systemd frees its memory when the unit is stopped",
}


def _discard(place: PoolLocation, path: Path) -> None:
    """Remove the files, and the directory unless somebody chose it."""
    directory = open_directory(place, wait_s=0.0)
    try:
        directory.discard()
    finally:
        directory.close()
    if not place.is_chosen:
        with contextlib.suppress(OSError):
            path.rmdir()


def _show(path: Path, files: dict[str, int], *, rehearsal: bool) -> None:
    if not files:
        render.show(said(f"there is no pool in {path}"))
        return
    sheet = Sheet("FILE", "MEMORY>")
    for name, size in files.items():
        sheet.row(name, amount(size))
    verb = "would be freed: nothing was changed" if rehearsal else "freed"
    total = said(f"{amount(sum(files.values()))} in {path} {verb}")
    render.show(sheet, total)
