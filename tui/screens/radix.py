"""The prefix tree: what is cached, who locks it, and what would go next."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual.binding import Binding
from typing_extensions import override

from kvd.text import clean, counted
from kvd.wire.console import MAX_OPENED, Filter, Query
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.screens.page import EVICT, FLUSH, Page
from tui.widgets.canvas import NOT_HERE_YET, Canvas
from tui.widgets.card import PAGES_OF
from tui.widgets.table import ColumnRules, WindowedTable

if TYPE_CHECKING:
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Cell, TableRow
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot, TableData


TREE = "tree"
TITLES = {
    TREE: "prefix tree",
    "locked": "locked nodes",
    "eviction": "in the order of eviction",
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
}
WITHOUT_BESIDE = {
    view: msgspec.structs.replace(rules, never=(*rules.never, "beside"))
    for view, rules in RULES.items()
}
"""Where no node has anything of other components: nobody misses the column."""
MAX_NAMED = 8192
"""Nodes of which the parent is remembered: more than anybody scrolls past."""
HOTTEST = "-hits"
MOST_FOLLOWED = 4
"""Levels that are opened to show the hottest branch."""
CLOSED, OPENED, LEAF = "▶", "▼", " "


class TreeTable(WindowedTable):
    """One of the views of nodes; in the tree the daemon shows what is below opened ones."""

    def __init__(self) -> None:
        super().__init__(TREE, title=TITLES[TREE], rules=RULES[TREE])
        self._above: dict[str, str] = {}
        """By the key of a node, as they were seen in the tree; empty for the uppermost."""

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
        data = self.data
        if data is None or data is before:
            return
        if self.is_tree:
            self._learn(data)
            if self.sort == HOTTEST:
                self._follow_first(data)
        at = data.index("beside")
        if at >= 0 and not any(row.cells[at] for row in data.rows.values()):
            self.rules = WITHOUT_BESIDE[self.view]
        else:
            self.rules = RULES[self.view]

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
        parent = self._above.get(self.chosen(), "")
        if parent:
            self.seek(parent)

    def is_parent(self, row: TableRow) -> bool:
        """Whether anything is below it; where that is not known yet, it may be."""
        children = self._of(row, "children")
        if isinstance(children, int):
            return children > 0
        below, own = self._of(row, "below_pages"), self._of(row, "pages")
        if not isinstance(below, int) or not isinstance(own, int):
            return True
        return below > own

    def _learn(self, data: TableData) -> None:
        """Remember the parents of what is shown: of a long tree only a part is ever here."""
        depth_at = data.index("depth")
        if depth_at < 0:
            return
        if len(self._above) > MAX_NAMED:
            self._above.clear()
        above: dict[int, str] = {}
        for row in data.listed():
            depth = row.cells[depth_at]
            depth = int(depth) if isinstance(depth, int | float) else 0
            if depth == 0 or depth - 1 in above:
                self._above[row.key] = above.get(depth - 1, "")
            above[depth] = row.key

    # ---- lines ------------------------------------------------------------------------------

    def _of(self, row: TableRow, name: str) -> Cell:
        at = self.data.index(name) if self.data is not None else -1
        return row.cells[at] if at >= 0 else None

    @override
    def indented(self, row: TableRow, text: str) -> str:
        if not self.is_tree:
            return text
        depth = self._of(row, "depth")
        mark = OPENED if self.is_open(row.key) else CLOSED if self.is_parent(row) else LEAF
        return f"{'  ' * int(depth) if isinstance(depth, int | float) else ''}{mark} {text}"


def _number(key: str) -> int | None:
    kind, _, number = key.partition(":")
    return int(number) if kind == "node" and number.isdecimal() else None


COUNTED = {"locked": Query("locked", limit=0)}
"""Lists whose length is shown beside the tree."""
NEXT = Query("eviction", limit=4, filters=(Filter("rank", "over", 0.0),))
"""What would be evicted next: not what would be passed."""
NEXT_COLUMNS = 20
"""Of the name of each of them."""
TALL_LINES = 24
"""From this height on the page has room for what would be evicted next."""
TABS = ((TREE, "x", "tree"), ("locked", "l", "locked"), ("eviction", "v", "eviction order"))


class RadixPage(Page):
    """The tree, or a list of some of its nodes; above which one, below what goes next."""

    NAME = "radix"
    REFS = ("node",)
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l", "nodes('locked')", "locked", tooltip="only what is locked"),
        Binding("v", "nodes('eviction')", "eviction", tooltip="in the order of eviction"),
        Binding("h", "hottest", "hottest", tooltip="the branches by their hits; again: by size"),
        Binding("x", "expand", "expand", tooltip="open or close the node"),
        Binding("p", "pages_of", "pages", tooltip="on the page map", show=False),
        EVICT,
        FLUSH,
    ]
    DEFAULT_CSS = """
    RadixPage > #radix-tabs { height: 1; }
    RadixPage > #radix-next { height: 1; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield Canvas(id="radix-tabs")
        yield TreeTable()
        yield Canvas(id="radix-next")

    @property
    def nodes(self) -> TreeTable:
        """The table, whichever nodes it shows."""
        return self.query_one(TreeTable)

    @override
    def queries(self) -> tuple[Slot, ...]:
        lists = [query for view, query in COUNTED.items() if view != self.nodes.view]
        return (self.nodes.asks(), *lists, *((NEXT,) if self._shows_next else ()))

    @property
    def _shows_next(self) -> bool:
        return self.size.height >= TALL_LINES and self.nodes.view != NEXT.view

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        super().show(snapshot)
        self.query_one("#radix-tabs", Canvas).paint([self._tabs(snapshot)])
        following = self.query_one("#radix-next", Canvas)
        following.display = self._shows_next
        if following.display:
            following.paint([self._next(snapshot)])

    @override
    def table_of(self, kind: str) -> None:
        """Nodes are shown below those that are opened: none of them alone."""

    @override
    def unfold(self) -> None:
        self.nodes.open_node()

    @override
    def action_shift(self, columns: int) -> None:
        """In the tree: open or close a node, or go to the one below or above."""
        nodes = self.nodes
        if not nodes.is_tree:
            super().action_shift(columns)
        elif columns > 0 and not nodes.open_node():
            nodes.move(1)
        elif columns < 0 and not nodes.close_node():
            nodes.to_parent()

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

    def action_pages_of(self) -> None:
        """Its pages on the page map."""
        self.post_message(self.OpenRequested(PAGES_OF + self.nodes.chosen()))

    # ---- lines ------------------------------------------------------------------------------

    def _tabs(self, snapshot: DaemonSnapshot) -> Line:
        """The lists by their keys with how many nodes each has, the one that is shown marked."""
        made: list[Styled] = []
        for view, key, name in TABS:
            is_shown = view == self.nodes.view
            count = self._count(snapshot, view)
            style: spans.Style = "selected" if is_shown else "plain"
            marks = (">", "<") if is_shown else (" ", " ")
            made += [
                Styled(marks[0], "key"),
                Styled(f"{key} ", "key") if view != TREE else Styled(""),
                cleaned(f"{name}{count}", style),
                Styled(f"{marks[1]} ", "key"),
            ]
        return spans.fit(spans.merged(made), self.size.width)

    def _count(self, snapshot: DaemonSnapshot, view: str) -> str:
        data = self.nodes.data if view == self.nodes.view else None
        if data is None and view in COUNTED:
            data = snapshot.table(COUNTED[view])
        return f" {data.of}" if data is not None and not data.trouble else ""

    def _next(self, snapshot: DaemonSnapshot) -> Line:
        """What would be evicted first."""
        made: list[Styled] = [Styled("next  ", "dim")]
        data = snapshot.table(NEXT)
        if data is None or data.trouble:
            why = data.trouble if data is not None else NOT_HERE_YET
            return spans.fit((*made, cleaned(why, "dim")), self.size.width)
        if not data.order:
            made.append(Styled("nothing can be evicted", "dim"))
        for rank, key in enumerate(data.order[: NEXT.limit], start=1):
            count = data.cell(key, "pages")
            pages = f" {counted(count, 'page')}" if isinstance(count, int) else ""
            name = spans.cut(clean(str(data.cell(key, "name"))), NEXT_COLUMNS)
            made += [Styled(f"#{rank} ", "key"), cleaned(f"{key} "), Styled(name)]
            made += [Styled(pages, "dim"), Styled("   ")]
        return spans.fit(made, self.size.width)
