"""A table of which only what is on the screen is here: the daemon sorts, filters and cuts.

The cursor stays on its row while others come and go. A line is made anew only when its text
changes, and only such lines are painted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
from textual.message import Message

from kvd.text import clean, counted
from kvd.wire.console import MAX_ROWS, Filter, Query
from tui.draw import spans
from tui.draw.spans import Line, Span
from tui.model import cells
from tui.widgets import fitting
from tui.widgets.canvas import Canvas
from tui.widgets.reach import missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events

    from kvd.wire.console import Column, TableRow
    from tui.draw.spans import Style
    from tui.model.moments import Moment
    from tui.model.sheets import Sheet

HEAD_LINES = 2
"""The caption and the names of the columns."""
GUTTER = 2
"""For the cursor and the tag, which are characters, not colours."""
WIDEST = 96
"""Columns of a terminal that one cell may take."""

Shown = tuple[str, "Style"]


class _Cells(NamedTuple):
    """What is known of a row until it changes; ``texts`` has all its cells."""

    row: TableRow
    texts: list[Shown]


class LineTable(Canvas):
    """A window of one view of the daemon.

    ``asks`` is what to ask for, ``show`` paints the answer. ``rules`` say which columns matter
    most. Everything that an operator changes (place, sort, filters, opened nodes) is in ``asks``.
    """

    class Moved(Message):
        """The cursor is on another row, or what to ask for has changed."""

        def __init__(self, table: LineTable) -> None:
            super().__init__()
            self.table = table

    class Opened(Moved):
        """A row was clicked twice."""

    def __init__(
        self,
        view: str,
        *,
        title: str = "",
        sort: str = "",
        rules: fitting.Rules | None = None,
        opened: tuple[int, ...] = (),
    ) -> None:
        super().__init__(id=f"table-{view}")
        self.view = view
        self.title = title or view
        self.sort = sort
        self.filters: tuple[Filter, ...] = ()
        self.filter_text = ""
        self.opened = opened
        self.tagged: set[str] = set()
        self.is_wide = False
        self.is_active = False
        """Whether keys move in this one; of a page with several tables only one is."""
        self.rules = rules if rules is not None else fitting.Rules()
        self._sheet: Sheet | None = None
        self._now_s = 0.0
        self._first = 0
        """The row at the top."""
        self._cursor = 0
        self._key = ""
        self._is_following = False
        """Whether the cursor goes with its row: once it was moved there."""
        self._shift = 0
        self._known: dict[str, _Cells] = {}
        self._fit = fitting.Fit((), (), 0)
        self._fit_for: tuple[object, ...] = ()
        self._wishes: list[int] = []

    # ---- what to ask ------------------------------------------------------------------------

    @property
    def page_rows(self) -> int:
        """Rows that there is room for."""
        return max(1, self.size.height - HEAD_LINES)

    def asks(self) -> Query:
        """What to ask for: what is shown, and half a screen more, so that small steps are here."""
        half = max(1, self.page_rows // 2)
        return Query(
            self.view,
            first=self._first // half * half,
            limit=min(MAX_ROWS, self.page_rows + half),
            sort=self.sort,
            filters=self.filters,
            opened=self.opened,
        )

    @property
    def sheet(self) -> Sheet | None:
        """What was shown last."""
        return self._sheet

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns of the view, once they are known."""
        return self._sheet.columns if self._sheet is not None else ()

    def chosen(self) -> str:
        """The key of the row under the cursor; empty where there is none."""
        return self._key

    def row(self) -> TableRow | None:
        """The row under the cursor."""
        return self._sheet.rows.get(self._key) if self._sheet is not None else None

    # ---- showing ----------------------------------------------------------------------------

    def show(self, moment: Moment) -> None:
        """Paint what changed since the last time."""
        self._now_s = moment.now_s
        sheet = moment.sheet(self.asks())
        if sheet is not None and sheet is not self._sheet:
            self._sheet = sheet
            self._place()
        self.redraw()

    def redraw(self) -> None:
        """Make every line, and have those painted that differ from what is there."""
        if not self.is_attached or not self.size.width:
            return
        self.paint(self._make())

    def _place(self) -> None:
        """Put the cursor where its row is now, and keep it and the window within the rows."""
        sheet = self._sheet
        assert sheet is not None
        if self._is_following and self._key in sheet.rows:
            was, self._cursor = self._cursor, sheet.slot.first + sheet.order.index(self._key)
            if self._cursor != was and not 0 <= self._cursor - self._first < self.page_rows:
                self._first = self._cursor - min(self.page_rows - 1, max(0, was - self._first))
        self._cursor = max(0, min(self._cursor, sheet.total - 1))
        self._scroll()
        self._key = self._key_at(self._cursor)
        self._known = {key: one for key, one in self._known.items() if key in sheet.rows}

    def _scroll(self) -> None:
        """Move the window so that the cursor is in it, and no further than the last row."""
        total = self._sheet.total if self._sheet is not None else 0
        rows = self.page_rows
        self._first = max(self._cursor - rows + 1, min(self._first, self._cursor))
        self._first = max(0, min(self._first, total - rows))

    def _key_at(self, index: int) -> str:
        sheet = self._sheet
        place = index - sheet.slot.first if sheet is not None else -1
        return sheet.order[place] if sheet is not None and 0 <= place < len(sheet.order) else ""

    def _make(self) -> list[Line]:
        sheet, width = self._sheet, self.size.width
        if sheet is None:
            return [self._caption(missing(self), width)]
        shown = [
            (index, self._key_at(index))
            for index in range(self._first, min(self._first + self.page_rows, sheet.total))
        ]
        texts = {key: self._texts(sheet.rows[key]) for _, key in shown if key}
        self._lay_out(list(texts.values()), width)
        lines = [self._caption(self._place_words(sheet), width), self._names(sheet)]
        for index, key in shown:
            lines.append(self._line(index, key, texts.get(key)))
        if not sheet.total:
            why = sheet.trouble or ("nothing passes the filter" if self.filters else "none")
            lines.append((Span("  "), spans.said(why, "bad" if sheet.trouble else "dim")))
        return lines

    def _texts(self, row: TableRow) -> list[Shown]:
        """The cells of a row as text; those that time does not change are made once."""
        known = self._known.get(row.key)
        if known is None or known.row is not row:
            texts = [self._cell(row, at) for at in range(len(row.cells))]
            self._known[row.key] = _Cells(row, texts)
            return texts
        for at, column in enumerate(self.columns):
            if column.kind in fitting.MOVING:
                known.texts[at] = self._cell(row, at)
        return known.texts

    def _cell(self, row: TableRow, at: int) -> Shown:
        column = self.columns[at]
        text, style = cells.show(row.cells[at], column.kind, self._now_s, WIDEST)
        if at and self.columns[at - 1].kind == "depth":
            text = self.indented(row, text)
        return text, style

    def indented(self, row: TableRow, text: str) -> str:
        """The text of the column after ``depth``: as deep as it is, opened or closed."""
        depth = next(
            (
                cell
                for cell, column in zip(row.cells, self.columns, strict=True)
                if column.kind == "depth"
            ),
            0,
        )
        number = row.key.partition(":")[2]
        mark = "▾" if number.isdigit() and int(number) in self.opened else "▸"
        return f"{'  ' * int(depth) if isinstance(depth, int | float) else ''}{mark} {text}"

    def _lay_out(self, texts: Sequence[Sequence[Shown]], width: int) -> None:
        """Fit the columns anew when something is wider than it was, or the room is another."""
        rows = [[text for text, _ in row] for row in texts]
        wishes = fitting.natural(self.columns, rows)
        slot = self._sheet.slot if self._sheet is not None else None
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
        self._fit = fitting.fit(self.columns, marked, width - GUTTER, rules, self._shift)

    # ---- lines ------------------------------------------------------------------------------

    def _place_words(self, sheet: Sheet) -> str:
        """Which rows these are, of how many, and in what order."""
        last = min(self._first + self.page_rows, sheet.total)
        words = [f"{min(self._first + 1, last)}-{last} of {sheet.total}"]
        if sheet.of != sheet.total:
            words[0] += f" (of {sheet.of})"
        if self.sort:
            words.append(f"by {self.sort}")
        if self.tagged:
            words.append(f"{len(self.tagged)} tagged")
        if self._fit.hidden:
            words.append(f"{counted(self._fit.hidden, 'column')} hidden")
        if sheet.note:
            words.append(sheet.note)
        return " · ".join(words)

    def _caption(self, words: str, width: int) -> Line:
        title: tuple[Span, ...] = (Span("─ ", "border"), spans.said(self.title, "head"))
        if self.filters:
            title = (*title, Span(" /", "key"), spans.said(self.filter_text, "key"))
        tail = (spans.said(words, "dim"), Span(" ─", "border"))
        return spans.spread(title, tail, width, Span("─", "border"))

    def _names(self, sheet: Sheet) -> Line:
        made = [Span(" " * GUTTER)]
        for at, width in zip(self._fit.at, self._fit.widths, strict=True):
            column = sheet.columns[at]
            mark = {f"-{column.name}": " ↓", column.name: " ↑"}.get(self.sort, "")
            name = clean(column.name) + mark
            pad = spans.right if column.kind in cells.FIGURES else spans.left
            made.append(Span(pad(name, width), "key" if mark else "head"))
            made.append(Span(" " * fitting.GAP))
        return spans.merged(made[:-1])

    def _line(self, index: int, key: str, texts: Sequence[Shown] | None) -> Line:
        is_chosen = index == self._cursor and self.is_active
        mark = ("▸" if is_chosen else "·" if index == self._cursor else " ") + (
            "*" if key in self.tagged else " "
        )
        if texts is None:
            return (Span(mark, "key"), Span("…", "dim"))
        columns, gap = self.columns, ""
        made = [Span(mark, "key")]
        for at, width in zip(self._fit.at, self._fit.widths, strict=True):
            text, style = texts[at]
            pad = spans.right if columns[at].kind in cells.FIGURES else spans.left
            if style == "plain":
                made.append(Span(gap + pad(text, width)))
            else:
                made += [Span(gap), Span(pad(text, width), style)]
            gap = " " * fitting.GAP
        if not is_chosen:
            return spans.merged(made)
        return tuple(one._replace(under="cursor") for one in spans.fit(made, self.size.width))

    # ---- moving -----------------------------------------------------------------------------

    def move(self, rows: int) -> None:
        """Move the cursor; it stops at both ends."""
        self._go(self._cursor + rows)

    def move_to_end(self) -> None:
        """To the last row."""
        self._go(self._sheet.total - 1 if self._sheet is not None else 0)

    def move_to_start(self) -> None:
        """To the first row; the cursor then stays at the top, whatever comes there."""
        self._go(0)
        self._is_following = False

    def _go(self, index: int) -> None:
        total = self._sheet.total if self._sheet is not None else 0
        self._cursor = max(0, min(index, total - 1))
        self._key = self._key_at(self._cursor)
        self._is_following = True
        self._scroll()
        self._touch()

    def shift(self, columns: int) -> None:
        """Look at the columns further right, or left again."""
        most = max(0, len(self.columns) - 2)
        self._shift = max(0, min(self._shift + columns, most))
        if columns > 0 and not self._fit.hidden:
            self._shift = max(0, self._shift - columns)
        self.redraw()

    def seek(self, key: str) -> bool:
        """Put the cursor on this row, if it is here."""
        sheet = self._sheet
        if sheet is None or key not in sheet.rows:
            return False
        self._go(sheet.slot.first + sheet.order.index(key))
        return True

    def tag(self) -> None:
        """Tag the row, or take its tag off; then one row down."""
        if self._key:
            self.tagged ^= {self._key}
            self.move(1)

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
        """By the next column, figures from the largest; after the last one the view's own order."""
        names = ["", *(column.name for column in self.columns if column.kind != "depth")]
        at = names.index(self.sort.removeprefix("-")) if self.sort.lstrip("-") in names else 0
        self.sort_by(names[(at + 1) % len(names)])

    def sort_by(self, name: str) -> None:
        """By this column, the other way round if it is sorted by it; figures from the largest."""
        kind = next((column.kind for column in self.columns if column.name == name), "")
        falling = f"-{name}" if name else ""
        if self.sort.removeprefix("-") == name:
            self.reverse()
            return
        self.set_sort(falling if kind in cells.FIGURES - {"since", "until"} else name)

    def reverse(self) -> None:
        """Sort the other way round."""
        if self.sort:
            self.set_sort(self.sort[1:] if self.sort.startswith("-") else f"-{self.sort}")

    def _touch(self) -> None:
        self.redraw()
        self.post_message(self.Moved(self))

    # ---- the mouse --------------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        """The name of a column sorts, a row is chosen, and opened by the second click."""
        if event.y == HEAD_LINES - 1:
            at = self._fit.column_under(event.x - GUTTER)
            if at is not None:
                self.sort_by(self.columns[at].name)
            return
        index = self._first + event.y - HEAD_LINES
        if event.y >= HEAD_LINES and self._key_at(index):
            self._go(index)
            if event.chain == 2:
                self.post_message(self.Opened(self))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Three rows down."""
        event.stop()
        self.move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Three rows up."""
        event.stop()
        self.move(-3)
