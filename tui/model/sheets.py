"""One table and one page map as a console has them: whole, and never changed in place.

A delta makes a new sheet that shares every row that stayed. What does not fit what is here is
refused with a sentence: then the sheet is dropped and asked for whole, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.console import Column, MapQuery, PageMap, Query, Table, TableRow

if TYPE_CHECKING:
    from kvd.wire.console import Cell

Slot = Query | MapQuery
"""What was asked for, without ``have``: two answers to the same slot are the same thing later."""

Answer = Table | PageMap

_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Misfit(msgspec.Struct, frozen=True):
    """Why an answer cannot be used."""

    why: str


class Sheet(msgspec.Struct, frozen=True):
    """A window of one table. ``rows`` are exactly those that ``order`` names.

    ``total`` rows pass the filters, of ``of``; ``at_s`` is as of when, on the daemon's clock.
    ``revision`` 0: the next ask is for all of it. ``trouble``: why the daemon has no such table.
    ``note`` is not empty where the rows were filtered or sorted here, and says from what.
    """

    slot: Query
    columns: tuple[Column, ...]
    order: tuple[str, ...]
    rows: Mapping[str, TableRow]
    total: int
    of: int
    at_s: float
    revision: int
    trouble: str = ""
    note: str = ""

    @property
    def view(self) -> str:
        """The name of the table."""
        return self.slot.view

    def listed(self) -> tuple[TableRow, ...]:
        """The rows in their order."""
        rows = self.rows
        return tuple([rows[key] for key in self.order])

    def index(self, name: str) -> int:
        """Where a column is; -1 if there is none of that name."""
        return next((at for at, column in enumerate(self.columns) if column.name == name), -1)

    def cell(self, key: str, name: str) -> Cell:
        """One cell by row and column; None where there is no such row or column."""
        at = self.index(name)
        row = self.rows.get(key)
        return row.cells[at] if row is not None and at >= 0 else None


def slot_of(query: Slot) -> Slot:
    """The query without what its asker has."""
    return msgspec.structs.replace(query, have=0) if query.have else query


def read(raw: msgspec.Raw) -> Answer | Misfit:
    """An answer of a frame; never raises."""
    try:
        return _ANSWERS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return Misfit(f"an answer cannot be read: {str(exc)[:200]}")


def fold(before: Sheet | None, slot: Query, table: Table) -> Sheet | Misfit:
    """The sheet after ``table``, or why that is no answer to ``slot`` on top of ``before``."""
    if table.view != slot.view:
        return Misfit(f"asked for {slot.view}, answered with {table.view}")
    if table.trouble:
        return _troubled(before, slot, table)
    columns, rows, order = table.columns, dict[str, TableRow](), table.order
    if table.since:
        if before is None or before.revision != table.since:
            have = before.revision if before is not None else 0
            return Misfit(f"{slot.view}: changes since {table.since}, but {have} is here")
        columns, rows = before.columns, dict(before.rows)
        order = before.order if order is None else order
    wrong = [row.key for row in table.rows if len(row.cells) != len(columns)]
    if wrong:
        return Misfit(f"{slot.view}: row {wrong[0]!r} has not one cell for each column")
    rows.update({row.key: row for row in table.rows})
    order = tuple(rows) if order is None else order
    missing = next((key for key in order if key not in rows), None)
    if missing is not None:
        return Misfit(f"{slot.view}: row {missing!r} is in the order and nowhere else")
    if len(rows) != len(order):
        rows = {key: rows[key] for key in order}
    return Sheet(slot, columns, order, rows, table.total, table.of, table.at_s, table.revision)


def _troubled(before: Sheet | None, slot: Query, table: Table) -> Sheet:
    """What was there, if anything, and the trouble; asked for whole next."""
    if before is None:
        before = Sheet(slot, table.columns, (), {}, 0, 0, table.at_s, 0)
    return msgspec.structs.replace(before, trouble=table.trouble, revision=0)


def fold_map(before: PageMap | None, slot: MapQuery, page_map: PageMap) -> PageMap | Misfit:
    """The map with its cells after ``page_map``, or why that is no answer on top of ``before``."""
    if page_map.lens != slot.lens or slot.component not in {"", page_map.component}:
        return Misfit(
            f"asked for the map of {slot.component} by {slot.lens}, answered with "
            f"{page_map.component} by {page_map.lens}"
        )
    if page_map.trouble:
        return page_map
    if page_map.cells is not None:
        return _checked(page_map)
    if before is None or before.cells is None or before.revision != page_map.revision:
        return Misfit(f"map of {page_map.component}: nothing new, but what was is not here")
    return _checked(msgspec.structs.replace(page_map, cells=before.cells))


def _checked(page_map: PageMap) -> PageMap | Misfit:
    """The map, if every cell has a level and every lit one is a cell: drawing relies on it."""
    cells = page_map.cells or b""
    if max(cells, default=0) >= max(1, len(page_map.levels)) or page_map.pages_each < 1:
        return Misfit(f"map of {page_map.component}: a cell has a level that there is not")
    if any(not 0 <= at < len(cells) for at in page_map.lit):
        return Misfit(f"map of {page_map.component}: a cell is lit that there is not")
    return page_map


def whole(sheet: Sheet) -> Table:
    """The sheet as the answer to a query that has nothing."""
    return Table(
        view=sheet.view,
        revision=sheet.revision,
        since=0,
        at_s=sheet.at_s,
        total=sheet.total,
        of=sheet.of,
        columns=sheet.columns,
        order=sheet.order,
        rows=sheet.listed(),
        trouble=sheet.trouble,
    )
