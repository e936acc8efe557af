"""Handoffs as an operator reads them: how far, how fast, how long still; and the look of each cell.

Pure. The rows are those of the view ``rooms``; the rate of a row is how its bytes grow here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import clean
from kvd.wire.console import Column
from tui.draw.chart import EIGHTHS
from tui.draw.phases import STYLES, lasting
from tui.model import cells

if TYPE_CHECKING:
    from kvd.wire.console import Cell
    from tui.draw.spans import Style
    from tui.model.dress import Facts
    from tui.model.rates import RowRates

COLUMNS = (
    Column("progress", "share", "bytes that are there, of all"),
    Column("done", "text", "bytes that are there, of all"),
    Column("rate", "bytes", "of the last second, per second"),
    Column("eta", "seconds", "at this rate"),
)
"""What is made here; the rest is the daemon's."""
FIRST = (
    *("state", "peer", "progress", "done", "rate", "eta", "since", "until", "room", "path"),
    *("moved", "waiting_for", "owner", "client", "lease"),
)
MATTERS = (
    *("state", "peer", "progress", "room", "since", "until", "rate", "done", "eta"),
    *("waiting_for", "path", "owner", "moved", "lease", "client"),
)
"""Which of them stay longest where there is little room."""
HIDDEN = ("side", "done_bytes", "total_bytes", "ended")
"""Said by others: by the arrow, the bar, and the state."""
STANDS_FOR = {"progress": "done_bytes", "done": "total_bytes", "rate": "done_bytes", "eta": "until"}
"""By what the daemon sorts where it does not know the column."""

LETTERS = {
    "queued": "Q",
    "offered": "O",
    "receiving": "R",
    "verifying": "V",
    "ready": "Y",
    "draining": "D",
    "await-engine": "E",
    "await-offer": "A",
    "streaming": "S",
    "flushing": "F",
    "settled": "T",
    "delivered": "+",
    "failed": "!",
}
"""Of a state; any other has a question mark."""
ENDED = {"delivered", "failed"}
ARROWS = {"decode": "←", "prefill": "→"}
"""Where the bytes go: to us, or from us."""
SLOW_S = 2.0
"""So long without a byte is worth a look, while bytes are to come."""
MOVING = {"receiving", "streaming", "flushing", "verifying", "offered", "draining"}


def made(row: Facts, rates: RowRates) -> tuple[Cell, ...]:
    """The cells of ``COLUMNS``."""
    done, total = row.number("done_bytes"), row.number("total_bytes")
    if done is None:
        return None, None, None, None
    share = max(0.0, min(1.0, done / total)) if total else None
    words = f"{cells.size(done)}/{cells.size(total)}" if total else cells.size(done)
    if row.text("state") in ENDED:
        return share, words, None, None
    rate = rates.rate(row.row.key, row.at_s)
    eta_s = (total - done) / rate if rate and total and total > done else None
    return share, words, rate, eta_s


def state(row: Facts) -> tuple[str, Style]:
    """A letter, the word, and the style of the phase."""
    word = row.text("state")
    style: Style = {"delivered": "ok", "failed": "bad"}.get(word) or STYLES.get(word, "dim")  # type: ignore[assignment]
    return f"{LETTERS.get(word, '?')} {clean(word)}", style


def peer(row: Facts) -> tuple[str, Style]:
    """Where it comes from or goes to."""
    name = clean(row.text("peer").removeprefix("peer:"))
    return f"{ARROWS.get(row.text('side'), '?')} {name or 'nobody yet'}", _dimmed(row, "plain")


def progress(row: Facts, columns: int) -> tuple[str, Style]:
    """A bar of so many columns with its share."""
    share = row.number("progress")
    if share is None:
        return "-".rjust(columns + 5), "dim"
    eighths = int(share * columns * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (EIGHTHS[rest - 1] if rest else "")
    style = STYLES.get(row.text("state"), "dim")
    return f"{filled.ljust(columns, '░')} {int(100 * share + 1e-9):3d}%", _dimmed(row, style)


def bar_columns(width: int) -> int:
    """How long a bar is in a table so wide."""
    return max(6, min(32, (width - 60) // 6 + 5))


def done(row: Facts) -> tuple[str, Style]:
    """``30.6Mi/70.0Mi``."""
    return row.text("done") or cells.NOTHING, _dimmed(row, "plain")


def rate(row: Facts) -> tuple[str, Style]:
    """Bytes per second; 0 stands out where bytes are due."""
    found = row.number("rate")
    if found is None:
        return cells.NOTHING, "dim"
    if found > 0:
        return f"{cells.size(found)}/s", "plain"
    return "0B/s", "warn" if row.text("state") in {"receiving", "streaming", "flushing"} else "dim"


def eta(row: Facts) -> tuple[str, Style]:
    """``~36ms``."""
    left_s = row.number("eta")
    return (cells.NOTHING, "dim") if left_s is None else (f"~{lasting(left_s)}", "plain")


def waiting_for(row: Facts) -> tuple[str, Style]:
    """What would take it further; of one that failed, why."""
    return clean(row.text("waiting_for")), "bad" if row.text("state") == "failed" else "plain"


def _dimmed(row: Facts, style: Style) -> Style:
    return "dim" if row.text("state") in ENDED else style
