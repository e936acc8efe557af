"""Counters into figures per second, by the daemon's own clock.

A frame may come late or twice; the daemon's clock in it says over which time a counter grew. One
point is kept per ``STEP_S``: an hour's quarter costs the same at one frame a second as at twenty.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.wire.console import Sources
from kvd.wire.snapshot import Totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import Vitals
    from tui.model.tables import TableData

HOLE_S = 3.0
"""Between two points that are so far apart nobody knows, if most come more often."""
STEP_S = 1.0
MAX_POINTS = 900
"""A quarter of an hour."""

COUNTERS = (
    *Totals.__struct_fields__,
    *(f"from_{name}" for name in Sources.__struct_fields__),
    "in_bytes",
    "out_bytes",
)
"""What is counted of a node. ``from_cached``...: tokens by source; ``in_bytes`` and ``out_bytes``:
of handoffs, those under way included."""
_AT = {name: at for at, name in enumerate(COUNTERS)}


class Point(NamedTuple):
    """What counters were at one moment of the daemon's clock."""

    at_s: float
    counters: tuple[float, ...]


class NodeRates:
    """The last quarter of an hour of a daemon's head, for charts.

    ``end_s``: only what was before it, for a screen that stands still.
    """

    def __init__(self) -> None:
        self._points: list[Point] = []

    def __len__(self) -> int:
        return len(self._points)

    def take(self, vitals: Vitals) -> None:
        """Remember the counters; of several frames within one step the last."""
        if not math.isfinite(vitals.at_s):
            return
        totals = vitals.totals
        counters = (
            *msgspec.structs.astuple(totals),
            *msgspec.structs.astuple(vitals.sources),
            totals.received_bytes + vitals.moving_bytes_in,
            totals.sent_bytes + vitals.moving_bytes_out,
        )
        _add(self._points, Point(vitals.at_s, counters))

    def forget(self) -> None:
        """The daemon is another one: its counters began again."""
        self._points.clear()

    def grown(
        self, names: Sequence[str], *, over_s: float, end_s: float | None = None
    ) -> tuple[list[float], float]:
        """By how much counters grew in the last ``over_s``, and over how many s that is known."""
        points = _until(self._points, end_s)
        if len(points) < 2:
            return [0.0] * len(names), 0.0
        end = points[-1]
        start_s = max(points[0].at_s, end.at_s - over_s)
        start = [_value_at(points, _AT[name], start_s, float("inf")) for name in names]
        grown = [
            end.counters[_AT[name]] - (was or 0.0) for name, was in zip(names, start, strict=True)
        ]
        return [max(0.0, growth) for growth in grown], max(0.0, end.at_s - start_s)

    def per_second(
        self, name: str, count: int, *, step_s: float = 1.0, end_s: float | None = None
    ) -> list[float | None]:
        """The last ``count`` steps of a counter, each as growth per second, the latest last.

        Fewer where less is known; None while nobody watched. Steps begin at multiples of
        ``step_s``: a chart of them moves by whole columns.
        """
        return _growth(_until(self._points, end_s), _AT[name], count, step_s)


class RowRates:
    """How fast one column grows in each row of a table, per second: bytes of a handoff.

    ``end_s``: as of then, for a screen that stands still.
    """

    def __init__(self, column: str, over_s: float = 1.0) -> None:
        self._column = column
        self._over_s = over_s
        self._seen: dict[str, list[Point]] = {}
        self._taken: TableData | None = None

    def take(self, data: TableData | None) -> None:
        """Remember the column of every row; rows that have left the window are forgotten.

        The same table once more says nothing, nor does none.
        """
        if data is None or data is self._taken:
            return
        self._taken = data
        at = data.index(self._column)
        seen: dict[str, list[Point]] = {}
        for key, row in data.rows.items() if at >= 0 else ():
            cell = row.cells[at]
            if isinstance(cell, int | float):
                points = self._seen.get(key)
                if points is None or cell < points[-1].counters[0]:
                    points = []
                _add(points, Point(data.at_s, (cell,)))
                seen[key] = points
        self._seen = seen

    def rate(self, key: str, end_s: float | None = None) -> float | None:
        """Growth per second over the last ``over_s``; None until two moments are known."""
        points = _until(self._seen.get(key, ()), end_s)
        if len(points) < 2:
            return None
        last = points[-1]
        start = max(0, bisect_right(points, last.at_s - self._over_s, key=_when) - 1)
        first = points[min(start, len(points) - 2)]
        return (last.counters[0] - first.counters[0]) / (last.at_s - first.at_s)

    def per_second(
        self, key: str, count: int, *, step_s: float = 1.0, end_s: float | None = None
    ) -> list[float | None]:
        """The last ``count`` steps, as those of ``NodeRates``."""
        return _growth(_until(self._seen.get(key, ()), end_s), 0, count, step_s)


def _add(points: list[Point], point: Point) -> None:
    """Add it if it is later; the last one goes where it was within a step of the one before."""
    if points and point.at_s <= points[-1].at_s:
        return
    if len(points) > 1 and points[-1].at_s - points[-2].at_s < STEP_S:
        points.pop()
    points.append(point)
    del points[:-MAX_POINTS]


def _until(points: Sequence[Point], end_s: float | None) -> Sequence[Point]:
    return points if end_s is None else points[: bisect_right(points, end_s, key=_when)]


def _when(point: Point) -> float:
    return point.at_s


def _growth(points: Sequence[Point], which: int, count: int, step_s: float) -> list[float | None]:
    """What a counter grew by in each of the last ``count`` whole steps, per second.

    None where an end of the step is in a hole: a line through it would be an invention.
    """
    if len(points) < 2:
        return []
    last = int(points[-1].at_s // step_s)
    first = max(last - count, -int(-points[0].at_s // step_s))
    usual_s = (points[-1].at_s - points[0].at_s) / (len(points) - 1)
    hole_s = max(HOLE_S, 2.5 * usual_s)
    values = [_value_at(points, which, edge * step_s, hole_s) for edge in range(first, last + 1)]
    return [
        None if left is None or right is None else max(0.0, right - left) / step_s
        for left, right in itertools.pairwise(values)
    ]


def _value_at(points: Sequence[Point], which: int, at_s: float, hole_s: float) -> float | None:
    """A counter at a moment between two points: on the line between them, if they are close."""
    after = bisect_left(points, at_s, key=_when)
    if after >= len(points):
        return points[-1].counters[which]
    right = points[after]
    if after == 0 or right.at_s == at_s:
        return right.counters[which]
    left = points[after - 1]
    if right.at_s - left.at_s > hole_s:
        return None
    share = (at_s - left.at_s) / (right.at_s - left.at_s)
    return left.counters[which] + share * (right.counters[which] - left.counters[which])
