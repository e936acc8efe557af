"""A cell as text and style, by the kind of its column. Ages are counted here, from moments.

Everything from a daemon is hostile: names may hold what steers a terminal, figures may be no
numbers, and a kind may be one of a later version. All of it comes out as harmless text.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

from kvd.text import age, clean, compact, compact_bytes
from tui.draw.spans import columns, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvd.wire.console import Cell, Holder
    from tui.draw.spans import Style

NOTHING: Final = "-"
"""Where the question makes no sense for the row."""
NO_NUMBER: Final = "?"

FIGURES: Final = frozenset(
    {"count", "bytes", "tokens", "pages", "share", "ms", "seconds", "since", "until", "depth"}
)
"""Kinds that stand at the right of their column; all others stand at the left."""

SOON_S: Final = 1.0
"""A deadline this close is worth a look."""

_STATES: Final[dict[str, Style]] = {
    **dict.fromkeys(
        ("up", "alive", "serving", "delivered", "ready", "ok", "cached", "healed"), "ok"
    ),
    **dict.fromkeys(
        (
            *("lingering", "retracted", "saving", "resuming", "restoring", "draining", "medium"),
            *("connecting", "greeting", "waiting", "silent", "aborting", "ending", "restarting"),
        ),
        "warn",
    ),
    **dict.fromkeys(
        (
            *("gone", "lost", "failed", "refused", "quarantined", "high", "broken", "aborted"),
            *("down", "stale", "ended", "corrupt", "orphan", "quar.", "short", "full"),
        ),
        "bad",
    ),
    "low": "dim",
    "free": "dim",
}


class CellText(NamedTuple):
    """What stands in a cell. Not padded; ``FIGURES`` says at which end it belongs."""

    text: str
    style: Style


def show(cell: Cell, kind: str, now_s: float, width: int) -> CellText:
    """The cell in at most ``width`` columns, at ``now_s`` on the daemon's clock. Never raises."""
    if cell is None:
        return CellText(cut(NOTHING, width), "dim")
    if isinstance(cell, tuple):
        return _holders(cell, now_s, width)
    if isinstance(cell, str):
        return CellText(cut(clean(cell), width), _style_of_text(cell, kind))
    if not math.isfinite(cell):
        return CellText(cut(NO_NUMBER, width), "warn")
    text = figure(cell, kind, now_s)
    if columns(text) > width and kind in {"count", "pages", "depth"}:
        text = compact(cell)
    return CellText(cut(text, width), _style_of_figure(cell, kind, now_s))


def figure(value: float, kind: str, now_s: float) -> str:
    """A finite number as its kind wants it."""
    match kind:
        case "since":
            return age(now_s - value)
        case "until":
            return age(value - now_s)
        case _:
            return _FORMATS.get(kind, _plain)(value)


def _plain(value: float) -> str:
    if isinstance(value, int) or value == int(value):
        return str(int(value))
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"


_FORMATS: Final[Mapping[str, Callable[[float], str]]] = {
    "tokens": compact,
    "bytes": compact_bytes,
    "share": lambda value: f"{100 * value:.0f}%",
    "ms": lambda value: f"{value:.2f}ms" if abs(value) < 10 else f"{value:.0f}ms",
    "seconds": age,
}


def _style_of_text(cell: str, kind: str) -> Style:
    match kind:
        case "state":
            return _STATES.get(cell.partition(" ")[0], "plain")
        case "ref":
            return "key"
        case _:
            return "plain"


def _style_of_figure(value: float, kind: str, now_s: float) -> Style:
    if kind != "until":
        return "plain"
    left_s = value - now_s
    return "bad" if left_s < 0 else "warn" if left_s < SOON_S else "plain"


def _holders(holders: tuple[Holder, ...], now_s: float, width: int) -> CellText:
    """As many as fit, then how many more there are: ``engine-1 2.1s, !engine-2 gone 31s, +3``."""
    told = [holder(who, now_s) for who in holders]
    style: Style = "bad" if any(who.state == "gone" for who in holders) else "plain"
    for count in range(len(told), 0, -1):
        rest = [f"+{len(told) - count}"] if count < len(told) else []
        text = ", ".join((*told[:count], *rest))
        if columns(text) <= width:
            return CellText(text, style)
    rest_text = f" +{len(told) - 1}" if len(told) > 1 else ""
    short = cut(told[0], width - len(rest_text)) if told else ""
    return CellText(cut(short + rest_text, width), style)


AT_WORK: Final = frozenset({"", "moving", "pinned"})
"""States of a holder in which all is well."""


def holder(who: Holder, now_s: float) -> str:
    """One holder: ``engine-1 2.1s``, or ``!engine-2 gone 31s`` where something is wrong with it."""
    mark = "" if who.state in AT_WORK else "!"
    state = f" {clean(who.state)}" if who.state else ""
    return f"{mark}{clean(who.who)}{state} {age(now_s - who.since_s)}"


def lettered(word: str, known: Mapping[str, tuple[str, Style]]) -> tuple[str, Style]:
    """A word of a few with its letter, for eyes without colours, and its style."""
    letter, style = known.get(word, ("?", "warn"))
    return f"{letter} {clean(word)}", style
