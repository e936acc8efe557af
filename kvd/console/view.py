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

from kvd.filters import KEY, WORD_KINDS, cell_passes, rank, texts_of
from kvd.wire.console import Column, Filter, Query, TableRow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from kvd.console.context import Context
    from kvd.core.inspect.schema import StateField


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
        sorts_itself: bool = False,
    ) -> None:
        self.name = name
        self.fields = tuple(fields)
        self.columns = tuple(Column(field.column, field.unit, field.help) for field in self.fields)
        self._by_name = {field.column: field for field in self.fields}
        self._objects = objects
        self._key = key
        self._sort = sort
        self._sorts_itself = sorts_itself
        """Whether ``objects`` come in the order that is asked for."""

    def is_there(self, context: Context, item: T) -> bool:
        """Whether one that was found in an earlier step can still be read; others override it."""
        return True

    def look(self, context: Context, query: Query) -> Generator[None, None, TableWindow | NoWindow]:
        """The rows asked for, or which column there is none of; a step at a time."""
        unknown = self._unknown(query)
        if unknown:
            known = ", ".join(self._by_name)
            return NoWindow(f"{self.name} has no column {unknown!r}: it has {known}")
        everything: list[T] = []
        for item in self._objects(context, query):
            if item is None:
                yield
            else:
                everything.append(item)
        sort = "" if self._sorts_itself else query.sort or self._sort
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
                TableRow(self._key(item), tuple([get(node, item) for get in getters]))
                for item in shown[start : start + ROWS]
                if self.is_there(context, item)
            ]
            yield
        return TableWindow(tuple(rows), len(passing), len(everything))

    def _unknown(self, query: Query) -> str:
        asked = [query.sort.removeprefix("-"), *[condition.column for condition in query.filters]]
        known = {*self._by_name, KEY, ""}
        return next((name for name in asked if name not in known), "")

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
            some = [item for item in some if self.is_there(context, item)]
            for holds in tests:
                some = [item for item in some if holds(item)]
            passing += some
            if get is not None:
                ranks += [rank(get(context.node, item)) for item in some]
            yield
        return passing, ranks if get is not None else None

    def _tests(self, context: Context, filters: Sequence[Filter]) -> list[Callable[[T], bool]]:
        """The conditions as tests of one object: one by one, those of any text together."""
        tests = [self._test(context, condition) for condition in filters if condition.column]
        of_any = [condition for condition in filters if not condition.column]
        return [*tests, self._test_any(context, of_any)] if of_any else tests

    def _test(self, context: Context, condition: Filter) -> Callable[[T], bool]:
        if condition.column == KEY:
            return lambda item: cell_passes(condition, self._key(item), "ref", context.now_s)
        field = self._by_name[condition.column]
        get, unit, node = field.get, field.unit, context.node
        return lambda item: cell_passes(condition, get(node, item), unit, context.now_s)

    def _test_any(self, context: Context, conditions: Sequence[Filter]) -> Callable[[T], bool]:
        """Some text of the object has each of what is wanted, and none what is not."""
        wanted = [
            (str(condition.value).casefold(), not condition.test.endswith("-not"))
            for condition in conditions
        ]
        getters = [field.get for field in self.fields if field.unit in WORD_KINDS]
        node = context.node

        def holds(item: T) -> bool:
            cells = [get(node, item) for get in getters]
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
