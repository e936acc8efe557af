"""What happened: the log of the node, and of one thing also what the other end tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.text import age, counted
from kvd.wire.admin import AskOtherEnd, OtherEnds
from kvd.wire.console import MAX_EVENTS, EventQuery
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import event_log, event_words
from tui.model.event_log import EventGap, LogEntries
from tui.screens.page import Page
from tui.widgets.canvas import Cursored, console
from tui.widgets.card import WITH_EVENTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.worker import Worker

    from kvd.wire.console import Column, Filter, TableRow
    from kvd.wire.events import Event
    from tui.model.event_log import Entry
    from tui.model.snapshots import DaemonSnapshot


CLOCK_FROM_COLUMNS = 60
"""Where there are fewer, what happened needs them more than the clock."""
THERE_S = 1.0
"""How often the daemon at the other end of a room is asked, through ours."""


class EventsPage(Page):
    """Every event as one line, the newest at the bottom.

    Kinds are left out by the daemon, words here. What is about one thing alone has, if that is a
    room, what the other end tells of it.
    """

    NAME = "events"
    REFS = ("event",)
    FAULTS: ClassVar[Mapping[str, str]] = {"": "!level:routine !level:notice"}
    CAN_FILTER = True
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("i", "app.events_of", "about", tooltip="only events about the same, of both ends"),
        Binding("f", "end", "follow", tooltip="the newest"),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.about = ""
        """What all lines are about; empty for everything."""
        self._text = ""
        self._kinds: tuple[str, ...] = ()
        self._book = LogEntries()
        self._told: list[Entry] = []
        self._snapshot: DaemonSnapshot | None = None

    @override
    def compose(self) -> ComposeResult:
        yield EventLogView()

    @override
    def on_mount(self) -> None:
        """Ask the other end, at its pace."""
        self.set_interval(THERE_S, self.ask_there)

    @property
    def log_lines(self) -> EventLogView:
        """The list under the cursor keys."""
        return self.query_one(EventLogView)

    @override
    def cursored(self) -> EventLogView:
        return self.log_lines

    # ---- what is shown ----------------------------------------------------------------------

    @override
    def events(self) -> EventQuery:
        return EventQuery(after=0, limit=MAX_EVENTS, kinds=self._kinds, about=self.about)

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        self._snapshot = snapshot
        mirror = console(self).mirror
        now_s = snapshot.now_s
        more = [entry for entry in self._told if entry.at_s <= now_s]
        if not self.about:
            more = event_log.restarts_of(mirror.notices, snapshot.heard_s, snapshot.vitals)
        lines = self.log_lines
        about = f"about {self.about}" if self.about else ""
        text = f"/{self._text}" if self._text else ""
        lines.words = " ".join(part for part in (about, text) if part)
        lines.show(self._book.entries(snapshot.log(self.events()), now_s, more), now_s)

    def _reshow(self) -> None:
        if self._snapshot is not None:
            self.show(self._snapshot)

    @override
    def chosen(self) -> str:
        entry = self.log_lines.entry
        return entry.ref if entry is not None else ""

    @override
    def row(self, ref: str) -> tuple[TableRow | None, tuple[Column, ...]]:
        """The record of an event that is here."""
        event = self._event(ref)
        return event_words.record_of(event) if event is not None else (None, ())

    def _event(self, ref: str) -> Event | None:
        kind, _, number = ref.partition(":")
        if kind != "event" or self._snapshot is None or not number.isdecimal():
            return None
        wanted = int(number)
        found = (item for log in self._snapshot.logs.values() for item in log.items)
        return next((e for e in found if not isinstance(e, EventGap) and e.seq == wanted), None)

    @override
    def seek(self, ref: str) -> bool:
        """Put the cursor on an event; of what events name, show those that name it."""
        kind = ref.partition(":")[0]
        if kind in WITH_EVENTS and ref != self.about:
            self._narrow(ref)
        return kind == "event" and self.log_lines.seek(ref)

    # ---- what is left out -------------------------------------------------------------------

    @property
    @override
    def filter_text(self) -> str:
        return self._text

    @override
    def filter_columns(self) -> tuple[Column, ...]:
        return event_words.COLUMNS

    @override
    def filter_by(self, text: str, filters: tuple[Filter, ...]) -> None:
        self._text, self._book.filters = text, filters
        self._kinds = event_words.kinds_for(filters)
        self._reshow()

    def _narrow(self, about: str) -> None:
        self.about, self._told = about, []
        self._reshow()
        self.ask_there()

    # ---- the other end ----------------------------------------------------------------------

    def ask_there(self) -> None:
        """Have our daemon ask the one at the other end, while a room is shown as it is now."""
        is_live = not console(self).mirror.history.is_frozen
        if self.display and is_live and self.about.startswith("room:"):
            _: Worker[None] = self.run_worker(self._ask_there, group="there", exclusive=True)

    async def _ask_there(self) -> None:
        app, about = console(self), self.about
        reply = await app.link.ask(AskOtherEnd(0, int(about.partition(":")[2])))
        if about == self.about and isinstance(reply, OtherEnds):
            at_s = app.mirror.history.newest.now_s
            self._told = event_log.marks_of(reply.ends, at_s)
            self._reshow()

    # ---- keys -------------------------------------------------------------------------------

    @override
    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return action != "shift" and super().check_action(action, parameters)

    @override
    def widen(self) -> bool:
        was_about = self.about
        if was_about:
            self._narrow("")
        return bool(was_about)


AGE_COLUMNS = 7


class EventLogView(Cursored):
    """``show`` gets all lines there are; only those on the screen are put into words."""

    def __init__(self) -> None:
        super().__init__(id="log")
        self.is_following = True
        """Whether the cursor stays on the newest line."""
        self.words = ""
        """What the head says of where the lines come from."""
        self.entries: Sequence[Entry] = ()
        """What passes the filters, oldest first."""
        self._now_s = 0.0
        self._key = ""
        self._sought = ""

    @property
    @override
    def total(self) -> int:
        return len(self.entries)

    @property
    def entry(self) -> Entry | None:
        """What is under the cursor."""
        return self.entries[self._cursor] if self._cursor < len(self.entries) else None

    # ---- showing ----------------------------------------------------------------------------

    def show(self, entries: Sequence[Entry], now_s: float) -> None:
        """Show these; the cursor stays on its line, or on the newest one."""
        self.entries, self._now_s = entries, now_s
        self._place()
        self.redraw()

    def _place(self) -> None:
        wanted = self._sought or ("" if self.is_following else self._key)
        at = self._index(wanted) if wanted else None
        last = max(0, len(self.entries) - 1)
        if self._sought and at is not None:
            self._sought, self.is_following = "", False
        if at is not None:
            self._first += at - self._cursor
            self._cursor = at
        elif self.is_following:
            self._cursor = last
        self._settle()

    def _index(self, key: str) -> int | None:
        return next((at for at, entry in enumerate(self.entries) if entry.key == key), None)

    def _settle(self) -> None:
        """Keep the cursor on a line and the window around it."""
        self._scroll()
        self._key = self.entry.key if self.entry is not None else ""

    @override
    def make_lines(self, width: int, height: int) -> Sequence[Line]:
        self._settle()
        shown = self.entries[self._first : self._first + self.page_rows]
        lines = [self._head(width)]
        for at, entry in enumerate(shown, start=self._first):
            lines.append(self._line(entry, width, is_chosen=at == self._cursor))
        if not shown:
            lines.append(spans.line("  nothing has happened that is asked for here", "dim"))
        return lines

    def _head(self, width: int) -> Line:
        below = len(self.entries) - 1 - self._cursor
        state = "following" if self.is_following else f"{below} newer below"
        at_left = (
            Styled("events", "head"),
            cleaned(f" {self.words}" if self.words else "", "key"),
        )
        tail = (
            Styled(f"{counted(len(self.entries), 'line')} · "),
            Styled(state, "ok" if self.is_following else "warn"),
        )
        return spans.ruled(at_left, tail, width, is_lit=self.has_keys)

    def _line(self, entry: Entry, width: int, *, is_chosen: bool) -> Line:
        told = event_log.line_of(entry)
        when = spans.right(age(self._now_s - entry.at_s), AGE_COLUMNS)
        if width >= CLOCK_FROM_COLUMNS:
            when += f"  {console(self).time_of_day(entry.at_s, is_fine=True)}"
        made = (
            Styled("▸ ", "key") if is_chosen else Styled("  ", "dim"),
            Styled(when, "dim"),
            Styled(" "),
            *told.spans,
        )
        line = spans.fit(made, width)
        return spans.pointed_at(line) if is_chosen else line

    # ---- moving -----------------------------------------------------------------------------

    @override
    def move(self, rows: int) -> None:
        """Up from the newest the cursor stays there, onto the newest it follows again."""
        self._cursor += rows
        self._settle()
        self.is_following = rows > 0 and self._cursor >= len(self.entries) - 1
        self.redraw()

    @override
    def move_to_end(self) -> None:
        """Stay on the newest line from now on."""
        self.is_following, self._sought = True, ""
        self._place()
        self.redraw()

    def seek(self, key: str) -> bool:
        """Put the cursor on this line, now or once it is here; whether it is."""
        self._sought = key
        self._place()
        self.redraw()
        return not self._sought

    # ---- the mouse --------------------------------------------------------------------------

    def on_click(self, event: events.Click) -> None:
        """A line is chosen, and opened by the second click."""
        at = self._first + event.y - self.head_lines
        if event.y >= self.head_lines and at < self.total:
            self.move(at - self._cursor)
            self.is_following = False
            self.redraw()
            if event.chain == 2:
                self.post_message(self.Opened(self))
