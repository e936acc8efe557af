"""The filter language of tables: what an operator types to see less, and what that means of a row.

Words with conditions on columns, all of which must hold:

    state:held      the column has this in it, in any case; * at either end is the same
    room=12         the column is this;  != is not
    age>5s          more than; < >= <= too. Of a moment: how long ago, or how long from now
    "two words"     text with blanks; also after a column
    lingering       any text of the row has this in it
    !state:held     the opposite of what follows

``age`` is the first column that tells since when, ``left`` the first that tells until when; a
column may be named by its beginning. ``>=`` is ``over`` the next smaller number: the wire has
``over`` and ``under`` only.

``parse`` makes conditions of a text. ``cell_passes`` and ``row_passes`` say whether they hold: the
daemon asks that of the objects of a table, a console of the rows that it has. Both by the same
words, so that a page that is filtered here until the daemon answers does not change when it does.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.console import MAX_FILTERS, Filter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import Cell, Column, TableRow

KEY = "key"
"""In place of a column: what a row is opened by, as ``lease:7``; nobody types that."""
MAX_CHARS = 256
"""Of one value: what the wire takes."""

REFS = frozenset({"lease", "node", "client", "peer", "receive", "send", "pool", "page", "room"})
"""``lease:7`` without a column ``lease`` is what it looks like: text of a row."""

TEXT_KINDS = frozenset({"text", "state", "ref"})
WORD_KINDS = TEXT_KINDS | {"holders"}
"""A condition without a column looks at columns of these."""
MOMENTS = {"age": "since", "left": "until"}
OPPOSITE = {"has": "has-not", "has-not": "has", "is": "is-not", "is-not": "is"}
OPERATORS = {":": "has", "=": "is", "!=": "is-not"}
TURNED = {">": "<=", "<=": ">", "<": ">=", ">=": "<"}

TIMES_S = {"": 1.0, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
SIZES = {
    "": 1.0,
    "b": 1.0,
    **{
        f"{letter}{end}": 1024.0**power
        for power, letter in enumerate("kmgt", start=1)
        for end in ("", "b", "ib")
    },
}
UNITS = {"since": TIMES_S, "until": TIMES_S, "seconds": TIMES_S, "bytes": SIZES, "ms": TIMES_S}

_TERM = re.compile(
    r"""(?P<no>!?)
        (?:(?P<name>[\w-]+)(?P<operator>!=|>=|<=|:|=|>|<))?
        (?:"(?P<quoted>[^"]*)"(?=\s|$)|(?P<plain>[^\s"]*)(?=\s|$))""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))\s*([a-z]*)", re.IGNORECASE)


class SyntaxFlaw(msgspec.Struct, frozen=True):
    """What is wrong with a text, and at which character, from 0."""

    what: str
    at: int


def parse(text: str, columns: Sequence[Column]) -> tuple[Filter, ...] | SyntaxFlaw:
    """The conditions of ``text`` on a table with ``columns``; none for an empty text."""
    filters: list[Filter] = []
    at = 0
    while True:
        at += len(text[at:]) - len(text[at:].lstrip())
        if at >= len(text):
            break
        term = _TERM.match(text, at)
        if term is None:
            return SyntaxFlaw('a " without its end, or in the middle of a word', text.find('"', at))
        condition = _condition(term, columns)
        if isinstance(condition, SyntaxFlaw):
            return condition
        filters.append(condition)
        at = term.end()
    if len(filters) > MAX_FILTERS:
        return SyntaxFlaw(f"{len(filters)} conditions, at most {MAX_FILTERS} are asked for", 0)
    return tuple(filters)


def _condition(term: re.Match[str], columns: Sequence[Column]) -> Filter | SyntaxFlaw:
    name, operator = term["name"], term["operator"]
    value = term["quoted"] if term["quoted"] is not None else term["plain"].strip("*")
    if len(value) > MAX_CHARS:
        what = f"a text of {len(value)} characters, at most {MAX_CHARS} are looked for"
        return SyntaxFlaw(what, term.start())
    if not name:
        return _anywhere(term, value)
    column = _column(name, columns)
    if column is None and name in REFS and operator == ":" and value:
        return _anywhere(term, f"{name}:{value}")
    if column is None:
        return SyntaxFlaw(_no_column(name, columns), term.start("name"))
    if not value:
        return SyntaxFlaw(f"expected a value after {name}{operator}", term.end())
    judge = _equal if operator in OPERATORS else _compared
    return judge(term, column, value)


def _anywhere(term: re.Match[str], value: str) -> Filter | SyntaxFlaw:
    """A condition on any text of the row."""
    if not value:
        return SyntaxFlaw("expected a word", term.end())
    return Filter("", "has-not" if term["no"] else "has", value)


def _column(name: str, columns: Sequence[Column]) -> Column | None:
    """By its name, by what it tells, or by its beginning if only one begins so."""
    by_name = [column for column in columns if column.name == name]
    by_kind = [column for column in columns if column.kind == MOMENTS.get(name, "")]
    if by_name or by_kind:
        return (by_name or by_kind)[0]
    alike = [column for column in columns if column.name.startswith(name)]
    return alike[0] if len(alike) == 1 else None


def _no_column(name: str, columns: Sequence[Column]) -> str:
    alike = [column.name for column in columns if column.name.startswith(name)]
    if alike:
        return f"{name!r} may be {' or '.join(alike)}"
    return f"there is no column {name!r}: {' '.join(column.name for column in columns)}"


def _equal(term: re.Match[str], column: Column, value: str) -> Filter | SyntaxFlaw:
    """``:``, ``=`` and ``!=``. A number is compared as a number, by ``=`` and ``!=``."""
    test = OPERATORS[term["operator"]]
    if term["no"]:
        test = OPPOSITE[test]
    if column.kind in TEXT_KINDS or column.kind == "holders" or test.startswith("has"):
        return Filter(column.name, test, value)
    number = quantity(value, column.kind)
    if number is None:
        return SyntaxFlaw(
            f"{column.name} is a number: {_example(column, '=')}", term.start("plain")
        )
    return Filter(column.name, test, number)


def _compared(term: re.Match[str], column: Column, value: str) -> Filter | SyntaxFlaw:
    """``>`` and the like, turned round by a ``!``."""
    if column.kind in TEXT_KINDS:
        return SyntaxFlaw(
            f"{column.name} is text: {column.name}:{value} or {column.name}={value}",
            term.start("operator"),
        )
    number = quantity(value, column.kind)
    if number is None:
        return SyntaxFlaw(
            f"expected a number: {_example(column, term['operator'])}",
            term.start("plain") if term["quoted"] is None else term.start("quoted"),
        )
    match TURNED[term["operator"]] if term["no"] else term["operator"]:
        case ">":
            return Filter(column.name, "over", number)
        case ">=":
            return Filter(column.name, "over", math.nextafter(number, -math.inf))
        case "<":
            return Filter(column.name, "under", number)
        case _:
            return Filter(column.name, "under", math.nextafter(number, math.inf))


def quantity(text: str, kind: str) -> float | None:
    """A number with the units of a kind: 5s 2m 1h, 10MiB 4k (bytes), 4k (others), 80%; or None.

    SnapshotHistory and seconds come out in s, bytes in B, ``ms`` in ms, shares from 0 to 1.
    """
    if kind == "share" and text.endswith("%"):
        percent = quantity(text[:-1], "count")
        return percent / 100 if percent is not None else None
    found = _NUMBER.fullmatch(text)
    units = UNITS.get(kind, COUNTS)
    if found is None or found[2].lower() not in units:
        return None
    unit = found[2].lower()
    value = float(found[1]) * units[unit]
    if not math.isfinite(value):
        return None
    return value * 1000 if kind == "ms" and unit else value


def _example(column: Column, operator: str) -> str:
    value = {"bytes": "10MiB", "share": "80%", "ms": "5ms", "tokens": "4k"}.get(column.kind)
    value = value or ("5s" if column.kind in UNITS else "10")
    return f"{column.name}{operator}{value}"


# ---- what a condition means ----------------------------------------------------------------------


def row_passes(condition: Filter, row: TableRow, columns: Sequence[Column], now_s: float) -> bool:
    """Whether one condition is true of a row at ``now_s`` on the daemon's clock.

    False where there is no such column: the daemon refuses to look for one.
    """
    if not condition.column:
        wanted = str(condition.value).casefold()
        texts = [
            text
            for column, cell in zip(columns, row.cells, strict=True)
            if cell and column.kind in WORD_KINDS
            for text in texts_of(cell)
        ]
        return any(wanted in text for text in texts) != condition.test.endswith("-not")
    if condition.column == KEY:
        return cell_passes(condition, row.key, "ref", now_s)
    for column, cell in zip(columns, row.cells, strict=True):
        if column.name == condition.column:
            return cell_passes(condition, cell, column.kind, now_s)
    return False


def cell_passes(condition: Filter, cell: Cell, kind: str, now_s: float) -> bool:
    """Whether a condition is true of one cell of its column, which is of this kind."""
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


def texts_of(cell: Cell) -> list[str]:
    """What can be looked for in a cell, in lower case."""
    match cell:
        case None:
            return []
        case tuple():
            return [
                text
                for holder in cell
                for text in (holder.who.casefold(), holder.ref, holder.state)
            ]
        case _:
            return [str(cell).casefold()]


def rank(cell: Cell) -> str | float | None:
    """A cell as something that compares with the others of its column; None is to come last."""
    match cell:
        case None:
            return None
        case str():
            return cell.casefold()
        case tuple():
            return float(len(cell))
        case _:
            return cell


def _figure(cell: Cell, kind: str, now_s: float) -> float | None:
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
    return any(wanted in text for text in texts_of(cell))


def _is(cell: Cell, value: str | float) -> bool:
    if isinstance(cell, str) or isinstance(value, str):
        return str(cell if cell is not None else "").casefold() == str(value).casefold()
    return len(cell) == value if isinstance(cell, tuple) else cell == value
