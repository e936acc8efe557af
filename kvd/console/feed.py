"""One window of a table over time: which of its rows changed with which revision.

Revisions come from one counter of the daemon, so a console that says what it has need not be
known: what is older than this feed, or from another one, is answered with the whole window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvd.console.view import Flaw
from kvd.wire.console import Query, Row, Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.scene import Scene
    from kvd.console.view import View

_ENCODE = msgspec.msgpack.Encoder().encode


class Feed:
    """What a query was last answered with. ``update`` now and then, ``answer`` anybody."""

    def __init__(self, view: View[Any], query: Query, revisions: Iterator[int]) -> None:
        self.asked_s = self.at_s = float("-inf")
        self._view = view
        self._query = query
        self._revisions = revisions
        self._born = self._revision = next(revisions)
        self._order: tuple[str, ...] = ()
        self._order_changed = self._born
        self._rows: dict[str, tuple[Row, int]] = {}
        self._total = self._of = 0
        self._trouble = "not looked at yet: the daemon spends only so much on consoles"
        self._answers: dict[int, bytes] = {}

    @property
    def revision(self) -> int:
        """Of what ``answer`` says; 0 where it says why there is nothing."""
        return 0 if self._trouble else self._revision

    def update(self, scene: Scene) -> None:
        """The window as it is now."""
        window = self._view.window(scene, self._query)
        self.at_s = scene.now_s
        self._answers.clear()
        if isinstance(window, Flaw):
            self._trouble = window.why
            return
        self._trouble = ""
        self._total, self._of = window.total, window.of
        before = self._rows
        revision = 0
        rows: dict[str, tuple[Row, int]] = {}
        for row in window.rows:
            known = before.get(row.key)
            if known is None or known[0] != row:
                revision = revision or next(self._revisions)
                known = (row, revision)
            rows[row.key] = known
        order = tuple(rows)
        if order != self._order:
            revision = revision or next(self._revisions)
            self._order, self._order_changed = order, revision
        self._rows = rows
        self._revision = revision or self._revision

    def answer(self, have: int) -> bytes:
        """What a console with that revision lacks: a ``Table``, encoded once for all who ask."""
        found = self._answers.get(have)
        if found is None:
            found = self._answers[have] = _ENCODE(self._table(have))
        return found

    def _table(self, have: int) -> Table:
        is_known = self._born <= have <= self._revision
        since = have if is_known else 0
        return Table(
            view=self._view.name,
            revision=self.revision,
            since=since,
            at_s=self.at_s,
            total=self._total,
            of=self._of,
            columns=() if is_known else self._view.columns,
            order=None if self._order_changed <= since else self._order,
            rows=tuple([row for row, changed in self._rows.values() if changed > since]),
            trouble=self._trouble,
        )
