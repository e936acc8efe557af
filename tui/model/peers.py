"""Peers as an operator reads them: what goes between us and each of them, and the look of cells.

Pure. The rows are those of the view ``peers``; rates are how its counters grow here. What goes
between two other nodes no daemon knows but they.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import bytes_per_second, clean
from kvd.wire.console import Column, Query
from tui.model import cells
from tui.model.rates import RowRates

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.wire.console import Cell
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow
    from tui.model.tables import TableData

ALL_PEERS = Query("peers", limit=200)
"""Asked for with every frame: who goes to a chart sees what was before that, too."""
COLUMNS = (
    Column("in", "bytes", "from it, of the last second, per second"),
    Column("out", "bytes", "to it, of the last second, per second"),
    Column("open", "text", "handoffs from it and to it that have not ended"),
    Column("path", "text", "what carries the bytes"),
)
"""What is made here; the rest is the daemon's."""
FIRST = (
    *("state", "name", "in", "out", "open", "delivered", "failed"),
    *("rtt", "posts", "heard", "path", "layout", "agent", "trouble"),
)
MATTERS = (
    *("state", "name", "in", "out", "open", "failed", "rtt", "heard", "delivered", "layout"),
    *("posts", "agent", "path", "trouble", "in_bytes", "out_bytes"),
)
HIDDEN = ("receives", "sends")
"""Said by ``open``."""
STANDS_FOR = {
    "in": "in_bytes",
    "out": "out_bytes",
    "open": "receives",
    "path": "name",
}

STATES: dict[str, tuple[str, Style]] = {
    "up": ("+", "ok"),
    "suspect": ("~", "warn"),
    "lost": ("!", "bad"),
}
MEANS = {
    "up": "it answers",
    "suspect": "it has not been heard for a while",
    "lost": "it has been silent for so long that it counts as gone",
    "silent": "it has not said Hello yet",
}
SAME = "same"
"""What the daemon says of a layout like ours."""


class TrafficRates:
    """Both ways of every peer."""

    def __init__(self) -> None:
        self.incoming = RowRates("in_bytes")
        self.outgoing = RowRates("out_bytes")

    def take(self, data: TableData | None) -> None:
        """Remember the counters of a table of all peers."""
        self.incoming.take(data)
        self.outgoing.take(data)

    def made(self, row: NamedRow, path: str) -> tuple[Cell, ...]:
        """The cells of ``COLUMNS``."""
        key, end_s = row.row.key, row.at_s
        receives, sends = row.number("receives"), row.number("sends")
        return (
            self.incoming.rate(key, end_s),
            self.outgoing.rate(key, end_s),
            f"←{receives or 0:.0f} →{sends or 0:.0f}",
            path,
        )


def state(row: NamedRow) -> tuple[str, Style]:
    """Whether it is heard."""
    return cells.lettered(row.text("state"), STATES)


def layout(row: NamedRow) -> tuple[str, Style]:
    """Whether its pages are like ours; or in words why not."""
    words = row.text("layout")
    return clean(words), "ok" if words == SAME else "warn"


def failed(row: NamedRow) -> tuple[str, Style]:
    """How many handoffs with it were given up."""
    count = row.number("failed") or 0
    return f"{count:.0f}", "bad" if count else "dim"


def trouble(row: NamedRow) -> tuple[str, Style]:
    """What is wrong with it."""
    words = row.text("trouble")
    return (clean(words), "bad") if words else (cells.NOTHING, "dim")


def _rate(found: float | None, style: Style) -> tuple[str, Style]:
    if found is None:
        return cells.NOTHING, "dim"
    return bytes_per_second(found), style if found > 0 else "dim"


PAINTERS: dict[str, Callable[[NamedRow], tuple[str, Style]]] = {
    "state": state,
    "in": lambda row: _rate(row.number("in"), "arriving"),
    "out": lambda row: _rate(row.number("out"), "sending"),
    "layout": layout,
    "failed": failed,
    "trouble": trouble,
}
"""How cells look, by their columns."""
