"""The map of one component's pages, with what it means, how old it is, and whose the pages are.

Only as many cells are asked for as there is room for. The cursor is on a page, and stays on it
whatever a cell stands for; what is lit is what the operator came here with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.text import age, clean, compact_bytes, thousands
from kvd.wire.console import MAX_CELLS, MapQuery
from tui.draw import bars, spans
from tui.draw import page_map as pages
from tui.draw.page_map import Grid, MapWindow
from tui.draw.spans import Line, Styled, cleaned
from tui.widgets.canvas import NOT_HERE_YET, Cursored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual import events

    from kvd.wire.console import PageMap
    from tui.model.snapshots import DaemonSnapshot

LENSES = ("owner", "state", "age", "hits", "locks", "tier")
"""In the order in which the key goes through them."""
LEAST_FOOT_LINES = 3
"""Of what the pages are, by the lens, where there is little room."""
SCREEN_ROWS = 8
"""Lines of cells that a page key moves over: a map has no other screens."""


class PageMapPanel(Cursored):
    """The map, its legend, and its keys' doing. ``asks`` is what to ask for."""

    def __init__(self) -> None:
        super().__init__(id="map")
        self.component = ""
        """Empty: the first one, until its name is known."""
        self.first_component = ""
        self.lens = LENSES[0]
        self.mark = ""
        self.page = 0
        """The page under the cursor."""
        self.window: MapWindow | None = None
        """What is shown of the component; None: all of it."""
        self._shown: PageMap | None = None
        self._totals: dict[str, int] = {}
        """By component, once any map of it has come."""
        self._levels: dict[str, int] = {}
        """By lens, the most that it had: others would make the map jump."""
        self._drawn: list[Line] = []
        self._drawn_for: tuple[object, ...] = ()
        self._seeks_lit = False
        self._now_s = 0.0

    # ---- what to ask ------------------------------------------------------------------------

    @property
    def ref(self) -> str:
        """The page under the cursor: ``page:17``, ``page:swa:17``; empty where there is none."""
        if self._shown is None or self.page >= self._shown.total_pages:
            return ""
        if self.component in {"", self.first_component}:
            return f"page:{self.page}"
        return f"page:{self.component}:{self.page}"

    @property
    @override
    def total(self) -> int:
        """Pages of the component; 0 until it is known."""
        return self._totals.get(self.component, 0)

    @property
    def grid(self) -> Grid:
        """The lines that cells have, no more of them than the component fills."""
        width, total = max(1, self.size.width), self.total
        room = max(1, self.size.height - 2 - self._foot_lines)
        grid = Grid(width, 1, "letters" if self.app.no_color else "blocks")
        needed = -(-total // (width * grid.each)) if total else room
        return grid._replace(height=max(1, min(room, needed, MAX_CELLS // grid.cells)))

    @property
    def _foot_lines(self) -> int:
        """Below the map and the line about the cursor: figures, and a line for each level."""
        most = max(LEAST_FOOT_LINES, self.size.height // 2)
        return 1 + min(self._levels.get(self.lens, LEAST_FOOT_LINES), most)

    def asks(self) -> tuple[MapQuery, ...]:
        """The map as it fits."""
        total, grid = self.total, self.grid
        window = self.window or pages.whole(total, grid.cells)
        first, each = pages.placed(*window, total, grid.cells)
        count = min(grid.cells, -(-(total - first) // each))
        return (
            MapQuery(
                component=self.component,
                lens=self.lens,
                first_page=first,
                pages_each=each,
                cells=count,
                mark=self.mark,
            ),
        )

    # ---- showing ----------------------------------------------------------------------------

    def show(self, snapshot: DaemonSnapshot) -> None:
        """Paint what changed since the last time."""
        self._now_s = snapshot.now_s
        asked = self.asks()
        exact = snapshot.page_map(asked[0])
        if exact is None or exact.trouble:
            alike = [page_map for page_map in self._of_component(snapshot) if page_map.cells]
            self._shown = alike[-1] if alike else exact
        else:
            self._shown = exact
            self._totals[self.component] = exact.total_pages
            if self._seeks_lit and exact.cells:
                self._seeks_lit = False
                self.page = pages.pages_of(exact, min(exact.lit, default=0)).start
        self.redraw()

    def _of_component(self, snapshot: DaemonSnapshot) -> list[PageMap]:
        """Maps that are in the picture: to be seen until the one that was asked for comes."""
        return [
            page_map for slot, page_map in snapshot.maps.items() if slot.component == self.component
        ]

    @override
    def make_lines(self, width: int, height: int) -> Sequence[Line]:
        shown, grid = self._shown, self.grid
        if shown is None or shown.trouble or shown.cells is None:
            why = clean(shown.trouble) if shown is not None else NOT_HERE_YET
            return [self._caption(shown, width), spans.line(f"  {why}", "dim")]
        sized = sum([level.pages > 0 for level in shown.levels])
        self._levels[shown.lens] = max(sized, self._levels.get(shown.lens, 1))
        cursor = pages.cell_of(shown, self.page)
        lines = [
            self._caption(shown, width),
            *self._map(shown, grid, cursor),
            spans.fit(self._cursor_words(shown, cursor), width),
        ]
        median, largest = shown.runs
        runs = f"free runs: median {thousands(median)}, largest {thousands(largest)}"
        lines.append(spans.line(f"{runs} {'page' if largest == 1 else 'pages'}", "dim"))
        return [*lines, *bars.histogram(bars.levels(shown), width, height - len(lines))][:height]

    def _map(self, shown: PageMap, grid: Grid, cursor: int | None) -> Sequence[Line]:
        """The cells; drawn once for what they are made of."""
        looks = tuple((level.letter, level.name) for level in shown.levels)
        made_of = (shown.cells, shown.lit, looks, shown.lens, grid, cursor)
        if made_of != self._drawn_for:
            self._drawn, self._drawn_for = pages.draw(shown, grid, cursor), made_of
        return self._drawn

    def _caption(self, shown: PageMap | None, width: int) -> Line:
        name = shown.component if shown is not None else self.component
        made = [cleaned(name or "pages", "head")]
        words: list[Styled] = [Styled(f"lens {self.lens}", "key")]
        tail: Line = ()
        if shown is not None and shown.total_pages:
            each = f"1 cell = {thousands(shown.pages_each)} pages"
            words.append(Styled(each if shown.pages_each > 1 else "1 cell = 1 page"))
            total = thousands(shown.total_pages)
            size = f" x {compact_bytes(shown.page_bytes)}" if shown.page_bytes else ""
            words.append(Styled(f"{total} pages{size}"))
            if shown.lens != self.lens or not shown.cells:
                words.append(Styled(f"asked for {self.lens}", "warn"))
            ago = age(max(0.0, self._now_s - shown.at_s))
            tail = (Styled(f"seen {ago} ago in {shown.took_s * 1000:.0f}ms", "dim"),)
        if self.mark:
            count = len(shown.lit) if shown is not None else 0
            lit = f"{count} cell{'s' * (count > 1)} lit" if count else "nothing lit here"
            words.insert(1, cleaned(f"{self.mark}: {lit}", "lit"))
        for word in words:
            if spans.width_of([*made, word]) + spans.width_of(tail) + 8 <= width:
                made += [Styled("  "), word]
        return spans.ruled(tuple(made), tail, width, is_lit=self.has_keys)

    def _cursor_words(self, shown: PageMap, cursor: int | None) -> list[Styled]:
        if cursor is None:
            return [Styled(f"page {self.page} is not in this part of the map", "dim")]
        return list(pages.told(shown, cursor))

    # ---- moving -----------------------------------------------------------------------------

    @override
    def move_screens(self, screens: int) -> None:
        self.move(screens * SCREEN_ROWS)

    @override
    def move_to_start(self) -> None:
        self.move_to(0)

    @override
    def move_to_end(self) -> None:
        self.move_to(self.total - 1)

    @override
    def shift(self, columns: int) -> None:
        self.move(0, columns)

    @override
    def move(self, rows: int, columns: int = 0) -> None:
        """The cursor to another cell; the window goes with it."""
        shown, grid = self._shown, self.grid
        if shown is None or not shown.cells:
            return
        cell = pages.cell_of(shown, self.page)
        there = cell
        if cell is not None:
            row, last = cell // grid.width, (len(shown.cells) - 1) // grid.width
            rows_here = max(-row, min(rows, last - row))
            there = grid.moved(cell, rows=rows_here, columns=columns, cells=len(shown.cells))
        if there is None:
            self.page = shown.first_page
        elif there != cell:
            self.page = pages.pages_of(shown, there).start
        elif self.window is not None:
            self.page += rows * grid.width * self.window.pages_each
            self._see()
        self.redraw()

    def move_to(self, page: int) -> None:
        """The cursor to this page; the window to where it is."""
        self.page = max(0, min(page, self.total - 1)) if self.total else max(0, page)
        self._see()
        self.redraw()

    def _see(self) -> None:
        """Move the window so that the cursor is in it."""
        total, grid, window = self.total, self.grid, self.window
        if not total:
            return
        self.page = max(0, min(self.page, total - 1))
        if window is None:
            return
        if not window.first_page <= self.page < window.first_page + grid.cells:
            self.zoom(2.0)

    def zoom(self, times: float) -> None:
        """A page a cell, around the cursor; all pages again where ``times`` is under 1."""
        total, grid = self.total, self.grid
        first = (self.page // grid.width - grid.height * grid.each // 2) * grid.width
        is_closer = times > 1 and total > grid.cells
        self.window = pages.placed(first, 1, total, grid.cells) if is_closer else None

    def next_lit(self) -> bool:
        """The cursor to the next cell that is lit, from the last one to the first; if any is."""
        shown = self._shown
        if shown is None or not shown.lit:
            return False
        cell = pages.cell_of(shown, self.page)
        lit = sorted(shown.lit)
        there = next((lit_cell for lit_cell in lit if cell is None or lit_cell > cell), lit[0])
        self.page = pages.pages_of(shown, there).start
        self.redraw()
        return True

    def next_lens(self) -> None:
        """Look at something else of the same pages."""
        self.lens = LENSES[(LENSES.index(self.lens) + 1) % len(LENSES)]

    def show_component(self, component: str) -> None:
        """The map of another component, all of it."""
        if component != self.component:
            self.component, self.window, self.page = component, None, 0
            self._shown = None

    def light(self, ref: str) -> None:
        """Light up the pages of this, and go to the first one; nothing: none is lit."""
        if ref != self.mark:
            self.mark, self.window, self._seeks_lit = ref, None, bool(ref)

    # ---- the mouse --------------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        """A page is chosen, and opened by the second click."""
        shown = self._shown
        cell = self.grid.cell_at(event.y - 1, event.x)
        if shown is None or cell is None or cell >= len(shown.cells or b""):
            return
        self.page = pages.pages_of(shown, cell).start
        self.redraw()
        self.post_message(self.Opened(self) if event.chain == 2 else self.Moved(self))

    @override
    def wheel(self, lines: int) -> None:
        self.zoom(0.5 if lines > 0 else 2.0)
