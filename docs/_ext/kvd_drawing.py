"""Draws a state machine as SVG: states in a column, each arrow in a lane of its own beside it.

No program is called and nothing is measured: a letter is taken to be as wide as it is in the font
that is asked for. Colours come from the page, so that the drawing is readable by day and by night.
"""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LETTER = 6.7
LINE = 19
GAP = 26
MARGIN = 8


class Arrow(msgspec.Struct, frozen=True):
    """From the row of one state to that of another, by what leads there; ``lane`` counts out."""

    start: int
    end: int
    label: str
    lane: int


def drawing(
    states: Sequence[str], arrows: Mapping[tuple[str, str], Sequence[str]], about: str
) -> str:
    """The machine as one ``svg`` element."""
    routed = _routed(states, arrows)
    box = max(map(len, states)) * LETTER + 2 * MARGIN
    # One port for each arrow that leaves or comes, so that no two of them touch.
    out = {row: [one for one in routed if one.start == row] for row in range(len(states))}
    into = {row: [one for one in routed if one.end == row] for row in range(len(states))}
    tops: list[float] = []
    heights: list[float] = []
    y = float(MARGIN)
    for row in range(len(states)):
        tops.append(y)
        heights.append(max(1, len(out[row]) + len(into[row])) * LINE + MARGIN)
        y += heights[-1] + GAP
    first_lane = box + 2 * MARGIN + max((len(one.label) for one in routed), default=0) * LETTER
    width = first_lane + (max((one.lane for one in routed), default=0) + 1) * 16 + MARGIN
    parts = [
        f'<svg viewBox="0 0 {width:.0f} {y:.0f}" width="{width:.0f}" role="img"'
        f' style="max-width:100%;height:auto" font-family="monospace" font-size="11">',
        f"<title>{html.escape(about)}</title>",
    ]
    for row, state in enumerate(states):
        middle = tops[row] + heights[row] / 2
        parts.append(
            f'<rect x="1" y="{tops[row]:.0f}" width="{box:.0f}" height="{heights[row]:.0f}" rx="6"'
            ' fill="none" stroke="currentColor"/>'
            f'<text x="{box / 2:.0f}" y="{middle + 4:.0f}" text-anchor="middle"'
            f' font-weight="bold" fill="currentColor">{html.escape(state)}</text>'
        )
    for one in routed:
        from_y = _port(tops, out, into, one, is_start=True)
        to_y = _port(tops, out, into, one, is_start=False)
        parts += _arrow(one, (box, first_lane + one.lane * 16), (from_y, to_y))
    return "".join([*parts, "</svg>"])


def _routed(states: Sequence[str], arrows: Mapping[tuple[str, str], Sequence[str]]) -> list[Arrow]:
    """Short arrows have the inner lanes; two share a lane where they do not meet."""
    rows = {state: row for row, state in enumerate(states)}
    wanted = sorted(
        ((rows[a], rows[b], ", ".join(on)) for (a, b), on in arrows.items()),
        key=lambda one: (abs(one[1] - one[0]), one[0]),
    )
    taken: list[list[tuple[int, int]]] = []
    routed = []
    for start, end, label in wanted:
        low, high = min(start, end), max(start, end)
        lane = next(
            (
                at
                for at, spans in enumerate(taken)
                if all(high < other[0] or low > other[1] for other in spans)
            ),
            len(taken),
        )
        if lane == len(taken):
            taken.append([])
        taken[lane].append((low, high))
        routed.append(Arrow(start, end, label, lane))
    return routed


def _port(
    tops: Sequence[float],
    out: Mapping[int, Sequence[Arrow]],
    into: Mapping[int, Sequence[Arrow]],
    arrow: Arrow,
    *,
    is_start: bool,
) -> float:
    """Where on the side of a box an arrow touches: those that come above those that leave."""
    row = arrow.start if is_start else arrow.end
    before = len(into[row]) + out[row].index(arrow) if is_start else into[row].index(arrow)
    return tops[row] + MARGIN / 2 + (before + 0.5) * LINE


def _arrow(arrow: Arrow, xs: tuple[float, float], ys: tuple[float, float]) -> Iterator[str]:
    """Out of one box, along its lane, and into another."""
    (left, right), (from_y, to_y) = xs, ys
    yield (
        f'<path d="M{left:.0f} {from_y:.0f} H{right:.0f} V{to_y:.0f} H{left + 8:.0f}"'
        ' fill="none" stroke="currentColor" opacity="0.55"/>'
        f'<path d="M{left + 1:.0f} {to_y:.0f} l8 -4 v8 z" fill="currentColor"/>'
        f'<text x="{left + 6:.0f}" y="{from_y - 3:.0f}" fill="currentColor">'
        f"{html.escape(arrow.label)}</text>"
    )
