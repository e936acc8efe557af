"""One frame without a terminal: as text for eyes and scripts, or as a picture."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from textual.pilot import Pilot

    from tui.app import KvdTui

WAIT_S = 5.0
"""So long a daemon is waited for."""
STEP_S = 0.02
FRAMES = 2
"""The second one has what the first one's columns made room for."""


class Taken(msgspec.Struct, frozen=True):
    """``text`` has the lines of the screen, ``svg`` the same as a picture.

    ``is_seen``: a daemon has answered; else the screen says why none has.
    """

    text: str
    svg: str
    is_seen: bool


async def take(app: KvdTui, columns: int, lines: int, after_s: float = 0.0) -> Taken:
    """Run the console on a screen of this size until it has something to show, and look at it.

    ``after_s``: and for so long, so that what is drawn over time has some.
    """
    async with app.run_test(size=(columns, lines)) as pilot:
        await asyncio.sleep(after_s)
        await _settle(app, pilot)
        return Taken(
            app.screen_text(), app.export_screenshot(title="kvd"), app.moment.vitals is not None
        )


async def _settle(app: KvdTui, pilot: Pilot[None]) -> None:
    end_s = time.monotonic() + WAIT_S
    while app.mirror.frames < FRAMES and time.monotonic() < end_s:
        await pilot.pause(STEP_S)
    for _ in range(FRAMES):
        app.tick()
        await pilot.pause()
