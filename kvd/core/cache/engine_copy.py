"""One copy that an engine makes of a lease's pages, while it is under way, and all of one lease.

Plain records; ``leases.engine_copies`` says what they are for, and alone writes them.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from kvd.core.inputs import WorkerCopies
    from kvd.wire.attach import CopyBegins, CopyPart


class Way(enum.Enum):
    """Which side is written."""

    SAVE = "save"
    """Pages of the lease, from blocks."""
    LOAD = "load"
    """Blocks of the engine, from pages."""


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineCopy:
    """One that is under way."""

    __slots__ = (
        *("call", "device", "from_token", "lease", "parts", "rank", "ranks", "since_s", "session"),
        *("upto_tokens", "way", "worker"),
    )

    def __init__(
        self, got: WorkerCopies, message: CopyBegins, from_token: int, at_s: float
    ) -> None:
        self.worker, self.call = got.worker, message.call
        self.session, self.lease = got.session, message.lease
        self.way = Way.SAVE if message.to_pages else Way.LOAD
        self.parts = message.parts
        self.from_token = from_token
        """Of a save: the first token whose KV it writes; -1: none of the first component."""
        self.upto_tokens = message.upto_tokens
        self.rank, self.ranks = got.rank, got.ranks
        self.device = message.device
        self.since_s = at_s

    @property
    def n_pages(self) -> int:
        """Of all parts."""
        return sum([part.n_pages for part in self.parts])

    def collides_with(self, other: EngineCopy) -> bool:
        """Whether both touch a page that one of them writes, in the same part of it."""
        is_written = Way.SAVE in (self.way, other.way)
        return self.rank == other.rank and is_written and self.meets(other)

    def meets(self, other: EngineCopy) -> bool:
        """Whether both touch a page."""
        return any(overlap(mine, theirs) for mine in self.parts for theirs in other.parts)

    def told(self, at_s: float) -> str:
        """In words, for whoever asks."""
        verb = "saving" if self.way is Way.SAVE else "loading"
        what = " and ".join([told_part(part) for part in self.parts])
        rank = f" rank {self.rank} of {self.ranks}" if self.ranks > 1 else ""
        where = f" on {self.device}" if self.device else ""
        since = told_s(at_s - self.since_s)
        return f"{verb} {what} for{rank or ' its engine'}{where} since {since}"


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseCopying:
    """What is copied of one lease. ``ahead``: by rank, stretches of tokens saved behind a gap."""

    __slots__ = ("ahead", "has_saved", "states", "under_way")

    def __init__(self) -> None:
        self.under_way: list[EngineCopy] = []
        self.ahead: dict[int, list[tuple[int, int]]] = {}
        self.has_saved = False
        """A save has begun."""
        self.states: dict[tuple[str, int], int] = {}
        """By component of states and rank, behind how many tokens the saved one stands."""

    def begin(self, copy: EngineCopy) -> None:
        """It is under way: what it writes is none of what was there any more."""
        self.under_way.append(copy)
        if copy.way is Way.SAVE:
            self.has_saved = True
            for part in copy.parts:
                self.states.pop((part.component, copy.rank), None)

    def save_states(self, copy: EngineCopy, components: set[str]) -> None:
        """Which of them a save that is over has put there."""
        for part in copy.parts:
            if part.component in components:
                self.states[part.component, copy.rank] = copy.upto_tokens

    def unwritten_from(self, rank: int | None) -> int | None:
        """The first token that a save under way writes, of one rank or of any; None: none does."""
        saves = [
            copy.from_token
            for copy in self.under_way
            if copy.from_token >= 0 and rank in {None, copy.rank}
        ]
        return min(saves, default=None)


def overlap(one: CopyPart, other: CopyPart) -> bool:
    """Whether both have a page of one component."""
    return (
        one.component == other.component
        and one.first_page < other.first_page + other.n_pages
        and other.first_page < one.first_page + one.n_pages
    )


def told_part(part: CopyPart) -> str:
    """Its pages, in words."""
    last = part.first_page + part.n_pages - 1
    pages = f"pages {part.first_page} to {last}" if part.n_pages != 1 else f"page {last}"
    return f"{pages} of {part.component}"


def told_s(seconds: float) -> str:
    """So long, in words."""
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
