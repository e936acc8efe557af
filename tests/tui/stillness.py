"""When an app under a pilot is still: all that could run has run, and all is painted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from textual._context import active_app

if TYPE_CHECKING:
    from textual.app import App

MOST_TURNS = 20_000
"""Of the loop; the longest tests need some hundreds."""


async def until_still(min_sleep: float = 0.0, max_sleep: float = 0.0) -> None:
    """Wait until nothing is left to be done but what a timer or another process will bring.

    Takes what Textual's ``wait_for_idle`` takes, and needs neither: no time has to pass.
    """
    app = active_app.get()
    for _ in range(MOST_TURNS):
        await asyncio.sleep(0)
        if not _has_work(asyncio.get_running_loop()) and not _was_painted(app):
            return
    raise AssertionError(f"{app!r} does not come to rest")


# The loop and the screen have no public word for what they still have to do.


def _has_work(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a callback waits for its turn, or a timer is due."""
    due = loop._scheduled
    return bool(loop._ready) or bool(due and due[0]._when <= loop.time())


def _was_painted(app: App[object]) -> bool:
    """Whether there was something to paint, or to be done after it; it is done by now or soon."""
    if not app.is_running or not app.screen_stack or app._batch_count:
        return False
    screen = app.screen
    if not (
        screen._layout_required
        or screen._scroll_required
        or screen._repaint_required
        or screen._recompose_required
        or screen._dirty_widgets
        or screen._callbacks
    ):
        return False
    screen._on_timer_update()
    return True
