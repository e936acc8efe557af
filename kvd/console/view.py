"""A table that consoles may ask for, as data: columns with getters over the objects of the node.

The window is found by the getters of the columns that are filtered or sorted by; whole rows are
built only for the objects in it. So ten thousand leases cost one comparison each, not a row each.

A look is made in steps of a millisecond or so, because a table may be of a hundred thousand nodes
and the loop has other things to do. The node lives on in between: a large table is a picture of no
moment, each row was so at some moment of the look, and what has gone meanwhile is left out. A small
one is one step or two.

What must not live here: what has changed and how often anybody may look (``server``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvd.core.inspect.schema import session_name
from kvd.core.inspect.words import lease_word
from kvd.filters import WORD_KINDS, cell_passes, rank, texts_of
from kvd.wire.console import Column, Filter, Holder, Query, TableRow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from kvd.console.context import Context
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inspect.schema import StateField
    from kvd.core.leases.owners import Kept


T = TypeVar("T")

OBJECTS = 128
"""Objects that are filtered or ranked in one step."""
ROWS = 64
"""Rows that are built in one step."""


class TableWindow(msgspec.Struct, frozen=True):
    """The rows that a query asked for; ``total`` pass its filters, of ``of``."""

    rows: tuple[TableRow, ...]
    total: int
    of: int


class NoWindow(msgspec.Struct, frozen=True):
    """Why there is no such window."""

    why: str


class View(Generic[T]):
    """One table. ``sort`` is its own order, as in ``Query``; empty: as the objects come.

    ``objects`` are asked for with the query, because some views are a matter of what is opened;
    None among them is the end of a step.
    """

    def __init__(
        self,
        name: str,
        fields: Sequence[StateField[T]],
        *,
        objects: Callable[[Context, Query], Iterable[T | None]],
        key: Callable[[T], str],
        sort: str = "",
    ) -> None:
        self.name = name
        self.fields = tuple(fields)
        self.columns = tuple(Column(one.column, one.unit, one.help) for one in self.fields)
        self._by_name = {one.column: one for one in self.fields}
        self._objects = objects
        self._key = key
        self._sort = sort

    def is_there(self, context: Context, one: T) -> bool:
        """Whether one that was found in an earlier step can still be read; others override it."""
        return True

    def look(self, context: Context, query: Query) -> Generator[None, None, TableWindow | NoWindow]:
        """The rows asked for, or which column there is none of; a step at a time."""
        unknown = self._unknown(query)
        if unknown:
            known = ", ".join(self._by_name)
            return NoWindow(f"{self.name} has no column {unknown!r}: it has {known}")
        everything: list[T] = []
        for one in self._objects(context, query):
            if one is None:
                yield
            else:
                everything.append(one)
        sort = query.sort or self._sort
        passing, ranks = everything, None
        if query.filters or sort:
            passing, ranks = yield from self._passing(context, query, sort, everything)
        places: Sequence[int] = range(len(passing))
        if ranks is not None:
            places = _in_order(ranks, is_falling=sort.startswith("-"))
            yield
        shown = [passing[place] for place in places[query.first : query.first + query.limit]]
        rows: list[TableRow] = []
        node, getters = context.node, [field.get for field in self.fields]
        for start in range(0, len(shown), ROWS):
            rows += [
                TableRow(self._key(one), tuple([get(node, one) for get in getters]))
                for one in shown[start : start + ROWS]
                if self.is_there(context, one)
            ]
            yield
        return TableWindow(tuple(rows), len(passing), len(everything))

    def _unknown(self, query: Query) -> str:
        asked = [query.sort.removeprefix("-"), *[one.column for one in query.filters]]
        return next((name for name in asked if name and name not in self._by_name), "")

    def _passing(
        self, context: Context, query: Query, sort: str, everything: list[T]
    ) -> Generator[None, None, tuple[list[T], list[Rank] | None]]:
        """What passes the filters, and its ranks if it is sorted."""
        tests = self._tests(context, query.filters)
        get = self._by_name[sort.removeprefix("-")].get if sort else None
        passing: list[T] = []
        ranks: list[Rank] = []
        for start in range(0, len(everything), OBJECTS):
            some = everything[start : start + OBJECTS]
            some = [one for one in some if self.is_there(context, one)]
            for holds in tests:
                some = [one for one in some if holds(one)]
            passing += some
            if get is not None:
                ranks += [rank(get(context.node, one)) for one in some]
            yield
        return passing, ranks if get is not None else None

    def _tests(self, context: Context, filters: Sequence[Filter]) -> list[Callable[[T], bool]]:
        """The conditions as tests of one object: one by one, those of any text together."""
        tests = [self._test(context, one) for one in filters if one.column]
        of_any = [one for one in filters if not one.column]
        return [*tests, self._test_any(context, of_any)] if of_any else tests

    def _test(self, context: Context, condition: Filter) -> Callable[[T], bool]:
        field = self._by_name[condition.column]
        get, unit, node = field.get, field.unit, context.node
        return lambda one: cell_passes(condition, get(node, one), unit, context.now_s)

    def _test_any(self, context: Context, conditions: Sequence[Filter]) -> Callable[[T], bool]:
        """Some text of the object has each of what is wanted, and none what is not."""
        wanted = [(str(one.value).casefold(), not one.test.endswith("-not")) for one in conditions]
        getters = [field.get for field in self.fields if field.unit in WORD_KINDS]
        node = context.node

        def holds(one: T) -> bool:
            cells = [get(node, one) for get in getters]
            texts = [text for cell in cells if cell for text in texts_of(cell)]
            return all(
                any(word in text for text in texts) is is_wanted for word, is_wanted in wanted
            )

        return holds


Rank = str | float | None
"""A cell as something that compares with the others of its column; None comes last."""


def _in_order(ranks: Sequence[Rank], *, is_falling: bool) -> list[int]:
    """The places of the ranks by rank; equal ones stay as they are.

    A sort of plain values beats a heap of ranks even where only a window is wanted.
    """
    places = [place for place, rank in enumerate(ranks) if rank is not None]
    # Any, because a column has texts or numbers, and never both.
    by_rank: Callable[[int], Any] = ranks.__getitem__
    places.sort(key=by_rank, reverse=is_falling)
    if len(places) < len(ranks):
        places += [place for place, rank in enumerate(ranks) if rank is None]
    return places


def lease_holder(context: Context, lease: LeaseRecord, pages: str = "") -> Holder:
    """A lease as a holder of something; ``pages`` says how much it has of it."""
    session = context.node.sessions.by_id.get(lease.session)
    who = (
        session_name(context.node, lease.session) or "kvd"
        if session is None
        else f"{session.name} {session.pids[0]}"
    )
    room = f" room {lease.room}" if lease.room else ""
    what = f"{who}: {lease.reason}{room}{pages}"
    return Holder(
        who=what, since_s=lease.since_s, ref=f"lease:{lease.id}", state=state_of(context, lease)
    )


def state_of(context: Context, lease: LeaseRecord) -> str:
    """Empty for one that runs; ``gone`` where its owner is, else its state: see ``Holder``."""
    word = lease_word(lease)
    if word != "held":
        return word
    return "" if lease.session in context.node.sessions.by_id else "gone"


def kept_holder(context: Context, kept: Kept) -> Holder:
    """A lease as one of those that keep the most pages from others."""
    locked = f", locks {kept.locked} cached" if kept.locked else ""
    promised = f", {kept.promised} promised" if kept.promised else ""
    return lease_holder(context, kept.lease, f", {kept.pages} pages{locked}{promised}")
