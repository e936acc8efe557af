"""The map of the pages of one component: every character is two cells, or one with its letter.

As ``blocks`` a character is a half block: the upper cell in the colour of the letter's ink, the
lower one in that of its ground. A run of one level begins with the letter of the level. Without
colour, as ``letters``, a character is one cell, and that is its letter.

A cell stands for ``pages_each`` pages. Cells count from 0 at the upper left, row by row; a row of
cells is half a line high as ``blocks``. Cells that are lit, and the cursor, are marked by shape.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple

from kvd.text import clean
from tui.draw.spans import (
    HUES,
    RAMPS,
    STYLES,
    Line,
    Style,
    Styled,
    columns,
    line,
    merged,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import Level, PageMap

Shape = Literal["blocks", "letters"]

HALF = "▀"
LABELLED_COLUMNS = 4
"""Runs of one level as wide as this begin with its letter."""
CURSOR = "◆"
CURSOR_UP, CURSOR_DOWN = "▲", "▼"
LIT = "■"
LIT_UP, LIT_DOWN = "▔", "▁"

NO_LETTER = "*"
"""In place of what is not one column wide."""

NOWHERE = 255
"""In place of a level, behind the last page."""

_LIT_UP, _LIT_DOWN, _AT_UP, _AT_DOWN = 1, 2, 4, 8

STATES: dict[str, Style] = {"lingering": "held"}
"""Levels of the lens ``state`` that are no style themselves."""

KNOWN: dict[str, Style] = {"cache": "cached", "others": "dim", "held": "held"}
"""Levels that other lenses have before those of their own."""
KNOWN_LEVELS = 3
"""So many are before anybody's name: an engine may call itself ``cache``."""

GRADED = {"age", "hits", "locks"}
"""Lenses whose levels are more and more of something."""


class Grid(NamedTuple):
    """Columns and lines of a map on the screen, and how its characters show cells."""

    width: int
    height: int
    shape: Shape = "blocks"

    @property
    def each(self) -> int:
        """Cells of one character."""
        return 2 if self.shape == "blocks" else 1

    @property
    def cells(self) -> int:
        """All that there is room for."""
        return self.width * self.height * self.each

    def cell_at(self, row: int, column: int) -> int | None:
        """The (upper) cell of the character on this line and column; None outside."""
        if not (0 <= row < self.height and 0 <= column < self.width):
            return None
        return row * self.each * self.width + column

    def moved(self, cell: int, *, rows: int = 0, columns: int = 0, cells: int) -> int:
        """Where an arrow key leads from a cell, if there are ``cells``: never outside."""
        row, column = divmod(cell, max(self.width, 1))
        column = min(max(column + columns, 0), self.width - 1)
        there = (row + rows) * self.width + column
        if not 0 <= there < cells:
            there = row * self.width + column
        return max(min(there, cells - 1), 0)


class MapWindow(NamedTuple):
    """What part of a component a map shows: from which page on, and how many a cell has."""

    first_page: int
    pages_each: int


def whole(total_pages: int, cells: int) -> MapWindow:
    """All pages, in as many cells as there is room for."""
    return MapWindow(0, max(1, -(-total_pages // max(cells, 1))))


def placed(first_page: int, pages_each: int, total_pages: int, cells: int) -> MapWindow:
    """A window at about this page that does not look past the last one."""
    latest = max(0, total_pages - cells * pages_each)
    return MapWindow(min(max(first_page, 0), latest), pages_each)


def pages_of(shown: PageMap, cell: int) -> range:
    """The pages of one cell; none of them behind the last page of the component."""
    first = shown.first_page + cell * shown.pages_each
    end = min(first + shown.pages_each, shown.total_pages)
    return range(min(first, end), end)


def cell_of(shown: PageMap, page: int) -> int | None:
    """The cell with this page; None if the map does not show it."""
    cell, rest = divmod(page - shown.first_page, shown.pages_each)
    is_there = 0 <= cell < len(shown.cells or b"") and page < shown.total_pages
    return cell if is_there and rest >= 0 else None


def draw(shown: PageMap, grid: Grid, cursor: int | None = None) -> list[Line]:
    """The map in exactly the lines and columns of ``grid``."""
    inks = _Inks(shown, grid.shape)
    size = grid.width * grid.each
    cells = (shown.cells or b"")[: grid.cells].ljust(grid.cells, bytes((NOWHERE,)))
    marks = _marks(shown.lit, cursor, grid)
    lines: list[Line] = []
    for row in range(grid.height):
        upper = cells[row * size : row * size + grid.width]
        lower = cells[row * size + grid.width : (row + 1) * size] or upper
        own = marks.get(row) or bytes(grid.width)
        spans: list[Styled] = []
        for key, run in groupby(zip(upper, lower, own, strict=True)):
            count = sum(1 for _ in run)
            spans += inks.run(key, count)
        lines.append(tuple(spans))
    return lines


def told(shown: PageMap, cell: int) -> Line:
    """A cell in words: its pages, its level with its letter, and whether it is lit."""
    pages = pages_of(shown, cell)
    cells = shown.cells or b""
    if not pages or not 0 <= cell < len(cells):
        return line("no page here", "dim")
    if len(pages) == 1 and not pages[0]:
        return line("page 0 stands for none: it is never anybody's", "dim")
    which = f"page {pages[0]}" if len(pages) == 1 else f"pages {pages[0]} to {pages[-1]}"
    spans = [Styled(which)]
    if cells[cell] < len(shown.levels):
        level = shown.levels[cells[cell]]
        spans += [
            Styled("  "),
            Styled(letter_of(level), "label", styles(shown)[cells[cell]]),
            Styled(f" {clean(level.name)}"),
        ]
        if len(pages) > 1:
            spans.append(Styled(" at worst", "dim"))
    if cell in shown.lit:
        spans += [Styled("  "), Styled(LIT, "lit"), Styled(" lit")]
    return merged(spans)


def styles(shown: PageMap) -> tuple[Style, ...]:
    """The style of each level: free first, nobody last, and the others as the lens has them."""
    if shown.lens == "state":
        names = [STATES.get(level.name, level.name) for level in shown.levels]
        return tuple([name if name in STYLES else "dim" for name in names])
    made: dict[int, Style] = {}
    last = len(shown.levels) - 1
    for at, level in enumerate(shown.levels):
        if at == 0 and level.name == "free":
            made[at] = "free"
        elif at == last and level.name == "nobody":
            made[at] = "nobody"
        elif at < KNOWN_LEVELS and level.name in KNOWN:
            made[at] = KNOWN[level.name]
    others = [at for at in range(last + 1) if at not in made]
    if shown.lens in GRADED:
        steps, last_of_all = max(len(others) - 1, 1), len(RAMPS) - 1
        made.update((at, RAMPS[rank * last_of_all // steps]) for rank, at in enumerate(others))
    else:  # by its letter, which somebody keeps whoever else comes and goes
        made.update(
            (at, HUES[(ord(letter_of(shown.levels[at])) - ord("A")) % len(HUES)]) for at in others
        )
    return tuple(made[at] for at in range(last + 1))


def _marks(lit: Sequence[int], cursor: int | None, grid: Grid) -> dict[int, bytearray]:
    """By line that has any: the marks of its characters."""
    found: dict[int, bytearray] = {}
    noted = [(cell, _LIT_UP) for cell in lit]
    if cursor is not None:
        noted.append((cursor, _AT_UP))
    for cell, mark in noted:
        if 0 <= cell < grid.cells:
            row, column = divmod(cell, grid.width)
            is_lower = grid.each == 2 and row % 2
            of_line = found.setdefault(row // grid.each, bytearray(grid.width))
            of_line[column] |= mark << 1 if is_lower else mark
    return found


Key = tuple[int, int, int]
"""Levels of the upper and the lower cell of a character, and its marks."""


class _Inks:
    """Spans for runs of characters, by what they show."""

    def __init__(self, shown: PageMap, shape: Shape) -> None:
        self._styles = styles(shown)
        self._letters = tuple(letter_of(level) for level in shown.levels)
        self._made = self._blocks if shape == "blocks" else self._lettered
        self._single: dict[Key, tuple[Styled, ...]] = {}
        """Runs of one, of which noise is made."""

    def run(self, key: Key, count: int) -> tuple[Styled, ...]:
        """``count`` equal characters."""
        if count > 1:
            return self._made(key, count)
        made = self._single.get(key)
        if made is None:
            made = self._single[key] = self._made(key, 1)
        return made

    def _lettered(self, key: Key, count: int) -> tuple[Styled, ...]:
        level, _, mark = key
        if mark:
            text, style = (CURSOR, _CURSOR) if mark & _AT_UP else (LIT, _LIT)
            return (Styled(text * count, style, self._style(level)),)
        if level >= len(self._styles):
            return (Styled(" " * count),)
        return (Styled(self._letters[level] * count, self._styles[level]),)

    def _blocks(self, key: Key, count: int) -> tuple[Styled, ...]:
        upper, lower, mark = key
        if mark:
            return (self._marked(key, count),)
        over, under = self._style(upper), self._style(lower)
        if not over and not under:
            return (Styled(" " * count),)
        if not over:
            return (Styled("▄" * count, under or "plain"),)
        if upper == lower and count >= LABELLED_COLUMNS:
            return (
                Styled(self._letters[upper], "label", over),
                Styled(HALF * (count - 1), over, under),
            )
        return (Styled(HALF * count, over, under),)

    def _marked(self, key: Key, count: int) -> Styled:
        """The cursor before what is lit; on the ground of the cell that is marked."""
        upper, lower, mark = key
        if mark & (_AT_UP | _AT_DOWN):
            is_up = bool(mark & _AT_UP)
            ground = self._style(upper if is_up else lower)
            return Styled((CURSOR_UP if is_up else CURSOR_DOWN) * count, _CURSOR, ground)
        text = {_LIT_UP: LIT_UP, _LIT_DOWN: LIT_DOWN}.get(mark, LIT)
        return Styled(text * count, _LIT, self._style(upper if mark & _LIT_UP else lower))

    def _style(self, level: int) -> Style | Literal[""]:
        return self._styles[level] if level < len(self._styles) else ""


def letter_of(level: Level) -> str:
    """One column wide, whatever the daemon sent."""
    letter = clean(level.letter)
    return letter if columns(letter) == 1 else NO_LETTER


_CURSOR: Style = "cursor"
_LIT: Style = "lit"
