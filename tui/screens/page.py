"""What every page of the console is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import Container
from textual.message import Message

from tui.widgets.table import HEAD_LINES, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.widget import Widget

    from kvd.wire.console import Column, EventQuery, TableRow
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot

STEPS: Mapping[str, int] = {"up": -1, "down": 1}


class Page(Container):
    """One page: what it wants to know while it is visible, and how it shows it.

    It holds no data: ``show`` gets a picture of everything, and paints what differs from what is
    there. It is asked for nothing while another page is visible. A page with one main table only
    has to compose it; ``queries``, ``show``, ``chosen`` and moving then follow from it.
    """

    NAME: ClassVar[str] = ""
    """As in the table of keys, and after ``:`` in the command bar."""
    FAULTS: ClassVar[Mapping[str, str]] = {}
    """By view, the filter that leaves only what is wrong; under an empty name that of the page."""
    REFS: ClassVar[tuple[str, ...]] = ()
    """Kinds of what can be opened here: ``lease`` of ``lease:7``."""
    CAN_MOVE: ClassVar[bool] = False
    """Whether arrows mean something without a table."""
    CAN_FILTER: ClassVar[bool] = False
    """Whether ``filter_by`` means something without a table."""

    class OpenRequested(Message):
        """The page would have this opened."""

        def __init__(self, ref: str) -> None:
            super().__init__()
            self.ref = ref

    DEFAULT_CSS = "Page { layout: vertical; width: 1fr; height: 1fr; }"

    def __init__(self) -> None:
        super().__init__(id=f"page-{self.NAME}")
        self._heights: dict[str, int] = {}

    def tables(self) -> list[WindowedTable]:
        """Every table that can be seen."""
        return [table for table in self.query(WindowedTable) if table.display]

    def table(self) -> WindowedTable | None:
        """The table that keys are about: moving, sorting, filtering; None for none."""
        tables = self.tables()
        return next((table for table in tables if table.is_active), None)

    def activate(self, table: WindowedTable) -> None:
        """Keys are about this table from now on."""
        for one in self.tables():
            one.is_active = one is table
            one.redraw()

    def next_table(self) -> None:
        """Keys are about the next table."""
        tables, now = self.tables(), self.table()
        if tables:
            at = tables.index(now) if now is not None else -1
            self.activate(tables[(at + 1) % len(tables)])

    def on_mount(self) -> None:
        """Keys are about the first table, until another is chosen."""
        self.next_table()

    def queries(self) -> tuple[Slot, ...]:
        """What is wanted while this page is visible, at its present size."""
        return tuple(table.asks() for table in self.tables())

    def events(self) -> EventQuery | None:
        """The events that are wanted while this page is visible; None for none."""
        return None

    def show(self, snapshot: DaemonSnapshot) -> None:
        """Repaint what differs from what is there; called by the clock of the console only."""
        for table in self.tables():
            table.show(snapshot)

    def chosen(self) -> str:
        """What is under the cursor: ``lease:7``; empty for nothing."""
        table = self.table()
        return table.chosen() if table is not None else ""

    def seek(self, ref: str) -> bool:
        """Put the cursor on this, if it is here."""
        for table in self.tables():
            if table.seek(ref):
                self.activate(table)
                return True
        return False

    def row(self, ref: str) -> tuple[TableRow | None, tuple[Column, ...]]:
        """What the page has in its rows about this, and their columns."""
        for table in self.tables():
            if table.data is not None and ref in table.data.rows:
                return table.data.rows[ref], table.columns
        return None, ()

    @property
    def filter_text(self) -> str:
        """The filter as it was typed; empty for none."""
        table = self.table()
        return table.filter_text if table is not None else ""

    def filter_columns(self) -> tuple[Column, ...]:
        """What can be filtered by."""
        table = self.table()
        return table.columns if table is not None else ()

    def filter_by(self, text: str) -> None:
        """Show only what passes; for a page that has no table and says ``CAN_FILTER``."""

    def faults(self) -> str:
        """The filter that leaves only what is wrong; empty if none is known here."""
        table = self.table()
        return self.FAULTS.get(table.view if table is not None else "", "")

    def fit_height(self, table: WindowedTable) -> None:
        """Give a table above others the lines that its rows need, at most two fifths of them all.

        For tables whose rows are few and stay: others would jump.
        """
        rows = table.data.total if table.data is not None else 0
        lines = max(HEAD_LINES + 2, min(HEAD_LINES + 1 + rows, self.size.height * 2 // 5))
        if self.size.height:
            self.set_height(table, lines)

    def set_height(self, widget: Widget, lines: int) -> None:
        """Make a panel so many lines high."""
        name = widget.id or ""
        if lines != self._heights.get(name):
            self._heights[name] = widget.styles.height = lines

    async def act(self, action: str) -> bool:
        """Do an action of the table of keys; whether it was one of this page's."""
        table = self.table()
        if table is None:
            return False
        screen = max(1, table.page_rows - 1)
        match action:
            case "panel":
                self.next_table()
            case "up" | "down":
                table.move(STEPS[action])
            case "pageup":
                table.move(-screen)
            case "pagedown":
                table.move(screen)
            case "home":
                table.move_to_start()
            case "end":
                table.move_to_end()
            case "left" | "right":
                table.shift(-1 if action == "left" else 1)
            case _:
                return False
        return True
