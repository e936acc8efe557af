"""The console that a widget is in, by its own type."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from textual.widget import Widget

    from tui.app import KvdTui


def console(widget: Widget) -> KvdTui:
    """The app: pages and their widgets live in no other."""
    return cast("KvdTui", widget.app)
