"""A table as a file: CSV, JSON or text; all its rows, or only those that are tagged.

CSV and JSON have the figures as they are, moments as ages in seconds; text has them as shown.
"""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING

import msgspec

from kvd.text import clean
from tui.draw.spans import columns as width_of
from tui.draw.spans import left, right
from tui.model.cells import holder, is_figure, text_of

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvd.wire.console import Cell, TableRow
    from tui.model.tables import TableData

FORMATS = ("csv", "json", "text")
WIDEST = 60
"""Columns of one cell of the text."""


def export(data: TableData, form: str, now_s: float, tagged: Collection[str] = ()) -> str:
    """The table in one of ``FORMATS``; ``tagged``: keys of the only rows that are wanted."""
    rows = [row for row in data.listed() if not tagged or row.key in tagged]
    match form:
        case "csv":
            return _csv(data, rows, now_s)
        case "json":
            return _json(data, rows, now_s)
        case _:
            return _text(data, rows, now_s)


def _csv(data: TableData, rows: list[TableRow], now_s: float) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["key", *(_heading(one.name, one.kind) for one in data.columns)])
    for row in rows:
        cells = zip(row.cells, data.columns, strict=True)
        values = [_plain(cell, one.kind, now_s) for cell, one in cells]
        writer.writerow([_harmless(row.key), *map(_harmless, values)])
    return out.getvalue()


def _harmless(value: str | float | None) -> str | float | None:
    """A text that a spreadsheet does not take for a formula, nor a terminal for an order."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text[:1] in {"=", "+", "-", "@"} else text


def _json(data: TableData, rows: list[TableRow], now_s: float) -> str:
    made = {
        "view": data.view,
        "at_s": data.at_s,
        "total": data.total,
        "of": data.of,
        "rows": [
            {
                "key": row.key,
                **{
                    _heading(one.name, one.kind): _nested(cell, one.kind, now_s)
                    for cell, one in zip(row.cells, data.columns, strict=True)
                },
            }
            for row in rows
        ],
    }
    return msgspec.json.format(msgspec.json.encode(made), indent=2).decode() + "\n"


def _text(data: TableData, rows: list[TableRow], now_s: float) -> str:
    heads = [clean(one.name) for one in data.columns]
    lines = [
        [text_of(cell, one.kind, now_s) for cell, one in zip(row.cells, data.columns, strict=True)]
        for row in rows
    ]
    widths = [min(WIDEST, max(map(width_of, column))) for column in zip(heads, *lines, strict=True)]
    sides = [right if is_figure(one.kind) else left for one in data.columns]
    made = [
        "  ".join(
            side(text, width) for side, text, width in zip(sides, line, widths, strict=True)
        ).rstrip()
        for line in (heads, *lines)
    ]
    left_out = data.total - len(rows)
    if left_out > 0:
        made.append(f"{left_out} more rows are not here")
    return "\n".join(made) + "\n"


def _heading(name: str, kind: str) -> str:
    """A moment is told as an age, and its column says so."""
    return {"since": f"{name}_age_s", "until": f"{name}_in_s"}.get(kind, name)


def _plain(cell: Cell, kind: str, now_s: float) -> str | float | None:
    if isinstance(cell, tuple):
        return ", ".join(holder(one, now_s) for one in cell)
    if cell is None or isinstance(cell, str):
        return cell
    return _aged(cell, kind, now_s)


def _nested(cell: Cell, kind: str, now_s: float) -> object:
    if isinstance(cell, tuple):
        return [
            {
                "who": one.who,
                "ref": one.ref,
                "state": one.state,
                "age_s": _aged(one.since_s, "since", now_s),
            }
            for one in cell
        ]
    return _plain(cell, kind, now_s)


def _aged(value: float, kind: str, now_s: float) -> float | None:
    match kind:
        case "since":
            value = now_s - value
        case "until":
            value = value - now_s
        case _:
            pass
    if isinstance(value, int):
        return value
    return round(value, 6) if math.isfinite(value) else None
