"""Events as a console keeps them: the last two thousand, with the gaps between them said.

A log never changes, so that a screen that stands still has the events as they were then.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from kvd.filters import row_passes
from kvd.text import clean
from kvd.wire.events import Event
from tui.draw.spans import Style, Styled, left
from tui.model import event_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvd.wire.admin import OtherEnd
    from kvd.wire.console import EventQuery, Filter, Vitals
    from tui.model.mirror import Notice


MAX_ITEMS = 2000
KIND_COLUMNS = 17


class EventGap(msgspec.Struct, frozen=True):
    """Events that are not in the log: ``lost`` had left the daemon's ring, ``skipped`` did not fit.

    ``before_seq`` is the event that comes after the gap; 0 where none has come yet. Where some were
    lost, all since ``since_s`` were there: before it only what failed, or changed the node.
    """

    before_seq: int
    lost: int
    skipped: int
    since_s: float = 0.0


Item = Event | EventGap


def log_slot(query: EventQuery) -> EventQuery:
    """What was asked for, whoever has how much of it: the name of a log."""
    return msgspec.structs.replace(query, after=0, limit=0)


class Log(msgspec.Struct, frozen=True):
    """Oldest first. ``last_seq`` is how far the daemon's events were looked through."""

    items: tuple[Item, ...] = ()
    last_seq: int = 0

    def add(self, items: Iterable[Item], last_seq: int) -> Log:
        """The log with ``items`` at its end, and without the oldest beyond ``MAX_ITEMS``."""
        return Log((*self.items, *items)[-MAX_ITEMS:], max(last_seq, self.last_seq))


class ToldByPeer(msgspec.Struct, frozen=True):
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
    item: Event | EventGap | ToldByPeer | Restart

    @property
    def ref(self) -> str:
        """What it is opened by; empty where there is nothing to open."""
        match self.item:
            case ToldByPeer(peer=peer):
                return f"peer:{peer}"
            case EventGap() | Restart():
                return ""
            case _:
                return self.key


class EventLine(msgspec.Struct, frozen=True):
    """An entry in words, harmless to a terminal."""

    letter: str
    kind: str
    words: str
    style: Style

    @property
    def spans(self) -> tuple[Styled, Styled]:
        """Its kind, as wide as that of any other, and what happened."""
        head = Styled(f"{self.letter} {left(self.kind, KIND_COLUMNS)} ", self.style)
        return head, Styled(self.words, self.style if self.style in {"warn", "bad"} else "plain")


def line_of(entry: Entry) -> EventLine:
    """How an entry reads."""
    item = entry.item
    match item:
        case EventGap():
            return EventLine(letter="?", kind="gap", words=gap_words(item), style="warn")
        case ToldByPeer(peer=peer, what=what):
            return EventLine(letter="~", kind=clean(peer), words=clean(what), style="hue-1")
        case Restart(what=what):
            return EventLine(letter="!", kind="restart", words=clean(what), style="warn")
        case _:
            level = event_words.level_of(item)
            return EventLine(
                letter=event_words.LETTERS[level],
                kind=event_words.tag_of(item),
                words=event_words.words(item),
                style=event_words.STYLES[level],
            )


def gap_words(gap: EventGap) -> str:
    """Why events are missing, and how many."""
    told = []
    if gap.lost:
        told.append(
            f"older events are no longer kept, {gap.lost} of them: only failures and changes are"
        )
    if gap.skipped:
        told.append(f"{gap.skipped} events were more than a frame takes")
    return "; ".join(told)


def marks_of(ends: Iterable[OtherEnd], at_s: float) -> list[Entry]:
    """What other ends told at ``at_s`` as lines; an end that tells nothing says why."""
    made = []
    for end in ends:
        if end.why_none:
            what = f"tells nothing of its end of {end.ours}: {end.why_none}"
            made.append(Entry(at_s, f"told:{end.ours}", ToldByPeer(end.peer, what)))
        for number, mark in enumerate(end.marks):
            what = f"{end.side}: {mark.what}"
            key = f"told:{end.ours}:{number}"
            made.append(Entry(at_s - mark.ago_s, key, ToldByPeer(end.peer, what)))
    return sorted(made, key=_when)


def restarts_of(notices: Iterable[Notice], heard_s: float, vitals: Vitals | None) -> list[Entry]:
    """Restarts that were known when a picture with ``vitals`` was heard, on our clock.

    The last one was when the present daemon began; of others it is known when they were noticed.
    """
    if vitals is None:
        return []
    made = [
        Entry(
            vitals.at_s - (heard_s - notice.heard_s),
            f"restart:{notice.heard_s}",
            Restart(notice.text),
        )
        for notice in notices
        if notice.kind == "restart" and notice.heard_s <= heard_s
    ]
    return [*made[:-1], msgspec.structs.replace(made[-1], at_s=vitals.started_s)] if made else []


class LogEntries:
    """Makes entries of logs, of those events that pass ``filters``, each once; gaps always do."""

    def __init__(self) -> None:
        self.filters: tuple[Filter, ...] = ()
        self._for: tuple[Filter, ...] = ()
        self._items: tuple[Item, ...] = ()
        self._made: list[Entry | None] = []
        """An entry for each item, or None where it does not pass."""

    def entries(self, log: Log, now_s: float, more: Sequence[Entry] = ()) -> list[Entry]:
        """The lines of a log; ``more`` are put where they belong in time."""
        if self.filters != self._for or any(condition.column == "at" for condition in self.filters):
            self._for, self._items = self.filters, ()
        fresh = len(log.items) - self._known(log.items)
        tail: list[Entry | None] = []
        told = (item for item in reversed(log.items) if not isinstance(item, EventGap))
        at_s = next((event.at_s for event in told), now_s)
        for item in reversed(log.items[len(log.items) - fresh :]):
            if isinstance(item, EventGap):  # as late as what came after it
                key = f"gap:{item.before_seq}:{at_s}"
                tail.append(Entry(min(at_s, item.since_s or at_s), key, item))
                continue
            at_s = item.at_s
            is_shown = self._passes(item, now_s)
            tail.append(Entry(at_s, event_words.key_of(item), item) if is_shown else None)
        known = self._made[len(self._made) - (len(log.items) - fresh) :]
        self._items, self._made = log.items, [*known, *reversed(tail)]
        made = [entry for entry in self._made if entry is not None]
        return list(heapq.merge(more, made, key=_when)) if more else made

    def _known(self, items: Sequence[Item]) -> int:
        """How many of these, from the first one on, have their entries; a gap at the end has not.

        A log goes on at its end and drops its oldest: what is before the last known item is known.
        """
        last = self._items[-1] if self._items else None
        if isinstance(last, EventGap):
            last = None
        return next((at for at in range(len(items), 0, -1) if items[at - 1] is last), 0)

    def _passes(self, event: Event, now_s: float) -> bool:
        if not self.filters:
            return True
        row = event_words.row_of(event)
        return all(
            row_passes(condition, row, event_words.COLUMNS, now_s) for condition in self.filters
        )


def _when(entry: Entry) -> float:
    return entry.at_s
