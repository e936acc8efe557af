"""A table that consoles may ask for, as data: columns with getters over the objects of the node.

The window is found by the getters of the columns that are filtered or sorted by; whole rows are
built only for the objects in it. So ten thousand leases cost one comparison each, not a row each.

What must not live here: what has changed (``feed``), and how often anybody may look (``desk``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from kvd.wire.console import Cell, Column, Filter, Query, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvd.console.scene import Scene

T = TypeVar("T")

MOMENTS = frozenset({"since", "until"})
WORDS = frozenset({"text", "state", "ref", "holders"})


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

    rows: tuple[Row, ...]
    total: int
    of: int


class Flaw(msgspec.Struct, frozen=True):
    """Why there is no such window."""

    why: str


class View(Generic[T]):
    """One table. ``sort`` is its own order, as in ``Query``; empty: as the objects come.

    ``objects`` are asked for with the query, because some views are a matter of what is opened.
    """

    def __init__(
        self,
        name: str,
        fields: Sequence[Field[T]],
        *,
        objects: Callable[[Scene, Query], Iterable[T]],
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

    def window(self, scene: Scene, query: Query) -> Window | Flaw:
        """The rows asked for, or which column there is none of."""
        unknown = self._unknown(query)
        if unknown:
            known = ", ".join(self._by_name)
            return Flaw(f"{self.name} has no column {unknown!r}: it has {known}")
        passing = everything = list(self._objects(scene, query))
        for condition in query.filters:
            holds = self._holds(scene, condition)
            passing = [one for one in passing if holds(one)]
        last = query.first + query.limit
        shown = self._sorted(scene, query.sort or self._sort, passing)[query.first : last]
        rows = tuple(
            Row(self._key(one), tuple([field.get(scene, one) for field in self.fields]))
            for one in shown
        )
        return Window(rows, len(passing), len(everything))

    def _unknown(self, query: Query) -> str:
        asked = [query.sort.removeprefix("-"), *[one.column for one in query.filters]]
        return next((name for name in asked if name and name not in self._by_name), "")

    def _sorted(self, scene: Scene, sort: str, objects: list[T]) -> list[T]:
        """By one column, those without a value last; equal ones stay as they are.

        A sort of plain values beats a heap of ranks even where only a window is wanted.
        """
        if not sort:
            return objects
        get = self._by_name[sort.removeprefix("-")].get
        ranks = [_rank(get(scene, one)) for one in objects]
        places = [place for place, rank in enumerate(ranks) if rank is not None]
        # Any, because a column has texts or numbers, and never both.
        by_rank: Callable[[int], Any] = ranks.__getitem__
        places.sort(key=by_rank, reverse=sort.startswith("-"))
        if len(places) < len(ranks):
            places += [place for place, rank in enumerate(ranks) if rank is None]
        return [objects[place] for place in places]

    def _holds(self, scene: Scene, condition: Filter) -> Callable[[T], bool]:
        """The condition as a test of one object."""
        if condition.column:
            field = self._by_name[condition.column]
            get, kind = field.get, field.column.kind
            return lambda one: _test(condition, get(scene, one), kind, scene.now_s)
        wanted = str(condition.value).casefold()
        words = [field.get for field in self.fields if field.column.kind in WORDS]
        is_wanted = not condition.test.endswith("-not")

        def holds(one: T) -> bool:
            for get in words:
                cell = get(scene, one)
                if cell and (
                    wanted in cell.casefold() if isinstance(cell, str) else _has(cell, wanted)
                ):
                    return is_wanted
            return not is_wanted

        return holds


def _rank(cell: Cell) -> str | float | None:
    """A cell as something that compares with the others of its column."""
    if isinstance(cell, str):
        return cell.casefold()
    return float(len(cell)) if isinstance(cell, tuple) else cell


def _test(condition: Filter, cell: Cell, kind: str, now_s: float) -> bool:
    value = condition.value
    match condition.test:
        case "has":
            return _has(cell, value)
        case "has-not":
            return not _has(cell, value)
        case "is":
            return _is(cell, value)
        case "is-not":
            return not _is(cell, value)
        case "over" | "under" as side if isinstance(value, int | float):
            figure = _figure(cell, kind, now_s)
            return figure is not None and (figure > value if side == "over" else figure < value)
        case _:
            return False


def _figure(cell: Cell, kind: str, now_s: float) -> float | None:
    """A number; of a moment how long ago it was, or how long it is from now."""
    if isinstance(cell, tuple):
        return float(len(cell))
    if cell is None or isinstance(cell, str):
        return None
    if kind in MOMENTS:
        return now_s - cell if kind == "since" else cell - now_s
    return float(cell)


def _has(cell: Cell, value: str | float) -> bool:
    wanted = str(value).casefold()
    if isinstance(cell, tuple):
        return any(
            wanted in one.who.casefold() or wanted in one.ref or wanted in one.state for one in cell
        )
    return cell is not None and wanted in str(cell).casefold()


def _is(cell: Cell, value: str | float) -> bool:
    if isinstance(cell, str) or isinstance(value, str):
        return str(cell if cell is not None else "").casefold() == str(value).casefold()
    if isinstance(cell, tuple):
        return len(cell) == value
    return cell == value
