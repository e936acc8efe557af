"""The engines that are attached, and what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.text import clean, compact
from kvd.wire.console import Column, Filter
from tui.model import cells
from tui.model.columns import ComputedColumns
from tui.model.rates import RowRates
from tui.screens.page import Page
from tui.widgets.pools import POOLS_QUERY, PoolTable
from tui.widgets.table import ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Cell
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot


COLUMNS = (Column("calls_s", "count", "requests of the last seconds, per second"),)
"""What is made here; the rest is the daemon's."""
FIRST = ("name", "kind", "state", "pids", "held", "locked", "leases", "oldest", "calls_s")
MATTERS = (
    *("name", "state", "pids", "held", "leases", "oldest", "calls_s", "kind", "locked"),
    *("receives", "sends", "since", "calls"),
)
HOLDING = ("name", "state", "held", "leases", "oldest", "kind", "pids")
"""Columns of who holds pages, on other pages."""
STANDS_FOR = {"calls_s": "calls"}
RATE_OVER_S = 2.0

LEASE_COLUMNS = (
    *("id", "state", "held", "since", "waiting_for", "holders", "room", "reason", "locked_node"),
    *("locked", "row", "quarantined", "touched", "prompt_tokens", "prefix_tokens", "why"),
)
"""Columns of the leases of one client that stay longest; whose they are, the caption says."""
LEASES_HIDDEN = ("owner", "client", "pid")

STATES: dict[str, tuple[str, Style]] = {
    "alive": ("+", "ok"),
    "gone": ("!", "bad"),
    "outlived": ("!", "bad"),
    "partly gone": ("~", "warn"),
    "hung up on": ("x", "warn"),
}


def state(row: NamedRow) -> tuple[str, Style]:
    """Whether its processes are there."""
    return cells.lettered(row.text("state"), STATES)


def kind(row: NamedRow) -> tuple[str, Style]:
    """What the engine is; one of before a restart has not said it again, an old one never does."""
    word = row.text("kind")
    return (clean(word), "plain") if word else ("not said", "dim")


def lease_state(row: NamedRow) -> tuple[str, Style]:
    """An arena is held too, but its engine places what is in it."""
    word = row.text("state")
    is_arena = row.text("reason") == "arena" and word == "held"
    return cells.show("arena" if is_arena else word, "state", row.at_s, 20)


def calls(row: NamedRow) -> tuple[str, Style]:
    """Requests per second."""
    found = row.number("calls_s")
    if found is None:
        return cells.NOTHING, "dim"
    return f"{found:.1f}" if found < 100 else compact(round(found)), "plain"


class EnginesPage(Page):
    """The other face of the pools: engines, and the leases of the one under the cursor.

    Nothing here takes pages away: kvd never does that to a process that lives. What is to be done
    about one that is gone is among the problems.
    """

    NAME = "engines"
    FAULTS: ClassVar[Mapping[str, str]] = {"clients": "!state=alive", "leases": "!state=held"}
    REFS = ("client", "lease")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("e", "app.go('pools')", "map", tooltip="the map of the pages again"),
        Binding("h", "handoffs('client')", "handoffs"),
    ]

    DEFAULT_CSS = """
    EnginesPage > #table-clients { height: 40%; min-height: 5; }
    EnginesPage > #table-leases { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rates = RowRates("calls", RATE_OVER_S)
        self._owner = ""

    @override
    def compose(self) -> ComposeResult:
        yield PoolTable()
        yield WindowedTable(
            "clients",
            title="engines",
            computed=ComputedColumns(COLUMNS, self._made, FIRST),
            painters={"state": state, "kind": kind, "calls_s": calls},
            sort="name",
            rules=ColumnRules(MATTERS),
            stands_for=STANDS_FOR,
            rates=(self._rates,),
        )
        yield WindowedTable(
            "leases",
            painters={"state": lease_state},
            rules=ColumnRules(LEASE_COLUMNS, LEASES_HIDDEN),
        )

    @property
    def clients(self) -> WindowedTable:
        """Who is attached."""
        return self.query_one("#table-clients", WindowedTable)

    @property
    def leases(self) -> WindowedTable:
        """What the one under the cursor holds."""
        return self.query_one("#table-leases", WindowedTable)

    def _made(self, row: NamedRow) -> tuple[Cell, ...]:
        return (self._rates.rate(row.row.key, row.at_s),)

    @override
    def queries(self) -> tuple[Slot, ...]:
        return (POOLS_QUERY, *super().queries())

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        self.query_one(PoolTable).show(snapshot)
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

    @override
    def table_of(self, kind: str) -> WindowedTable:
        return self.leases if kind == "lease" else self.clients
