"""Handoffs as an operator reads them: how far, how fast, how long still; and the look of each cell.

Pure. The rows are those of the view ``rooms``; the rate of a row is how its bytes grow here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.errors import Refusal
from kvd.text import age, bytes_per_second, clean, compact_bytes, lasting
from kvd.wire.admin import Because, Mark, OtherEnd
from kvd.wire.console import Column
from tui.draw.chart import EIGHTHS
from tui.draw.phases import ASKED, STYLES, HandoffEnd
from tui.model import cells

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvd.wire.console import Cell
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow
    from tui.model.rates import RowRates


COLUMNS = (
    Column("progress", "share", "bytes that are there, of all"),
    Column("done", "text", "bytes that are there, of all"),
    Column("rate", "bytes", "of the last second, per second"),
    Column("eta", "seconds", "at this rate"),
)
"""What is made here; the rest is the daemon's."""
FIRST = (
    *("room", "state", "peer", "waiting_for", "progress", "done", "rate", "eta", "since", "until"),
    *("moved", "owner", "client", "lease", "path"),
)
MATTERS = (
    *("room", "state", "peer", "waiting_for", "progress", "since", "until", "rate", "eta"),
    *("done", "owner", "moved", "path", "lease", "client"),
)
"""Which of them stay longest where there is little room."""
HIDDEN = ("side", "done_bytes", "total_bytes", "ended")
"""Said by others: by the arrow, the bar, and the state."""
STANDS_FOR = {"progress": "done_bytes", "done": "total_bytes", "rate": "done_bytes", "eta": "until"}
"""By what the daemon sorts where it does not know the column."""

LETTERS = {
    "queued": "Q", "offered": "O", "receiving": "R", "verifying": "V", "ready": "Y",
    "draining": "D", "await-engine": "E", "await-offer": "A", "streaming": "S", "flushing": "F",
    "settled": "T", "delivered": "+", "failed": "!", "kept": "K",
}  # fmt: skip
"""Of a state; any other has a question mark."""
ENDED = {"delivered", "failed"}
ARROWS = {"decode": "←", "prefill": "→"}
"""Where the bytes go: to us, or from us."""


def made(row: NamedRow, rates: RowRates) -> tuple[Cell, ...]:
    """The cells of ``COLUMNS``."""
    done, total = row.number("done_bytes"), row.number("total_bytes")
    if done is None:
        return None, None, None, None
    share = max(0.0, min(1.0, done / total)) if total else None
    words = f"{compact_bytes(done)}/{compact_bytes(total)}" if total else compact_bytes(done)
    if row.text("state") in ENDED:
        return share, words, None, None
    rate = rates.rate(row.row.key, row.at_s)
    eta_s = (total - done) / rate if rate and total and total > done else None
    return share, words, rate, eta_s


def state(row: NamedRow) -> tuple[str, Style]:
    """A letter, the word, and the style of the phase."""
    words = row.text("state")
    word = words.partition(" ")[0]
    style: Style = {"failed": "bad"}.get(word) or STYLES.get(word, "dim")  # type: ignore[assignment]
    return f"{LETTERS.get(word, '?')} {clean(words)}", style


def until(row: NamedRow) -> tuple[str, Style]:
    """When it is given up; one that is kept on purpose ends then."""
    until_s = row.number("until")
    if until_s is None:
        return cells.NOTHING, "dim"
    left_s = until_s - row.at_s
    if row.text("state").startswith("kept "):
        return f"ends in {age(left_s)}", "plain"
    return cells.show(until_s, "until", row.at_s, 12)


def peer(row: NamedRow) -> tuple[str, Style]:
    """Where it comes from or goes to."""
    name = clean(row.text("peer").removeprefix("peer:"))
    return f"{ARROWS.get(row.text('side'), '?')} {name or 'nobody yet'}", _dimmed(row, "plain")


def progress(row: NamedRow, columns: int) -> tuple[str, Style]:
    """A bar of so many columns with its share."""
    share = row.number("progress")
    if share is None or row.text("state") in ENDED:
        return "-".rjust(columns + 5), "dim"
    eighths = int(share * columns * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (EIGHTHS[rest - 1] if rest else "")
    style = STYLES.get(row.text("state"), "dim")
    return f"{filled.ljust(columns, '░')} {int(100 * share + 1e-9):3d}%", _dimmed(row, style)


def bar_columns(width: int) -> int:
    """How long a bar is in a table so wide."""
    return max(6, min(17, (width - 60) // 6 + 5))


def done(row: NamedRow) -> tuple[str, Style]:
    """``30.6Mi/70.0Mi``."""
    return row.text("done") or cells.NOTHING, _dimmed(row, "plain")


def rate(row: NamedRow) -> tuple[str, Style]:
    """Bytes per second; 0 stands out where bytes are due."""
    found = row.number("rate")
    if found is None:
        return cells.NOTHING, "dim"
    if found > 0:
        return bytes_per_second(found), "plain"
    return "0B/s", "warn" if row.text("state") in {"receiving", "streaming", "flushing"} else "dim"


def eta(row: NamedRow) -> tuple[str, Style]:
    """``~36ms``."""
    left_s = row.number("eta")
    return (cells.NOTHING, "dim") if left_s is None else (f"~{lasting(left_s)}", "plain")


def waiting_for(row: NamedRow) -> tuple[str, Style]:
    """What would take it further; of one that failed, why."""
    return clean(row.text("waiting_for")), "bad" if row.text("state") == "failed" else "plain"


def _dimmed(row: NamedRow, style: Style) -> Style:
    return "dim" if row.text("state") in ENDED else style


PAINTERS: dict[str, Callable[[NamedRow], tuple[str, Style]]] = {
    "state": state,
    "peer": peer,
    "done": done,
    "rate": rate,
    "eta": eta,
    "waiting_for": waiting_for,
    "until": until,
}
"""How cells look, by their columns; the bar is as long as the page has room."""


UNNAMED = "the other end"
LAST_BYTES = "bytes moved, at the latest"
"""Whoever looks for the first time knows no more than that."""
AFTER_S = 1.0
"""Bytes that moved so long after the last change of state are told."""
OTHER_SIDE = {"decode": "prefill", "prefill": "decode"}


class StoryAnswer(msgspec.Struct, frozen=True):
    """An answer of the daemon, and its clock when it came."""

    at_s: float
    answer: Because | Refusal | tuple[OtherEnd, ...]


class HandoffStory(msgspec.Struct, frozen=True):
    """A handoff that is looked at. ``here`` and ``there`` are None until they were asked for."""

    ref: str
    here: StoryAnswer | None = None
    there: StoryAnswer | None = None

    def with_here(self, at_s: float, answer: Because | Refusal) -> HandoffStory:
        """With what the daemon says now. One that has ended is forgotten: its story stays."""
        kept = self.here
        if isinstance(answer, Refusal) and kept is not None and isinstance(kept.answer, Because):
            return self
        return msgspec.structs.replace(self, here=StoryAnswer(at_s, answer))

    def with_there(self, at_s: float, answer: tuple[OtherEnd, ...] | Refusal) -> HandoffStory:
        """With what the other daemon says now; of all ends of the room those of this part.

        Where there is no answer, what it said before stays: the head says how old that is.
        """
        kept = self.there.answer if self.there is not None else ()
        was_told = isinstance(kept, tuple) and any(not end.why_none for end in kept)
        if isinstance(answer, Refusal) and was_told:
            return self
        if isinstance(answer, tuple):
            answer = tuple(end for end in answer if end.ours == self.ref)
        return msgspec.structs.replace(self, there=StoryAnswer(at_s, answer))


def ends(story: HandoffStory, row: NamedRow, node: str, now_s: float) -> tuple[HandoffEnd, ...]:
    """Our end, then the other one, as of ``now_s`` on the daemon's clock."""
    peer = row.text("peer").removeprefix("peer:")
    return (_ours(story, row, node, now_s), *_others(story, row, peer, now_s))


def _ours(story: HandoffStory, row: NamedRow, node: str, now_s: float) -> HandoffEnd:
    side, state, why = row.text("side"), row.text("state"), row.text("waiting_for")
    match story.here:
        case StoryAnswer(at_s=at_s, answer=Because(marks=marks)):
            shown = seen(marks, now_s - at_s)
        case StoryAnswer(answer=Refusal(message=message)) if state not in ENDED:
            return HandoffEnd(node, side, state, (), why, message)
        case _:
            shown = _began(row, now_s)
    if state in ENDED:
        return HandoffEnd(node, side, "closed", _closed(shown, row, now_s))
    return HandoffEnd(node, side, state, _moved(shown, row, now_s), why)


def _moved(marks: tuple[Mark, ...], row: NamedRow, now_s: float) -> tuple[Mark, ...]:
    """With the last bytes, which no story tells of."""
    moved_s = row.number("moved")
    if moved_s is None or not marks or now_s - moved_s + AFTER_S > marks[-1].ago_s:
        return marks
    return (*marks, Mark(max(0.0, now_s - moved_s), LAST_BYTES))


def _began(row: NamedRow, now_s: float) -> tuple[Mark, ...]:
    """What the row alone tells."""
    since_s = row.number("since")
    return (Mark(max(0.0, now_s - since_s), "began"),) if since_s is not None else ()


def _closed(marks: tuple[Mark, ...], row: NamedRow, now_s: float) -> tuple[Mark, ...]:
    """The end itself, which came after the last story was asked for."""
    ended_s = row.number("ended")
    if ended_s is None or not marks or marks[-1].what.partition(" (")[0].endswith("-> closed"):
        return marks
    before = marks[-1].what.partition("-> ")[2].partition(" (")[0] or "open"
    ago_s = min(max(0.0, now_s - ended_s), marks[-1].ago_s)
    why = row.text("waiting_for") or row.text("state")
    return (*marks, Mark(ago_s, f"{before} -> closed ({why})"))


def _others(story: HandoffStory, row: NamedRow, peer: str, now_s: float) -> tuple[HandoffEnd, ...]:
    side = OTHER_SIDE.get(row.text("side"), "?")
    match story.there:
        case None:
            trouble = ASKED if peer else "nobody yet"
            if row.text("state") in ENDED:
                trouble = "not asked: it has ended"
            return (HandoffEnd(peer or UNNAMED, side, "", (), "", trouble),)
        case StoryAnswer(answer=Refusal(message=message)):
            return (HandoffEnd(peer or UNNAMED, side, "", (), "", message),)
        case StoryAnswer(at_s=at_s, answer=tuple() as found):
            if not found:
                none = "this daemon tells of no other end"
                return (HandoffEnd(peer or UNNAMED, side, "", (), "", none),)
            return tuple(_other(end, now_s - at_s) for end in found)
        case _:
            return ()


def _other(end: OtherEnd, by_s: float) -> HandoffEnd:
    marks = seen(end.marks, by_s)
    return HandoffEnd(
        end.peer or UNNAMED, end.side, end.state, marks, end.waiting_for, end.why_none
    )


def seen(marks: Iterable[Mark], by_s: float) -> tuple[Mark, ...]:
    """The marks ``by_s`` later; earlier where negative, without those that were yet to come."""
    return tuple(Mark(mark.ago_s + by_s, mark.what) for mark in marks if mark.ago_s + by_s >= 0.0)


def timeline(shown: Iterable[HandoffEnd]) -> list[tuple[float, str, str]]:
    """Everything that happened at either end, oldest first: how long ago, where, what."""
    return sorted(
        ((mark.ago_s, end.name, mark.what) for end in shown for mark in end.marks),
        key=lambda ranked: -ranked[0],
    )
