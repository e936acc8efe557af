"""How the node is, at one look: what moves, what is full, what is wrong, what happened."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual.containers import Container
from textual.message import Message
from typing_extensions import override

from kvd.text import age, bytes_per_second, clean, compact, duration
from kvd.wire.console import EventQuery, Sources
from kvd.wire.events import HandoffEnded
from tui import actions
from tui.draw import bars, chart, spans
from tui.draw.spans import Line, Styled, TextBlock, cleaned
from tui.model import cells, event_words
from tui.model.event_log import EventGap
from tui.model.rates import RowRates
from tui.screens.page import Page
from tui.widgets.canvas import NOT_HERE_YET, Canvas, console
from tui.widgets.pools import POOLS_QUERY, pages_of
from tui.widgets.table import HEAD_LINES, ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from textual import events
    from textual.app import ComposeResult

    from kvd.wire.console import Vitals
    from kvd.wire.events import Event
    from tui.draw.spans import Style
    from tui.model.event_log import Log
    from tui.model.rates import NodeRates
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot, TableData


WIDE_COLUMNS = 120
"""From here on pools and findings stand side by side."""
CHARTS_FROM_LINES = 28
"""Lower screens have the figures without their charts."""
LEAST_EVENT_LINES = 3
RULES = ColumnRules(
    first=("severity", "kind", "subject", "since", "evidence"),
    never=("rule", "action"),
    narrow=("evidence",),
)


class OverviewPage(Page):
    """Figures and charts, pools and sources, findings, last events."""

    NAME = "overview"
    FAULTS: ClassVar[Mapping[str, str]] = {"concerns": "!severity:low"}
    REFS = ("concern",)

    DEFAULT_CSS = """
    OverviewPage > #middle { layout: vertical; height: 10; }
    OverviewPage > #middle > #left { layout: vertical; width: 1fr; height: 6; }
    OverviewPage > #middle > WindowedTable { width: 1fr; height: 1fr; }
    OverviewPage > #last-events { height: 1fr; }
    OverviewPage.wide > #middle { layout: horizontal; }
    OverviewPage.wide > #middle > #left { height: 1fr; width: 45%; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield Figures()
        with Container(id="middle"):
            with Container(id="left"):
                yield PoolBars()
                yield SourceBar()
            yield WindowedTable(
                "concerns",
                painters={"severity": cells.severity},
                title="findings",
                rules=RULES,
            )
        yield LastEvents()

    @property
    def findings(self) -> WindowedTable:
        """The findings, the gravest on top."""
        return self.query_one("#table-concerns", WindowedTable)

    @override
    def queries(self) -> tuple[Slot, ...]:
        return (POOLS_QUERY, *super().queries())

    @override
    def events(self) -> EventQuery:
        return LAST_EVENTS

    # ---- showing ----------------------------------------------------------------------------

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        super().show(snapshot)
        mirror, vitals = console(self).mirror, snapshot.vitals
        pools = self.query_one(PoolBars)
        pools.take(mirror.history.newest)
        if vitals is not None:
            self._arrange(snapshot)
            end_s = snapshot.now_s if mirror.history.is_frozen else None
            self.query_one(Figures).show(vitals, mirror.rates, end_s)
            self.query_one(SourceBar).show()
        pools.show(snapshot)
        self.query_one(LastEvents).show(snapshot)

    def _arrange(self, snapshot: DaemonSnapshot) -> None:
        """Give every panel the lines that it needs now; what is left is for the last events."""
        width, height = self.size.width, self.size.height
        vitals, mirror = snapshot.vitals, console(self).mirror
        if not width or not height or vitals is None:
            return
        is_wide = width >= WIDE_COLUMNS
        self.set_class(is_wide, "wide")
        end_s = snapshot.now_s if mirror.history.is_frozen else None
        figures, pools = self.query_one(Figures), self.query_one(PoolBars)
        figures.charts_height = 0 if height < CHARTS_FROM_LINES else max(5, height // 4)
        above = figures.charts_height + figures.lines_needed(vitals, mirror.rates, width)
        self.set_height(figures, above)
        sources = self.query_one(SourceBar)
        panel = width * 9 // 20 if is_wide else width
        needed = sources.make(vitals, mirror.rates, end_s, panel)
        self.set_height(pools, pools.lines_needed)
        self.set_height(sources, needed)
        left = pools.lines_needed + needed
        data = self.findings.data
        rows = HEAD_LINES + max(1, data.total if data is not None else 1)
        if is_wide:
            self.set_height(self.query_one("#middle"), max(left, min(rows, height // 2)))
        else:
            self.set_height(self.query_one("#left"), left)
            room = max(HEAD_LINES + 1, height - above - left - LEAST_EVENT_LINES)
            self.set_height(self.query_one("#middle"), left + min(rows, room))

    # ---- keys -------------------------------------------------------------------------------

    @override
    def chosen(self) -> str:
        """What the finding under the cursor is about; the finding itself where that is nothing."""
        row = self.findings.named_row()
        return row.text("subject") or row.row.key if row is not None else ""

    @override
    async def act(self, action: str) -> bool:
        row = self.findings.named_row()
        if action == "propose" and row is not None:
            actions.propose(console(self), row.text("action"))
            return True
        return await super().act(action)

    def on_opened(self, message: Opened) -> None:
        """A line of a panel was clicked."""
        self.post_message(self.OpenRequested(message.ref))


SPARK_COLUMNS = 10
RATE_S = 10.0
MINUTE_S = 60.0
MOST_POOLS = 8
NAME_COLUMNS = 12
LAST_EVENTS = EventQuery(0, 100, event_words.NOTABLE)
"""Without what every request does: in passing nobody reads that."""


class Opened(Message):
    """A line was clicked: what it is about."""

    def __init__(self, ref: str) -> None:
        super().__init__()
        self.ref = ref


class Figures(Canvas):
    """Bytes over time, and how many of everything there are."""

    charts_height = 0
    """Lines of the charts, their heads included; 0 where there is no room for any."""

    def __init__(self) -> None:
        super().__init__(id="figures")
        self._charts: list[Line] = []
        self._charts_for: tuple[object, ...] = ()

    def show(self, vitals: Vitals, rates: NodeRates, end_s: float | None) -> None:
        """Paint the head of a frame, and what it was over time, up to ``end_s``."""
        width = self.size.width
        if width:
            self.paint(self._lines_of(vitals, rates, end_s, width))

    def lines_needed(self, vitals: Vitals, rates: NodeRates, width: int) -> int:
        """How many there are without charts."""
        return len(_flow(vitals, rates, None, width, has_bytes=not self.charts_height))

    def _lines_of(
        self, vitals: Vitals, rates: NodeRates, end_s: float | None, width: int
    ) -> list[Line]:
        height = self.charts_height
        numbers = _flow(vitals, rates, end_s, width, has_bytes=not height)
        if not height:
            return numbers
        # A step of a chart is a second: in between nothing moves.
        wanted = (int(vitals.at_s), len(rates) < 3, end_s, width, height, vitals.incarnation)
        if wanted != self._charts_for:
            self._charts_for, self._charts = wanted, _charts(rates, end_s, width, height)
        return [*self._charts, *numbers]


def _charts(rates: NodeRates, end_s: float | None, width: int, height: int) -> list[Line]:
    """Bytes in and out, side by side."""
    each = (width - 2) // 2
    made = []
    for title, name in (("bytes in", "in_bytes"), ("bytes out", "out_bytes")):
        values = rates.per_second(name, 2 * each, end_s=end_s)
        made.append(
            TextBlock(
                chart.chart(chart.Series(title, values, bytes_per_second), each, height), each
            )
        )
    return spans.side_by_side(made, 2)


def _flow(
    vitals: Vitals, rates: NodeRates, end_s: float | None, width: int, *, has_bytes: bool
) -> list[Line]:
    """Everything that is a figure, on as few lines as that takes."""

    def per_s(*names: str, over_s: float = RATE_S) -> float:
        grown, known_s = rates.grown(names, over_s=over_s, end_s=end_s)
        return sum(grown) / known_s if known_s else 0.0

    lately, made = vitals.latency, list[Line]()
    for title, name in (("in", "in_bytes"), ("out", "out_bytes")) if has_bytes else ():
        values = rates.per_second(name, int(MINUTE_S), end_s=end_s)
        steps = chart.spark(values, SPARK_COLUMNS)
        now = per_s(name, over_s=1.0)
        top = max(values, default=0.0)
        made.append(
            (
                *_figure(title, bytes_per_second(now)),
                Styled(" "),
                steps,
                *_figure(" max", bytes_per_second(top)),
            )
        )
    ended = per_s("handoffs_delivered", "handoffs_failed")
    timed = lately.ended > lately.failed
    made += [
        _figure("handoffs", f"{ended:.1f}/s"),
        _figure("p50", _lasting(lately.p50_s) if timed else "-"),
        _figure("p99", _lasting(lately.p99_s) if timed else "-"),
        _figure("in flight", str(vitals.rooms)),
        _figure("waiting", str(vitals.waiting), "warn" if vitals.waiting else "plain"),
        _figure("failed", f"{lately.failed} in 1m", "bad" if lately.failed else "plain"),
        _figure("engines", str(vitals.clients)),
        _figure("leases", compact(vitals.leases)),
        _figure(
            "peers",
            f"{vitals.peers_up}/{vitals.peers}",
            "warn" if vitals.peers_up < vitals.peers else "plain",
        ),
        _figure("evicted", f"{per_s('evicted_pages'):.1f}/s"),
        _figure("consoles", f"{100 * vitals.console_share:.1f}% of a core"),
    ]
    return spans.wrapped(made, width)


def _figure(name: str, text: str, style: Style = "plain") -> Line:
    return (Styled(f"{name} ", "dim"), Styled(text, style))


def _lasting(seconds: float) -> str:
    return f"{1000 * seconds:.1f}ms" if seconds < 1 else duration(seconds)


# ---- pools ---------------------------------------------------------------------------------------


class PoolBars(Canvas):
    """A line for each component: its pages as a bar, how much is used, and where that goes."""

    def __init__(self) -> None:
        super().__init__(id="pool-bars")
        self.data: TableData | None = None
        self._taken: TableData | None = None
        self._evicted = RowRates("evicted", RATE_S)
        self._used: dict[str, deque[tuple[int, float]]] = {}

    def take(self, newest: DaemonSnapshot) -> None:
        """Remember how much is used; also while the screen stands still."""
        data = newest.table(POOLS_QUERY)
        if data is None or data is self._taken:
            return
        self._taken = data
        self._evicted.take(data)
        used = {}
        for key in data.order:
            points = self._used.get(key) or deque(maxlen=SPARK_COLUMNS * 6)
            if not points or points[-1][0] != int(data.at_s):
                points.append((int(data.at_s), _used(data, key)))
            used[key] = points
        self._used = used

    def show(self, snapshot: DaemonSnapshot) -> None:
        """Paint what there is."""
        self.data = snapshot.table(POOLS_QUERY) or self.data
        if self.size.width:
            self.paint(self._make(self.size.width, int(snapshot.now_s)))

    @property
    def lines_needed(self) -> int:
        """How many there are."""
        count = len(self.data.order) if self.data is not None else 0
        return 1 + max(1, min(count, MOST_POOLS + 1))

    def _make(self, width: int, now_s: int) -> list[Line]:
        data = self.data
        tail = f"{'used':>5} {'evict/s':>8}  {'1m':>{SPARK_COLUMNS}}"
        bar = max(8, width - 2 - NAME_COLUMNS - 1 - len(tail) - 1)
        title = spans.spread(
            (Styled("─ ", "border"), Styled("pools", "head")), (Styled(tail, "dim"),), width - 1,
            Styled("─", "border"),
        )  # fmt: skip
        if data is None or not data.order:
            why = data.trouble if data is not None else NOT_HERE_YET
            return [title, (Styled("  "), cleaned(why or "no components", "dim"))]
        made = [title, *[self._line(data, key, bar, now_s) for key in data.order[:MOST_POOLS]]]
        if len(data.order) > MOST_POOLS:
            made.append(spans.line(f"  and {len(data.order) - MOST_POOLS} more", "dim"))
        return made

    def _line(self, data: TableData, key: str, bar: int, now_s: int) -> Line:
        share = _used(data, key)
        state = data.cell(key, "state")
        rate = self._evicted.rate(key)
        points = [value for at_s, value in self._used.get(key, ()) if at_s <= now_s]
        style: Style = "plain" if state == "ok" else "warn"
        name = spans.left(clean(str(data.cell(key, "component"))), NAME_COLUMNS)
        return (
            Styled(f"  {name} ", style),
            *bars.stacked(bars.pool(pages_of(data, key)), bar),
            Styled(f" {100 * share:>4.0f}%", style),
            Styled(f" {'-' if rate is None else f'{rate:.1f}':>8}  ", "warn" if rate else "dim"),
            chart.spark(points[-SPARK_COLUMNS:], SPARK_COLUMNS, 1.0),
        )

    def on_click(self, event: events.Click) -> None:
        """The component of this line."""
        at = event.y - 1
        if self.data is not None and 0 <= at < min(len(self.data.order), MOST_POOLS):
            self.post_message(Opened(self.data.order[at]))


def _used(data: TableData, key: str) -> float:
    """The share of the pages that are not free."""
    pages = pages_of(data, key)
    total = sum(pages) - pages.locked
    return 1 - pages.free / total if total else 0.0


# ---- sources -------------------------------------------------------------------------------------


class SourceBar(Canvas):
    """Where tokens came from, and why those that had to be computed were not there."""

    def __init__(self) -> None:
        super().__init__(id="sources")
        self._made: list[Line] = []

    def make(self, vitals: Vitals, rates: NodeRates, end_s: float | None, width: int) -> int:
        """Make the lines for this width; how many they are."""
        names = [f"from_{name}" for name in Sources.__struct_fields__]
        grown, known_s = rates.grown(names, over_s=MINUTE_S, end_s=end_s)
        tokens = Sources(*(round(one) for one in grown))
        when = f"last {known_s:.0f}s"
        if not any(grown):
            tokens, when = vitals.sources, f"since it began, none in the {when}"
        title = (Styled("where tokens came from ", "head"), Styled(when, "dim"))
        self._made = [spans.headed(title, width - 1), *_source_lines(tokens, width - 3)]
        return len(self._made)

    def show(self) -> None:
        """Paint what was made."""
        self.paint(self._made)


def _source_lines(tokens: Sources, width: int) -> list[Line]:
    parts, missed = bars.sources(tokens), bars.misses(tokens)
    if not any(msgspec.structs.astuple(tokens)):
        return [spans.line("  no prompt has come yet", "dim")]
    made = [bars.stacked(parts, width), *bars.key(parts, width)]
    if any(part.size for part in missed):
        made += [(Styled("computed because", "dim"),), *bars.key(missed, width)]
    return [(Styled("  "), *one) for one in made]


# ---- events --------------------------------------------------------------------------------------


def _remarkable(log: Log) -> Iterator[Event]:
    """The newest first, without handoffs that went well: they would hide the one that did not."""
    for chunk in reversed(log.chunks):
        for one in reversed(chunk):
            is_fine = isinstance(one, HandoffEnded) and one.outcome in event_words.DELIVERED
            if not isinstance(one, EventGap) and not is_fine:
                yield one


class LastEvents(Canvas):
    """The last things that happened beside what every request does, the newest first."""

    def __init__(self) -> None:
        super().__init__(id="last-events")
        self._shown: Sequence[Event] = ()
        self._words: dict[int, Line] = {}

    def show(self, snapshot: DaemonSnapshot) -> None:
        """Paint as many as there is room for."""
        width, room = self.size.width, self.size.height - 1
        if not width or room < 1:
            return
        self._shown = list(itertools.islice(_remarkable(snapshot.log(LAST_EVENTS)), room))
        self._words = {one.seq: self._words.get(one.seq) or self._told(one) for one in self._shown}
        title = (Styled("last events ", "head"), Styled("(6: what went well too)", "dim"))
        made = [spans.headed(title, width)]
        for one in self._shown:
            ago = age(snapshot.now_s - one.at_s)
            made.append(spans.fit((Styled(f"{ago:>8} ", "dim"), *self._words[one.seq]), width))
        if not self._shown:
            made.append(spans.line("  nothing worth a word", "dim"))
        self.paint(made)

    @staticmethod
    def _told(event: Event) -> Line:
        level = event_words.level_of(event)
        style = event_words.STYLES[level]
        kind = event_words.tag_of(event)
        return (
            Styled(f"{event_words.LETTERS[level]} {kind} ", style),
            Styled(event_words.words(event)),
        )

    def on_click(self, event: events.Click) -> None:
        """The event of this line."""
        at = event.y - 1
        if 0 <= at < len(self._shown):
            self.post_message(Opened(event_words.key_of(self._shown[at])))
