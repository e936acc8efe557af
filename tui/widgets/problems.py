"""What is wrong, as sentences over the whole width; and what has failed, a line each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.text import age, clean
from kvd.wire.console import Filter
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import cells, handoffs
from tui.model.columns import NamedRow, places
from tui.model.commands import KILL, is_doable
from tui.widgets.canvas import NOT_HERE_YET, console, wrap_words
from tui.widgets.table import GUTTER, CellLook, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.console import TableRow
    from tui.draw.spans import Style

TELLING_COLUMNS, WIDE_COLUMNS = 60, 120
"""From here on a failure has how long ago it was beside when; a problem when beside how long."""
SMALL_LINES = 10
"""With less room the one under the cursor has what the next one leaves it."""
NEXT_LINES = 1
"""Of the next one, so that one knows that there is more."""


SEVERITIES: dict[str, tuple[str, Style]] = {
    "high": ("!", "bad"),
    "medium": ("▲", "warn"),
    "low": ("·", "dim"),
}


class ProblemCards(WindowedTable):
    """Findings as sentences over the whole width, each with what to do and its key.

    Where there is no room for that, only the one under the cursor has more than a line.
    """

    head_lines = 1

    def __init__(self) -> None:
        super().__init__("concerns", title="problems")
        self._is_all = True
        """Whether all have their whole text."""
        self._room = 0
        self._rows_at: list[int] = []
        """By line below the head: which row is there."""

    @property
    @override
    def page_rows(self) -> int:
        lines = max(1, self.size.height - self.head_lines)
        row = self.row()
        return lines if row is None or self._is_all else max(1, lines - len(self._card(row)) + 1)

    def fit_into(self, room: int) -> int:
        """The lines that it takes of ``room``: all that all of them need, if that is there."""
        data = self.data
        if data is None or not data.total:
            return 1
        self._room = room
        whole = self.head_lines + sum([len(self._card(row)) for row in data.listed()])
        self._is_all = len(data.order) == data.total and whole <= room
        under = self.row()
        more = 0 if under is None else len(self._card(under)) - 1
        return whole if self._is_all else min(room, self.head_lines + data.total + more)

    @override
    def make_lines(self, width: int, height: int) -> Sequence[Line]:
        data = self.data
        if data is None or not data.total:
            words = NOT_HERE_YET if data is None else data.trouble or self._nothing()
            return [self._caption((words,), width)]
        lines = [self._caption(self._place_words(data), width)]
        self._rows_at = []
        for index in range(self._first, data.total):
            key = self._key_at(index)
            is_chosen = index == self._cursor and self.is_active
            card = self._card(data.rows[key]) if key else [(Styled("…", "dim"),)]
            if not self._is_all and index != self._cursor:
                card = [self._short(data.rows[key])] if key else card
            for at, line in enumerate(card):
                mark = Styled("▸ " if is_chosen and not at else "  ", "key")
                made = spans.fit((mark, *line), width)
                lines.append(spans.pointed_at(made) if is_chosen else made)
                self._rows_at.append(index)
            if len(lines) >= height:
                break
        return lines[:height]

    def _nothing(self) -> str:
        return "nothing passes the filter" if self.filters else "none"

    def _head(self, row: NamedRow) -> tuple[Styled, Styled]:
        """How grave, and for how long."""
        letter, style = cells.lettered(row.text("severity"), SEVERITIES)
        since_s = row.number("since")
        ago = "" if since_s is None else f"for {age(self._now_s - since_s)}"
        if since_s is not None and self.size.width >= WIDE_COLUMNS:
            ago = f"since {console(self).time_of_day(since_s)}, {ago}"
        return Styled(f"{letter.upper():<9}", style), Styled(f" {ago}", "dim")

    def _short(self, row: TableRow) -> Line:
        named = NamedRow(row, places(self.columns), self._now_s)
        grave, ago = self._head(named)
        width = self.size.width - GUTTER - 1
        return spans.spread((grave, *_said(named)), (ago,), width)

    def _card(self, row: TableRow) -> list[Line]:
        """A sentence, and what to do about it."""
        named = NamedRow(row, places(self.columns), self._now_s)
        grave, ago = self._head(named)
        width = max(20, self.size.width - GUTTER - 1)
        pad = spans.columns(grave.text)
        is_small = 0 < self._room < SMALL_LINES
        if is_small:  # the words need the columns more than the margin does
            pad = GUTTER
        said = spans.text_of(_said(named))
        room = width - spans.columns(grave.text) - spans.columns(ago.text) - 1
        first = next(iter(wrap_words(said, room)), "-")
        rest = wrap_words(said[len(first) :].strip(), width - pad)
        todo = self._todo(named, pad, width)
        most = self._room - self.head_lines - len(todo) - NEXT_LINES - 1
        if is_small and len(rest) > most:
            left = " ".join(rest[max(0, most - 1) :])
            rest = (*rest[: max(0, most - 1)], spans.cut(left, width - pad))[: max(0, most)]
        made = [spans.spread((grave, Styled(first)), (ago,), width)]
        made += [(Styled(" " * pad), Styled(part)) for part in rest if part]
        return [*made, *todo]

    def _todo(self, row: NamedRow, pad: int, width: int) -> list[Line]:
        """What to do, and what Enter opens; in lines where it is not short of room."""
        action, subject = clean(row.text("action")), row.text("subject")
        opens = f"   Enter: {subject}" if subject and action != f"open {subject}" else ""
        key = "press x to copy: " if action.startswith(KILL) else "press x: "
        key = key if is_doable(action) else "↳ "
        room = width - pad - len(key) - 2 - spans.columns(opens)
        is_small = 0 < self._room < SMALL_LINES
        if is_small and spans.columns(action) > room:  # that Enter opens it, the foot says too
            opens, room = "", room + spans.columns(opens)
        words = (spans.cut(action, room),) if is_small else wrap_words(action, room) or ("",)
        made: list[Line] = [
            (Styled(" " * pad), Styled(key if at == 0 else " " * len(key), "key"), Styled(part))
            for at, part in enumerate(words)
        ]
        return [*made[:-1], (*made[-1], cleaned(opens, "key"))]

    @override
    def row_at(self, y: int) -> int:
        at = y - self.head_lines
        return self._rows_at[at] if 0 <= at < len(self._rows_at) else -1


def _said(row: NamedRow) -> Line:
    """What kind of problem, and the sentence."""
    return cleaned(f"{row.text('kind')}: "), cleaned(row.text("evidence"))


class FailedHandoffs(WindowedTable):
    """What failed, the latest first: when, which, with whom, and why; a line each."""

    head_lines = 1

    def __init__(self) -> None:
        super().__init__("rooms")
        self.restrict((Filter("state", "is", "failed"),), "failed")

    def needs(self, most: int) -> int:
        """Lines for so many; none where none has failed."""
        total = self.data.total if self.data is not None else 0
        return self.head_lines + min(total, most) if total else 0

    @override
    def _cells(self, key: str, texts: Sequence[CellLook]) -> Line:
        assert self.data is not None, "it has rows"
        row = NamedRow(self.data.rows[key], places(self.data.columns), self._now_s)
        ended_s = row.number("ended") or 0.0
        when = console(self).time_of_day(ended_s)
        peer, _ = handoffs.peer(row)
        ago = (
            f"{age(self._now_s - ended_s):>7} ago  " if self.size.width >= TELLING_COLUMNS else " "
        )
        head = f"{when}{ago}room {row.cell('room')}  {peer}  "
        why = cleaned(row.text("waiting_for") or "nobody said why", "bad")
        return spans.fit((Styled(head, "dim"), why), self.size.width - GUTTER)
