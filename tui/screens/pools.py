"""The memory: components, and the map of the pages of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from tui.screens.page import EVICT, FLUSH, Page
from tui.widgets.canvas import console
from tui.widgets.card import WITH_PAGES, Card
from tui.widgets.page_map import PageMapPanel
from tui.widgets.pools import POOLS_QUERY, PoolTable

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Column, TableRow
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot

NOTHING_LIT = "nothing is lit here: p on a node, r on a lease or client, o on the card of a page"


class PoolsPage(Page):
    """Components above, the map of the chosen one below; the cursor is on a page.

    What is opened here of ``WITH_PAGES`` is lit: a lease, a node, or a client, with all its pages.
    """

    NAME = "pools"
    REFS = ("page", "pool")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "app.go('engines')", "engines", tooltip="who they are, and what they hold"),
        Binding("l", "lens", "lens", tooltip="the next one of the page map"),
        Binding("+,=", "zoom(2.0)", "zoom", tooltip="a page a cell, around the cursor"),
        Binding("-", "zoom(0.5)", "all pages", show=False),
        Binding("o", "light", "light", tooltip="all pages of its holder, then of the next one"),
        Binding("n", "next_lit", "the next page that is lit up", show=False),
        Binding("m", "component", "the map of the next component", show=False),
        EVICT,
        FLUSH,
    ]

    @override
    def compose(self) -> ComposeResult:
        yield PoolTable()
        yield PageMapPanel()

    @property
    def lines(self) -> PoolTable:
        """The table above the map, a component a row."""
        return self.query_one(PoolTable)

    @property
    def map(self) -> PageMapPanel:
        """The map."""
        return self.query_one(PageMapPanel)

    @override
    def cursored(self) -> PageMapPanel:
        return self.map

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
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "light":
            return bool(self.screen.query_one(Card).ref)
        return super().check_action(action, parameters)

    def action_lens(self) -> None:
        """Look at something else of the same pages."""
        self.map.next_lens()
        self._repaint()

    def action_zoom(self, times: float) -> None:
        """Closer, or farther where ``times`` is under 1."""
        self.map.zoom(times)
        self._repaint()

    def action_next_lit(self) -> None:
        """To the next page that is lit up."""
        if not self.map.next_lit():
            self.notify(NOTHING_LIT, markup=False)
        self._repaint()

    def action_light(self) -> None:
        """Light up all pages of its holder, then of the next one."""
        self.map.light(self._holder())
        self._repaint()

    def action_component(self) -> None:
        """The map of the next component."""
        self._show_component(self.lines.next())
        self._repaint()

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

    async def on_cursored_moved(self) -> None:
        """A page was clicked: the card goes with it."""
        if self.screen.query_one(Card).ref:
            await console(self).open(self.chosen())
