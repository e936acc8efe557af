"""Events as a console keeps them: the last two thousand, with the gaps between them said.

A log never changes: adding makes a new one that shares what it can, so that every moment that is
kept has the events as they were then for next to nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.wire.events import Event
from tui.model.happenings import refs_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.wire.console import EventQuery

MAX_ITEMS = 2000
CHUNK_ITEMS = 64


class Gap(msgspec.Struct, frozen=True):
    """Events that are not in the log: ``lost`` had left the daemon's ring, ``skipped`` did not fit.

    ``before_seq`` is the event that comes after the gap; 0 where none has come yet.
    """

    before_seq: int
    lost: int
    skipped: int


Item = Event | Gap


def log_slot(query: EventQuery) -> EventQuery:
    """What was asked for, whoever has how much of it: the name of a log."""
    return msgspec.structs.replace(query, after=0, limit=0)


def only(log: Log, slot: EventQuery) -> Log:
    """The events that ``slot`` asks for; gaps stay, as what is in them is not known."""
    kinds, about = set(slot.kinds), slot.about
    items = [
        one
        for one in log.items()
        if isinstance(one, Gap)
        or (
            (not kinds or one.__struct_config__.tag in kinds)
            and (not about or about in refs_of(one))
        )
    ]
    return Log().add(items, log.last_seq)


class Log(msgspec.Struct, frozen=True):
    """Oldest first. ``last_seq`` is how far the daemon's events were looked through."""

    chunks: tuple[tuple[Item, ...], ...] = ()
    last_seq: int = 0

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    def items(self) -> list[Item]:
        """Everything that is kept."""
        return [one for chunk in self.chunks for one in chunk]

    def tail(self, count: int) -> list[Item]:
        """The last ``count``."""
        found: list[Item] = []
        for chunk in reversed(self.chunks):
            if len(found) >= count:
                break
            found[:0] = chunk
        return found[-count:] if count > 0 else []

    def add(self, items: Iterable[Item], last_seq: int) -> Log:
        """The log with ``items`` at its end, and without the oldest beyond ``MAX_ITEMS``."""
        chunks = list(self.chunks)
        for one in items:
            if chunks and len(chunks[-1]) < CHUNK_ITEMS:
                chunks[-1] = (*chunks[-1], one)
            else:
                chunks.append((one,))
        count = sum(len(chunk) for chunk in chunks)
        while chunks and count - len(chunks[0]) >= MAX_ITEMS:
            count -= len(chunks.pop(0))
        if count > MAX_ITEMS:
            chunks[0] = chunks[0][count - MAX_ITEMS :]
        return Log(tuple(chunks), max(last_seq, self.last_seq))
