"""The engines that are attached, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvd.wire.console import Filter
from tui.draw import spans
from tui.model import engines
from tui.model.dress import Wardrobe
from tui.model.rates import RowRates
from tui.screens.handoffs import show_handoffs
from tui.screens.page import Page
from tui.widgets.canvas import Canvas
from tui.widgets.dressed import DressedTable
from tui.widgets.fitting import Rules
from tui.widgets.owned import OwnedLeases
from tui.widgets.popup import broken

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult

    from kvd.wire.console import Cell
    from tui.draw.spans import Line
    from tui.model.dress import Facts
    from tui.model.moments import Moment

MOST_ADVICE_LINES = 3


class ClientsPage(Page):
    """Clients above; below what can be done about the one under the cursor, and its leases.

    Nothing here takes pages away: kvd never does that to a process that lives.
    """

    NAME = "clients"
    FAULTS: ClassVar[Mapping[str, str]] = {"clients": "!state=alive", "leases": "!state=held"}
    REFS = ("client", "lease")

    DEFAULT_CSS = """
    ClientsPage > #table-clients { height: 40%; min-height: 5; }
    ClientsPage > #advice { height: 3; }
    ClientsPage > #table-leases { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rates = RowRates("calls", engines.RATE_OVER_S)
        self._owner = ""
        self._pinned = ""
        """A lease that was gone to from elsewhere, until the cursor moves to another client."""

    @override
    def compose(self) -> ComposeResult:
        yield DressedTable(
            "clients",
            Wardrobe(engines.COLUMNS, self._made, engines.FIRST),
            {"state": engines.state, "calls_s": engines.calls},
            sort="name",
            rules=Rules(engines.MATTERS),
            stands_for=engines.STANDS_FOR,
            rates=(self._rates,),
        )
        yield Canvas(id="advice")
        yield OwnedLeases("leases", rules=Rules(engines.LEASES, engines.LEASES_HIDDEN))

    @property
    def clients(self) -> DressedTable:
        """Who is attached."""
        return self.query_one("#table-clients", DressedTable)

    @property
    def leases(self) -> OwnedLeases:
        """What the one under the cursor holds."""
        return self.query_one("#table-leases", OwnedLeases)

    def _made(self, row: Facts) -> tuple[Cell, ...]:
        return engines.made(row, self._rates)

    @override
    def show(self, moment: Moment) -> None:
        if self.clients.display:
            self.clients.show(moment)
            self.shorten(self.clients)
        self._follow()
        if self.leases.display:
            self.leases.show(moment)
        advice = self.query_one("#advice", Canvas)
        if advice.display and advice.size.width:
            advice.paint(self._advice(moment.now_s, advice.size.width))

    def _follow(self) -> None:
        """Show the leases of the client under the cursor."""
        ref = self.clients.chosen()
        if ref != self._owner:
            self._pinned = "" if self._owner else self._pinned
            self._owner = ref
        if self._pinned:
            number = float(self._pinned.partition(":")[2])
            self.leases.restrict((Filter("id", "is", number),), self._pinned)
        elif ref:
            name = self._owned_by()
            self.leases.restrict((Filter("client", "is", ref),), f"leases of {name}")
        else:
            self.leases.restrict((), "leases")

    def _owned_by(self) -> str:
        row = self.clients.facts()
        name = row.text("name") if row is not None else ""
        return f"{name} ({self._owner})" if name else self._owner

    def _advice(self, now_s: float, width: int) -> list[Line]:
        row = self.clients.facts()
        if row is None:
            return []
        words = broken(engines.advice(row, now_s), width - 4)
        style: spans.Style = "plain" if row.text("state") == "alive" else "warn"
        return [(spans.Span("  "), spans.said(part, style)) for part in words[:MOST_ADVICE_LINES]]

    @override
    async def act(self, action: str) -> bool:
        if action != "handoffs":
            return await super().act(action)
        await show_handoffs(self, "client", self.clients.chosen())
        return True

    @override
    def seek(self, ref: str) -> bool:
        """A lease that is not in sight is asked for alone."""
        if super().seek(ref):
            return True
        kind, _, number = ref.partition(":")
        if kind != "lease" or not number.isdecimal():
            return False
        self._pinned = ref
        self._follow()
        self.activate(self.leases)
        return True
