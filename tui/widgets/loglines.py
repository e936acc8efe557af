"""Lines of a log, the newest at the bottom: it follows, or stays where it was scrolled to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

from kvd.text import counted
from tui.draw import spans
from tui.draw.spans import Line, Span, said
from tui.model import cells, logbook
from tui.widgets.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events

    from tui.model.logbook import Entry

HEAD_LINES = 1
AGE_COLUMNS = 7
CLOCK_COLUMNS = 11
KIND_COLUMNS = 17
MAX_WORDS = 512
"""Lines that are kept in words: more than any terminal shows."""


class LogLines(Canvas):
    """``show`` gets all lines there are; only those on the screen are put into words."""

    class Opened(Message):
        """A line was clicked twice."""

    def __init__(self) -> None:
        super().__init__(id="log")
        self.is_following = True
        """Whether the cursor stays on the newest line."""
        self.words = ""
        """What the head says of where the lines come from."""
        self._entries: Sequence[Entry] = ()
        self._now_s = 0.0
        self._first = 0
        self._cursor = 0
        self._key = ""
        self._sought = ""
        self._known: dict[str, tuple[Entry, logbook.Line]] = {}

    @property
    def page_rows(self) -> int:
        """Lines that there is room for."""
        return max(1, self.size.height - HEAD_LINES)

    @property
    def entry(self) -> Entry | None:
        """What is under the cursor."""
        return self._entries[self._cursor] if self._cursor < len(self._entries) else None

    @property
    def entries(self) -> Sequence[Entry]:
        """All lines."""
        return self._entries

    # ---- showing ----------------------------------------------------------------------------

    def show(self, entries: Sequence[Entry], now_s: float) -> None:
        """Show these; the cursor stays on its line, or on the newest one."""
        self._entries, self._now_s = entries, now_s
        self._place()
        self.redraw()

    def _place(self) -> None:
        wanted = self._sought or ("" if self.is_following else self._key)
        at = self._index(wanted) if wanted else None
        last = max(0, len(self._entries) - 1)
        if self._sought and at is not None:
            self._sought, self.is_following = "", False
        if at is not None:
            self._first += at - self._cursor
            self._cursor = at
        elif self.is_following:
            self._cursor = last
        self._settle()

    def _index(self, key: str) -> int | None:
        return next((at for at, one in enumerate(self._entries) if one.key == key), None)

    def _settle(self) -> None:
        """Keep the cursor on a line and the window around it."""
        total, rows = len(self._entries), self.page_rows
        self._cursor = max(0, min(self._cursor, total - 1))
        self._first = max(self._cursor - rows + 1, min(self._first, self._cursor))
        self._first = max(0, min(self._first, total - rows))
        self._key = self.entry.key if self.entry is not None else ""

    def redraw(self) -> None:
        """Make the lines on the screen anew."""
        if not self.is_attached or not self.size.width:
            return
        width = self.size.width
        shown = self._entries[self._first : self._first + self.page_rows]
        lines = [self._head(width)]
        for at, entry in enumerate(shown, start=self._first):
            lines.append(self._line(entry, width, is_chosen=at == self._cursor))
        if not shown:
            lines.append(spans.line("  nothing has happened that is asked for here", "dim"))
        self.paint(lines)

    def _head(self, width: int) -> Line:
        below = len(self._entries) - 1 - self._cursor
        state = "following" if self.is_following else f"{below} newer below"
        at_left = (
            Span("─ ", "border"),
            Span("events", "head"),
            said(f" {self.words}" if self.words else "", "key"),
        )
        tail = (
            Span(f"{counted(len(self._entries), 'line')} · "),
            Span(state, "ok" if self.is_following else "warn"),
            Span(" ─", "border"),
        )
        return spans.spread(at_left, tail, width, Span("─", "border"))

    def _line(self, entry: Entry, width: int, *, is_chosen: bool) -> Line:
        told = self._told(entry)
        age = cells.age(self._now_s - entry.at_s)
        when = f"{spans.right(age, AGE_COLUMNS)}{spans.right(f'{entry.at_s:.3f}', CLOCK_COLUMNS)}"
        made = (
            Span("▸ ", "key") if is_chosen else Span("  ", "dim"),
            Span(when, "dim"),
            Span(f" {told.letter} {spans.left(told.kind, KIND_COLUMNS)} ", told.style),
            Span(told.words, told.style if told.style in {"warn", "bad"} else "plain"),
        )
        line = spans.fit(made, width)
        return tuple(one._replace(under="cursor") for one in line) if is_chosen else line

    def _told(self, entry: Entry) -> logbook.Line:
        known = self._known.get(entry.key)
        if known is None or known[0] is not entry:
            if len(self._known) >= MAX_WORDS:
                self._known.clear()
            known = self._known[entry.key] = (entry, logbook.line_of(entry))
        return known[1]

    def on_resize(self) -> None:
        """Other lines have room now."""
        self._settle()
        self.redraw()

    # ---- moving -----------------------------------------------------------------------------

    def move(self, rows: int) -> None:
        """Move the cursor; up from the newest it stays there, onto the newest it follows again."""
        self._cursor += rows
        self._settle()
        self.is_following = rows > 0 and self._cursor >= len(self._entries) - 1
        self.redraw()

    def follow(self, *, is_wanted: bool) -> None:
        """Stay on the newest line from now on, or on this one."""
        self.is_following = is_wanted
        self._sought = ""
        self._place()
        self.redraw()

    def seek(self, key: str) -> bool:
        """Put the cursor on this line, now or once it is here; whether it is."""
        self._sought = key
        self._place()
        self.redraw()
        return not self._sought

    # ---- the mouse --------------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        """A line is chosen, and opened by the second click."""
        at = self._first + event.y - HEAD_LINES
        if event.y >= HEAD_LINES and at < len(self._entries):
            self.move(at - self._cursor)
            self.is_following = False
            self.redraw()
            if event.chain == 2:
                self.post_message(self.Opened())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Three lines down."""
        event.stop()
        self.move(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Three lines up."""
        event.stop()
        self.move(-3)
