"""The console that a widget is in, by its own type."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from textual.widget import Widget

    from tui.app import KvdTui


def console(widget: Widget) -> KvdTui:
    """The app: pages and their widgets live in no other."""
    return cast("KvdTui", widget.app)


def missing(widget: Widget) -> str:
    """Why what is asked for is not here: a recording has only what was looked at in it."""
    from tui.app import KvdTui  # noqa: PLC0415 - the console imports its widgets

    if isinstance(widget.app, KvdTui) and widget.app.replay is not None:
        return "not in this recording so far; it has what was looked at"
    return "asked for; not here yet"
