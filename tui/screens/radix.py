"""The prefix tree: what is cached, who locks it, and what would go next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.text import clean, counted
from kvd.wire.console import Filter, Query
from tui.draw import spans
from tui.draw.spans import Line, Span, said
from tui.screens.page import Page
from tui.widgets.canvas import Canvas
from tui.widgets.card import PAGES_OF
from tui.widgets.reach import missing
from tui.widgets.treetable import TREE, TreeTable

if TYPE_CHECKING:
    from textual.app import ComposeResult

    from tui.model.moments import Moment
    from tui.model.sheets import Slot

LISTS = {"only-locked": "locked", "only-orphans": "orphans", "eviction": "eviction"}
"""Actions that show a list of nodes, and by the same key the tree again."""
COUNTED = {"locked": Query("locked", limit=0), "orphans": Query("orphans", limit=0)}
"""Lists whose length is shown beside the tree."""
NEXT = Query("eviction", limit=4, filters=(Filter("rank", "over", 0.0),))
"""What would be evicted next: not what would be passed."""
NEXT_COLUMNS = 20
"""Of the name of each of them."""
TALL_LINES = 24
"""From this height on the page has room for what would be evicted next."""
TABS = ((TREE, "x", "tree"), ("locked", "l", "locked"), ("orphans", "o", "orphans"),
        ("eviction", "v", "eviction order"))  # fmt: skip


class RadixPage(Page):
    """The tree, or a list of some of its nodes; above which one, below the way to the node."""

    NAME = "radix"
    REFS = ("node",)
    DEFAULT_CSS = """
    RadixPage > #radix-tabs { height: 1; }
    RadixPage > #radix-path { height: 2; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield Canvas(id="radix-tabs")
        yield TreeTable()
        yield Canvas(id="radix-path")

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
    def show(self, moment: Moment) -> None:
        super().show(moment)
        self.query_one("#radix-tabs", Canvas).paint([self._tabs(moment)])
        path = self.query_one("#radix-path", Canvas)
        lines = [self._path()]
        if self._shows_next:
            lines.append(self._next(moment))
        if path.styles.height is None or path.styles.height.value != len(lines):
            path.styles.height = len(lines)
        path.paint(lines)

    @override
    async def act(self, action: str) -> bool:
        nodes = self.nodes
        match action:
            case "only-locked" | "only-orphans" | "eviction":
                view = LISTS[action]
                nodes.turn(TREE if nodes.view == view else view)
            case "expand":
                if not nodes.close_node():
                    nodes.open_node()
            case "open-node":
                nodes.open_node()
                self.post_message(self.Wish(nodes.chosen()))
            case "right" if nodes.is_tree:
                if not nodes.open_node():
                    nodes.move(1)
            case "left" if nodes.is_tree:
                if not nodes.close_node():
                    nodes.to_parent()
            case "pages":
                self.post_message(self.Wish(PAGES_OF + nodes.chosen()))
            case _:
                return await super().act(action)
        return True

    # ---- lines ------------------------------------------------------------------------------

    def _tabs(self, moment: Moment) -> Line:
        """The lists by their keys with how many nodes each has, the one that is shown marked."""
        made: list[Span] = []
        for view, key, name in TABS:
            is_shown = view == self.nodes.view
            count = self._count(moment, view)
            style: spans.Style = "selected" if is_shown else "plain"
            if view == "orphans" and count not in {"", " 0"}:
                style = "bad"
            marks = (">", "<") if is_shown else (" ", " ")
            made += [
                Span(marks[0], "key"),
                Span(f"{key} ", "key") if view != TREE else Span(""),
                said(f"{name}{count}", style),
                Span(f"{marks[1]} ", "key"),
            ]
        return spans.fit(spans.merged(made), self.size.width)

    def _count(self, moment: Moment, view: str) -> str:
        sheet = self.nodes.sheet if view == self.nodes.view else None
        if sheet is None and view in COUNTED:
            sheet = moment.sheet(COUNTED[view])
        return f" {sheet.of}" if sheet is not None and not sheet.trouble else ""

    def _path(self) -> Line:
        """The way from the root to the node under the cursor; its end matters most."""
        words = " / ".join(self.nodes.path())
        text = spans.text_of([said(words or "-")])
        room = max(1, self.size.width - 6)
        while spans.columns(text) > room:
            text = "…" + text[2:] if text.startswith("…") else "…" + text[1:]
        return spans.fit((Span("path  ", "dim"), Span(text)), self.size.width)

    def _next(self, moment: Moment) -> Line:
        """What would be evicted first."""
        made: list[Span] = [Span("next  ", "dim")]
        sheet = moment.sheet(NEXT)
        if sheet is None or sheet.trouble:
            why = sheet.trouble if sheet is not None else missing(self)
            return spans.fit((*made, said(why, "dim")), self.size.width)
        if not sheet.order:
            made.append(Span("nothing can be evicted", "dim"))
        for rank, key in enumerate(sheet.order[: NEXT.limit], start=1):
            count = sheet.cell(key, "pages")
            pages = f" {counted(count, 'page')}" if isinstance(count, int) else ""
            name = spans.cut(clean(str(sheet.cell(key, "name"))), NEXT_COLUMNS)
            made += [Span(f"#{rank} ", "key"), said(f"{key} "), Span(name)]
            made += [Span(pages, "dim"), Span("   ")]
        return spans.fit(made, self.size.width)
