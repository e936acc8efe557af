"""Cells as text, in the plainest way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import clean, duration

if TYPE_CHECKING:
    from kvd.wire.console import Cell
    from tui.draw.spans import Style


def show(cell: Cell, kind: str, now_s: float, width: int) -> tuple[str, Style]:
    """A cell in at most ``width`` characters, and its style."""
    match cell:
        case None:
            return "", "dim"
        case tuple():
            text = ", ".join(f"{clean(one.who)} {duration(now_s - one.since_s)}" for one in cell)
        case float() | int() if kind == "since":
            text = duration(max(0.0, now_s - cell))
        case float() | int() if kind == "until":
            text = duration(cell - now_s)
        case _:
            text = clean(str(cell))
    return text[:width], "plain"
