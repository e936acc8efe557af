"""A table that consoles may ask for, as data: columns with getters over the objects of the node.

The window is found by the getters of the columns that are filtered or sorted by; whole rows are
built only for the objects in it. So ten thousand leases cost one comparison each, not a row each.

A look is made in steps of a millisecond or so, because a table may be of a hundred thousand nodes
and the loop has other things to do. The node lives on in between: a large table is a picture of no
moment, each row was so at some moment of the look, and what has gone meanwhile is left out. A small
one is one step or two.

What must not live here: what has changed (``feed``), and how often anybody may look (``desk``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvd.filters import WORD_KINDS, cell_passes, rank, texts_of
from kvd.wire.console import Cell, Column, Filter, Query, TableRow

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from kvd.console.scene import Scene

T = TypeVar("T")

OBJECTS = 128
"""Objects that are filtered or ranked in one step."""
ROWS = 64
"""Rows that are built in one step."""


class Field(Generic[T]):
    """One column and how to read it off an object."""

    __slots__ = ("column", "get")

    def __init__(
        self, name: str, kind: str, get: Callable[[Scene, T], Cell], help_: str = ""
    ) -> None:
        self.column = Column(name, kind, help_)
        self.get = get


class Window(msgspec.Struct, frozen=True):
    """The rows that a query asked for; ``total`` pass its filters, of ``of``."""

    rows: tuple[TableRow, ...]
    total: int
    of: int


class Flaw(msgspec.Struct, frozen=True):
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
        fields: Sequence[Field[T]],
        *,
        objects: Callable[[Scene, Query], Iterable[T | None]],
        key: Callable[[T], str],
        sort: str = "",
    ) -> None:
        self.name = name
        self.fields = tuple(fields)
        self.columns = tuple(field.column for field in self.fields)
        self._by_name = {field.column.name: field for field in self.fields}
        self._objects = objects
        self._key = key
        self._sort = sort

    def is_there(self, scene: Scene, one: T) -> bool:
        """Whether one that was found in an earlier step can still be read; others override it."""
        return True

    def window(self, scene: Scene, query: Query) -> Window | Flaw:
        """The rows asked for, or which column there is none of; at one moment."""
        steps = self.look(scene, query)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                found: Window | Flaw = end.value
                return found

    def look(self, scene: Scene, query: Query) -> Generator[None, None, Window | Flaw]:
        """The same a step at a time."""
        unknown = self._unknown(query)
        if unknown:
            known = ", ".join(self._by_name)
            return Flaw(f"{self.name} has no column {unknown!r}: it has {known}")
        everything: list[T] = []
        for one in self._objects(scene, query):
            if one is None:
                yield
            else:
                everything.append(one)
        sort = query.sort or self._sort
        passing, ranks = everything, None
        if query.filters or sort:
            passing, ranks = yield from self._passing(scene, query, sort, everything)
        places: Sequence[int] = range(len(passing))
        if ranks is not None:
            places = _in_order(ranks, is_falling=sort.startswith("-"))
            yield
        shown = [passing[place] for place in places[query.first : query.first + query.limit]]
        rows: list[TableRow] = []
        for start in range(0, len(shown), ROWS):
            rows += [
                TableRow(self._key(one), tuple([field.get(scene, one) for field in self.fields]))
                for one in shown[start : start + ROWS]
                if self.is_there(scene, one)
            ]
            yield
        return Window(tuple(rows), len(passing), len(everything))

    def _unknown(self, query: Query) -> str:
        asked = [query.sort.removeprefix("-"), *[one.column for one in query.filters]]
        return next((name for name in asked if name and name not in self._by_name), "")

    def _passing(
        self, scene: Scene, query: Query, sort: str, everything: list[T]
    ) -> Generator[None, None, tuple[list[T], list[Rank] | None]]:
        """What passes the filters, and its ranks if it is sorted."""
        tests = self._tests(scene, query.filters)
        get = self._by_name[sort.removeprefix("-")].get if sort else None
        passing: list[T] = []
        ranks: list[Rank] = []
        for start in range(0, len(everything), OBJECTS):
            some = everything[start : start + OBJECTS]
            some = [one for one in some if self.is_there(scene, one)]
            for holds in tests:
                some = [one for one in some if holds(one)]
            passing += some
            if get is not None:
                ranks += [rank(get(scene, one)) for one in some]
            yield
        return passing, ranks if get is not None else None

    def _tests(self, scene: Scene, filters: Sequence[Filter]) -> list[Callable[[T], bool]]:
        """The conditions as tests of one object: one by one, those of any text together."""
        tests = [self._test(scene, one) for one in filters if one.column]
        of_any = [one for one in filters if not one.column]
        return [*tests, self._test_any(scene, of_any)] if of_any else tests

    def _test(self, scene: Scene, condition: Filter) -> Callable[[T], bool]:
        field = self._by_name[condition.column]
        get, kind = field.get, field.column.kind
        return lambda one: cell_passes(condition, get(scene, one), kind, scene.now_s)

    def _test_any(self, scene: Scene, conditions: Sequence[Filter]) -> Callable[[T], bool]:
        """Some text of the object has each of what is wanted, and none what is not."""
        wanted = [(str(one.value).casefold(), not one.test.endswith("-not")) for one in conditions]
        getters = [field.get for field in self.fields if field.column.kind in WORD_KINDS]

        def holds(one: T) -> bool:
            cells = [get(scene, one) for get in getters]
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
