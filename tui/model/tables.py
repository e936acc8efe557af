"""One table and one page map as a console has them: whole, and never changed in place.

A change makes new data that shares every row that stayed. What does not fit what is here is
refused with a sentence: then the table is dropped and asked for whole, nothing is guessed.
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


class BadAnswer(msgspec.Struct, frozen=True):
    """Why an answer cannot be used."""

    why: str


class TableData(msgspec.Struct, frozen=True):
    """A window of one table. ``rows`` are exactly those that ``order`` names.

    ``total`` rows pass the filters, of ``of``; ``at_s`` is as of when, on the daemon's clock.
    ``revision`` 0: the next ask is for all of it. ``trouble``: why the daemon has no such table.
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


def read(raw: msgspec.Raw) -> Answer | BadAnswer:
    """An answer of a frame; never raises."""
    try:
        return _ANSWERS.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        return BadAnswer(f"an answer cannot be read: {str(exc)[:200]}")


def fold(before: TableData | None, slot: Query, table: Table) -> TableData | BadAnswer:
    """What is here after ``table``, or why that is no answer to ``slot`` on top of ``before``."""
    if table.view != slot.view:
        return BadAnswer(f"asked for {slot.view}, answered with {table.view}")
    if table.trouble:
        return _troubled(before, slot, table)
    columns, rows, order = table.columns, dict[str, TableRow](), table.order
    if table.since:
        if before is None or before.revision != table.since:
            have = before.revision if before is not None else 0
            return BadAnswer(f"{slot.view}: changes since {table.since}, but {have} is here")
        columns, rows = before.columns, dict(before.rows)
        order = before.order if order is None else order
    wrong = [row.key for row in table.rows if len(row.cells) != len(columns)]
    if wrong:
        return BadAnswer(f"{slot.view}: row {wrong[0]!r} has not one cell for each column")
    rows.update({row.key: row for row in table.rows})
    order = tuple(rows) if order is None else order
    why_missing = next((key for key in order if key not in rows), None)
    if why_missing is not None:
        return BadAnswer(f"{slot.view}: row {why_missing!r} is in the order and nowhere else")
    if len(rows) != len(order):
        rows = {key: rows[key] for key in order}
    return TableData(
        slot=slot,
        columns=columns,
        order=order,
        rows=rows,
        total=table.total,
        of=table.of,
        at_s=table.at_s,
        revision=table.revision,
    )


def _troubled(before: TableData | None, slot: Query, table: Table) -> TableData:
    """What was there, if anything, and the trouble; asked for whole next."""
    if before is None:
        before = TableData(
            slot=slot,
            columns=table.columns,
            order=(),
            rows={},
            total=0,
            of=0,
            at_s=table.at_s,
            revision=0,
        )
    return msgspec.structs.replace(before, trouble=table.trouble, revision=0)


def fold_map(before: PageMap | None, slot: MapQuery, page_map: PageMap) -> PageMap | BadAnswer:
    """The map with its cells after ``page_map``, or why that is no answer on top of ``before``."""
    if page_map.lens != slot.lens or slot.component not in {"", page_map.component}:
        return BadAnswer(
            f"asked for the map of {slot.component} by {slot.lens}, answered with "
            f"{page_map.component} by {page_map.lens}"
        )
    if page_map.trouble:
        return page_map
    if page_map.cells is not None:
        return _checked(page_map)
    if before is None or before.cells is None or before.revision != page_map.revision:
        return BadAnswer(f"map of {page_map.component}: nothing new, but what was is not here")
    return _checked(msgspec.structs.replace(page_map, cells=before.cells))


def _checked(page_map: PageMap) -> PageMap | BadAnswer:
    """The map, if every cell has a level and every lit one is a cell: drawing relies on it."""
    cells = page_map.cells or b""
    if max(cells, default=0) >= max(1, len(page_map.levels)) or page_map.pages_each < 1:
        return BadAnswer(f"map of {page_map.component}: a cell has a level that there is not")
    if any(not 0 <= at < len(cells) for at in page_map.lit):
        return BadAnswer(f"map of {page_map.component}: a cell is lit that there is not")
    return page_map
