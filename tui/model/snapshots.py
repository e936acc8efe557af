"""What was: the newest picture, the one that a frozen screen shows, and what to compare with.

Every ``MARK_S`` the figures of a picture are kept, for a quarter of an hour; the rows are not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kvd.text import compact, compact_bytes
from kvd.wire.console import EventQuery, MapQuery, PageMap, Query, Vitals
from tui.model.event_log import Log, log_slot
from tui.model.tables import TableData

if TYPE_CHECKING:
    from kvd.wire.console import Cell

MARK_S = 10.0
MAX_MARKS = 91
"""Of a quarter of an hour."""
FRESH_S = 2.0
"""A table is of the time of a picture if it is not older."""


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
        """The answer to ``query``; None where none is here."""
        return self.tables.get(query)

    def page_map(self, query: MapQuery) -> PageMap | None:
        """The answer to ``query``; or None."""
        return self.maps.get(query)

    def log(self, query: EventQuery) -> Log:
        """The events that ``query`` asked for, as far as they were kept."""
        return self.logs.get(log_slot(query), Log())


NOTHING = DaemonSnapshot(heard_s=0.0, vitals=None, tables={}, maps={}, logs={})
"""Before the first frame."""


class SnapshotHistory:
    """Which picture is shown: the newest, or the one it was frozen at; and marks of what was."""

    def __init__(self) -> None:
        self.newest = NOTHING
        """The last one that was added."""
        self._frozen: DaemonSnapshot | None = None
        self._marks: deque[DaemonSnapshot] = deque(maxlen=MAX_MARKS)

    @property
    def is_frozen(self) -> bool:
        """Whether ``shown`` stands still."""
        return self._frozen is not None

    @property
    def shown(self) -> DaemonSnapshot:
        """What is to be painted."""
        return self._frozen if self._frozen is not None else self.newest

    @property
    def behind_s(self) -> float:
        """How far ``shown`` lies behind the newest, on our clock."""
        return max(0.0, self.newest.heard_s - self.shown.heard_s)

    def add(self, snapshot: DaemonSnapshot) -> None:
        """Show ``snapshot`` from now on, unless the screen stands still."""
        self.newest, now, marks = snapshot, snapshot.vitals, self._marks
        was = marks[-1].vitals if marks else None
        if now is None or (was is not None and was.incarnation != now.incarnation):
            marks.clear()
        elif was is None or now.at_s - was.at_s >= MARK_S:
            pools = {slot: data for slot, data in snapshot.tables.items() if data.view == "pools"}
            marks.append(msgspec.structs.replace(snapshot, tables=pools, maps={}, logs={}))

    def ago(self, seconds: float) -> DaemonSnapshot:
        """The figures of then, of this daemon; the oldest there are where that is later."""
        until_s = self.newest.now_s - seconds
        return next((mark for mark in self._marks if mark.now_s >= until_s), self.newest)

    def freeze(self) -> None:
        """Stand still at what is shown now."""
        if self._frozen is None and self.newest is not NOTHING:
            self._frozen = self.newest

    def live(self) -> None:
        """Show the newest again."""
        self._frozen = None


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
