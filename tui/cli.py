"""``kvd-tui``: who holds which page, why, and since when."""

from __future__ import annotations

import asyncio
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from kvd.filters import SyntaxFlaw
from tui import endpoint as places
from tui.model.commands import FACES, PAGES, parse

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from tui.app import KvdTui


MIN_FPS, MAX_FPS = 0.2, 20.0
MAX_AFTER_S = 3600.0
SIZE = re.compile(r"(\d{2,3})x(\d{2,3})")
DEFAULT_SIZE = "132x40"


@click.command()
@click.option(
    "--connect",
    metavar="ENDPOINT",
    help="Where the daemon is heard: ipc:///PATH, or ssh://[user@]host[:port][/PATH]. "
    "Default: sockets.admin of the daemon's configuration.",
)
@click.option("--readonly", is_flag=True, help="Refuse whatever would change anything.")
@click.option(
    "--fps",
    type=click.FloatRange(MIN_FPS, MAX_FPS),
    default=4.0,
    show_default=True,
    help="Frames a second, if the daemon and the terminal keep up.",
)
@click.option(
    "--theme", default="textual-dark", show_default=True, help="Colours; Ctrl+T changes them."
)
@click.option(
    "--screen",
    type=click.Choice((*PAGES, *FACES)),
    default=PAGES[0],
    show_default=True,
    help="The page to begin with.",
)
@click.option(
    "--open",
    "ref",
    metavar="REF",
    default="",
    help="Begin with this open: lease:7, page:17, room:12, peer:NAME.",
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
@click.option(
    "--after",
    "after_s",
    metavar="SECONDS",
    type=click.FloatRange(0.0, MAX_AFTER_S),
    default=0.0,
    help="Look for so long before that frame: charts begin when the console does.",
)
@click.version_option(package_name="kvd")
def main(  # noqa: PLR0913 - click passes every option by its name
    *,
    connect: str | None,
    readonly: bool,
    fps: float,
    theme: str,
    screen: str,
    ref: str,
    once: bool,
    screenshot: Path | None,
    size: str,
    after_s: float,
) -> None:
    """Browse a daemon: who holds which page, why, and since when. ? shows the keys."""
    found = SIZE.fullmatch(size)
    if found is None:
        raise click.BadParameter(f"{size!r} is no size; write {DEFAULT_SIZE}", param_hint="--size")
    opened = parse(f"open {ref}") if ref else None
    if isinstance(opened, SyntaxFlaw):
        raise click.BadParameter(opened.what, param_hint="--open")
    where = places.read(connect or _configured())
    if isinstance(where, places.BadEndpoint):
        raise click.BadParameter(where.why, param_hint="--connect")
    app = _console(where, readonly=readonly, fps=fps, theme=theme, screen=screen, ref=ref)
    if not once and screenshot is None:
        app.run()
        raise SystemExit(app.return_code or 0)
    width, height = int(found[1]), int(found[2])
    _once(app, (width, height, after_s), screenshot, is_shown=once)


def _console(
    where: places.Local | places.Remote,
    *,
    readonly: bool,
    fps: float,
    theme: str,
    screen: str,
    ref: str,
) -> KvdTui:
    """The console. Textual and ZeroMQ are loaded here: help and refusals need neither."""
    from textual.theme import BUILTIN_THEMES  # noqa: PLC0415

    from tui.app import KvdTui, Options  # noqa: PLC0415
    from tui.link import Link  # noqa: PLC0415
    from tui.model.mirror import Mirror  # noqa: PLC0415
    from tui.themes import THEMES  # noqa: PLC0415

    if theme not in {*BUILTIN_THEMES, *THEMES}:
        known = " ".join(sorted({*BUILTIN_THEMES, *THEMES}))
        raise click.BadParameter(f"{theme!r} is none of {known}", param_hint="--theme")
    return KvdTui(
        Mirror(),
        lambda mirror, wanted: Link(where, mirror, wanted),
        Options(readonly=readonly, fps=fps, theme=theme, page=screen, ref=ref),
    )


def _once(app: KvdTui, how: tuple[int, int, float], file: Path | None, *, is_shown: bool) -> None:
    """One frame, of this size and so late; the exit status is 1 where no daemon answered."""
    taken = asyncio.run(take(app, *how))
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


WAIT_S = 5.0
"""So long a daemon is waited for."""
STEP_S = 0.02
FRAMES = 2
"""The second one has what the first one's columns made room for."""


class OneFrame(msgspec.Struct, frozen=True):
    """``text`` has the lines of the screen, ``svg`` the same as a picture.

    ``is_seen``: a daemon has answered; else the screen says why none has.
    """

    text: str
    svg: str
    is_seen: bool


async def take(app: KvdTui, columns: int, lines: int, after_s: float = 0.0) -> OneFrame:
    """Run the console on a screen of this size until it has something to show, and look at it.

    ``after_s``: and for so long, so that what is drawn over time has some.
    """
    async with app.run_test(size=(columns, lines)) as pilot:
        await asyncio.sleep(after_s)
        await _settle(app, pilot)
        return OneFrame(
            app.screen_text(), app.export_screenshot(title="kvd"), app.snapshot.vitals is not None
        )


async def _settle(app: KvdTui, pilot: Pilot[None]) -> None:
    end_s = time.monotonic() + WAIT_S
    while app.mirror.frames < FRAMES and time.monotonic() < end_s:
        await pilot.pause(STEP_S)
    for _ in range(FRAMES):
        app.tick()
        await pilot.pause()
