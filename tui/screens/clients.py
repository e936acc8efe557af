"""The engines that are attached, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual.binding import Binding
from typing_extensions import override

from kvd.wire.console import MAX_FILTERS, Filter
from tui.draw import spans
from tui.model import clients
from tui.model.columns import ComputedColumns
from tui.model.rates import RowRates
from tui.screens.handoffs import show_handoffs
from tui.screens.page import Page
from tui.widgets.canvas import Canvas, wrap_words
from tui.widgets.table import ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Cell, Query
    from tui.draw.spans import Line
    from tui.model.columns import NamedRow
    from tui.model.snapshots import DaemonSnapshot


MOST_ADVICE_LINES = 3


class ClientsPage(Page):
    """Clients above; below what can be done about the one under the cursor, and its leases.

    Nothing here takes pages away: kvd never does that to a process that handoffs.
    """

    NAME = "clients"
    FAULTS: ClassVar[Mapping[str, str]] = {"clients": "!state=alive", "leases": "!state=held"}
    REFS = ("client", "lease")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("h", "handoffs", "handoffs")]

    DEFAULT_CSS = """
    ClientsPage > #table-clients { height: 40%; min-height: 5; }
    ClientsPage > #advice { height: 3; }
    ClientsPage > #table-leases { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rates = RowRates("calls", clients.RATE_OVER_S)
        self._owner = ""
        self._pinned = ""
        """A lease that was gone to from elsewhere, until the cursor moves to another client."""

    @override
    def compose(self) -> ComposeResult:
        yield WindowedTable(
            "clients",
            computed=ComputedColumns(clients.COLUMNS, self._made, clients.FIRST),
            painters={"state": clients.state, "calls_s": clients.calls},
            sort="name",
            rules=ColumnRules(clients.MATTERS),
            stands_for=clients.STANDS_FOR,
            rates=(self._rates,),
        )
        yield Canvas(id="advice")
        yield OwnedLeases("leases", rules=ColumnRules(clients.LEASES, clients.LEASES_HIDDEN))

    @property
    def clients(self) -> WindowedTable:
        """Who is attached."""
        return self.query_one("#table-clients", WindowedTable)

    @property
    def leases(self) -> OwnedLeases:
        """What the one under the cursor holds."""
        return self.query_one("#table-leases", OwnedLeases)

    def _made(self, row: NamedRow) -> tuple[Cell, ...]:
        return clients.made(row, self._rates)

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        if self.clients.display:
            self.clients.show(snapshot)
            self.fit_height(self.clients)
        self._follow()
        if self.leases.display:
            self.leases.show(snapshot)
        advice = self.query_one("#advice", Canvas)
        if advice.display and advice.size.width:
            advice.paint(self._advice(snapshot.now_s, advice.size.width))

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
        row = self.clients.named_row()
        name = row.text("name") if row is not None else ""
        return f"{name} ({self._owner})" if name else self._owner

    def _advice(self, now_s: float, width: int) -> list[Line]:
        row = self.clients.named_row()
        if row is None:
            return []
        words = wrap_words(clients.advice(row, now_s), width - 4)
        style: spans.Style = "plain" if row.text("state") == "alive" else "warn"
        return [
            (spans.Styled("  "), spans.cleaned(part, style)) for part in words[:MOST_ADVICE_LINES]
        ]

    async def action_handoffs(self) -> None:
        """Go to the handoffs of the one under the cursor."""
        await show_handoffs(self, "client", self.clients.chosen())

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


class OwnedLeases(WindowedTable):
    """``restrict`` says whose; the filter of the operator comes on top."""

    _only: tuple[Filter, ...] = ()

    @override
    def asks(self) -> Query:
        asked = super().asks()
        return msgspec.structs.replace(asked, filters=(*self._only, *asked.filters)[:MAX_FILTERS])

    def restrict(self, only: tuple[Filter, ...], title: str) -> None:
        """Show only these, from the top."""
        self.title = title
        if only != self._only:
            self._only = only
            self._first = self._cursor = 0
            self._is_following = False
