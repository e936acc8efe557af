"""Filtering and sorting here, of rows that are here: for what was, and until the daemon answers.

The tests and the order are those of the daemon's views, as ``Filter`` and ``Query`` say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import Cell, Column, Filter, MapQuery, PageMap, Query, TableRow
    from tui.model.sheets import Sheet

WORDS = frozenset({"text", "state", "ref", "holders"})
"""Kinds that a filter without a column looks at."""


def derive(sheets: Sequence[Sheet], slot: Query, now_s: float) -> Sheet:
    """The answer to ``slot`` as far as one of ``sheets`` has its rows; at least one sheet.

    The sheet that knows most is taken: of those whose filters ``slot`` has too, the one with the
    most rows. ``total`` is what was found here; ``note`` says of how many.
    """
    wanted = set(slot.filters)
    best = max(sheets, key=lambda one: (set(one.slot.filters) <= wanted, len(one.order)))
    rows = [row for row in best.listed() if _passes(row, slot.filters, best.columns, now_s)]
    if slot.sort and slot.sort != best.slot.sort:
        rows = _sorted(rows, slot.sort, best)
    shift = best.slot.first if _same_window(best.slot, slot) else 0
    shown = rows[max(0, slot.first - shift) : max(0, slot.first + slot.limit - shift)]
    return msgspec.structs.replace(
        best,
        slot=slot,
        order=tuple(row.key for row in shown),
        rows={row.key: row for row in shown},
        total=best.total if set(best.slot.filters) == wanted else len(rows),
        revision=0,
        note=_note(best, slot),
    )


def _note(best: Sheet, slot: Query) -> str:
    """What is missing from a sheet that was made here; empty where nothing is."""
    has_all = len(best.order) >= best.total
    if has_all or (_same_window(best.slot, slot) and _covers(best.slot, slot)):
        return ""
    return f"of {len(best.order)} rows that are here; there were {best.total}"


def _same_window(have: Query, want: Query) -> bool:
    """Whether both are cut from the same rows in the same order."""
    return (have.sort, set(have.filters), have.opened) == (
        want.sort,
        set(want.filters),
        want.opened,
    )


def _covers(have: Query, want: Query) -> bool:
    last = want.first + want.limit
    return have.first <= want.first and last <= have.first + have.limit


def _sorted(rows: list[TableRow], sort: str, sheet: Sheet) -> list[TableRow]:
    at = sheet.index(sort.removeprefix("-"))
    if at < 0:
        return rows
    falls = sort.startswith("-")
    return sorted(rows, key=lambda row: rank(row.cells[at], 0 if falls else 1), reverse=falls)


def regrid(page_map: PageMap, slot: MapQuery) -> PageMap:
    """A map in the grid of ``slot``: the worst of the cells that a new one touches.

    Where the grid is finer than what is here, neighbours look alike. ``lit`` goes with the
    cells.
    """
    cells = page_map.cells or b""
    here = [
        _touched(page_map, slot.first_page + at * slot.pages_each, slot.pages_each)
        for at in range(min(slot.cells, page_map.total_pages))
        if slot.first_page + at * slot.pages_each < page_map.total_pages
    ]
    lit = set(page_map.lit)
    return msgspec.structs.replace(
        page_map,
        revision=0,
        first_page=slot.first_page,
        pages_each=slot.pages_each,
        cells=bytes(max(cells[one.start : one.stop], default=0) for one in here),
        lit=tuple(at for at, one in enumerate(here) if not lit.isdisjoint(one)) if lit else (),
    )


def _touched(page_map: PageMap, first_page: int, pages: int) -> range:
    """Which cells of a map have some of these pages."""
    first = first_page - page_map.first_page
    each = page_map.pages_each
    return range(max(0, first // each), max(0, -(-(first + pages) // each)))


def rank(cell: Cell, nowhere: int) -> tuple[int, str, float]:
    """A cell as something that compares; ``nowhere`` puts those without a value first or last."""
    match cell:
        case None:
            return (nowhere, "", 0.0)
        case str():
            return (1 - nowhere, cell.casefold(), 0.0)
        case tuple():
            return (1 - nowhere, "", float(len(cell)))
        case _:
            return (1 - nowhere, "", float(cell))


def _passes(
    row: TableRow, filters: Sequence[Filter], columns: Sequence[Column], now_s: float
) -> bool:
    return all(holds(one, row, columns, now_s) for one in filters)


def holds(condition: Filter, row: TableRow, columns: Sequence[Column], now_s: float) -> bool:
    """Whether one condition is true of ``row`` at ``now_s`` on the daemon's clock."""
    pairs = list(zip(columns, row.cells, strict=True))
    if not condition.column:
        words = [cell for column, cell in pairs if column.kind in WORDS]
        found = any(cell and _has(cell, condition.value) for cell in words)
        return found != condition.test.endswith("-not")
    for column, cell in pairs:
        if column.name == condition.column:
            return _test(condition, cell, column.kind, now_s)
    return False


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
            figure = figure_of(cell, kind, now_s)
            return figure is not None and (figure > value if side == "over" else figure < value)
        case _:
            return False


def figure_of(cell: Cell, kind: str, now_s: float) -> float | None:
    """A number; of a moment how long ago it was, or how long it is from now; of holders how many.

    None of text, and where there is nothing.
    """
    match cell:
        case None | str():
            return None
        case tuple():
            return float(len(cell))
        case _ if kind == "since":
            return now_s - cell
        case _ if kind == "until":
            return cell - now_s
        case _:
            return float(cell)


def _has(cell: Cell, value: str | float) -> bool:
    wanted = str(value).casefold()
    match cell:
        case None:
            return False
        case tuple():
            return any(
                wanted in one.who.casefold() or wanted in one.ref or wanted in one.state
                for one in cell
            )
        case _:
            return wanted in str(cell).casefold()


def _is(cell: Cell, value: str | float) -> bool:
    if isinstance(cell, str) or isinstance(value, str):
        return str(cell if cell is not None else "").casefold() == str(value).casefold()
    return len(cell) == value if isinstance(cell, tuple) else cell == value
