"""The memory: components, and the map of the pages of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from tui.screens.page import Page
from tui.widgets.card import WITH_PAGES, Card
from tui.widgets.page_map import PageMapPanel
from tui.widgets.pools import POOLS_QUERY, PoolTable

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from kvd.wire.console import Column, TableRow
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot

SCREEN_ROWS = 8
"""Lines of cells that a page key moves over: a map has no other screens."""
MOVES = {
    "up": (-1, 0),
    "down": (1, 0),
    "left": (0, -1),
    "right": (0, 1),
    "pageup": (-SCREEN_ROWS, 0),
    "pagedown": (SCREEN_ROWS, 0),
}
"""By how many rows and columns of cells."""
ZOOM = 2.0
NOTHING_LIT = "nothing is lit here: p on a node, g on a lease or client, L on the card of a page"


class PoolsPage(Page):
    """Components above, the map of the chosen one below; the cursor is on a page.

    What is opened here of ``WITH_PAGES`` is lit: a lease, a node, or a client, with all its pages.
    """

    NAME = "pools"
    REFS = ("page", "pool")
    CAN_MOVE = True

    @override
    def compose(self) -> ComposeResult:
        yield PoolTable()
        yield PageMapPanel()

    @property
    def lines(self) -> PoolTable:
        """The components."""
        return self.query_one(PoolTable)

    @property
    def map(self) -> PageMapPanel:
        """The map."""
        return self.query_one(PageMapPanel)

    @override
    def queries(self) -> tuple[Slot, ...]:
        return (POOLS_QUERY, *self.map.asks())

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        lines, shown = self.lines, self.map
        lines.show(snapshot)
        shown.first_component = next(iter(lines.names), "")
        shown.show(snapshot)

    @override
    def chosen(self) -> str:
        return self.map.ref

    @override
    def row(self, ref: str) -> tuple[TableRow | None, tuple[Column, ...]]:
        data = self.lines.data
        if data is None or ref not in data.rows:
            return None, ()
        return data.rows[ref], data.columns

    @override
    def seek(self, ref: str) -> bool:
        """Go to a page or a component; light up what else can be lit, but it is not here."""
        kind, _, rest = ref.partition(":")
        if kind in WITH_PAGES:
            self.map.light(ref)
            return False
        component, _, number = rest.rpartition(":")
        if kind == "page" and number.isdecimal():
            self._show_component(component)
            self.map.move_to(int(number))
            return True
        if kind == "pool":
            self._show_component(rest)
            return True
        return False

    def _show_component(self, component: str) -> None:
        """The map of this component; the first one has no name until it is known."""
        first = next(iter(self.lines.names), "")
        self.lines.choose(component or first)
        self.map.show_component("" if component == first else component)

    @override
    async def act(self, action: str) -> bool:
        shown = self.map
        match action:
            case "lens":
                shown.next_lens()
            case "zoom-in":
                shown.zoom(ZOOM)
            case "zoom-out":
                shown.zoom(1 / ZOOM)
            case "next-lit":
                if not shown.next_lit():
                    self.notify(NOTHING_LIT, markup=False)
            case "light":
                shown.light(self._holder())
            case "component":
                self._show_component(self.lines.next())
            case _:
                return self._move(action)
        self._repaint()
        return True

    def _move(self, action: str) -> bool:
        if action in MOVES:
            self.map.move(*MOVES[action])
        elif action in {"home", "end"}:
            self.map.move_to(0 if action == "home" else self.map.total_pages - 1)
        else:
            return False
        return True

    def _holder(self) -> str:
        """Of what the open card names, the next one that can be lit; after the last one nothing."""
        links = self.screen.query_one(Card).links
        found = [ref for ref in links if ref.partition(":")[0] in WITH_PAGES]
        at = found.index(self.map.mark) + 1 if self.map.mark in found else 0
        return found[at] if at < len(found) else ""

    def _repaint(self) -> None:
        self.lines.redraw()
        self.map.redraw()

    def on_pool_table_chosen(self, message: PoolTable.Chosen) -> None:
        """A component was clicked."""
        self._show_component(message.component)
        self._repaint()

    def on_page_map_panel_opened(self) -> None:
        """A page was clicked twice."""
        self.post_message(self.OpenRequested(self.chosen()))

    def on_page_map_panel_moved(self) -> None:
        """A page was clicked: the card goes with it."""
        if self.screen.query_one(Card).ref:
            self.post_message(self.OpenRequested(self.chosen()))
