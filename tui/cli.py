"""``kvd-tui``: who holds which page, why, and since when."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tui import endpoint as places
from tui.keys import PAGES

if TYPE_CHECKING:
    from tui.app import KvdTui

MIN_FPS, MAX_FPS = 0.2, 20.0
SIZE = re.compile(r"(\d{2,3})x(\d{2,3})")
DEFAULT_SIZE = "132x40"


@click.command()
@click.option(
    "--connect",
    metavar="ENDPOINT",
    help="Where the daemon is heard: ipc:///PATH, or ssh://[user@]host[:port][/PATH]. "
    "Default: sockets.admin of the daemon's configuration.",
)
@click.option("--readonly", is_flag=True, help="Show nothing that could change anything.")
@click.option(
    "--fps",
    type=click.FloatRange(MIN_FPS, MAX_FPS),
    default=10.0,
    show_default=True,
    help="Frames a second, if the daemon and the terminal keep up.",
)
@click.option("--theme", default="textual-dark", show_default=True, help="Colours; T changes them.")
@click.option(
    "--screen",
    type=click.Choice(PAGES),
    default=PAGES[0],
    show_default=True,
    help="The page to begin with.",
)
@click.option("--once", is_flag=True, help="Print one frame as text, and end.")
@click.option(
    "--screenshot",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write one frame as SVG to a new file, and end.",
)
@click.option(
    "--size", metavar="WxH", default=DEFAULT_SIZE, show_default=True, help="Of that frame."
)
@click.version_option(package_name="kvd")
def main(  # noqa: PLR0913 - click passes every option by its name
    *,
    connect: str | None,
    readonly: bool,
    fps: float,
    theme: str,
    screen: str,
    once: bool,
    screenshot: Path | None,
    size: str,
) -> None:
    """Browse a daemon: who holds which page, why, and since when. ? shows the keys."""
    where = places.read(connect or _configured())
    if isinstance(where, places.Flaw):
        raise click.BadParameter(where.why, param_hint="--connect")
    found = SIZE.fullmatch(size)
    if found is None:
        raise click.BadParameter(f"{size!r} is no size; write {DEFAULT_SIZE}", param_hint="--size")
    app = _console(where, readonly=readonly, fps=fps, theme=theme, screen=screen)
    if not once and screenshot is None:
        app.run()
        raise SystemExit(app.return_code or 0)
    _once(app, (int(found[1]), int(found[2])), screenshot, is_shown=once)


def _console(
    where: places.Local | places.Remote, *, readonly: bool, fps: float, theme: str, screen: str
) -> KvdTui:
    """The console of a daemon. Textual is loaded here: help and refusals need none of it."""
    from textual.theme import BUILTIN_THEMES  # noqa: PLC0415

    from tui.app import KvdTui, Options  # noqa: PLC0415
    from tui.link import Link  # noqa: PLC0415
    from tui.model.mirror import Mirror  # noqa: PLC0415
    from tui.themes import THEMES  # noqa: PLC0415

    if theme not in {*BUILTIN_THEMES, *THEMES}:
        known = " ".join(sorted({*BUILTIN_THEMES, *THEMES}))
        raise click.BadParameter(f"{theme!r} is none of {known}", param_hint="--theme")
    options = Options(readonly=readonly, fps=fps, theme=theme, page=screen)
    return KvdTui(Mirror(), lambda mirror, wanted: Link(where, mirror, wanted, fps=fps), options)


def _once(app: KvdTui, size: tuple[int, int], file: Path | None, *, is_shown: bool) -> None:
    """One frame; the exit status is 1 where no daemon answered."""
    from tui.once import take  # noqa: PLC0415 - loads Textual

    taken = asyncio.run(take(app, *size))
    if is_shown:
        click.echo(taken.text, nl=False)
    if file is not None:
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(taken.svg)
        except OSError as exc:
            raise click.ClickException(f"{file} not written: {exc.strerror or exc}") from None
    raise SystemExit(0 if taken.is_seen else 1)


def _configured() -> str:
    """Where the daemon's own configuration puts the admin socket."""
    from kvd.config import load  # noqa: PLC0415 - not needed with --connect

    loaded = load(None, os.environ, ())
    if isinstance(loaded, list):
        click.echo("\n".join(error.sentence for error in loaded), err=True)
        raise SystemExit(78)
    return loaded.sockets.admin
