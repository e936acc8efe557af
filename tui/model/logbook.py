"""What a log shows, line by line: events, gaps, restarts, and what another node tells. Pure.

Oldest first. A log comes in chunks that stay the same objects, so what was made of them is kept:
a frame with ten new events costs as much as its last chunk, however long the log is.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from kvd.text import clean
from kvd.wire.events import Event
from tui.draw.spans import Style
from tui.model import happenings
from tui.model.local import holds
from tui.model.log import Gap

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.wire.admin import OtherEnd
    from kvd.wire.console import Filter, Vitals
    from tui.model.log import Item, Log
    from tui.model.mirror import Notice

    _Made = tuple[tuple[Item, ...], list["Entry"]]


class Told(msgspec.Struct, frozen=True):
    """What the daemon at the other end of a handoff says that happened there."""

    peer: str
    what: str


class Restart(msgspec.Struct, frozen=True):
    """The daemon became another one; ``what`` says which."""

    what: str


class Entry(msgspec.Struct, frozen=True):
    """One line. ``at_s`` on the daemon's clock; ``key`` is the same from frame to frame."""

    at_s: float
    key: str
    item: Event | Gap | Told | Restart

    @property
    def ref(self) -> str:
        """What it is opened by; empty where there is nothing to open."""
        match self.item:
            case Told(peer=peer):
                return f"peer:{peer}"
            case Gap() | Restart():
                return ""
            case _:
                return self.key


class Line(msgspec.Struct, frozen=True):
    """An entry in words, harmless to a terminal."""

    letter: str
    kind: str
    words: str
    style: Style


def line_of(entry: Entry) -> Line:
    """How an entry reads."""
    item = entry.item
    match item:
        case Gap():
            return Line("?", "gap", gap_words(item), "warn")
        case Told(peer=peer, what=what):
            return Line("~", clean(peer), clean(what), "hue-1")
        case Restart(what=what):
            return Line("!", "restart", clean(what), "warn")
        case _:
            pass
    level = happenings.level_of(item)
    return Line(
        happenings.LETTERS[level],
        happenings.tag_of(item),
        happenings.words(item),
        happenings.STYLES[level],
    )


def gap_words(gap: Gap) -> str:
    """Why events are missing, and how many."""
    told = []
    if gap.lost:
        told.append(f"{gap.lost} events had left the daemon's ring before they were asked for")
    if gap.skipped:
        told.append(f"{gap.skipped} events were more than a frame takes")
    return "; ".join(told)


def marks_of(ends: Iterable[OtherEnd], at_s: float) -> list[Entry]:
    """What other ends told at ``at_s`` as lines; an end that tells nothing says why."""
    made = []
    for end in ends:
        if end.why_none:
            what = f"tells nothing of its end of {end.ours}: {end.why_none}"
            made.append(Entry(at_s, f"told:{end.ours}", Told(end.peer, what)))
        for number, mark in enumerate(end.marks):
            what = f"{end.side}: {mark.what}"
            key = f"told:{end.ours}:{number}"
            made.append(Entry(at_s - mark.ago_s, key, Told(end.peer, what)))
    return sorted(made, key=_when)


def restarts_of(notices: Iterable[Notice], heard_s: float, vitals: Vitals | None) -> list[Entry]:
    """Restarts that were known when a picture with ``vitals`` was heard, on our clock.

    The last one was when the present daemon began; of others it is known when they were noticed.
    """
    if vitals is None:
        return []
    made = [
        Entry(vitals.at_s - (heard_s - one.heard_s), f"restart:{one.heard_s}", Restart(one.text))
        for one in notices
        if one.kind == "restart" and one.heard_s <= heard_s
    ]
    return [*made[:-1], msgspec.structs.replace(made[-1], at_s=vitals.started_s)] if made else []


class Logbook:
    """Makes entries of logs, of those events that pass ``filters``; gaps always do."""

    def __init__(self) -> None:
        self.filters: tuple[Filter, ...] = ()
        self._made: dict[int, _Made] = {}
        self._last: _Made = ((), [])
        self._for: tuple[Filter, ...] = ()

    def entries(self, log: Log, now_s: float, more: Sequence[Entry] = ()) -> list[Entry]:
        """The lines of a log; ``more`` are put where they belong in time."""
        if self.filters != self._for or any(one.column == "at" for one in self.filters):
            self._for, self._made, self._last = self.filters, {}, ((), [])
        known, last = self._made, self._last
        self._made = {}
        made: list[Entry] = []
        for chunk in log.chunks:
            have = known.get(id(chunk))
            if have is None or have[0] is not chunk:
                have = (chunk, self._grown(chunk, last, now_s))
            self._made[id(chunk)] = self._last = have
            made += have[1]
        return list(heapq.merge(more, made, key=_when)) if more else made

    def _grown(self, chunk: tuple[Item, ...], last: _Made, now_s: float) -> list[Entry]:
        """Entries of a chunk; of one that is the last one with more at its end, only of that."""
        before, made = last
        if before and chunk[: len(before)] == before:
            return made + self._of(chunk[len(before) :], now_s)
        return self._of(chunk, now_s)

    def _of(self, chunk: Sequence[Item], now_s: float) -> list[Entry]:
        made: list[Entry] = []
        at_s = next((one.at_s for one in chunk if not isinstance(one, Gap)), now_s)
        for place, one in enumerate(chunk):
            match one:
                case Gap():
                    after = chunk[place + 1 : place + 2]
                    at_s = next((e.at_s for e in after if not isinstance(e, Gap)), at_s)
                    made.append(Entry(at_s, f"gap:{one.before_seq}:{at_s}", one))
                case _:
                    at_s = one.at_s
                    if self._passes(one, now_s):
                        made.append(Entry(at_s, happenings.key_of(one), one))
        return made

    def _passes(self, event: Event, now_s: float) -> bool:
        if not self.filters:
            return True
        row = happenings.row_of(event)
        return all(holds(one, row, happenings.COLUMNS, now_s) for one in self.filters)


def _when(entry: Entry) -> float:
    return entry.at_s
