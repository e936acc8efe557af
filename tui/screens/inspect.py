"""What an operator should look at, with the evidence; the books; and who waits for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from tui import orders
from tui.model import concerns
from tui.model.dress import Facts, Wardrobe, places
from tui.screens.page import Page
from tui.widgets.dressed import DressedTable
from tui.widgets.fitting import Rules
from tui.widgets.ledger import AUDIT, Detail, Ledger
from tui.widgets.linetable import HEAD_LINES, LineTable
from tui.widgets.poollines import ASKS as POOLS
from tui.widgets.reach import console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult

    from tui.model.moments import Moment
    from tui.model.sheets import Slot

CONCERNS = Rules(
    first=("severity", "kind", "subject", "since", "evidence", "action", "rule"),
    narrow=("evidence", "rule"),
)
WAITING = Rules(
    first=("place", "kind", "owner", "since", "why", "until", "missing_pages", "held_by"),
    never=("ahead", "client", "overtaken"),
    narrow=("why", "held_by"),
)
DETAIL_SHARE = 3
"""The detail has at most one line of so many."""


class InspectPage(Page):
    """Concerns, what is under the cursor in full, the ledger, the admission queue."""

    NAME = "inspect"
    FAULTS: ClassVar[Mapping[str, str]] = {"concerns": "!severity:low"}
    REFS = ("waiting",)

    DEFAULT_CSS = """
    InspectPage > #table-concerns { height: 6; }
    InspectPage > #detail { height: 1; }
    InspectPage > #ledger { height: 3; }
    InspectPage > #table-waiting { height: 1fr; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield DressedTable(
            "concerns",
            Wardrobe((), lambda _: ()),
            {"severity": concerns.severity},
            title="findings",
            rules=CONCERNS,
        )
        yield Detail()
        yield Ledger()
        yield LineTable("waiting", title="waiting for room", rules=WAITING)

    @property
    def findings(self) -> DressedTable:
        """The concerns, the gravest on top."""
        return self.query_one("#table-concerns", DressedTable)

    @property
    def waiting(self) -> LineTable:
        """The admission queue, in its order."""
        return self.query_one("#table-waiting", LineTable)

    @override
    def queries(self) -> tuple[Slot, ...]:
        return (*super().queries(), POOLS, AUDIT)

    @override
    def show(self, moment: Moment) -> None:
        super().show(moment)
        detail, ledger, findings = self.query_one(Detail), self.query_one(Ledger), self.findings
        height = self.size.height
        is_waiting = self.table() is self.waiting
        row = self._under_cursor(moment.now_s)
        told = detail.show(row, moment.now_s, max(5, height // DETAIL_SHARE), is_waiting=is_waiting)
        booked = ledger.show(moment)
        # At least two rows of the queue, whatever is above.
        sheet = findings.sheet
        rows = HEAD_LINES + max(1, sheet.total if sheet is not None else 1)
        room = max(HEAD_LINES + 1, height - told - booked - HEAD_LINES - 2)
        for widget, lines in ((detail, told), (ledger, booked), (findings, min(rows, room))):
            self.give(widget, lines)

    def _under_cursor(self, now_s: float) -> Facts | None:
        table = self.table()
        row = table.row() if table is not None else None
        return Facts(row, places(table.columns), now_s) if row is not None and table else None

    @override
    async def act(self, action: str) -> bool:
        if action != "propose":
            return await super().act(action)
        row = self._under_cursor(0.0)
        if row is not None:
            orders.propose(console(self), _proposed(row))
        return True


def _proposed(row: Facts) -> str:
    """Of a finding its action; of a request that waits: who has the most of what it lacks."""
    holders = row.cell("held_by")
    if isinstance(holders, tuple) and holders:
        return f"open {holders[0].ref}"
    return row.text("action") or row.text("why")
