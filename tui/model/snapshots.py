"""What was: every frame leaves a picture, and the last minutes of them can be walked through.

A frozen screen shows one of them while collecting goes on. Bounded by count and by what the
pictures weigh; a picture weighs only what it does not share with the one before it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kvd.text import compact, compact_bytes
from kvd.wire.console import EventQuery, MapQuery, PageMap, Query, Vitals
from tui.model.event_log import Log, log_slot, only
from tui.model.tables import TableData, derive, regrid, slot_of

if TYPE_CHECKING:
    from kvd.wire.console import Cell

MAX_MOMENTS = 600
MAX_WEIGHT_BYTES = 32 * 2**20
FRESH_S = 2.0
"""A table is of the time of a picture if it is not older."""
CELL_BYTES = 64
"""What a cell of a row takes, about: a short string, or a float and its place."""
MOMENT_BYTES = 2048
"""And a picture in which nothing changed."""


class DaemonSnapshot(msgspec.Struct, frozen=True):
    """A picture of the daemon; nothing in it ever changes.

    ``heard_s`` is on our clock, everything else on the daemon's: ages are from ``now_s``.
    ``vitals`` is None until a daemon has answered. ``logs`` are by event query, without ``after``.
    """

    heard_s: float
    vitals: Vitals | None
    tables: Mapping[Query, TableData]
    maps: Mapping[MapQuery, PageMap]
    logs: Mapping[EventQuery, Log]

    @property
    def now_s(self) -> float:
        """The daemon's clock: what ages and deadlines are counted from."""
        return self.vitals.at_s if self.vitals is not None else 0.0

    def table(self, query: Query) -> TableData | None:
        """The answer to ``query``; else the best that can be made of another of that view.

        What is made here says so in its ``note``. None where nothing of that view is here.
        """
        slot = slot_of(query)
        assert isinstance(slot, Query)
        exact = self.tables.get(slot)
        if exact is not None:
            return exact
        alike = [
            table for table in self.tables.values() if table.view == slot.view and table.columns
        ]
        return derive(alike, slot, self.now_s) if alike else None

    def page_map(self, query: MapQuery) -> PageMap | None:
        """The answer to ``query``; else the same by the same lens in another grid; or None."""
        slot = slot_of(query)
        assert isinstance(slot, MapQuery)
        exact = self.maps.get(slot)
        if exact is not None:
            return exact
        alike = [
            page_map
            for was, page_map in self.maps.items()
            if _is_alike(was, slot, page_map) and page_map.cells
        ]
        return regrid(min(alike, key=lambda page_map: page_map.pages_each), slot) if alike else None

    def log(self, query: EventQuery) -> Log:
        """The events that ``query`` asked for, as far as they were kept.

        What was not asked for by itself is found among all events, if those were.
        """
        slot = log_slot(query)
        exact = self.logs.get(slot)
        if exact is not None:
            return exact
        everything = self.logs.get(EventQuery(0, 0))
        return only(everything, slot) if everything is not None else Log()


NOTHING = DaemonSnapshot(heard_s=0.0, vitals=None, tables={}, maps={}, logs={})
"""Before the first frame."""


class SnapshotHistory:
    """The ring of pictures, and which one is shown: the newest, or the one it was frozen at."""

    def __init__(
        self, max_moments: int = MAX_MOMENTS, max_weight_bytes: int = MAX_WEIGHT_BYTES
    ) -> None:
        self._max_moments = max_moments
        self._max_weight_bytes = max_weight_bytes
        self._ring: deque[DaemonSnapshot] = deque()
        self._weights: deque[int] = deque()
        self.weight_bytes = 0
        self._frozen: DaemonSnapshot | None = None
        self._at = 0

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def is_frozen(self) -> bool:
        """Whether ``shown`` stands still."""
        return self._frozen is not None

    @property
    def newest(self) -> DaemonSnapshot:
        """The last one that was added; ``NOTHING`` before any was."""
        return self._ring[-1] if self._ring else NOTHING

    @property
    def shown(self) -> DaemonSnapshot:
        """What is to be painted. A frozen picture stays, even when the ring has lost it."""
        return self._frozen if self._frozen is not None else self.newest

    @property
    def behind_s(self) -> float:
        """How far ``shown`` lies behind the newest, on our clock."""
        return max(0.0, self.newest.heard_s - self.shown.heard_s)

    def add(self, snapshot: DaemonSnapshot) -> None:
        """Keep ``snapshot`` as the newest; the oldest go when they are too many or too heavy."""
        weight = weight_bytes(self._ring[-1] if self._ring else NOTHING, snapshot)
        self._ring.append(snapshot)
        self._weights.append(weight)
        self.weight_bytes += weight
        while len(self._ring) > 1 and (
            len(self._ring) > self._max_moments or self.weight_bytes > self._max_weight_bytes
        ):
            self._ring.popleft()
            self.weight_bytes -= self._weights.popleft()
            self._at = max(0, self._at - 1)

    def ago(self, seconds: float) -> DaemonSnapshot:
        """The picture of then, of this daemon; the oldest there is where that is later."""
        newest = self.newest
        same = [
            moment
            for moment in self._ring
            if moment.vitals is not None
            and newest.vitals is not None
            and moment.vitals.incarnation == newest.vitals.incarnation
        ]
        until_s = newest.now_s - seconds
        return next((moment for moment in same if moment.now_s >= until_s), newest)

    def freeze(self) -> None:
        """Stand still at what is shown now."""
        if self._frozen is None and self._ring:
            self._at = len(self._ring) - 1
            self._frozen = self._ring[-1]

    def live(self) -> None:
        """Show the newest again."""
        self._frozen = None

    def step(self, count: int) -> None:
        """Freeze, and go ``count`` pictures on, back where negative; stops at both ends."""
        if not self._ring:
            return
        self.freeze()
        self._at = max(0, min(len(self._ring) - 1, self._at + count))
        self._frozen = self._ring[self._at]


def differences(before: DaemonSnapshot, after: DaemonSnapshot) -> list[str]:
    """What has changed between two pictures: what was counted, what there is, and the pools."""
    then, now = before.vitals, after.vitals
    if then is None or now is None:
        return []
    made = []
    for words, name in GROWN.items():
        more = getattr(now.totals, name) - getattr(then.totals, name)
        figure = compact_bytes(more) if name.endswith("_bytes") else compact(more)
        made += [f"+{figure} {words}"] if more else []
    for name, words in THERE.items():
        made += _change(words, getattr(then, name), getattr(now, name))
    was, pools = _pools(before), _pools(after)
    if was is not None and pools is not None:
        for key in pools.order:
            component = pools.cell(key, "component")
            for column, words in (("headroom", "can give"), ("held", "held"), ("cached", "cached")):
                made += _change(
                    f"{component} {words}", was.cell(key, column), pools.cell(key, column)
                )
    return made or ["nothing has changed"]


def _pools(snapshot: DaemonSnapshot) -> TableData | None:
    """The components, if they are of the time of the picture."""
    found = [
        data
        for data in snapshot.tables.values()
        if data.view == "pools" and snapshot.now_s - data.at_s < FRESH_S
    ]
    return found[-1] if found else None


GROWN = {
    "delivered": "handoffs_delivered",
    "failed": "handoffs_failed",
    "in": "received_bytes",
    "out": "sent_bytes",
    "evicted pages": "evicted_pages",
}
"""What is told of the counters."""
THERE = {
    "findings": "problems",
    "rooms": "in flight",
    "waiting": "waiting",
    "clients": "engines",
    "leases": "leases",
    "peers_up": "peers up",
}
"""And of what there is."""


def _change(words: str, then: Cell, now: Cell) -> list[str]:
    if not isinstance(then, int) or not isinstance(now, int) or now == then:
        return []
    return [f"{words} {now} ({now - then:+d})"]


def _is_alike(was: MapQuery, slot: MapQuery, page_map: PageMap) -> bool:
    """Whether a map shows the component of ``slot`` by its lens, in whatever grid."""
    same = slot.component in (was.component, page_map.component)
    return same and was.lens == slot.lens


def weight_bytes(before: DaemonSnapshot, snapshot: DaemonSnapshot) -> int:
    """What ``snapshot`` takes beyond what it shares with ``before``, about."""
    weight = MOMENT_BYTES
    for slot, data in snapshot.tables.items():
        last = before.tables.get(slot)
        if last is None or data.rows is not last.rows:
            known = last.rows if last is not None else {}
            fresh = [row for key, row in data.rows.items() if known.get(key) is not row]
            weight += CELL_BYTES * (len(data.rows) // 4 + sum(len(row.cells) for row in fresh))
    for map_slot, page_map in snapshot.maps.items():
        was = before.maps.get(map_slot)
        if page_map.cells is not None and (was is None or was.cells is not page_map.cells):
            weight += len(page_map.cells)
    return weight
