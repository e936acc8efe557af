"""The prefix tree as a table: nodes are opened where they stand; and lists of some of its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from typing_extensions import override

from kvd.wire.console import MAX_OPENED
from tui.widgets.fitting import Rules
from tui.widgets.linetable import LineTable

if TYPE_CHECKING:
    from kvd.wire.console import Cell, TableRow
    from tui.model.moments import Moment
    from tui.model.sheets import Sheet

TREE = "tree"
TITLES = {
    TREE: "prefix tree",
    "locked": "locked nodes",
    "orphans": "locks nobody answers for",
    "eviction": "in the order of eviction",
}
"""Views of nodes, and how they are headed."""
RULES = {
    TREE: Rules(
        first=("name", "pages", "below_pages", "lock_ref", "holders", "last_use", "hits", "tokens"),
        never=("children",),
        narrow=("name", "holders"),
    ),
    "locked": Rules(
        first=("name", "lock_ref", "holders", "pages", "namespace", "last_use", "tokens"),
        narrow=("name", "holders", "namespace"),
    ),
    "orphans": Rules(
        first=("why", "name", "lock_ref", "holders", "pages", "namespace"),
        narrow=("name", "holders", "namespace"),
    ),
    "eviction": Rules(
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
CLOSED, OPENED, LEAF = "▶", "▼", " "


class TreeTable(LineTable):
    """A ``LineTable`` of one of the views of nodes; in the tree the daemon shows what is opened."""

    def __init__(self) -> None:
        super().__init__(TREE, title=TITLES[TREE], rules=RULES[TREE])
        self._above: dict[str, str] = {}
        """By the key of a node, as they were seen in the tree; empty for the uppermost."""
        self._named: dict[str, str] = {}

    @property
    def is_tree(self) -> bool:
        """Whether nodes can be opened here."""
        return self.view == TREE

    def turn(self, view: str) -> None:
        """Show these nodes, from the top, in their own order."""
        self.view, self.title, self.rules = view, TITLES[view], RULES[view]
        self.sort = self.filter_text = self._key = ""
        self.filters, self._sheet, self._known, self._shift = (), None, {}, 0
        self.move_to_start()

    @override
    def show(self, moment: Moment) -> None:
        before = self.sheet
        super().show(moment)
        sheet = self.sheet
        if sheet is None or sheet is before:
            return
        if self.is_tree:
            self._learn(sheet)
        at = sheet.index("beside")
        if at >= 0 and not any(row.cells[at] for row in sheet.rows.values()):
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
        self._set_opened(tuple(one for one in self.opened if one != self.number))
        return True

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

    # ---- the way to a node ------------------------------------------------------------------

    def path(self) -> tuple[str, ...]:
        """The names from the root to the node under the cursor, as far as they were seen."""
        row = self.row()
        if not self.is_tree and row is not None:
            above = [self._of(row, "namespace"), self._before(row), self._of(row, "name")]
            return tuple(str(one) for one in above if one)
        made: list[str] = []
        key = self.chosen()
        while key in self._named and len(made) < MAX_OPENED:
            made.append(self._named[key])
            key = self._above.get(key, "")
        return tuple(reversed(made))

    def _before(self, row: TableRow) -> str:
        """What of a prompt is above a node of a list."""
        start = self._of(row, "start")
        return f"{start} tokens" if isinstance(start, int) and start else ""

    def _learn(self, sheet: Sheet) -> None:
        """Remember the parents of what is shown: of a long tree only a part is ever here."""
        depth_at, name_at = sheet.index("depth"), sheet.index("name")
        if depth_at < 0 or name_at < 0:
            return
        if len(self._named) > MAX_NAMED:
            self._named.clear()
            self._above.clear()
        above: dict[int, str] = {}
        for row in sheet.listed():
            depth = row.cells[depth_at]
            depth = int(depth) if isinstance(depth, int | float) else 0
            self._named[row.key] = str(row.cells[name_at])
            if depth == 0 or depth - 1 in above:
                self._above[row.key] = above.get(depth - 1, "")
            above[depth] = row.key

    # ---- lines ------------------------------------------------------------------------------

    def _of(self, row: TableRow, name: str) -> Cell:
        at = self.sheet.index(name) if self.sheet is not None else -1
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
