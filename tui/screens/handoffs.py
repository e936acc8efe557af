"""Handoffs under way, and the story of one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.text import bytes_per_second, clean, compact_bytes, counted, lasting
from kvd.wire.admin import AskOtherEnd, Because, OtherEnds, Why
from kvd.wire.console import Filter
from tui.actions import answered
from tui.draw import chart, phases, spans
from tui.draw.chart import Series
from tui.draw.spans import Line, Styled, cleaned
from tui.model import handoffs
from tui.model.columns import ComputedColumns
from tui.model.handoffs import HandoffStory
from tui.model.rates import RowRates
from tui.screens.page import ABORT, FENCE, Page
from tui.widgets.canvas import NOT_HERE_YET, Canvas, console, wrap_words
from tui.widgets.card import CardContent, card_lines
from tui.widgets.table import ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.worker import Worker

    from kvd.wire.admin import OtherEnd
    from kvd.wire.console import Cell
    from tui.draw.phases import HandoffEnd
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow
    from tui.model.snapshots import DaemonSnapshot


LEAST_CHART_LINES, MOST_CHART_LINES = 4, 8
HERE_S = 0.5
"""How often our daemon is asked for the story of the one under the cursor."""
THERE_S = 1.0
"""And the other daemon, through ours."""
WITHOUT_DELIVERED = ((Filter("state", "is-not", "delivered"),), "handoffs")
WITH_DELIVERED = ((), "handoffs, delivered too")
"""What is left out, and what the rest is called."""


class HandoffsPage(Page):
    """What is under way and what failed above, the story of the one under the cursor below."""

    NAME = "handoffs"
    FAULTS: ClassVar[Mapping[str, str]] = {"rooms": "moved>2s !state=ready"}
    REFS = ("room", "receive", "send")
    TOLD = frozenset({"room"})
    BINDINGS: ClassVar[list[BindingType]] = [
        ABORT,
        Binding("d", "delivered", "delivered", tooltip="those that went well too, or not"),
        FENCE,
    ]

    DEFAULT_CSS = """
    HandoffsPage > #table-rooms { height: 1fr; }
    HandoffsPage > #life { height: 52%; min-height: 6; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._rates = RowRates("done_bytes")
        self._story: HandoffStory | None = None

    @override
    def compose(self) -> ComposeResult:
        table = WindowedTable(
            "rooms",
            computed=ComputedColumns(handoffs.COLUMNS, self._made, handoffs.FIRST),
            painters={**handoffs.PAINTERS, "progress": self._progress},
            rules=ColumnRules(handoffs.MATTERS, handoffs.HIDDEN),
            stands_for=handoffs.STANDS_FOR,
            rates=(self._rates,),
        )
        table.restrict(*WITHOUT_DELIVERED)
        yield table
        yield Canvas(id="life")

    @override
    def on_mount(self) -> None:
        """Ask for stories, each at its pace."""
        self.set_interval(HERE_S, self.ask_here)
        self.set_interval(THERE_S, self.ask_there)

    # ---- the table --------------------------------------------------------------------------

    @property
    def rooms(self) -> WindowedTable:
        """The handoffs."""
        return self.query_one("#table-rooms", WindowedTable)

    @property
    def panel(self) -> Canvas:
        """The story of the one under the cursor."""
        return self.query_one("#life", Canvas)

    def action_delivered(self) -> None:
        """Those that went well too, or not."""
        self.rooms.restrict(*(WITH_DELIVERED if self.rooms.only else WITHOUT_DELIVERED))

    def _made(self, row: NamedRow) -> tuple[Cell, ...]:
        return handoffs.made(row, self._rates)

    def _progress(self, row: NamedRow) -> tuple[str, Style]:
        return handoffs.progress(row, handoffs.bar_columns(self.size.width))

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        super().show(snapshot)
        row, ref = self.rooms.named_row(), self.chosen()
        if not ref:
            self._story = None
        elif self._story is None or self._story.ref != ref:
            self._story = HandoffStory(ref)
            self.ask_here()
            self.ask_there()
        node = snapshot.vitals.node if snapshot.vitals is not None else "here"
        width, height = self.panel.size
        if self.panel.display and width:  # what does not fit is the oldest of the story
            lines = story_lines(self._story, row, node, snapshot.now_s, width)
            room = min(height - len(lines), MOST_CHART_LINES)
            if row is not None and room >= LEAST_CHART_LINES:
                moved = self._rates.per_second(row.row.key, 2 * width, end_s=row.at_s)
                series = Series("bytes of it", moved, bytes_per_second)
                lines += chart.chart(series, width, room)
            self.panel.paint(lines[:height])

    @override
    def chosen(self) -> str:
        """One that was gone to, and is in no table any more, can still be asked about."""
        rooms = self.rooms
        is_gone = rooms.pinned and rooms.data is not None and not rooms.data.total
        return rooms.pinned if is_gone else super().chosen()

    @override
    def seek(self, ref: str) -> bool:
        """Of a room: the first part of it."""
        kind, _, number = ref.partition(":")
        data = self.rooms.data
        if kind != "room" or data is None or not number.isdecimal():
            return super().seek(ref)
        found = [key for key in data.order if data.cell(key, "room") == int(number)]
        return bool(found) and super().seek(found[0])

    # ---- the story of one --------------------------------------------------------------------

    def ask_here(self) -> None:
        """Ask our daemon for the story of the one that is shown."""
        if self._is_asking():
            _: Worker[None] = self.run_worker(self._ask_here, group="here", exclusive=True)

    def ask_there(self) -> None:
        """Have it ask the daemon at the other end."""
        if self._is_asking():
            _: Worker[None] = self.run_worker(self._ask_there, group="there", exclusive=True)

    def _is_asking(self) -> bool:
        """Whether the story of one is to be seen, as it is now."""
        is_seen = self.display and self.panel.display
        return is_seen and self._story is not None and not console(self).mirror.history.is_frozen

    async def _ask_here(self) -> None:
        ref = self._story.ref if self._story is not None else ""
        kind, _, number = ref.partition(":")
        if not number.isdecimal():
            return
        answer = answered(await console(self).link.ask(Why(0, kind, int(number))), Because)
        story = self._story
        if story is not None and story.ref == ref:  # another one may be shown by now
            self._story = story.with_here(self._now_s(), answer)

    async def _ask_there(self) -> None:
        ref = self._story.ref if self._story is not None else ""
        row = self.rooms.named_row()
        room = row.number("room") if row is not None and row.row.key == ref else None
        if row is None or room is None or row.text("state") in handoffs.ENDED:
            return
        answer = answered(await console(self).link.ask(AskOtherEnd(0, int(room))), OtherEnds)
        ends = answer.ends if isinstance(answer, OtherEnds) else answer
        story = self._story
        if story is not None and story.ref == ref:
            self._story = story.with_there(self._now_s(), ends)

    def _now_s(self) -> float:
        """The daemon's clock, as of its newest frame."""
        return console(self).mirror.history.newest.now_s


AGO_COLUMNS = 9
NAMED_FROM_COLUMNS = 60
"""Where there are fewer, which room it is needs them more than how far it is."""
BAR_FROM_COLUMNS = 100
"""Where there is room for a second bar; the table has one already."""


def story_lines(
    story: HandoffStory | None, row: NamedRow | None, node: str, now_s: float, width: int
) -> list[Line]:
    """Its head, the chart, what is wrong, the figures, then its story; in the order of weight."""
    if row is None or story is None:
        ref, told = ("life of a handoff", None) if story is None else (story.ref, story.here)
        words = ["no handoff is under way" if story is None else NOT_HERE_YET]
        if told is not None and not isinstance(told.answer, tuple):
            words = [spans.text_of(line) for line in card_lines(CardContent(ref, told.answer))]
        head = spans.headed((cleaned(ref, "head"),), width)
        return [head, *[spans.line(part) for line in words for part in wrap_words(line, width)]]
    ends = handoffs.ends(story, row, node, now_s)
    until_s = row.number("until")
    deadline_in_s = None if until_s is None else until_s - now_s
    made = [_head(row, width), *phases.draw(ends, width, deadline_in_s)]
    made += _trouble(row, width)
    made += _figures(story, row, node, now_s, width)
    return [*made, *_story(ends, width)]


def _head(row: NamedRow, width: int) -> Line:
    state, style = handoffs.state(row)
    room = row.cell("room")
    at_left = (
        cleaned(row.row.key, "head"),
        Styled("" if room is None else f"  room {room}  "),
        Styled(handoffs.peer(row)[0]),
        Styled("  "),
        Styled(state, style),
    )
    words = f"{handoffs.done(row)[0]}  {handoffs.rate(row)[0]}  {handoffs.eta(row)[0]}"
    if width < NAMED_FROM_COLUMNS:
        words = ""
    if width >= BAR_FROM_COLUMNS and row.number("progress") is not None:
        words = f"{handoffs.progress(row, 10)[0]} {words}"
    return spans.ruled(at_left, (Styled(words.strip(), "dim"),), width)


def _trouble(row: NamedRow, width: int) -> list[Line]:
    """Why it failed."""
    if row.text("state") == "failed":
        why = row.text("waiting_for") or "nobody said why"
        return [spans.fit((Styled("failed: ", "bad"), cleaned(why, "bad")), width)]
    return []


def _figures(story: HandoffStory, row: NamedRow, node: str, now_s: float, width: int) -> list[Line]:
    """What each end says of its bytes, ours first."""
    made = _of_end(node, _ours(row), width)
    if story.there is not None and isinstance(story.there.answer, tuple):
        by_s = now_s - story.there.at_s
        told = [end for end in story.there.answer if not end.why_none]
        for end in told:
            made += _of_end(end.peer, _told(end, by_s), width)
    return made


def _of_end(name: str, words: list[str], width: int) -> list[Line]:
    *before, last = [word for word in words if word]
    items = [spans.line(text) for text in (*(f"{word}," for word in before), last)]
    return spans.wrapped([(cleaned(f"{name}:", "head"),), *items], width, 1)


def _ours(row: NamedRow) -> list[str]:
    """The figures of our own end, as they are now."""
    posts, pages, of = row.number("posts"), row.number("done_pages"), row.number("total_pages")
    return [
        f"{handoffs.done(row)[0]} {'here' if row.text('side') == 'decode' else 'sent'}",
        f"{pages:.0f} of {of:.0f} pages posted" if pages is not None and of is not None else "",
        f"{counted(posts, 'post')} under way" if posts is not None else "",
        _prompt(row.number("prompt_tokens"), row.number("decode_prefix_len")),
    ]


def _told(end: OtherEnd, by_s: float) -> list[str]:
    """The figures of the other end, and how far away it is; its deadline is by its own clock."""
    deadline_in_s = end.deadline_in_s - by_s
    return [
        f"{compact_bytes(end.moved_bytes)}/{compact_bytes(end.total_bytes)} there",
        f"{counted(end.outstanding_posts, 'post')} under way" if end.side == "prefill" else "",
        _prompt(end.prompt_tokens, end.decode_prefix_len),
        f"its deadline in {lasting(deadline_in_s)}" if end.deadline_in_s else "",
        f"round trip {lasting(end.round_trip_s)}",
    ]


def _prompt(tokens: float | None, cached: float | None) -> str:
    return "" if tokens is None else f"prompt {tokens:.0f} tokens, {cached or 0:.0f} cached before"


def _story(ends: Sequence[HandoffEnd], width: int) -> list[Line]:
    """What happened at both ends in one order, the newest first: it is what one looks for."""
    found = handoffs.timeline(ends)
    if not found:
        return []
    made = [spans.headed((Styled("story of both ends", "dim"),), width)]
    names = min(24, max(spans.columns(clean(name)) for _, name, _ in found))
    for ago_s, name, what in reversed(found):
        ago = spans.right(f"-{lasting(max(0.0, ago_s))}", AGO_COLUMNS)
        who = spans.left(clean(name), names)
        before = Styled(f"{ago}  {who}  ", "dim")
        made.append(spans.fit((before, cleaned(what)), width))
    return made
