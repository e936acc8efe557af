"""Clients as an operator reads them: whether they live, how busy they are, and what can be done.

Pure. The rows are those of the view ``clients``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import clean, compact
from kvd.wire.console import Column
from tui.model import cells

if TYPE_CHECKING:
    from kvd.wire.console import Cell
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow
    from tui.model.rates import RowRates

COLUMNS = (Column("calls_s", "count", "requests of the last seconds, per second"),)
"""What is made here; the rest is the daemon's."""
FIRST = ("name", "state", "pids", "held", "locked", "leases", "oldest", "calls_s")
MATTERS = (
    *("name", "state", "pids", "held", "leases", "oldest", "calls_s", "locked", "receives"),
    *("sends", "since", "calls"),
)
STANDS_FOR = {"calls_s": "calls"}
RATE_OVER_S = 2.0

LEASES = (
    *("id", "state", "held", "since", "waiting_for", "holders", "room", "reason", "locked_node"),
    *("locked", "row", "quarantined", "touched", "prompt_tokens", "prefix_tokens", "why"),
)
"""Columns of the leases of one client that stay longest; whose they are, the caption says."""
LEASES_HIDDEN = ("owner", "client", "pid")

LETTERS = {"alive": "+", "gone": "!", "partly gone": "~", "awaited": "?", "hung up on": "x"}
STATES: dict[str, Style] = {
    "alive": "ok",
    "gone": "bad",
    "partly gone": "warn",
    "awaited": "warn",
    "hung up on": "warn",
}


def made(row: NamedRow, rates: RowRates) -> tuple[Cell, ...]:
    """The cells of ``COLUMNS``."""
    return (rates.rate(row.row.key, row.at_s),)


def state(row: NamedRow) -> tuple[str, Style]:
    """A letter, the word, and its style."""
    word = row.text("state")
    return f"{LETTERS.get(word, '?')} {clean(word)}", STATES.get(word, "warn")


def calls(row: NamedRow) -> tuple[str, Style]:
    """Requests per second."""
    found = row.number("calls_s")
    if found is None:
        return cells.NOTHING, "dim"
    return f"{found:.1f}" if found < 100 else compact(round(found)), "plain"
