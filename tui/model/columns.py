"""Sheets with columns that are made here: of others of the row, or of how they grow. Pure.

The daemon knows only its own columns; it sorts and filters by those. So none of them is taken away:
a table hides what another column says better.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.console import Cell, Column, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tui.model.tables import TableData


class NamedRow:
    """One row by the names of its columns; None where there is no such column.

    ``at_s``: as of when, on the daemon's clock.
    """

    __slots__ = ("_at", "at_s", "row")

    def __init__(self, row: Row, at: Mapping[str, int], at_s: float) -> None:
        self.row = row
        self.at_s = at_s
        self._at = at

    def cell(self, name: str) -> Cell:
        """Whatever is there."""
        at = self._at.get(name)
        return self.row.cells[at] if at is not None else None

    def number(self, name: str) -> float | None:
        """A finite figure, or None."""
        cell = self.cell(name)
        return cell if isinstance(cell, int | float) and math.isfinite(cell) else None

    def text(self, name: str) -> str:
        """Text, or nothing."""
        cell = self.cell(name)
        return cell if isinstance(cell, str) else ""


def places(columns: Sequence[Column]) -> dict[str, int]:
    """Where each column is, by its name."""
    return {column.name: at for at, column in enumerate(columns)}


def named_row_of(data: TableData, key: str) -> NamedRow | None:
    """The row of this key."""
    row = data.rows.get(key)
    return NamedRow(row, places(data.columns), data.at_s) if row is not None else None


class ComputedColumns:
    """Adds ``columns``, whose cells ``make`` gives, and puts those of ``first`` before the others.

    Rows that did not change stay the same objects, so that nothing is made of them twice.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        make: Callable[[NamedRow], tuple[Cell, ...]],
        first: Sequence[str] = (),
    ) -> None:
        self._columns = tuple(columns)
        self._make = make
        self._first = tuple(first)
        self._for: tuple[Column, ...] | None = None
        self._order: tuple[int, ...] = ()
        self._at: dict[str, int] = {}
        self._dressed: tuple[Column, ...] = ()
        self._known: dict[str, tuple[Row, tuple[Cell, ...], Row]] = {}

    def extend(self, data: TableData) -> TableData:
        """The sheet with the new columns; as it is where the daemon has no such table."""
        if not data.columns:
            return data
        if data.columns != self._for:
            self._plan(data.columns)
        known = {key: self._row(row, data.at_s) for key, row in data.rows.items()}
        self._known = known
        rows = {key: made for key, (_, _, made) in known.items()}
        return msgspec.structs.replace(data, columns=self._dressed, rows=rows)

    def _plan(self, columns: tuple[Column, ...]) -> None:
        self._for, self._at, self._known = columns, places(columns), {}
        both = (*columns, *[one for one in self._columns if one.name not in self._at])
        names = [column.name for column in both]
        ranks = {name: at for at, name in enumerate(self._first)}
        self._order = tuple(
            sorted(range(len(both)), key=lambda at: ranks.get(names[at], len(ranks) + at))
        )
        self._dressed = tuple(both[at] for at in self._order)

    def _row(self, row: Row, at_s: float) -> tuple[Row, tuple[Cell, ...], Row]:
        made = self._make(NamedRow(row, self._at, at_s))
        known = self._known.get(row.key)
        if known is not None and known[0] is row and known[1] == made:
            return known
        own = [
            cell
            for cell, column in zip(made, self._columns, strict=True)
            if column.name not in self._at
        ]
        cells = (*row.cells, *own)
        return row, made, Row(row.key, tuple([cells[at] for at in self._order]))
