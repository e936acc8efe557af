"""One window of a table over time: which of its rows changed with which revision.

Revisions come from one counter of the daemon, so a console that says what it has need not be
known: what is older than this feed, or from another one, is answered with the whole window.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from kvd.console.view import Flaw
from kvd.wire.console import Query, Table, TableRow

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.scene import Scene
    from kvd.console.view import View

MAX_ANSWERS = 16
"""Encoded answers that are kept until the next look: consoles have the last revisions, or none."""

_ENCODE = msgspec.msgpack.Encoder().encode


class Feed:
    """What a query was last answered with. ``look`` now and then, ``answer`` anybody."""

    def __init__(self, view: View[Any], query: Query, revisions: Iterator[int]) -> None:
        self.asked_s = self.at_s = float("-inf")
        """``at_s``: when the last look was over."""
        self._view = view
        self._query = query
        self._revisions = revisions
        self._born = self._revision = next(revisions)
        self._order: tuple[str, ...] = ()
        self._order_changed = self._born
        self._rows: dict[str, tuple[TableRow, int]] = {}
        self._total = self._of = 0
        self._trouble = "not looked at yet: the daemon spends only so much on consoles"
        self._answers: dict[int, bytes] = {}

    @property
    def revision(self) -> int:
        """Of what ``answer`` says; 0 where it says why there is nothing."""
        return 0 if self._trouble else self._revision

    def look(self, scene: Scene) -> Iterator[None]:
        """The window as it is now, a step at a time: answered when it is over."""
        window = yield from self._view.look(scene, self._query)
        self.at_s = scene.now_s
        self._answers.clear()
        if isinstance(window, Flaw):
            self._trouble = window.why
            return
        self._trouble = ""
        self._total, self._of = window.total, window.of
        before = self._rows
        revision = 0
        rows: dict[str, tuple[TableRow, int]] = {}
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
        since = have if self._born <= have <= self._revision else 0
        found = self._answers.get(since)
        if found is None:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            found = self._answers[since] = _ENCODE(self._table(since))
        return found

    def _table(self, since: int) -> Table:
        """All of it if ``since`` is 0."""
        return Table(
            view=self._view.name,
            revision=self.revision,
            since=since,
            at_s=self.at_s,
            total=self._total,
            of=self._of,
            columns=() if since else self._view.columns,
            order=None if self._order_changed <= since else self._order,
            rows=tuple([row for row, changed in self._rows.values() if changed > since]),
            trouble=self._trouble,
        )
