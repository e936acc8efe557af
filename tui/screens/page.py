"""What every page of the console is."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.wire.console import Filter
from tui.model.commands import PAGES, RULES
from tui.widgets.canvas import Cursored, Ground, console
from tui.widgets.table import HEAD_LINES, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.binding import BindingType
    from textual.events import Key
    from textual.widget import Widget

    from kvd.wire.console import Column, EventQuery, TableRow
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot

ABORT = Binding(
    "ctrl+k", "app.change('abort')", "abort", priority=True, tooltip="the handoff's room"
)
EVICT = Binding("ctrl+e", "app.change('evict')", "evict", priority=True, tooltip="pages")
FLUSH = Binding("ctrl+f", "app.change('flush')", "flush", tooltip="every unlocked cached page")
PROPOSE = Binding(
    "x", "propose", "do", priority=True, tooltip="put the proposed command in the bar"
)
FENCE = Binding("ctrl+x", "app.change('fence')", "fence", tooltip="restart the transfer process")
"""What changes the node has Ctrl; those that begin to type come before the next key."""
KEYS_HELP = """\
Shift and a letter sorts by the column that begins with it, again: by the next one, or the other way
round (`G` alone is the last row). Ctrl and a letter changes the node, after it was looked at.
"""
ON_A_ROW = frozenset({"handoffs", "propose", "pages_of"})
MOVES = frozenset({"move", "screen", "shift", "home", "end"})


class Page(Ground, can_focus=True):
    """One page: what it wants to know while it is visible, and how it shows it.

    Whatever its keys do is an action of it or of the console; it has the focus while it is visible.
    It holds no data: ``show`` gets a picture of everything, and paints what differs from what is
    there. It is asked for nothing while another page is visible. A page with one main table only
    has to compose it; ``queries``, ``show``, ``chosen`` and moving then follow from it.
    """

    NAME: ClassVar[str] = ""
    """Its tab, and what it is called after ``:`` in the command bar."""
    FAULTS: ClassVar[Mapping[str, str]] = {}
    """By view, the filter that leaves only what is wrong; under an empty name that of the page."""
    REFS: ClassVar[tuple[str, ...]] = ()
    """Kinds of what can be opened here: ``lease`` of ``lease:7``."""
    TOLD: ClassVar[frozenset[str]] = frozenset()
    """Kinds of which the page itself tells all: they have no card over it."""
    CAN_FILTER: ClassVar[bool] = False
    """Whether ``filter_by`` means something without a table."""
    HELP = "\n".join((KEYS_HELP, *(f"- `:{rule.usage}` {rule.help}" for rule in RULES)))
    BINDING_GROUP_TITLE = "on this page"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "app.open", "open", tooltip="who holds it, why, since when"),
        # Those that begin to type are done before the next key is looked at.
        Binding("/", "app.ask('/')", "filter", priority=True,
            tooltip="state:held owner:eng* age>5s !lingering words"),
        Binding(":", "app.ask(':')", "command", priority=True, tooltip="with Tab"),
        # So is a page, for what is typed in one go after it.
        *(
            Binding(str(at), f"app.go({page!r})", f"the page {page}", show=False, priority=True)
            for at, page in enumerate(PAGES, start=1)
        ),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("left", "shift(-1)", "left", show=False, tooltip="columns, pages, closes a node"),
        Binding("right", "shift(1)", "right", show=False, tooltip="columns, pages, opens a node"),
        Binding("pageup,ctrl+u", "screen(-1)", "one screen up", show=False),
        Binding("pagedown,ctrl+d", "screen(1)", "one screen down", show=False),
        Binding("home,g", "home", "to the first row", show=False),
        Binding("end,G", "end", "to the last row", show=False),
        Binding("tab", "next_table", "to the next table", show=False),
        Binding("r", "app.related", "related", show=False, tooltip="what it leads to"),
        Binding("i", "app.events_of", "events", show=False,
            tooltip="what happened to it, of a handoff from both ends"),
        Binding("y", "app.copy", "copy", show=False, tooltip="the kvd command that says why"),
        Binding("s", "sort", "sort", show=False, tooltip="by the next column"),
        Binding("w", "wide", "wide", show=False, tooltip="all columns, no card beside them"),
        Binding("z", "app.faults", "faults", show=False, tooltip="only what is wrong"),
    ]  # fmt: skip

    DEFAULT_CSS = "Page { layout: vertical; width: 1fr; height: 1fr; }"

    def __init__(self) -> None:
        super().__init__(id=f"page-{self.NAME}")
        self._heights: dict[str, int] = {}
        self._tables: list[WindowedTable] = []
        """Looked up once: asked for several times a frame."""

    def tables(self) -> list[WindowedTable]:
        """Every table that can be seen."""
        return [table for table in self._tables if table.display]

    def table(self) -> WindowedTable | None:
        """The table that keys are about: moving, sorting, filtering; None for none."""
        tables = self.tables()
        return next((table for table in tables if table.is_active), None)

    def cursored(self) -> Cursored | None:
        """In what keys move the cursor: the table, unless a page has something else."""
        return self.table()

    def activate(self, table: WindowedTable) -> None:
        """Keys are about this table from now on."""
        for other in self._tables:
            other.is_active = other is table
            other.redraw()

    def action_next_table(self) -> None:
        """Keys are about the next table."""
        tables, now = self.tables(), self.table()
        if tables:
            at = tables.index(now) if now is not None else -1
            self.activate(tables[(at + 1) % len(tables)])

    def on_mount(self) -> None:
        """Keys are about the first table, until another is chosen."""
        self._tables = list(self.query(WindowedTable))
        self.action_next_table()

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

    def table_of(self, kind: str) -> WindowedTable | None:
        """The table with the rows of this kind, in which one can be asked for alone."""
        return next(iter(self.tables()), None)

    def pin(self, ref: str) -> None:
        """Show this alone, as it is not in sight; everything again where it is empty."""
        table = self.table_of(ref.partition(":")[0]) if ref else self.table()
        if table is not None and table.pin(ref) and ref:
            self.activate(table)

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

    def filter_by(self, text: str, filters: tuple[Filter, ...]) -> None:
        """Show only what passes; ``text`` is how that was written."""
        if (table := self.table()) is not None:
            table.set_filters(text, filters)

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

    def widen(self) -> bool:
        """Show more again where what is shown was narrowed down; whether it was."""
        return any(table.pin("") for table in self.tables())

    def unfold(self) -> None:
        """Show what is below what is under the cursor, where there is such a thing."""

    # ---- keys -------------------------------------------------------------------------------

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Whether a key means something here and now."""
        table = self.table()
        if action in MOVES:
            return self.cursored() is not None
        if action == "next_table":
            return len(self.tables()) > 1
        if action in {"sort", "wide"}:
            return table is not None
        if action in ON_A_ROW:
            return bool(self.chosen())
        return super().check_action(action, parameters)

    def on_key(self, event: Key) -> None:
        """Shift and a letter sorts by the column with that letter: on every page."""
        table, letter = self.table(), event.character or ""
        if not (letter.isalpha() and letter.isupper()):
            return
        if table is not None and table.sort_by_letter(letter.lower()):
            self.post_message(WindowedTable.Moved(table))
        else:
            self.notify(f"no column here begins with {letter.lower()}", markup=False)

    async def action_handoffs(self, column: str) -> None:
        """Go to the handoffs that have in this column what the first table is at."""
        app, ref = console(self), self.tables()[0].chosen()
        await app.action_go("handoffs")
        table = app.page.table()
        if table is not None and ref:
            table.set_filters(f'{column}="{ref}"', (Filter(column, "is", ref),))

    def action_move(self, rows: int) -> None:
        """So many rows down."""
        if (lines := self.cursored()) is not None:
            lines.move(rows)

    def action_screen(self, screens: int) -> None:
        """So many screens down."""
        if (lines := self.cursored()) is not None:
            lines.move_screens(screens)

    def action_shift(self, columns: int) -> None:
        """So many columns to the right."""
        if (lines := self.cursored()) is not None:
            lines.shift(columns)

    def action_home(self) -> None:
        """To the first row."""
        if (lines := self.cursored()) is not None:
            lines.move_to_start()

    def action_end(self) -> None:
        """To the last row."""
        if (lines := self.cursored()) is not None:
            lines.move_to_end()

    def action_sort(self) -> None:
        """By the next column."""
        if (table := self.table()) is not None:
            table.sort_next()

    def action_wide(self) -> None:
        """All columns, or those that fit."""
        if (table := self.table()) is not None:
            table.set_wide(is_wide=not table.is_wide)
            console(self).place_card()
