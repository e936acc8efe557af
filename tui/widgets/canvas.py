"""A widget that shows lines of spans, and repaints only those that differ from what is there."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, cast

from rich.console import Group
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.containers import Container
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from typing_extensions import override

from tui.draw.spans import Styled
from tui.themes import Palette

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from textual import events
    from textual.app import App
    from textual.filter import LineFilter

    from tui.app import KvdTui
    from tui.draw.spans import Line

WHEEL_LINES = 3
NOT_HERE_YET = "asked for; not here yet"
BLANK = Styled("")
"""Fills a line."""


def palette_of(app: App[None]) -> Palette:
    """The palette of the app's present theme; one is made per theme."""
    key = f"{app.theme}:{app.no_color}"
    if key not in _PALETTES:
        _PALETTES[key] = Palette(app)
    return _PALETTES[key]


_PALETTES: dict[str, Palette] = {}


def rich_lines(lines: Iterable[Line], palette: Palette, links: Sequence[str] = ()) -> Group:
    """Lines for a widget that wraps what is too long for it; ``links`` are opened by a click."""

    def look(text: str, style: str) -> Style:
        click = {"@click": f"app.open({text!r})"} if text in links else None
        return palette.style(style) + Style(meta=click)

    return Group(*[Text.assemble(*[(text, look(text, style)) for text, style, _ in line])
                   for line in lines])  # fmt: skip


@lru_cache(maxsize=500)
def wrap_words(text: str, width: int) -> tuple[str, ...]:
    """``text`` in lines of at most ``width`` columns, at blanks where there are any."""
    return tuple([line.plain.rstrip() for line in Content(text).wrap(max(1, width))])


class Canvas(Widget, can_focus=False):
    """Lines of spans from its top left; what does not fit is cut.

    ``paint`` may be called as often as one likes: equal lines cost a comparison. What a span leaves
    open is the widget's, never the terminal's own: the colours of a theme can be read only on its
    background.
    """

    DEFAULT_CSS = "Canvas { height: 1fr; width: 1fr; }"

    def __init__(self, *, name: str | None = None, id: str | None = None) -> None:  # noqa: A002
        super().__init__(name=name, id=id, markup=False)
        self.lines: Sequence[Line] = ()
        """What is shown."""
        self._strips: dict[int, Strip] = {}
        self._looks: dict[tuple[str, str], Style] = {}
        """By style and what is under it, with what the widget stands on."""
        self._made_for: tuple[object, ...] = ()

    def paint(self, lines: Sequence[Line]) -> None:
        """Show these lines, the first one at the top."""
        before, self.lines = self.lines, tuple(lines)
        rows = max(len(before), len(lines))
        changed = [at for at in range(rows) if _at(before, at) != _at(self.lines, at)]
        for at in changed:
            self._strips.pop(at, None)
        if changed:
            self.refresh(*_regions(changed, self.size.width))

    def make_lines(self, width: int, height: int) -> Sequence[Line]:
        """All lines at this size; of a widget that has no more to say those that are there."""
        del width, height
        return self.lines

    def redraw(self) -> None:
        """Make the lines anew, and have those painted that differ from what is there."""
        if self.is_attached and self.size.width:
            self.paint(self.make_lines(*self.size))

    def on_resize(self) -> None:
        """Other lines, or longer ones, have room now."""
        self.redraw()

    @property
    def has_keys(self) -> bool:
        """Whether keys are about what is on the page: not while something is typed."""
        return not console(self).bar.display

    def wheel(self, lines: int) -> None:
        """What the mouse wheel does: so many lines further."""

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Three lines further down."""
        event.stop()
        self.wheel(WHEEL_LINES)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Three lines further up."""
        event.stop()
        self.wheel(-WHEEL_LINES)

    @property
    @override
    def size(self) -> Size:
        return self.outer_size  # Textual looks for borders and scrollbars each time: there are none

    @override
    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._made_for = ()

    @override
    def render_lines(self, crop: Region) -> list[Strip]:
        """Lines as they were made: Textual's way takes twice as long, for borders and tints."""
        filters, width = self.app.get_line_filters(), self.size.width
        made_for = (self.app.theme, width, *filters)
        if made_for != self._made_for:
            self._made_for = made_for
            self._strips.clear()
            self._looks.clear()
        strips = [self._strips.get(y) or self._strip(y, filters) for y in crop.line_range]
        if crop.column_span == (0, width):
            return strips
        return [strip.crop(*crop.column_span) for strip in strips]

    def _strip(self, y: int, filters: Sequence[LineFilter]) -> Strip:
        looks, segments = self._looks, list[Segment]()
        for text, style, under in (*(_at(self.lines, y) or ()), BLANK):
            look = looks.get((style, under)) or self._look(style, under, filters)
            segments.append(Segment(text, look))
        blank = segments.pop().style
        made = Strip(segments).adjust_cell_length(self.size.width, blank)
        self._strips[y] = made
        return made

    def _look(self, style: str, under: str, filters: Sequence[LineFilter]) -> Style:
        """A style on what the widget stands on, as all colours of the app are to be seen."""
        ground = self.rich_style
        look = Style(color=ground.color, bgcolor=ground.bgcolor)
        look += palette_of(self.app).style(style, under)
        segments = [Segment(" ", look)]
        for each in filters:
            segments = each.apply(segments, self.background_colors[1])
        made = self._looks[style, under] = segments[0].style or look
        return made


class Cursored(Canvas):
    """Lines among which keys and the mouse move a cursor; ``total``: how many there are."""

    class Moved(Message):
        """The cursor is on another line, or what to ask for has changed."""

        def __init__(self, canvas: Cursored) -> None:
            super().__init__()
            self.canvas = canvas

    class Opened(Moved):
        """A line was clicked twice."""

    head_lines = 1
    """Above those lines."""

    def __init__(self, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id)
        self._first = self._cursor = 0
        """The line at the top, and the one with the cursor."""

    @property
    def total(self) -> int:
        """How many lines the cursor may be on."""
        raise NotImplementedError

    @property
    def page_rows(self) -> int:
        """Lines that there is room for."""
        return max(1, self.size.height - self.head_lines)

    def move(self, rows: int) -> None:
        """So many lines down; the cursor stops at both ends."""
        raise NotImplementedError

    def move_screens(self, screens: int) -> None:
        """So many screens down."""
        self.move(screens * max(1, self.page_rows - 1))

    def move_to_start(self) -> None:
        """To the first line."""
        self.move(-self.total)

    def move_to_end(self) -> None:
        """To the last line."""
        self.move(self.total)

    def shift(self, columns: int) -> None:
        """So many columns to the right, where there are any."""

    @override
    def wheel(self, lines: int) -> None:
        self.move(lines)

    def _scroll(self) -> None:
        """Keep the cursor on a line, the window around it, and that no further than the last."""
        self._cursor = max(0, min(self._cursor, self.total - 1))
        self._first = max(self._cursor - self.page_rows + 1, min(self._first, self._cursor))
        self._first = max(0, min(self._first, self.total - self.page_rows))


class Ground(Container):
    """What widgets stand on: all its lines are alike, and made once."""

    _blank: tuple[object, list[Strip]] | None = None

    @override
    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._blank = None

    @override
    def render_lines(self, crop: Region) -> list[Strip]:
        made_for = (self.app.theme, crop.x, crop.width)
        if self._blank is None or self._blank[0] != made_for:
            line = super().render_lines(Region(crop.x, 0, crop.width, 1))
            self._blank = made_for, line
        return self._blank[1] * crop.height


def _at(lines: Sequence[Line], at: int) -> Line | None:
    return lines[at] if at < len(lines) else None


def _regions(rows: Sequence[int], width: int) -> list[Region]:
    """Rows as regions, neighbours as one."""
    made: list[Region] = []
    for row in rows:
        if made and made[-1].bottom == row:
            made[-1] = made[-1].grow((0, 0, 1, 0))
        else:
            made.append(Region(x=0, y=row, width=width, height=1))
    return made


def console(widget: Widget) -> KvdTui:
    """The app: pages and their widgets live in no other."""
    return cast("KvdTui", widget.app)
