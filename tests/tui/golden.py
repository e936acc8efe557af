"""Pictures of a screen that are kept, as text and as SVG, and what differs when one does.

``GOLDEN=update`` writes them anew. The text is what a person reads in a review; the SVG has the
colours too. What is compared depends on nothing but the app: identifiers that Rich makes up are
taken out.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import App
    from textual.pilot import Pilot

GOLDEN = Path(__file__).parent / "golden"
SIZES = ((80, 24), (132, 40), (200, 60))
MOST_LINES = 60
"""Of a difference: more of them say no more."""
MOST_COLUMNS = 220

_MADE_UP = re.compile(r"terminal-\d+-")


async def settled(pilot: Pilot[object]) -> None:
    """Wait until everything that was asked for has been painted."""
    for _ in range(3):
        await pilot.pause()


def text_of(app: App[object]) -> str:
    """What stands on the screen, a line for each row, without blanks at their ends."""
    strips = app.screen._compositor.render_strips()
    lines = ["".join(segment.text for segment in strip).rstrip() for strip in strips]
    return "\n".join(lines) + "\n"


def picture_of(app: App[object]) -> str:
    """The screen as an SVG that is the same in every process; an element a line."""
    svg = _MADE_UP.sub("terminal-", app.export_screenshot())
    return svg.replace("><", ">\n<") + ("" if svg.endswith("\n") else "\n")


def same_text(app: App[object], name: str, at: Path = GOLDEN) -> None:
    """The screen reads as the one that is kept under this name."""
    _compare(text_of(app), at / f"{name}.txt")


def same_picture(app: App[object], name: str, at: Path = GOLDEN) -> None:
    """The screen looks as the one that is kept under this name, and reads so too."""
    same_text(app, name, at)
    _compare(picture_of(app), at / f"{name}.svg")


def _compare(shown: str, path: Path) -> None:
    if os.environ.get("GOLDEN") == "update":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shown, "utf-8")
        return
    how = "GOLDEN=update writes it anew; look at the difference first"
    if not path.exists():
        raise AssertionError(f"no {path.name} is kept: {how}\n{shown[:8000]}")
    kept = path.read_text("utf-8")
    if shown != kept:
        raise AssertionError(f"{path.name} is not what is shown: {how}\n{_difference(kept, shown)}")


def _difference(kept: str, shown: str) -> str:
    """Lines that differ, with their numbers: ``-`` is kept, ``+`` is shown."""
    lines = [
        line[:MOST_COLUMNS]
        for line in difflib.unified_diff(
            kept.splitlines(), shown.splitlines(), "kept", "shown", n=1, lineterm=""
        )
    ]
    return "\n".join(_few(lines))


def _few(lines: Sequence[str]) -> Sequence[str]:
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} lines more"]
