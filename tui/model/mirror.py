"""The reducer: what the daemon's frames add up to. One ``Look`` out, one ``Frame`` in.

Nothing is guessed. A change to a table that is not here, an answer that cannot be read, a frame
that nobody waits for: the table is dropped and asked for whole, and a notice says so. A daemon that
has restarted makes everything that was here the past: it is dropped too.

Who shows a page says what it wants (``Subscription``); the mirror fills in what it has.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, TypeVar, assert_never

import msgspec

from kvd.wire.admin import Frame, Look
from kvd.wire.console import MAX_QUERIES, EventQuery, MapQuery, PageMap, Query, Table, Vitals
from tui.model import tables
from tui.model.event_log import EventGap, Log, log_slot
from tui.model.rates import NodeRates
from tui.model.snapshots import DaemonSnapshot, SnapshotHistory
from tui.model.tables import BadAnswer, Slot, TableData, slot_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.wire.events import Event
    from tui.model.event_log import Item


K = TypeVar("K")
V = TypeVar("V")

MAX_TABLES = 24
"""Windows that are kept, the last used ones: to go back to a page is to see it at once."""
MAX_MAPS = 4
MAX_LOGS = 4
MAX_NOTICES = 200
EVERY_S = 0.1


LATE_FRAMES = 2.0
"""So many intervals without a frame are lag, not chance."""
LATE_S = 0.5
"""And never less than this: a terminal that paints twenty times a second is not that precise."""


class LinkConnecting(msgspec.Struct, frozen=True):
    """Nobody has answered yet; ``why`` is what is known about it."""

    why: str


class LinkLive(msgspec.Struct, frozen=True):
    """Frames come as they are wanted; the last one came ``lag_s`` ago."""

    lag_s: float


class LinkLagging(msgspec.Struct, frozen=True):
    """The next frame is due and has not come, ``lag_s`` after the last one."""

    lag_s: float


class LinkDown(msgspec.Struct, frozen=True):
    """There was an answer once, and there is none any more; ``since_s`` is on our clock."""

    why: str
    since_s: float


LinkState = LinkConnecting | LinkLive | LinkLagging | LinkDown


class Subscription(msgspec.Struct, frozen=True):
    """What is to be asked for: at most ``MAX_QUERIES`` queries, whose ``have`` does not matter."""

    queries: tuple[Slot, ...] = ()
    events: EventQuery | None = None


class Notice(msgspec.Struct, frozen=True):
    """A line for the operator about what is shown, not about the daemon's pages.

    ``kind``: ``restart``, or ``misfit`` (an answer). Events that are missing are in their log.
    """

    heard_s: float
    kind: str
    text: str


class Mirror:
    """What a console has of one daemon."""

    def __init__(self, history: SnapshotHistory | None = None) -> None:
        self.history = history if history is not None else SnapshotHistory()
        self.rates = NodeRates()
        self.notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self.frames = 0
        """Frames taken, of any daemon: a screen that has shown this one need not paint again."""
        self._trouble: LinkConnecting | LinkDown | None = LinkConnecting("")
        """Why nothing comes; None while frames do."""
        self._heard_s = 0.0
        self.vitals: Vitals | None = None
        """The head of the last frame."""
        self._tables: dict[Query, TableData] = {}
        self._maps: dict[MapQuery, PageMap] = {}
        self._logs: dict[EventQuery, Log] = {}
        self._expected: Look | None = None
        self._due = 0
        """Frames of that look that are still to come."""
        self._is_whole = True
        """Nothing of the frame that is being folded in had to be dropped."""

    # ---- how the link stands -----------------------------------------------------------------

    def link_state(self, now_s: float, interval_s: float) -> LinkState:
        """How the link stands at ``now_s`` on our clock, where a frame is due every interval."""
        if self._trouble is not None:
            return self._trouble
        lag_s = max(0.0, now_s - self._heard_s)
        is_late = lag_s > max(LATE_S, LATE_FRAMES * interval_s)
        return LinkLagging(lag_s) if is_late else LinkLive(lag_s)

    def failed(self, why: str, now_s: float) -> None:
        """The link has no answer: it is connecting still, or down since it first said so."""
        match self._trouble:
            case LinkConnecting():
                self._trouble = LinkConnecting(why)
            case LinkDown(since_s=since_s):
                self._trouble = LinkDown(why, since_s)
            case None:
                self._trouble = LinkDown(why, now_s)

    # ---- what to ask -------------------------------------------------------------------------

    def queries(self, wanted: Iterable[Slot]) -> tuple[Slot, ...]:
        """The queries with the revisions that are here, each once, ``MAX_QUERIES`` at most."""
        slots = list(dict.fromkeys(slot_of(query) for query in wanted))[:MAX_QUERIES]
        return tuple(msgspec.structs.replace(slot, have=self._have(slot)) for slot in slots)

    def look(
        self, call: int, wanted: Subscription, frames: int = 1, every_s: float = EVERY_S
    ) -> Look:
        """The next thing to send; ``take`` then waits for so many frames of that call."""
        events = None
        if wanted.events is not None:
            log = self._logs.get(log_slot(wanted.events), Log())
            events = msgspec.structs.replace(wanted.events, after=log.last_seq)
        look = Look(
            call=call,
            queries=self.queries(wanted.queries),
            events=events,
            frames=frames,
            every_s=every_s,
        )
        self._expected, self._due = look, look.frames
        return look

    def _have(self, slot: Slot) -> int:
        match slot:
            case Query():
                return self._tables[slot].revision if slot in self._tables else 0
            case MapQuery():
                return self._maps[slot].revision if slot in self._maps else 0
            case _:
                assert_never(slot)

    # ---- what came ---------------------------------------------------------------------------

    def take(self, frame: Frame, heard_s: float) -> bool:
        """Fold ``frame`` in; it came at ``heard_s`` on our clock. Never raises.

        Returns:
            Whether further frames of the same look fit. Not where something had to be dropped: they
            would tell of changes to what is not here.
        """
        look = self._expected
        if look is None or frame.call != look.call:
            waited = f"the one of {look.call} is due" if look is not None else "none is due"
            self.note(heard_s, "misfit", f"a frame of call {frame.call} came, {waited}")
            return False
        self._due -= 1
        if not self._due:
            self._expected = None
        self._is_whole = True
        is_other = self._drop_if_restarted(frame.vitals, heard_s)
        self.vitals, self._heard_s, self._trouble = frame.vitals, heard_s, None
        self.frames += 1
        if len(frame.answers) == len(look.queries):
            for query, raw in zip(look.queries, frame.answers, strict=True):
                self._fold(query, tables.read(raw), heard_s, is_other=is_other)
        else:
            counts = f"{len(look.queries)} queries, {len(frame.answers)} answers"
            self._drop(look.queries, heard_s, counts)
        if look.events is not None and not is_other:
            self._hear(look.events, frame, heard_s)
        self.rates.take(frame.vitals)
        self.history.add(self.snapshot())
        return self._is_whole and not is_other

    def note(self, heard_s: float, kind: str, text: str) -> None:
        """Tell the operator something about what is shown."""
        self.notices.append(Notice(heard_s, kind, text))

    def snapshot(self) -> DaemonSnapshot:
        """The picture as of the last frame."""
        return DaemonSnapshot(
            heard_s=self._heard_s,
            vitals=self.vitals,
            tables=dict(self._tables),
            maps=dict(self._maps),
            logs=dict(self._logs),
        )

    def _drop_if_restarted(self, vitals: Vitals, heard_s: float) -> bool:
        """Drop everything if this is another incarnation than before; whether it is."""
        before = self.vitals
        if before is None or before.incarnation == vitals.incarnation:
            return False
        self._tables.clear()
        self._maps.clear()
        self._logs.clear()
        self.rates.forget()
        who = vitals.node if vitals.node == before.node else f"{before.node}, now {vitals.node},"
        self.note(
            heard_s,
            "restart",
            f"{who} has restarted: incarnation {before.incarnation[:8]} ended, "
            f"{vitals.incarnation[:8]} is here",
        )
        return True

    def _fold(
        self, query: Slot, answer: Table | PageMap | BadAnswer, heard_s: float, *, is_other: bool
    ) -> None:
        """Take one answer. Of another incarnation only whole ones: its revisions are not ours."""
        match query, answer:
            case Query(), Table():
                if is_other and answer.since:
                    return
                slot = msgspec.structs.replace(query, have=0)
                data = tables.fold(self._tables.get(slot), slot, answer)
                if isinstance(data, TableData):
                    _put(self._tables, slot, data, MAX_TABLES)
                else:
                    self._drop((query,), heard_s, data.why)
            case MapQuery(), PageMap():
                if is_other and answer.cells is None:
                    return
                map_slot = msgspec.structs.replace(query, have=0)
                page_map = tables.fold_map(self._maps.get(map_slot), map_slot, answer)
                if isinstance(page_map, PageMap):
                    _put(self._maps, map_slot, page_map, MAX_MAPS)
                else:
                    self._drop((query,), heard_s, page_map.why)
            case _, BadAnswer():
                self._drop((query,), heard_s, answer.why)
            case _:
                self._drop((query,), heard_s, "a table came for a map, or a map for a table")

    def _drop(self, queries: Iterable[Slot], heard_s: float, why: str) -> None:
        self._is_whole = False
        for query in queries:
            match slot_of(query):
                case Query() as slot:
                    self._tables.pop(slot, None)
                case MapQuery() as map_slot:
                    self._maps.pop(map_slot, None)
        self.note(heard_s, "misfit", f"dropped, and asked for again: {why}")

    def _hear(self, asked: EventQuery, frame: Frame, heard_s: float) -> None:
        """Put events into their log. What was before the first ask is no loss, but is told."""
        slot = log_slot(asked)
        log = self._logs.get(slot, Log())
        fresh: list[Event] = [event for event in frame.events if event.seq > log.last_seq]
        items: list[Item] = list(fresh)
        if frame.lost or (log.last_seq and frame.skipped):
            at = next((at for at, e in enumerate(fresh) if e.at_s >= frame.since_s), len(fresh))
            before = fresh[at].seq if at < len(fresh) else 0
            gap = EventGap(
                before_seq=before, lost=frame.lost, skipped=frame.skipped, since_s=frame.since_s
            )
            items.insert(at, gap)
        last_seq = max(frame.upto, fresh[-1].seq if fresh else 0)
        _put(self._logs, slot, log.add(items, last_seq), MAX_LOGS)


def _put(kept: dict[K, V], key: K, value: V, most: int) -> None:
    """Set it as the last used, and drop the first used where they are too many."""
    kept.pop(key, None)
    kept[key] = value
    while len(kept) > most:
        del kept[next(iter(kept))]
