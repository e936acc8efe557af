"""A table of which only what is on the screen is here: the daemon sorts, filters and cuts.

The cursor stays on its row while others come and go. A line is made anew only when its text
changes, and only such lines are painted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from kvd.filters import KEY
from kvd.text import age, clean, counted
from kvd.wire.console import MAX_FILTERS, MAX_ROWS, Filter, Query, TableRow
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.draw.spans import columns as width_of
from tui.model import cells
from tui.model.columns import NamedRow, heading, places
from tui.model.snapshots import FRESH_S
from tui.widgets.canvas import NOT_HERE_YET, Cursored, console

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual import events

    from kvd.wire.console import Column
    from tui.draw.spans import Style
    from tui.model.columns import ComputedColumns
    from tui.model.rates import RowRates
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import TableData


GAP = 2
"""Blanks between two columns."""

MOVING = frozenset({"since", "until", "holders"})
"""Kinds whose text changes as time goes by."""

CAPS = {"text": 28, "state": 14, "ref": 20, "holders": 44}
"""How wide a column is at most before all have what they need; others are as wide as they are.

Of 100 columns: in a wider table sentences have more, before columns that matter less are shown.
"""

TIGHT = 12
"""The same for all of these where as many columns as possible are wanted."""


class Fit(msgspec.Struct, frozen=True):
    """``at`` are the columns shown, by their place in the table; ``hidden``: how many are not."""

    at: tuple[int, ...]
    widths: tuple[int, ...]
    hidden: int

    def column_under(self, x: int) -> int | None:
        """The column at this place of a line; None for none."""
        edge = 0
        for at, width in zip(self.at, self.widths, strict=True):
            if edge <= x < edge + width + GAP:
                return at
            edge += width + GAP
        return None


class ColumnRules(msgspec.Struct, frozen=True):
    """What a page says of a table's columns: ``first`` stay longest, ``never`` are not shown.

    ``narrow`` may be cut so that others have room. ``is_tight``: that is so of all of them.
    """

    first: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    is_tight: bool = False


def natural(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """How wide each column would like to be: its widest text, and its name."""
    widths = [width_of(heading(column)) for column in columns]
    for row in rows:
        for at, text in enumerate(row):
            if len(text) > widths[at]:
                widths[at] = width_of(text)
    return widths


def fit(
    columns: Sequence[Column], wishes: Sequence[int], width: int, rules: ColumnRules, shift: int = 0
) -> Fit:
    """The columns that go into ``width``, in the table's order.

    Those of ``rules.first`` are taken before others; the rest in the table's order. ``shift``
    leaves out so many after the first one, to look at those further right.
    """
    names = [column.name for column in columns]
    usable = [
        at
        for at, column in enumerate(columns)
        if column.kind != "depth" and column.name not in rules.never
    ]
    if shift and usable:
        usable = [usable[0], *usable[1 + min(shift, len(usable) - 2) :]]
    ranked = sorted(
        usable,
        key=lambda at: rules.first.index(names[at]) if names[at] in rules.first else len(names),
    )
    most = {kind: cap * max(100, width) // 100 for kind, cap in CAPS.items()}
    least = {at: _least(columns[at], wishes[at], rules, most) for at in usable}
    taken: list[int] = []
    room = width + GAP
    for at in ranked:
        need = least[at] + GAP
        if need <= room:
            taken.append(at)
            room -= need
        elif not taken:
            least[at] = max(1, width)
            taken.append(at)
            room = 0
    shown = tuple(sorted(taken))
    kinds = [column.kind for column in columns]
    caps = [min(wish, most.get(kind, wish)) for kind, wish in zip(kinds, wishes, strict=True)]
    room = _widen(shown, least, caps, room)
    _widen(shown, least, wishes, room)
    return Fit(shown, tuple(least[at] for at in shown), len(usable) - len(taken))


def _least(column: Column, wish: int, rules: ColumnRules, most: Mapping[str, int]) -> int:
    """What a column must have to be shown at all."""
    cap = most.get(column.kind, wish)
    is_tight = column.name in rules.narrow or (rules.is_tight and column.kind in CAPS)
    return max(1, min(wish, cap, TIGHT if is_tight else cap))


def _widen(taken: Sequence[int], widths: dict[int, int], wishes: Sequence[int], room: int) -> int:
    """Room that is left goes to those that have less than they wish, from the left; the rest."""
    for at in taken:
        more = min(room, wishes[at] - widths[at])
        if more > 0:
            widths[at] += more
            room -= more
    return room


HEAD_LINES = 2
"""The caption and the names of the columns."""
GUTTER = 2
"""For the cursor, which is a character, not a colour."""
RULES = 6
"""Columns of the rules at both ends of a caption, and between its words."""
WIDEST = 96
"""Columns of a terminal that one cell may take."""

CellLook = tuple[str, "Style"]
Painter = Callable[["NamedRow"], CellLook]


class _Cells(msgspec.Struct):
    """What is known of a row until it changes; ``texts`` has all its cells.

    ``line``: the row as it was last drawn, of texts and columns as they were then.
    """

    row: TableRow
    texts: list[CellLook]
    line: Line = ()
    fit: Fit | None = None


class WindowedTable(Cursored):
    """A window of one view of the daemon.

    ``asks`` is what to ask for, ``show`` paints the answer. ``rules`` say which columns matter
    most. Everything that an operator changes (place, sort, filters, opened nodes) is in ``asks``.

    ``computed`` adds columns, by which the daemon cannot sort: ``stands_for`` says by which of its
    own it shall do so instead. ``painters`` make text of cells by the name of their column; others
    look as their kind does. ``rates`` hear every new table, also while the screen stands still.
    """

    head_lines = HEAD_LINES

    def __init__(
        self,
        view: str,
        *,
        title: str = "",
        sort: str = "",
        rules: ColumnRules | None = None,
        computed: ComputedColumns | None = None,
        painters: Mapping[str, Painter] | None = None,
        stands_for: Mapping[str, str] | None = None,
        rates: Sequence[RowRates] = (),
    ) -> None:
        super().__init__(id=f"table-{view}")
        self.view = view
        self.title = title or view
        self.sort = sort
        self.filters: tuple[Filter, ...] = ()
        self.filter_text = ""
        self.only: tuple[Filter, ...] = ()
        """What the page leaves out by itself; the operator's filters come on top."""
        self.pinned = ""
        """What alone is asked for, as it was gone to and was not in sight; empty for nothing."""
        self.opened: tuple[int, ...] = ()
        """Nodes of the tree whose children are shown."""
        self.is_wide = False
        self.is_active = False
        """Whether keys move in this one; of a page with several tables only one is."""
        self.rules = rules if rules is not None else ColumnRules()
        self.source: TableData | None = None
        """What was shown last, as the daemon sent it."""
        self.data: TableData | None = None
        """The same with the columns that are made here."""
        self._computed = computed
        self._painters = painters if painters is not None else {}
        self._stands_for = stands_for if stands_for is not None else {}
        self._rates = tuple(rates)
        self._now_s = 0.0
        self.seen_ago_s = 0.0
        """How old the rows are."""
        self._key = ""
        self._is_following = False
        """Whether the cursor goes with its row: once it was moved there."""
        self._shift = 0
        self._known: dict[str, _Cells] = {}
        self._fit = Fit((), (), 0)
        self._fit_for: tuple[object, ...] = ()
        self._wishes: list[int] = []

    # ---- what to ask ------------------------------------------------------------------------

    @property
    @override
    def total(self) -> int:
        return self.data.total if self.data is not None else 0

    def asks(self) -> Query:
        """What to ask for: what is shown, and half a screen more, so that small steps are here."""
        half = max(1, self.page_rows // 2)
        filters = (*self.only, *self.filters)[:MAX_FILTERS]
        if self.pinned:
            kind, _, number = self.pinned.partition(":")
            is_room = kind == "room"
            filters = (
                Filter(kind, "is", float(number)) if is_room else Filter(KEY, "is", self.pinned),
            )
        return Query(
            self.view,
            first=self._first // half * half,
            limit=min(MAX_ROWS, self.page_rows + half),
            sort=self.sort,
            filters=filters,
            opened=self.opened,
        )

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the view, once they are known."""
        return self.data.columns if self.data is not None else ()

    def chosen(self) -> str:
        """The key of the row under the cursor; empty where there is none."""
        return self._key

    def row(self) -> TableRow | None:
        """The row under the cursor."""
        return self.data.rows.get(self._key) if self.data is not None else None

    def named_row(self) -> NamedRow | None:
        """The row under the cursor, by the names of its columns."""
        row = self.row()
        return NamedRow(row, places(self.columns), self._now_s) if row is not None else None

    # ---- showing ----------------------------------------------------------------------------

    def show(self, snapshot: DaemonSnapshot) -> None:
        """Paint what changed since the last time."""
        asked = self.asks()
        for rates in self._rates:
            rates.take(console(self).mirror.history.newest.table(asked))
        data = snapshot.table(asked)
        if data is not None and data is not self.source:
            self.source = data
            self.data = self._computed.extend(data) if self._computed is not None else data
            self._place()
        elif data is None and self.source is not None and self.source.slot.filters != asked.filters:
            self.source = self.data = None  # rows that nobody asks for, and no key is to be about
            self._key = ""
        # A window that was not asked for lately is as it was then, and says so.
        self.seen_ago_s = snapshot.now_s - self.data.at_s if self.data is not None else 0.0
        self._now_s = snapshot.now_s - (self.seen_ago_s if self.seen_ago_s > FRESH_S else 0.0)
        self.redraw()

    def _place(self) -> None:
        """Put the cursor where its row is now, and keep it and the window within the rows."""
        data = self.data
        assert data is not None
        if self._is_following and self._key in data.rows:
            was, self._cursor = self._cursor, data.slot.first + data.order.index(self._key)
            if self._cursor != was and not 0 <= self._cursor - self._first < self.page_rows:
                self._first = self._cursor - min(self.page_rows - 1, max(0, was - self._first))
        self._scroll()
        self._key = self._key_at(self._cursor)
        self._known = {key: row for key, row in self._known.items() if key in data.rows}

    def _key_at(self, index: int) -> str:
        data = self.data
        place = index - data.slot.first if data is not None else -1
        return data.order[place] if data is not None and 0 <= place < len(data.order) else ""

    @override
    def make_lines(self, width: int, height: int) -> Sequence[Line]:
        data = self.data
        if data is None:
            is_frozen = console(self).mirror.history.is_frozen
            why = "frozen: not in this picture" if is_frozen else NOT_HERE_YET
            return [self._caption((why,), width)]
        shown = [
            (index, self._key_at(index))
            for index in range(self._first, min(self._first + self.page_rows, data.total))
        ]
        texts = {key: self._texts(data.rows[key]) for _, key in shown if key}
        self._lay_out(list(texts.values()), width)
        lines = [self._caption(self._place_words(data), width)]
        if self.head_lines == HEAD_LINES:
            lines.append(self._names(data))
        lines += [self._line(index, key, texts.get(key)) for index, key in shown]
        if not data.total:
            why = data.trouble or ("nothing passes the filter" if self.filters else "none")
            lines.append((Styled("  "), cleaned(why, "bad" if data.trouble else "dim")))
        return lines

    def _texts(self, row: TableRow) -> list[CellLook]:
        """The cells of a row as text; those that time does not change are made once."""
        known = self._known.get(row.key)
        if known is None or known.row is not row:
            texts = [self._cell(row, at) for at in range(len(row.cells))]
            self._known[row.key] = _Cells(row, texts)
            return texts
        for at, column in enumerate(self.columns):
            if column.kind in MOVING and (moved := self._cell(row, at)) != known.texts[at]:
                known.texts[at], known.fit = moved, None
        return known.texts

    def _cell(self, row: TableRow, at: int) -> CellLook:
        column = self.columns[at]
        paint = self._painters.get(column.name)
        if paint is not None:
            return paint(NamedRow(row, places(self.columns), self._now_s))
        text, style = cells.show(row.cells[at], column.kind, self._now_s, WIDEST)
        if at and self.columns[at - 1].kind == "depth":
            text = self.indented(row, text)
        return text, style

    def indented(self, row: TableRow, text: str) -> str:
        """The text of the column after ``depth``, as deep as it is."""
        return text

    def _lay_out(self, texts: Sequence[Sequence[CellLook]], width: int) -> None:
        """Fit the columns anew when something is wider than it was, or the room is another."""
        rows = [[text for text, _ in row] for row in texts]
        wishes = natural(self.columns, rows)
        slot = self.data.slot if self.data is not None else None
        key = (slot, width, self.columns, self.is_wide, self._shift, self.rules)
        if key == self._fit_for:
            if all(wish <= was for wish, was in zip(wishes, self._wishes, strict=True)):
                return
            wishes = [max(pair) for pair in zip(wishes, self._wishes, strict=True)]
        self._fit_for, self._wishes = key, wishes
        marked = [
            wish + (2 if column.name == self.sort.removeprefix("-") else 0)
            for wish, column in zip(wishes, self.columns, strict=True)
        ]
        rules = msgspec.structs.replace(self.rules, is_tight=self.is_wide)
        self._fit = fit(self.columns, marked, width - GUTTER, rules, self._shift)

    # ---- lines ------------------------------------------------------------------------------

    def _place_words(self, data: TableData) -> tuple[str, ...]:
        """Which rows these are, of how many, how old, and in what order: what matters first."""
        last = min(self._first + self.page_rows, data.total)
        words = [f"{min(self._first + 1, last)}-{last} of {data.total}"]
        if self.seen_ago_s > FRESH_S:
            words.append(f"seen {age(self.seen_ago_s)} ago")
        if data.of != data.total:
            words[0] += f" (of {data.of})"
        if self.sort:
            words.append(f"by {self.sort}")
        if self._fit.hidden and self.head_lines == HEAD_LINES:
            words.append(f"{counted(self._fit.hidden, 'column')} hidden")
        return tuple(words)

    def _caption(self, words: Sequence[str], width: int) -> Line:
        title: Line = (cleaned(self.title, "head" if self.is_active else "dim"),)
        if self.pinned:
            title = (cleaned(f"only {self.pinned}, Esc: all", "key"),)
        elif self.filters:
            title = (*title, Styled(" /", "key"), cleaned(self.filter_text, "key"))
        while len(words) > 1 and len(" · ".join(words)) + spans.width_of(title) + RULES > width:
            words = words[:-1]
        tail = (cleaned(" · ".join(words), "dim"),)
        return spans.ruled(title, tail, width, is_lit=self.is_active and self.has_keys)

    def _names(self, data: TableData) -> Line:
        made = [Styled(" " * GUTTER)]
        for at, width in zip(self._fit.at, self._fit.widths, strict=True):
            column = data.columns[at]
            mark = {f"-{column.name}": " ↓", column.name: " ↑"}.get(self.sort, "")
            name = clean(heading(column)) + mark
            pad = spans.right if column.kind in cells.FIGURES else spans.left
            made.append(Styled(pad(name, width), "key" if mark else "head"))
            made.append(Styled(" " * GAP))
        return spans.merged(made[:-1])

    def _line(self, index: int, key: str, texts: Sequence[CellLook] | None) -> Line:
        is_chosen = index == self._cursor and self.is_active
        mark = "▸ " if is_chosen else "· " if index == self._cursor else "  "
        if texts is None:
            return (Styled(mark, "key"), Styled("…", "dim"))
        made = (Styled(mark, "key"), *self._cells(key, texts))
        if not is_chosen:
            return spans.merged(made)
        return spans.pointed_at(spans.fit(made, self.size.width))

    def _cells(self, key: str, texts: Sequence[CellLook]) -> Line:
        """A row without its cursor."""
        known = self._known[key]
        if known.fit is self._fit:
            return known.line
        columns, gap, made = self.columns, "", list[Styled]()
        states = [texts[at][1] for at in self._fit.at if columns[at].kind == "state"]
        tint: Style = states[0] if states and states[0] in {"bad", "warn"} else "plain"
        for at, width in zip(self._fit.at, self._fit.widths, strict=True):
            text, style = texts[at]
            pad = spans.right if columns[at].kind in cells.FIGURES else spans.left
            if style == "plain":
                made.append(Styled(gap + pad(text, width), tint))
            else:
                made += [Styled(gap), Styled(pad(text, width), style)]
            gap = " " * GAP
        known.line, known.fit = spans.merged(made), self._fit
        return known.line

    # ---- moving -----------------------------------------------------------------------------

    @override
    def move(self, rows: int) -> None:
        self._go(self._cursor + rows)

    @override
    def move_to_start(self) -> None:
        """To the first row; the cursor then stays at the top, whatever comes there."""
        self._go(0)
        self._is_following = False

    def _go(self, index: int) -> None:
        self._cursor = index
        self._scroll()
        self._key = self._key_at(self._cursor)
        self._is_following = True
        self.redraw()
        self.post_message(self.Moved(self))

    @override
    def shift(self, columns: int) -> None:
        """Look at the columns further right, or left again."""
        most = max(0, len(self.columns) - 2)
        self._shift = max(0, min(self._shift + columns, most))
        if columns > 0 and not self._fit.hidden:
            self._shift = max(0, self._shift - columns)
        self.redraw()

    def seek(self, key: str) -> bool:
        """Put the cursor on this row, if it is here."""
        data = self.data
        if data is None or key not in data.rows:
            return False
        self._go(data.slot.first + data.order.index(key))
        return True

    def pin(self, ref: str) -> bool:
        """Ask for this row alone, or for all again where it is empty; whether that is another."""
        if ref == self.pinned:
            return False
        self.pinned = ref
        self.move_to_start()
        return True

    def restrict(self, only: tuple[Filter, ...], title: str) -> None:
        """Show only these, from the top."""
        self.title = title
        if only != self.only:
            self.only = only
            self._first = self._cursor = 0
            self._is_following = False

    def set_filters(self, text: str, filters: tuple[Filter, ...]) -> None:
        """Show only what passes, from the top; ``text`` is how it was written."""
        self.filter_text, self.filters = text, filters
        self.move_to_start()

    def set_sort(self, sort: str) -> None:
        """By a column, ``-column`` for the largest first, empty for the view's own order."""
        self.sort = sort
        self.move_to_start()

    def set_wide(self, *, is_wide: bool) -> None:
        """All columns, or those that fit."""
        self.is_wide = is_wide
        self._shift = 0
        self.redraw()

    def sort_next(self) -> None:
        """By the daemon's next column, figures from the largest; at last in its own order."""
        columns = self.source.columns if self.source is not None else ()
        names = ["", *(column.name for column in columns if column.kind != "depth")]
        now = self.sort.removeprefix("-")
        at = names.index(now) if now in names else 0
        self.sort_by(names[(at + 1) % len(names)])

    def sort_by_letter(self, letter: str) -> bool:
        """By the next column whose heading begins with this letter; whether there is any."""
        shown = [self.columns[at] for at in self._fit.at] or self.columns
        names = [column.name for column in shown if heading(column).startswith(letter)]
        told = [self._stands_for.get(name, name) for name in names]
        now = self.sort.removeprefix("-")
        if names:
            is_more = now in told and len(set(told)) > 1
            self.sort_by(names[(told.index(now) + 1) % len(names)] if is_more else names[0])
        return bool(names)

    def sort_by(self, name: str) -> None:
        """By this column, the other way round if it is sorted by it; figures from the largest."""
        name = self._stands_for.get(name, name)
        kind = next((column.kind for column in self.columns if column.name == name), "")
        is_falling = kind in cells.FIGURES - {"since", "until"}
        if self.sort.removeprefix("-") == name:
            is_falling = not self.sort.startswith("-")
        self.set_sort(f"-{name}" if name and is_falling else name)

    # ---- the mouse --------------------------------------------------------------------------

    def row_at(self, y: int) -> int:
        """Which row is on this line; under 0 for none."""
        return self._first + y - self.head_lines if y >= self.head_lines else -1

    def on_click(self, event: events.Click) -> None:
        """The name of a column sorts, a row is chosen, and opened by the second click."""
        if event.y == HEAD_LINES - 1 < self.head_lines:
            at = self._fit.column_under(event.x - GUTTER)
            if at is not None:
                self.sort_by(self.columns[at].name)
            return
        index = self.row_at(event.y)
        if index >= 0 and self._key_at(index):
            self._go(index)
            if event.chain == 2:
                self.post_message(self.Opened(self))

    @override
    def on_resize(self) -> None:
        # Cells may be made for the room that there is.
        self._known.clear()
        super().on_resize()
