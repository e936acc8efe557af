"""The prefix tree: what is cached, who locks it, and what would go next."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.wire.console import MAX_OPENED
from tui.screens.page import EVICT, FLUSH, Page
from tui.widgets.canvas import console
from tui.widgets.card import PAGES_OF
from tui.widgets.table import ColumnRules, WindowedTable

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Cell, TableRow
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import TableData


TREE = "tree"
TITLES = {
    TREE: "prefix tree",
    "locked": "locked nodes",
    "eviction": "in the order of eviction",
    "evicted": "evicted last, and who asked for it again",
}
"""Views of nodes, and how they are headed."""
RULES = {
    TREE: ColumnRules(
        first=("name", "pages", "hits", "below_pages", "lock_ref", "holders", "last_use", "tokens"),
        never=("children",),
        narrow=("name", "holders"),
    ),
    "locked": ColumnRules(
        first=("name", "lock_ref", "holders", "pages", "namespace", "last_use", "tokens"),
        narrow=("name", "holders", "namespace"),
    ),
    "eviction": ColumnRules(
        first=("rank", "name", "pages", "skipped", "why", "last_use", "hits", "namespace"),
        narrow=("name", "namespace"),
    ),
    "evicted": ColumnRules(
        first=("gone", "pages", "wrote", "needed_by", "missed_by", "missed", "hits", "tier"),
    ),
}
HOTTEST = "-hits"
MOST_FOLLOWED = 4
"""Levels that are opened to show the hottest branch."""
CLOSED, OPENED, LEAF = "▶", "▼", " "


class TreeTable(WindowedTable):
    """One of the views of nodes; in the tree the daemon shows what is below opened ones."""

    def __init__(self) -> None:
        super().__init__(TREE, title=TITLES[TREE], rules=RULES[TREE])
        self._greeted: set[int | None] = set()
        """Roots that have been opened."""

    @property
    def is_tree(self) -> bool:
        """Whether nodes can be opened here."""
        return self.view == TREE

    def show_view(self, view: str) -> None:
        """Show these nodes, from the top, in their own order."""
        self.view, self.title, self.rules = view, TITLES[view], RULES[view]
        self.sort = self.filter_text = self._key = ""
        self.filters, self.data, self._known, self._shift = (), None, {}, 0
        self.move_to_start()

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        before = self.data
        super().show(snapshot)
        if self.data is None or self.data is before or not self.is_tree:
            return
        roots = [row for row in self.data.listed() if self._of(row, "depth") == 0]
        fresh = {_number(row.key) for row in roots if self.is_parent(row)} - self._greeted
        if self.sort == HOTTEST:
            self._follow_first(self.data)
        elif fresh:  # each once: one that the operator closes stays closed
            self._greeted |= fresh
            more = [number for number in fresh if number is not None and number not in self.opened]
            self._set_opened((*self.opened, *more)[-MAX_OPENED:])

    @override
    def shift(self, columns: int) -> None:
        """In the tree: open or close a node, or go to the one below or above."""
        if not self.is_tree:
            super().shift(columns)
        elif columns > 0 and not self.open_node():
            self.move(1)
        elif columns < 0 and not self.close_node():
            self.to_parent()

    # ---- opening ----------------------------------------------------------------------------

    @property
    def number(self) -> int | None:
        """The node under the cursor; None where there is none."""
        return _number(self.chosen())

    def is_open(self, key: str) -> bool:
        """Whether what is below this node is shown."""
        return _number(key) in self.opened

    def open_node(self) -> bool:
        """Show what is below the node under the cursor; whether it was closed, and a parent."""
        number, row = self.number, self.row()
        is_closed = number is not None and number not in self.opened
        if number is None or row is None or not is_closed or not self.is_parent(row):
            return False
        self._set_opened((*self.opened[-MAX_OPENED + 1 :], number))
        return True

    def close_node(self) -> bool:
        """Show nothing below the node under the cursor any more; whether it was open."""
        if self.number not in self.opened:
            return False
        self._set_opened(tuple(node for node in self.opened if node != self.number))
        return True

    def _follow_first(self, data: TableData) -> None:
        """Open what is below the first of the first ones, a level with each picture."""
        for depth, row in enumerate(data.listed()[:MOST_FOLLOWED]):
            if self._of(row, "depth") != depth:
                return
            number = _number(row.key)
            if number is not None and number not in self.opened and self.is_parent(row):
                self._set_opened((*self.opened[-MAX_OPENED + 1 :], number))
                return

    def _set_opened(self, opened: tuple[int, ...]) -> None:
        self.opened, self._known = opened, {}
        self.redraw()

    def to_parent(self) -> None:
        """The cursor to the node above, as far as that is in the window."""
        row, data = self.row(), self.data
        if row is not None and data is not None:
            before = data.listed()[: data.order.index(row.key)]
            above = [one.key for one in before if self._depth(one) == self._depth(row) - 1]
            self.seek(above[-1] if above else row.key)

    def is_parent(self, row: TableRow) -> bool:
        """Whether anything is below it; where that is not known yet, it may be."""
        children = self._of(row, "children")
        if isinstance(children, int):
            return children > 0
        below, own = self._of(row, "below_pages"), self._of(row, "pages")
        if not isinstance(below, int) or not isinstance(own, int):
            return True
        return below > own

    # ---- lines ------------------------------------------------------------------------------

    def _of(self, row: TableRow, name: str) -> Cell:
        at = self.data.index(name) if self.data is not None else -1
        return row.cells[at] if at >= 0 else None

    def _depth(self, row: TableRow) -> int:
        depth = self._of(row, "depth")
        return depth if isinstance(depth, int) else 0

    @override
    def indented(self, row: TableRow, text: str) -> str:
        if not self.is_tree:
            return text
        mark = OPENED if self.is_open(row.key) else CLOSED if self.is_parent(row) else LEAF
        return f"{'  ' * self._depth(row)}{mark} {text}"


def _number(key: str) -> int | None:
    kind, _, number = key.partition(":")
    return int(number) if kind == "node" and number.isdecimal() else None


class RadixPage(Page):
    """The tree, or a list of some of its nodes: its caption says which."""

    NAME = "radix"
    REFS = ("node",)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "nodes('locked')", "locked", tooltip="only what is locked"),
        Binding("v", "nodes('eviction')", "eviction", tooltip="in the order of eviction"),
        Binding("e", "nodes('evicted')", "evicted", tooltip="last, for whom, who missed it"),
        Binding("h", "hottest", "hottest", tooltip="the branches by their hits; again: by size"),
        Binding("x", "expand", "expand", tooltip="open or close the node"),
        Binding("p", "pages_of", "pages", tooltip="on the page map", show=False),
        EVICT,
        FLUSH,
    ]

    @override
    def compose(self) -> ComposeResult:
        yield TreeTable()

    @property
    def nodes(self) -> TreeTable:
        """The table, whichever nodes it shows."""
        return self.query_one(TreeTable)

    @override
    def table_of(self, kind: str) -> None:
        """Nodes are shown below those that are opened: none of them alone."""

    @override
    def unfold(self) -> None:
        self.nodes.open_node()

    def action_nodes(self, view: str) -> None:
        """Show a list of nodes, or the tree again."""
        self.nodes.show_view(TREE if self.nodes.view == view else view)

    def action_expand(self) -> None:
        """Open or close the node."""
        if not self.nodes.close_node():
            self.nodes.open_node()

    def action_hottest(self) -> None:
        """The branches that are used the most on top, or again the biggest."""
        nodes = self.nodes
        if not nodes.is_tree:
            nodes.show_view(TREE)
        nodes.set_sort("" if nodes.sort == HOTTEST else HOTTEST)

    async def action_pages_of(self) -> None:
        """Its pages on the page map."""
        await console(self).open(PAGES_OF + self.nodes.chosen())
