"""A row by the names of its columns, and columns that are made here of what the daemon tells.

The daemon knows only its own columns; it sorts and filters by those. So none of them is taken away:
a table hides what another column says better.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.console import Cell, Column, TableRow

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tui.model.tables import TableData


HEADINGS = {
    "calls_s": "calls/s",
    "lock_ref": "locks",
    "below_pages": "pages below",
    "last_use": "last used",
    "locked_node": "locked at",
    "row": "pages in all",
    "waiting_for": "waits for",
    "until": "deadline",
    "since": "for",
    "moved": "last moved",
    "away_since": "away for",
    "touched": "last touched",
    "beside": "other components",
    "missing_pages": "missing",
    "needed_pages": "needed",
    "held_by": "held by",
    "gone": "gone for",
    "wrote": "was of",
    "needed_by": "needed by",
    "missed_by": "missed by",
    "missed": "missed for",
    "end_tokens": "up to tokens",
    "owner": "engine",
    "done_bytes": "done",
    "total_bytes": "of",
    "quarantined": "quarantine",
}
"""Of columns whose own name is one of the wire; filters and sorts know them by that."""


def heading(column: Column) -> str:
    """What stands over a column: pages are what most are of, tokens say so."""
    words = HEADINGS.get(column.name, column.name.replace("_", " "))
    is_said = column.kind != "tokens" or "token" in words
    return words if is_said else f"{words} tokens"


class NamedRow:
    """One row by the names of its columns; None where there is no such column.

    ``at_s``: as of when, on the daemon's clock.
    """

    __slots__ = ("_at", "at_s", "row")

    def __init__(self, row: TableRow, at: Mapping[str, int], at_s: float) -> None:
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
        """The text of that column; empty where there is none, or something else."""
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
        self._for: tuple[Column, ...] = ()
        self._known: dict[str, tuple[TableRow, tuple[Cell, ...], TableRow]] = {}

    def extend(self, data: TableData) -> TableData:
        """The table with the new columns; as it is where the daemon has no such table."""
        if not data.columns:
            return data
        if data.columns != self._for:
            self._for, self._known = data.columns, {}
        at = places(data.columns)
        own = [place for place, column in enumerate(self._columns) if column.name not in at]
        both = (*data.columns, *(self._columns[place] for place in own))
        ranks = {name: rank for rank, name in enumerate(self._first)}
        order = sorted(range(len(both)), key=lambda place: ranks.get(both[place].name, len(ranks)))
        known: dict[str, tuple[TableRow, tuple[Cell, ...], TableRow]] = {}
        for key, row in data.rows.items():
            made = self._make(NamedRow(row, at, data.at_s))
            before = self._known.get(key)
            if before is None or before[0] is not row or before[1] != made:
                cells = (*row.cells, *(made[place] for place in own))
                before = (row, made, TableRow(key, tuple([cells[place] for place in order])))
            known[key] = before
        self._known = known
        return msgspec.structs.replace(
            data,
            columns=tuple(both[place] for place in order),
            rows={key: shown for key, (_, _, shown) in known.items()},
        )
