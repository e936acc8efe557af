"""Charts over time, and bars: shapes for the eye, and always the figure beside them in text.

A chart of ``w`` columns shows the last ``2 w`` values, the newest at the right. Runs of braille are
spans of their own: in a picture, a run that mixes letters and braille changes its font as a whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvd.text import age, percent
from tui.draw.spans import Line, Style, Styled, cleaned, fit, line, merged, spread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

DOTS = 4
"""Of a braille cell, from the bottom; it has two columns of them."""
MAX_HEIGHT = 63
"""Lines of a chart: the dots of one column are counted in a byte."""

_LEFT = (0, 0x40, 0x44, 0x46, 0x47)
_RIGHT = (0, 0x80, 0xA0, 0xB0, 0xB8)
_BRAILLE = [[chr(0x2800 + left + right) for right in _RIGHT] for left in _LEFT]
"""By dots in the left column, then in the right one."""

_CLIPS = [
    bytes(min(max(dots - DOTS * row, 0), DOTS) for dots in range(256)) for row in range(MAX_HEIGHT)
]
"""By line from the bottom: the dots of a column that are in it, for any number of dots."""

STEPS = "▁▂▃▄▅▆▇█"
EIGHTHS = "▏▎▍▌▋▊▉█"
UNKNOWN = "·"

MID_SHARE, HIGH_SHARE = 0.5, 0.8
"""Above these shares of its top a chart changes its style."""

Value = float | None
"""None where nobody knows: before the console came, or while the daemon was away."""


class Series(NamedTuple):
    """What a chart shows: values at even intervals, oldest first, and how a figure is said.

    ``step_s``: from one to the next. The upper edge is the largest one shown.
    """

    title: str
    values: Sequence[Value]
    show: Callable[[float], str]
    step_s: float = 1.0


def chart(series: Series, width: int, height: int) -> list[Line]:
    """A head with the newest and the largest value, and ``height - 1`` lines of an area."""
    shown = _last(series.values, 2 * width)
    known = [value for value in shown if value is not None]
    if not known:
        head = spread((cleaned(series.title, "head"),), line("no figures yet", "dim"), width)
        return [head, *[line("⠀" * width, "dim")] * (height - 1)]
    newest = shown[-1]
    peak = max(known)
    now = "-" if newest is None else series.show(newest)
    at_left = (cleaned(series.title, "head"), Styled(f" {now}"))
    most = f"max {series.show(peak)} in {age(len(shown) * series.step_s)}"
    head = spread(at_left, line(most, "dim"), width, Styled("─", "border"))
    return [head, *area(shown, width, height - 1, peak)]


def area(values: Sequence[Value], width: int, height: int, top: float) -> list[Line]:
    """The values as a filled curve; whatever is above nothing shows at least one dot."""
    height = min(height, MAX_HEIGHT)
    if height <= 0 or width <= 0:
        return []
    shown = _last(values, 2 * width)
    full = DOTS * height
    scale = full / top if top > 0 else 0.0
    dots = bytes(
        min(max(round(value * scale), 1), full) if value else 0
        for value in (0.0 if value is None else max(value, 0.0) for value in shown)
    ).rjust(2 * width, b"\0")
    lines: list[Line] = []
    for row in reversed(range(height)):
        inside = dots.translate(_CLIPS[row])
        pairs = zip(inside[::2], inside[1::2], strict=True)
        text = "".join([_BRAILLE[a][b] for a, b in pairs])
        lines.append((Styled(text, _load_of((row + 0.5) / height)),))
    holes = [value is None for value in shown]
    if any(holes):
        lines[-1] = _with_holes(lines[-1][0], [False] * (2 * width - len(shown)) + holes)
    return lines


def _with_holes(bottom: Styled, holes: Sequence[bool]) -> Line:
    """The lowest line with a dot where nobody knows: nothing there would be a figure."""
    return merged(
        [
            Styled(UNKNOWN, "dim") if left and right else bottom._replace(text=sign)
            for sign, left, right in zip(bottom.text, holes[::2], holes[1::2], strict=True)
        ]
    )


def spark(values: Sequence[Value], width: int) -> Styled:
    """The last values as steps, one column each; a dot where nobody knows."""
    shown = _last(values, width)
    highest = max([value for value in shown if value is not None], default=0.0)
    steps = "".join([_step(value, highest) for value in shown])
    newest = shown[-1] if shown else None
    share = newest / highest if newest is not None and highest > 0 else 0.0
    return Styled(steps.rjust(max(width, 0)), _load_of(share))


def bar(part: float, whole: float, width: int, style: Style | None = None) -> Line:
    """A share as a bar and in percent, in ``width`` columns; just the percent where it is narrow.

    Without ``style`` it has that of its load.
    """
    said_share = f" {percent(part, whole):>4}"
    room = width - len(said_share)
    share = min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0
    if room < 1:
        return fit(line(said_share.lstrip()), width)
    eighths = int(share * room * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (EIGHTHS[rest - 1] if rest else "")
    spans = (
        Styled(filled, style or _load_of(share)),
        Styled("░" * (room - len(filled)), "dim"),
        Styled(said_share),
    )
    return fit(spans, width)


def _last(values: Sequence[Value], count: int) -> list[Value]:
    return list(values[-count:]) if count > 0 else []


def _step(value: Value, top: float) -> str:
    if value is None:
        return UNKNOWN
    if value <= 0 or top <= 0:
        return STEPS[0]
    return STEPS[min(max(round(7 * value / top), 1), 7)]


def _load_of(share: float) -> Style:
    if share < MID_SHARE:
        return "graph-low"
    return "graph-mid" if share < HIGH_SHARE else "graph-high"
