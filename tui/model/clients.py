"""Clients as an operator reads them: whether they live, how busy they are, and what can be done.

Pure. The rows are those of the view ``clients``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import age, clean, compact, counted
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


def advice(row: NamedRow, now_s: float) -> str:
    """What it holds, and how that comes back: kvd takes no page from a process that handoffs."""
    name, pids = row.text("name") or row.row.key, row.text("pids")
    leases, held = row.number("leases") or 0, row.number("held") or 0
    oldest_s = row.number("oldest")
    oldest = "" if oldest_s is None else f", the oldest for {age(now_s - oldest_s)}"
    word = row.text("state")
    if not leases:
        return f"{name} holds nothing"
    holds = f"{name} holds {counted(held, 'page')} by {counted(leases, 'lease')}{oldest}."
    if word == "gone":
        return (
            f"{holds} Its processes are gone, and a process that inherited its connection keeps it "
            "open: stop that one, and its leases are released within 1 s"
        )
    if word == "awaited":
        return (
            f"{holds} It was there before the restart and has not come back yet: what it does not "
            f"use any more is released when it does, and all of it when pid {pids} ends"
        )
    if word == "hung up on":
        return (
            f"{holds} kvd hung up on it and serves it no more, and its process may still write: "
            f"all of it is released within 1 s when pid {pids} ends"
        )
    stop = f"stop pid {pids}" if pids else "stop its process"
    return (
        f"{holds} kvd never takes pages from a living process: {stop}, and its leases are "
        "released within 1 s"
    )
