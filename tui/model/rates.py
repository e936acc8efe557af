"""Counters into figures per second, by the daemon's own clock.

A frame may come late or twice; the daemon's clock in it says over which time a counter grew. One
sample is kept per ``STEP_S``, so ten minutes cost the same at one frame a second as at twenty.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvd.wire.console import Sources
from kvd.wire.snapshot import Totals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import Vitals
    from tui.model.tables import TableData

STEP_S = 0.25
MAX_SAMPLES = 2400
"""Ten minutes."""

COUNTERS = (
    *Totals.__struct_fields__,
    *(f"from_{name}" for name in Sources.__struct_fields__),
    "in_bytes",
    "out_bytes",
)
"""What ``per_second`` knows. ``from_cached``...: tokens by source; ``in_bytes`` and ``out_bytes``:
of handoffs, those under way included."""
GAUGES = ("lag_s", "leases", "rooms", "waiting", "clients", "p50_s", "p99_s", "console_share")
"""What ``levels`` knows."""
_AT = {name: at for at, name in enumerate((*COUNTERS, *GAUGES))}


class Sample(msgspec.Struct, frozen=True):
    """All counters and gauges at one moment of the daemon's clock."""

    at_s: float
    figures: tuple[float, ...]


class NodeRates:
    """The last ten minutes of a daemon's head, for charts."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def __len__(self) -> int:
        return len(self._samples)

    def take(self, vitals: Vitals) -> None:
        """Remember the figures; of several within one step the last."""
        if not math.isfinite(vitals.at_s):
            return
        last = self._samples[-1] if self._samples else None
        if last is not None and vitals.at_s <= last.at_s:
            return
        before = self._samples[-2] if len(self._samples) > 1 else None
        if before is not None and vitals.at_s - before.at_s < STEP_S:
            self._samples.pop()
        figures = tuple([one if math.isfinite(one) else 0.0 for one in _figures(vitals)])
        self._samples.append(Sample(vitals.at_s, figures))

    def forget(self) -> None:
        """The daemon is another one: its counters began again."""
        self._samples.clear()

    def now(self, name: str, *, over_s: float = 1.0, end_s: float | None = None) -> float:
        """How fast a counter grew in the last ``over_s``, per second; 0 where that is not known."""
        grown, known_s = self.grown((name,), over_s=over_s, end_s=end_s)
        return grown[0] / known_s if known_s else 0.0

    def grown(
        self, names: Sequence[str], *, over_s: float, end_s: float | None = None
    ) -> tuple[list[float], float]:
        """By how much counters grew in the last ``over_s``, and over how many s that is known."""
        samples = self._until(end_s)
        if len(samples) < 2:
            return [0.0] * len(names), 0.0
        end = samples[-1].at_s
        start = max(samples[0].at_s, end - over_s)
        grown = [self._at(samples, one, end) - self._at(samples, one, start) for one in names]
        return [max(0.0, one) for one in grown], max(0.0, end - start)

    def per_second(
        self, name: str, count: int, *, step_s: float = 1.0, end_s: float | None = None
    ) -> list[float]:
        """The last ``count`` steps of a counter, each as growth per second, the latest last.

        Fewer where less is known. Steps begin at multiples of ``step_s``: a chart of them moves by
        whole columns. ``end_s``: only what was before it, for a screen that stands still.
        """
        samples = self._until(end_s)
        edges = _edges(samples, count, step_s)
        values = [self._at(samples, name, edge) for edge in edges]
        return [max(0.0, right - left) / step_s for left, right in itertools.pairwise(values)]

    def levels(
        self, name: str, count: int, *, step_s: float = 1.0, end_s: float | None = None
    ) -> list[float]:
        """The last ``count`` steps of a gauge: what it was at the end of each, the latest last."""
        samples = self._until(end_s)
        return [self._at(samples, name, edge) for edge in _edges(samples, count, step_s)[1:]]

    def _until(self, end_s: float | None) -> list[Sample]:
        if end_s is None:
            return list(self._samples)
        return [one for one in self._samples if one.at_s <= end_s]

    @staticmethod
    def _at(samples: list[Sample], name: str, at_s: float) -> float:
        """A figure at a moment between two samples: on the line between them."""
        which = _AT[name]
        after = bisect_left(samples, at_s, key=lambda one: one.at_s)
        if after >= len(samples):
            return samples[-1].figures[which]
        right = samples[after]
        if after == 0 or right.at_s == at_s:
            return right.figures[which]
        left = samples[after - 1]
        share = (at_s - left.at_s) / (right.at_s - left.at_s)
        return left.figures[which] + share * (right.figures[which] - left.figures[which])


def _edges(samples: Sequence[Sample | Point], count: int, step_s: float) -> list[float]:
    """Where the steps begin and end, one more than there are steps; empty for none."""
    if len(samples) < 2:
        return []
    last = int(samples[-1].at_s // step_s)
    first = max(last - count, -int(-samples[0].at_s // step_s))
    return [number * step_s for number in range(first, last + 1)] if first < last else []


def _figures(vitals: Vitals) -> tuple[float, ...]:
    """In the order of ``COUNTERS`` and ``GAUGES``."""
    totals = msgspec.structs.astuple(vitals.totals)
    in_bytes = vitals.totals.received_bytes + vitals.moving_bytes_in
    out_bytes = vitals.totals.sent_bytes + vitals.moving_bytes_out
    return (
        *totals,
        *msgspec.structs.astuple(vitals.sources),
        in_bytes,
        out_bytes,
        vitals.lag_s,
        vitals.leases,
        vitals.rooms,
        vitals.waiting,
        vitals.clients,
        vitals.latency.p50_s,
        vitals.latency.p99_s,
        vitals.console_share,
    )


class RowRates:
    """How fast one column grows in each row of a table, per second: bytes of a handoff.

    What was is kept for ``keep_s``. ``end_s``: as of then, for a screen that stands still.
    """

    def __init__(self, column: str, over_s: float = 1.0, keep_s: float = 90.0) -> None:
        self._column = column
        self._over_s = over_s
        self._keep_s = keep_s
        self._seen: dict[str, deque[Point]] = {}

    def take(self, data: TableData) -> None:
        """Remember the column of every row; rows that have left the window are forgotten."""
        at = data.index(self._column)
        seen: dict[str, deque[Point]] = {}
        for key, row in data.rows.items() if at >= 0 else ():
            cell = row.cells[at]
            if isinstance(cell, int | float):
                seen[key] = self._grown(key, data.at_s, cell)
        self._seen = seen

    def rate(self, key: str, end_s: float | None = None) -> float | None:
        """Growth per second over the last ``over_s``; None until two moments are known."""
        points = self._until(key, end_s)
        if len(points) < 2:
            return None
        last = points[-1]
        start = max(0, bisect_right(points, last.at_s - self._over_s, key=_when) - 1)
        first = points[min(start, len(points) - 2)]
        return (last.value - first.value) / (last.at_s - first.at_s)

    def series(
        self, key: str, count: int, *, step_s: float = 1.0, end_s: float | None = None
    ) -> list[float]:
        """The last ``count`` steps, each as growth per second, the latest last.

        Fewer where less is known. Steps begin at multiples of ``step_s``, as of ``NodeRates``.
        """
        points = self._until(key, end_s)
        edges = _edges(points, count, step_s)
        values = [_value_at(points, edge) for edge in edges]
        return [(right - left) / step_s for left, right in itertools.pairwise(values)]

    def _until(self, key: str, end_s: float | None) -> list[Point]:
        points = self._seen.get(key, ())
        return [one for one in points if end_s is None or one.at_s <= end_s]

    def _grown(self, key: str, at_s: float, value: float) -> deque[Point]:
        points = self._seen.get(key)
        if points is None or value < points[-1].value:
            points = deque()
        if points and at_s <= points[-1].at_s:
            return points
        if len(points) > 1 and points[-1].at_s - points[-2].at_s < STEP_S:
            points.pop()
        points.append(Point(at_s, value))
        while len(points) > 2 and points[1].at_s <= at_s - self._keep_s:
            points.popleft()
        return points


class Point(NamedTuple):
    """What a cell was at one moment of the daemon's clock."""

    at_s: float
    value: float


def _when(point: Point) -> float:
    return point.at_s


def _value_at(points: list[Point], at_s: float) -> float:
    """Between two points: on the line between them."""
    after = bisect_left(points, at_s, key=_when)
    if after >= len(points):
        return points[-1].value
    right = points[after]
    if after == 0 or right.at_s == at_s:
        return right.value
    left = points[after - 1]
    share = (at_s - left.at_s) / (right.at_s - left.at_s)
    return left.value + share * (right.value - left.value)
