"""What happened: the log of the node, and of one thing also what the other end tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvd.wire.admin import AskOtherEnd, OtherEnds
from kvd.wire.console import MAX_EVENTS, EventQuery
from tui.model import filters, happenings, logbook
from tui.model.filters import Flaw
from tui.model.log import Gap
from tui.model.logbook import Logbook
from tui.screens.page import STEPS, Page
from tui.widgets.card import WITH_EVENTS
from tui.widgets.loglines import LogLines
from tui.widgets.reach import console

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.worker import Worker

    from kvd.wire.console import Column, TableRow
    from kvd.wire.events import Event
    from tui.model.logbook import Entry
    from tui.model.moments import Moment

THERE_S = 1.0
"""How often the daemon at the other end of a room is asked, through ours."""


class EventsPage(Page):
    """Every event as one line, the newest at the bottom.

    Kinds are left out by the daemon, words here. ``correlate`` leaves only what is about the same
    thing as the line under the cursor; about a room, with what the other end tells of it.
    """

    NAME = "events"
    REFS = ("event",)
    FAULTS: ClassVar[Mapping[str, str]] = {"": "!level:routine !level:notice"}
    CAN_MOVE = True
    CAN_FILTER = True

    def __init__(self) -> None:
        super().__init__()
        self.about = ""
        """What all lines are about; empty for everything."""
        self._text = ""
        self._kinds: tuple[str, ...] = ()
        self._book = Logbook()
        self._told: list[Entry] = []
        self._moment: Moment | None = None
        self._record: tuple[TableRow, tuple[Column, ...]] | None = None

    @override
    def compose(self) -> ComposeResult:
        yield LogLines()

    @override
    def on_mount(self) -> None:
        """Ask the other end, at its pace."""
        self.set_interval(THERE_S, self.ask_there)

    @property
    def log_lines(self) -> LogLines:
        """The log."""
        return self.query_one(LogLines)

    # ---- what is shown ----------------------------------------------------------------------

    @override
    def events(self) -> EventQuery:
        return EventQuery(0, MAX_EVENTS, self._kinds, self.about)

    @override
    def show(self, moment: Moment) -> None:
        self._moment = moment
        mirror = console(self).mirror
        now_s = moment.now_s
        more = [one for one in self._told if one.at_s <= now_s]
        if not self.about:
            more = logbook.restarts_of(mirror.notices, moment.heard_s, moment.vitals)
        lines = self.log_lines
        about = f"about {self.about}" if self.about else ""
        text = f"/{self._text}" if self._text else ""
        lines.words = " ".join(part for part in (about, text) if part)
        lines.show(self._book.entries(moment.log(self.events()), now_s, more), now_s)

    def _reshow(self) -> None:
        if self._moment is not None:
            self.show(self._moment)

    @override
    def chosen(self) -> str:
        entry = self.log_lines.entry
        return entry.ref if entry is not None else ""

    @override
    def row(self, ref: str) -> tuple[TableRow | None, tuple[Column, ...]]:
        """The record of an event that is here; of the last one also when it no longer is."""
        event = self._event(ref)
        if event is not None:
            self._record = happenings.record_of(event)
        if self._record is None or self._record[0].key != ref:
            return None, ()
        return self._record

    def _event(self, ref: str) -> Event | None:
        kind, _, number = ref.partition(":")
        if kind != "event" or self._moment is None or not number.isdecimal():
            return None
        wanted = int(number)
        for log in self._moment.logs.values():
            for chunk in reversed(log.chunks):
                for one in chunk:
                    if not isinstance(one, Gap) and one.seq == wanted:
                        return one
        return None

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
        return happenings.COLUMNS

    @override
    def filter_by(self, text: str) -> None:
        found = filters.parse(text, happenings.COLUMNS)
        if isinstance(found, Flaw):
            return
        self._text, self._book.filters = text, found
        self._kinds = happenings.kinds_for(found)
        self._reshow()

    def _correlate(self) -> None:
        """Only what is about the same; again: the next thing that the line names, then all."""
        entry = self.log_lines.entry
        item = entry.item if entry is not None else None
        refs: tuple[str, ...] = ()
        if not isinstance(item, logbook.Told | logbook.Restart | Gap | None):
            refs = happenings.refs_of(item)
        if self.about in refs:
            at = refs.index(self.about) + 1
            self._narrow(refs[at] if at < len(refs) else "")
        elif refs:
            self._narrow(refs[0])
        elif self.about:
            self._narrow("")
        else:
            console(self).say("it names nothing that others could be about too")

    def _narrow(self, about: str) -> None:
        self.about, self._told = about, []
        self._reshow()
        self.ask_there()

    # ---- the other end ----------------------------------------------------------------------

    def ask_there(self) -> None:
        """Have our daemon ask the one at the other end, while a room is shown as it is now."""
        is_live = not console(self).mirror.moments.is_frozen
        if self.display and is_live and self.about.startswith("room:"):
            _: Worker[None] = self.run_worker(self._ask_there, group="there", exclusive=True)

    async def _ask_there(self) -> None:
        app, about = console(self), self.about
        reply = await app.link.ask(AskOtherEnd(0, int(about.partition(":")[2])))
        if about == self.about and isinstance(reply, OtherEnds):
            at_s = app.mirror.moments.newest.now_s
            self._told = logbook.marks_of(reply.ends, at_s)
            self._reshow()

    # ---- keys -------------------------------------------------------------------------------

    @override
    async def act(self, action: str) -> bool:
        lines = self.log_lines
        match action:
            case "follow":
                lines.follow(is_wanted=not lines.is_following)
            case "correlate":
                self._correlate()
            case "back" if self.about:
                self._narrow("")
            case "up" | "down":
                lines.move(STEPS[action])
            case "pageup":
                lines.move(1 - lines.page_rows)
            case "pagedown":
                lines.move(lines.page_rows - 1)
            case "home":
                lines.move(-len(lines.entries))
            case "end":
                lines.follow(is_wanted=True)
            case _:
                return False
        return True

    def on_log_lines_opened(self) -> None:
        """A line was clicked twice."""
        if self.chosen():
            self.post_message(self.Wish(self.chosen()))
