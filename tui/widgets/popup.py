"""Lines over everything: help, menus and questions are made of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

from textual.binding import Binding
from textual.screen import ModalScreen
from typing_extensions import override

from kvd.text import counted
from tui.draw import spans
from tui.draw.spans import Line, Span, said
from tui.widgets.canvas import Canvas

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType

Result = TypeVar("Result")

MARGIN = 4
"""Columns and lines of the screen that stay free around it."""

FRAME_LINES = 6
"""The border, the heading and the last line, each with a blank one."""


def broken(text: str, width: int) -> list[str]:
    """``text`` in lines of at most ``width`` columns, at blanks where there are any."""
    made, line = [], ""
    for word in text.split(" "):
        rest = word
        while True:
            joined = f"{line} {rest}" if line else rest
            if spans.columns(joined) <= width:
                line = joined
                break
            if line:
                made.append(line)
                line = ""
                continue
            made.append(rest[: max(1, width)])
            rest = rest[max(1, width) :]
    return [*made, line] if line else made


class Popup(ModalScreen[Result], inherit_bindings=False):
    """Shows ``body``, as wide and high as it is, and scrolls what does not fit."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "leave", show=False),
        Binding("up,k", "move(-1)", show=False),
        Binding("down,j", "move(1)", show=False),
        Binding("pageup", "move(-10)", show=False),
        Binding("pagedown", "move(10)", show=False),
    ]
    AUTO_FOCUS = None
    DEFAULT_CSS = """
    Popup { align: center middle; background: $background 60%; }
    Popup > Canvas { background: $surface; border: round $primary; padding: 0 1; }
    """

    def __init__(self, title: str, columns: int = 72) -> None:
        super().__init__()
        self._heading = title
        self._columns = columns
        self._top = 0

    def body(self, width: int) -> Sequence[Line]:
        """Every line, in at most this many columns."""
        raise NotImplementedError

    def last(self) -> Line:
        """What keys do here; always to be seen."""
        return (Span("Esc", "key"), Span(" closes"))

    @override
    def compose(self) -> ComposeResult:
        yield Canvas()

    def on_mount(self) -> None:
        """Show it, and nothing over it: what was said in passing is over."""
        self.app.clear_notifications()
        self.redraw()

    def on_resize(self) -> None:
        """Fit it to the terminal."""
        self.redraw()

    def redraw(self) -> None:
        """Make every line anew."""
        width = max(20, min(self._columns, self.app.size.width - MARGIN))
        lines = list(self.body(width))
        room = max(3, self.app.size.height - MARGIN - FRAME_LINES)
        self._top = max(0, min(self._top, len(lines) - room))
        shown = lines[self._top : self._top + room]
        more = len(lines) - len(shown) - self._top
        tail = (
            (*self.last(), Span(f"   {counted(more, 'line')} more", "dim")) if more else self.last()
        )
        canvas = self.query_one(Canvas)
        canvas.styles.width = width + 4
        canvas.styles.height = len(shown) + FRAME_LINES
        head: Line = (said(self._heading, "head"),)
        canvas.paint([head, (), *shown, (), spans.fit(tail, width)])

    def action_move(self, rows: int) -> None:
        """Scroll."""
        self._top += rows
        self.redraw()

    def action_leave(self) -> None:
        """Close it, and choose nothing."""
        self.dismiss(None)
