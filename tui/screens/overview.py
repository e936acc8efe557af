"""How the node is, at one look: what moves, what is full, what is wrong, what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.containers import Container
from typing_extensions import override

from tui import orders
from tui.model import concerns
from tui.model.dress import Wardrobe
from tui.screens.page import Page
from tui.widgets.dressed import DressedTable
from tui.widgets.fitting import Rules
from tui.widgets.linetable import HEAD_LINES
from tui.widgets.overviewpanels import (
    LAST_EVENTS,
    Figures,
    LastEvents,
    Opened,
    PoolBars,
    SourceBar,
)
from tui.widgets.poollines import ASKS
from tui.widgets.reach import console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult

    from kvd.wire.console import EventQuery
    from tui.model.moments import Moment
    from tui.model.sheets import Slot

WIDE_COLUMNS = 120
"""From here on pools and findings stand side by side."""
CHARTS_FROM_LINES = 28
"""Lower screens have the figures without their charts."""
LEAST_EVENT_LINES = 3
RULES = Rules(
    first=("severity", "kind", "subject", "since", "evidence"),
    never=("rule", "action"),
    narrow=("evidence",),
)


class OverviewPage(Page):
    """Figures and charts, pools and sources, findings, last events."""

    NAME = "overview"
    FAULTS: ClassVar[Mapping[str, str]] = {"concerns": "!severity:low"}
    REFS = ("concern",)

    DEFAULT_CSS = """
    OverviewPage > #middle { layout: vertical; height: 10; }
    OverviewPage > #middle > #left { layout: vertical; width: 1fr; height: 6; }
    OverviewPage > #middle > LineTable { width: 1fr; height: 1fr; }
    OverviewPage > #last-events { height: 1fr; }
    OverviewPage.wide > #middle { layout: horizontal; }
    OverviewPage.wide > #middle > #left { height: 1fr; width: 45%; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield Figures()
        with Container(id="middle"):
            with Container(id="left"):
                yield PoolBars()
                yield SourceBar()
            yield DressedTable(
                "concerns",
                Wardrobe((), lambda _: ()),
                {"severity": concerns.severity},
                title="findings",
                rules=RULES,
            )
        yield LastEvents()

    @property
    def findings(self) -> DressedTable:
        """The findings, the gravest on top."""
        return self.query_one("#table-concerns", DressedTable)

    @override
    def queries(self) -> tuple[Slot, ...]:
        return (ASKS, *super().queries())

    @override
    def events(self) -> EventQuery:
        return LAST_EVENTS

    # ---- showing ----------------------------------------------------------------------------

    @override
    def show(self, moment: Moment) -> None:
        super().show(moment)
        mirror, vitals = console(self).mirror, moment.vitals
        pools = self.query_one(PoolBars)
        pools.take(mirror.moments.newest)
        if vitals is not None:
            self._arrange(moment)
            end_s = moment.now_s if mirror.moments.is_frozen else None
            self.query_one(Figures).show(vitals, mirror.rates, end_s)
            self.query_one(SourceBar).show()
        pools.show(moment)
        self.query_one(LastEvents).show(moment)

    def _arrange(self, moment: Moment) -> None:
        """Give every panel the lines that it needs now; what is left is for the last events."""
        width, height = self.size.width, self.size.height
        vitals, mirror = moment.vitals, console(self).mirror
        if not width or not height or vitals is None:
            return
        is_wide = width >= WIDE_COLUMNS
        self.set_class(is_wide, "wide")
        end_s = moment.now_s if mirror.moments.is_frozen else None
        figures, pools = self.query_one(Figures), self.query_one(PoolBars)
        figures.charts_height = 0 if height < CHARTS_FROM_LINES else max(5, height // 4)
        above = figures.charts_height + figures.lines_needed(vitals, mirror.rates, width)
        self.give(figures, above)
        sources = self.query_one(SourceBar)
        panel = width * 9 // 20 if is_wide else width
        needed = sources.make(vitals, mirror.rates, end_s, panel)
        self.give(pools, pools.lines_needed)
        self.give(sources, needed)
        left = pools.lines_needed + needed
        sheet = self.findings.sheet
        rows = HEAD_LINES + max(1, sheet.total if sheet is not None else 1)
        if is_wide:
            self.give(self.query_one("#middle"), max(left, min(rows, height // 2)))
        else:
            self.give(self.query_one("#left"), left)
            room = max(HEAD_LINES + 1, height - above - left - LEAST_EVENT_LINES)
            self.give(self.query_one("#middle"), left + min(rows, room))

    # ---- keys -------------------------------------------------------------------------------

    @override
    def chosen(self) -> str:
        """What the finding under the cursor is about; the finding itself where that is nothing."""
        row = self.findings.facts()
        return row.text("subject") or row.row.key if row is not None else ""

    @override
    async def act(self, action: str) -> bool:
        row = self.findings.facts()
        if action == "propose" and row is not None:
            orders.propose(console(self), row.text("action"))
            return True
        return await super().act(action)

    def on_opened(self, message: Opened) -> None:
        """A line of a panel was clicked."""
        self.post_message(self.Wish(message.ref))
