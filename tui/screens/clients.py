"""The engines that are attached, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.wire.console import Filter
from tui.model import clients
from tui.model.columns import ComputedColumns
from tui.model.rates import RowRates
from tui.screens.handoffs import show_handoffs
from tui.screens.page import Page
from tui.widgets.table import ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Cell
    from tui.model.columns import NamedRow
    from tui.model.snapshots import DaemonSnapshot


class ClientsPage(Page):
    """Clients above, the leases of the one under the cursor below.

    Nothing here takes pages away: kvd never does that to a process that lives. What is to be done
    about one that is gone is among the problems.
    """

    NAME = "clients"
    FAULTS: ClassVar[Mapping[str, str]] = {"clients": "!state=alive", "leases": "!state=held"}
    REFS = ("client", "lease")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("h", "handoffs", "handoffs")]

    DEFAULT_CSS = """
    ClientsPage > #table-clients { height: 40%; min-height: 5; }
    ClientsPage > #table-leases { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rates = RowRates("calls", clients.RATE_OVER_S)
        self._owner = ""

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
        yield WindowedTable("leases", rules=ColumnRules(clients.LEASES, clients.LEASES_HIDDEN))

    @property
    def clients(self) -> WindowedTable:
        """Who is attached."""
        return self.query_one("#table-clients", WindowedTable)

    @property
    def leases(self) -> WindowedTable:
        """What the one under the cursor holds."""
        return self.query_one("#table-leases", WindowedTable)

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

    def _follow(self) -> None:
        """Show the leases of the client under the cursor."""
        ref = self.clients.chosen()
        if ref != self._owner:
            if self._owner:
                self.leases.pin("")
            self._owner = ref
        if ref:
            name = self._owned_by()
            self.leases.restrict((Filter("client", "is", ref),), f"leases of {name}")
        else:
            self.leases.restrict((), "leases")

    def _owned_by(self) -> str:
        row = self.clients.named_row()
        name = row.text("name") if row is not None else ""
        return f"{name} ({self._owner})" if name else self._owner

    async def action_handoffs(self) -> None:
        """Go to the handoffs of the one under the cursor."""
        await show_handoffs(self, "client", self.clients.chosen())

    @override
    def table_of(self, kind: str) -> WindowedTable:
        return self.leases if kind == "lease" else self.clients
