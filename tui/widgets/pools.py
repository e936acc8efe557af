"""A line for each component: its pages as a bar, then in figures; and more about the chosen one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from textual.message import Message
from typing_extensions import override

from kvd.text import clean, compact
from kvd.wire.console import Query
from tui.draw import bars, spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import cells
from tui.model.columns import NamedRow, places
from tui.model.rates import RowRates
from tui.widgets.canvas import NOT_HERE_YET, Canvas

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual import events

    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import TableData

POOLS_QUERY = Query("pools", limit=32)
"""Components: more of them than any model has."""
MOST_LINES = 12
"""So many of them are shown at once."""
GUTTER = 2
GAP = 1
LEAST_BAR_COLUMNS = 12
MORE_BAR_COLUMNS = 28
MOST_NAME_COLUMNS = 16
PLENTY = 0.2
"""Of its pages a component can give more now: all is well. The daemon says when it is short."""
RATE_S = 10.0
"""Evictions come in bursts: over so long their rate is taken."""


class PoolFigure(NamedTuple):
    """One column: the column of the view, its heading, and how wide it is."""

    name: str
    head: str
    width: int


FIGURES = (
    PoolFigure("headroom", "can give", 8),
    PoolFigure("state", "state", 6),
    PoolFigure("evicted", "evict/s", 7),
    PoolFigure("free", "free", 6),
    PoolFigure("held", "held", 6),
    PoolFigure("locked", "locked", 6),
    PoolFigure("cached", "cached", 6),
    PoolFigure("quarantined", "quar", 5),
    PoolFigure("waiting", "wait", 4),
    PoolFigure("tier", "tier", 6),
    PoolFigure("total", "total", 8),
    PoolFigure("saved", "saved", 6),
    PoolFigure("page_size", "tokens", 6),
    PoolFigure("page_bytes", "page", 6),
    PoolFigure("extent", "extent", 10),
    PoolFigure("promised", "promised", 8),
)
"""The most important first; those that there is no room for are left out."""
COMPUTED = ("evicted",)
"""Those that are made here."""

SAVED = ".saved"
"""After the name of a component: the area for what is saved of retracted leases."""
WORDS = ("tier", "extent", "interior", "companions", "window", "buffer", "tag")
"""Of the chosen component, in words."""
SHORT_STATES = {"quarantined": "quar.", "does not add up": "broken"}
"""Where there is room for a column and no sentence."""
USUAL = "nhd"
"""How pages lie inside, unless somebody says otherwise: it goes without saying."""


class PoolTable(Canvas):
    """Every component, the chosen one marked: the map below is of its pages."""

    DEFAULT_CSS = "PoolTable { height: 3; }"

    class Chosen(Message):
        """Another component was clicked."""

        def __init__(self, component: str) -> None:
            super().__init__()
            self.component = component

    def __init__(self, *, is_brief: bool = False) -> None:
        super().__init__(id="pools")
        self._is_brief = is_brief
        """Nothing is chosen, and nothing is said in words."""
        self.component = ""
        """The chosen one; empty until any is known."""
        self.data: TableData | None = None
        self._rates = RowRates("evicted", RATE_S)
        self._now_s = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """All components, the first one first."""
        data = self.data
        if data is None:
            return ()
        return tuple(str(data.cell(key, "component")) for key in data.order)

    @property
    def maps(self) -> tuple[str, ...]:
        """What there are maps of: components, and what is saved of them in host memory."""
        data, made = self.data, list[str]()
        for key, name in zip(data.order if data is not None else (), self.names, strict=True):
            made.append(name)
            if data is not None and data.cell(key, "saved_capacity"):
                made.append(name + SAVED)
        return tuple(made)

    @property
    def key(self) -> str:
        """The key of the chosen component's row; empty where there is none."""
        names, chosen = self.names, self.component.removesuffix(SAVED)
        if self.data is None or chosen not in names:
            return ""
        return self.data.order[names.index(chosen)]

    @property
    def needed_lines(self) -> int:
        """With nothing said in words."""
        names = len(self.names)
        return 1 + min(names, MOST_LINES) + (names > MOST_LINES)

    def choose(self, component: str) -> None:
        """The map is of this one."""
        self.component = component
        self.redraw()

    def next(self) -> str:
        """What there is a map of after the chosen one."""
        maps = self.maps
        if not maps:
            return self.component
        at = maps.index(self.component) if self.component in maps else -1
        return maps[(at + 1) % len(maps)]

    def show(self, snapshot: DaemonSnapshot) -> None:
        """Paint what changed since the last time."""
        data = snapshot.table(POOLS_QUERY)
        self._now_s = snapshot.now_s
        if data is not None and data is not self.data:
            self.data = data
            self._rates.take(data)
            if not self.key:
                self.component = self.names[0] if data.order else ""
        self.redraw()

    def on_click(self, event: events.Click) -> None:
        """The component of this line is chosen."""
        at = event.y - 1
        if 0 <= at < min(len(self.names), MOST_LINES):
            self.post_message(self.Chosen(self.names[at]))

    # ---- lines ------------------------------------------------------------------------------

    @override
    def make_lines(self, width: int, height: int) -> Sequence[Line]:
        lines = self._make(width)
        if height != len(lines):
            self.styles.height = len(lines)
        return lines

    def _make(self, width: int) -> list[Line]:
        data = self.data
        if data is None or not data.order:
            why = data.trouble if data is not None else NOT_HERE_YET
            return [(Styled("  "), cleaned(why or "no components", "dim"))]
        name_columns = max(
            9, min(MOST_NAME_COLUMNS, max(spans.columns(clean(name)) for name in self.names))
        )
        room = width - GUTTER - name_columns - GAP - LEAST_BAR_COLUMNS
        figures: list[PoolFigure] = []
        at = places(data.columns)
        for figure in FIGURES:
            if figure.name not in at and figure.name not in COMPUTED:
                continue
            if figure.width + GAP > room:
                break
            figures.append(figure)
            room -= figure.width + GAP
        bar_columns = LEAST_BAR_COLUMNS + min(room, MORE_BAR_COLUMNS)
        lines = [self._heads(figures, name_columns, bar_columns)]
        kinds = {column.name: column.kind for column in data.columns}
        rows = [NamedRow(data.rows[key], at, self._now_s) for key in data.order[:MOST_LINES]]
        lines += [self._line(row, kinds, figures, name_columns, bar_columns) for row in rows]
        if len(data.order) > MOST_LINES:
            lines.append(spans.line(f"  and {len(data.order) - MOST_LINES} more (m)", "dim"))
        words = self._words(data) if not self._is_brief else []
        return [*lines, spans.fit(words, width)] if words else lines

    @staticmethod
    def _heads(figures: Sequence[PoolFigure], name_columns: int, bar_columns: int) -> Line:
        heads = [
            spans.left("component", name_columns + GAP),
            spans.left("pages", bar_columns),
            *(spans.right(figure.head, figure.width + GAP) for figure in figures),
        ]
        return Styled(" " * GUTTER), Styled("".join(heads), "head")

    def _line(
        self,
        row: NamedRow,
        kinds: Mapping[str, str],
        figures: Sequence[PoolFigure],
        name_columns: int,
        bar_columns: int,
    ) -> Line:
        is_chosen = not self._is_brief and row.row.key == self.key
        name, pages = clean(str(row.cell("component"))), pages_of(row)
        style: spans.Style = "selected" if is_chosen else "plain"
        made = [
            Styled("▶ " if is_chosen else "  ", "key"),
            Styled(spans.left(name, name_columns) + " " * GAP, style),
            *bars.stacked(bars.pool(pages), bar_columns),
        ]
        for figure in figures:
            text, told = self._figure(row, kinds.get(figure.name, ""), figure, pages)
            made.append(Styled(spans.right(text, figure.width + GAP), told))
        return spans.merged(made)

    def _figure(
        self, row: NamedRow, kind: str, figure: PoolFigure, pages: bars.PoolPages
    ) -> cells.CellText:
        if figure.name == "evicted":
            rate = self._rates.rate(row.row.key)
            if rate is None:
                return cells.CellText(cells.NOTHING, "dim")
            return cells.CellText(f"{rate:.1f}", "warn" if rate else "dim")
        cell = row.cell(figure.name)
        if figure.name == "headroom" and isinstance(cell, int):
            share = cell / max(1, sum(pages[:4]))
            is_short = row.text("state") in {"short", "full"}
            style: spans.Style = "bad" if is_short else "ok" if share > PLENTY else "warn"
            return cells.CellText(f"{compact(cell)} {100 * share:.0f}%", style)
        cell = SHORT_STATES.get(str(cell), cell)
        shown = cells.show(cell, kind, row.at_s, figure.width)
        if cell == 0 and kind in {"pages", "count"}:
            return shown._replace(style="dim")
        return shown

    def _words(self, data: TableData) -> list[Styled]:
        """What the chosen component is beside its figures."""
        key = self.key
        if not key:
            return []
        told = [str(data.cell(key, name) or "") for name in WORDS]
        state = str(data.cell(key, "state") or "")
        made = [Styled("  "), cleaned(f"{state}, ", "bad")] if " " in state else [Styled("  ")]
        made.append(cleaned(", ".join(word for word in told if word and word != USUAL), "dim"))
        at = data.index("held_by")
        if at >= 0 and data.rows[key].cells[at]:
            holders = cells.show(data.rows[key].cells[at], "holders", self._now_s, 120)
            made += [Styled("  most held by ", "dim"), Styled(holders.text, holders.style)]
        return made if spans.text_of(made).strip() else []


def pages_of(row: NamedRow) -> bars.PoolPages:
    """The pages of a component by state, as far as they are known."""
    return bars.PoolPages(*(int(row.number(name) or 0) for name in bars.PoolPages._fields))
