"""How the node is, at one look: what moves, what is full, what is wrong, what happened."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual.binding import Binding
from textual.containers import Container
from textual.message import Message
from typing_extensions import override

from kvd.text import age, bytes_per_second, clean, compact, duration, thousands
from kvd.wire.console import EventQuery, Query, Sources
from kvd.wire.events import HandoffEnded
from tui import actions
from tui.draw import bars, chart, spans
from tui.draw.spans import Line, Styled, TextBlock, cleaned
from tui.model import cells, event_words
from tui.model.columns import NamedRow, named_row_of, places
from tui.model.event_log import EventGap
from tui.screens.page import PROPOSE, Page
from tui.widgets.canvas import Canvas, console, wrap_words
from tui.widgets.pools import POOLS_QUERY, PoolTable
from tui.widgets.table import HEAD_LINES, ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from textual import events
    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Holder, Vitals
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
SHORT_SOURCES = 4
"""Where tokens came from, without why they had to be computed, where findings need the room."""
MOST_WAITING = 3
"""Rows of the queue that are shown at once."""
WAITING = ColumnRules(
    first=("place", "kind", "owner", "since", "why", "until", "missing_pages", "held_by"),
    never=("ahead", "client", "overtaken"),
    narrow=("why", "held_by"),
)
RULES = ColumnRules(
    first=("severity", "kind", "subject", "since", "evidence"),
    never=("rule", "action"),
    narrow=("evidence",),
)


class OverviewPage(Page):
    """Figures and charts, pools and sources, findings, who waits, the books, last events."""

    NAME = "overview"
    FAULTS: ClassVar[Mapping[str, str]] = {"concerns": "!severity:low"}
    REFS = ("concern", "waiting")
    BINDINGS: ClassVar[list[BindingType]] = [
        PROPOSE,
        Binding("a", "app.audit", "audit", tooltip="check every invariant now"),
    ]

    DEFAULT_CSS = """
    OverviewPage > #middle { layout: vertical; height: 10; }
    OverviewPage > #middle > #left { layout: vertical; width: 1fr; height: 6; }
    OverviewPage > #middle > WindowedTable { width: 1fr; height: 1fr; }
    OverviewPage > #detail { height: 1; }
    OverviewPage > #table-waiting { height: 4; }
    OverviewPage > #ledger { height: 2; }
    OverviewPage > #last-events { height: 1fr; }
    OverviewPage.wide > #middle { layout: horizontal; }
    OverviewPage.wide > #middle > #left { height: 1fr; width: 45%; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield Figures()
        with Container(id="middle"):
            with Container(id="left"):
                yield PoolTable(is_brief=True)
                yield SourceBar()
            yield WindowedTable(
                "concerns",
                painters={"severity": cells.severity},
                title="findings",
                rules=RULES,
            )
        yield Detail()
        yield WindowedTable("waiting", title="waiting for room", rules=WAITING)
        yield Ledger()
        yield LastEvents()

    @property
    def findings(self) -> WindowedTable:
        """The findings, the gravest on top."""
        return self.query_one("#table-concerns", WindowedTable)

    @property
    def waiting(self) -> WindowedTable:
        """The admission queue, in its order."""
        return self.query_one("#table-waiting", WindowedTable)

    @override
    def queries(self) -> tuple[Slot, ...]:
        return (POOLS_QUERY, *super().queries(), AUDIT)

    @override
    def events(self) -> EventQuery:
        return LAST_EVENTS

    # ---- showing ----------------------------------------------------------------------------

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        mirror, vitals = console(self).mirror, snapshot.vitals
        self._queue(vitals.waiting if vitals is not None else 0)
        super().show(snapshot)
        self.query_one(PoolTable).show(snapshot)
        if vitals is not None and self.size.width and self.size.height:
            self._arrange(snapshot, vitals)
            end_s = snapshot.now_s if mirror.history.is_frozen else None
            self.query_one(Figures).show(vitals, mirror.rates, end_s)
            self.query_one(SourceBar).show()
        self.query_one(LastEvents).show(snapshot)

    def _queue(self, waiting: int) -> None:
        """Show the queue while somebody waits."""
        table = self.waiting
        if table.display != bool(waiting):
            table.display = bool(waiting)
            if self.table() is None or not waiting:
                self.activate(self.findings)
        self.set_height(table, HEAD_LINES + min(waiting, MOST_WAITING))

    def _arrange(self, snapshot: DaemonSnapshot, vitals: Vitals) -> None:
        """Give every panel the lines that it needs now; what is left is for the last events."""
        width, height, rates = self.size.width, self.size.height, console(self).mirror.rates
        is_wide = width >= WIDE_COLUMNS
        self.set_class(is_wide, "wide")
        end_s = snapshot.now_s if console(self).mirror.history.is_frozen else None
        figures, pools = self.query_one(Figures), self.query_one(PoolTable)
        figures.charts_height = 0 if height < CHARTS_FROM_LINES else max(5, height // 4)
        above = figures.charts_height + figures.lines_needed(vitals, rates, width)
        self.set_height(figures, above)
        sources = self.query_one(SourceBar)
        panel = width * 9 // 20 if is_wide else width
        data = self.findings.data
        needed = sources.make(vitals, rates, end_s, panel)
        if data is not None and data.total and height < CHARTS_FROM_LINES:
            needed = min(needed, SHORT_SOURCES)
        self.set_height(sources, needed)
        left = len(pools.make_lines(panel, 0)) + needed
        rows = HEAD_LINES + max(1, data.total if data is not None else 1)
        ledger = self.query_one(Ledger)
        below = ledger.show(snapshot)
        self.set_height(ledger, below)
        below += self.waiting.size.height if self.waiting.display else 0
        is_waiting = self.table() is self.waiting
        room = height - above - (0 if is_wide else left) - below - LEAST_EVENT_LINES
        detail = self.query_one(Detail)
        told = detail.show(
            self._under_cursor(snapshot.now_s), snapshot.now_s, max(0, room - HEAD_LINES - 2),
            is_waiting=is_waiting,
        )  # fmt: skip
        detail.display = told > 0
        self.set_height(detail, max(1, told))
        rows = min(rows, max(HEAD_LINES + 2, room - told))
        if not is_wide:
            self.set_height(self.query_one("#left"), left)
        self.set_height(self.query_one("#middle"), max(left, rows) if is_wide else left + rows)

    def _under_cursor(self, now_s: float) -> NamedRow | None:
        table = self.table()
        row = table.row() if table is not None else None
        return NamedRow(row, places(table.columns), now_s) if row is not None and table else None

    # ---- keys -------------------------------------------------------------------------------

    @override
    def chosen(self) -> str:
        """What the finding under the cursor is about; the finding itself where that is nothing."""
        if self.table() is self.waiting:
            return self.waiting.chosen()
        row = self.findings.named_row()
        return row.text("subject") or row.row.key if row is not None else ""

    def action_propose(self) -> None:
        """Put the command that is proposed into the bar."""
        row = self._under_cursor(0.0)
        if row is not None:
            actions.propose(console(self), _proposed(row))

    def on_pool_table_chosen(self, message: PoolTable.Chosen) -> None:
        """A component was clicked."""
        self.post_message(self.OpenRequested(f"pool:{message.component}"))

    def on_opened(self, message: Opened) -> None:
        """A line of a panel was clicked."""
        self.post_message(self.OpenRequested(message.ref))


def _proposed(row: NamedRow) -> str:
    """Of a finding its action; of a request that waits: who has the most of what it lacks."""
    holders = row.cell("held_by")
    if isinstance(holders, tuple) and holders:
        return f"open {holders[0].ref}"
    return row.text("action") or row.text("why")


SPARK_COLUMNS = 10
RATE_S = 10.0
MINUTE_S = 60.0
MOST_POOLS = 8
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


# ---- findings and books ----------------------------------------------------------------------


AUDIT = Query("audit", limit=1)
PARTS = ("free", "held", "cached", "quarantined")
NULL_PAGES = 1
"""Of each component: the page that stands for none is never anybody's."""


def ledger_lines(snapshot: DaemonSnapshot, width: int) -> list[Line]:
    """A line for each component, then the audit."""
    made = [spans.headed((Styled("ledger", "head"),), width)]
    pools, audit = snapshot.table(POOLS_QUERY), snapshot.table(AUDIT)
    for key in pools.order[:MOST_POOLS] if pools is not None else ():
        facts = named_row_of(pools, key) if pools is not None else None
        if facts is not None:
            line = _component(facts, "quarantined", " + ")
            if spans.width_of(line) > width:
                line = _component(facts, "quar", "+")
            made.append(spans.fit(line, width))
    if pools is not None and len(pools.order) > MOST_POOLS:
        made.append(spans.line(f"  and {len(pools.order) - MOST_POOLS} more on page 2", "dim"))
    return [*made, *_audit(audit, snapshot.now_s, width)]


def _component(row: NamedRow, last: str, plus: str) -> Line:
    """Whether null + free + held + cached + quarantined is the total."""
    name, total = row.text("component"), round(row.number("total") or 0)
    parts = [(part, round(row.number(part) or 0)) for part in PARTS]
    known = NULL_PAGES + sum(pages for _, pages in parts)
    named = [*PARTS[:-1], last]
    terms = plus.join(
        f"{thousands(pages)} {name}" for name, (_, pages) in zip(named, parts, strict=True)
    )
    off = total - known
    verdict: Styled = Styled("balanced", "ok")
    if off:
        what = f"{thousands(off)} NOWHERE" if off > 0 else f"{thousands(-off)} TWICE"
        verdict = Styled(what, "bad")
    return (
        Styled("! " if off else "  ", "bad"),
        cleaned(f"{name}: "),
        verdict,
        Styled(f"  {thousands(known)} of {thousands(total)} = {NULL_PAGES} null{plus}{terms}"),
    )


def _audit(data: TableData | None, now_s: float, width: int) -> list[Line]:
    """How the standing audit stands, when it last looked, and what that costs."""
    row = named_row_of(data, data.order[0]) if data is not None and data.order else None
    if row is None:
        why = data.trouble if data is not None else "asked for; not here yet"
        return [(Styled("  audit: "), cleaned(why or "not here", "dim"))]
    findings = round(row.number("findings") or 0)
    style: Style = "bad" if findings else "ok"
    found = f"{findings} broken rule{'' if findings == 1 else 's'}" if findings else "nothing found"
    ended_s = row.number("ended")
    if ended_s is None:
        words = "no sweep has ended yet"
    else:
        words = (
            f"last sweep {age(now_s - ended_s)} ago took "
            f"{duration(row.number('took_s') or 0)} for {compact(row.number('objects') or 0)}"
            f" objects, {compact(row.number('pages') or 0)} pages; cost "
            f"{100 * (row.number('core') or 0):.2f}% of a core, "
            f"{duration(row.number('spent_s') or 0)} in {row.number('sweeps') or 0:.0f} sweeps"
        )
    head = (Styled("! " if findings else "  ", "bad"), Styled("audit: "), Styled(found, style))
    room = width - spans.width_of(head) - 2
    first, *rest = wrap_words(words, max(20, room))
    return [
        (*head, Styled(f"  {first}")),
        *((Styled(" " * (width - room)), Styled(text)) for text in rest),
    ]


class Ledger(Canvas):
    """Shows ``ledger_lines``."""

    def __init__(self) -> None:
        super().__init__(id="ledger")

    def show(self, snapshot: DaemonSnapshot) -> int:
        """Paint it; how many lines it takes."""
        lines = ledger_lines(snapshot, max(20, self.size.width))
        self.paint(lines)
        return len(lines)


def detail_lines(row: NamedRow | None, now_s: float, width: int, *, is_waiting: bool) -> list[Line]:
    """What is under the cursor in full: of a finding what to do, of a request who is in its way."""
    if row is None:
        told = "nothing waits" if is_waiting else "nothing to look at"
        return [spans.headed((Styled(told, "ok"),), width)]
    made = [spans.headed((cleaned(row.row.key, "head"),), width)]
    if is_waiting:
        made += _told("waits for", row.text("why"), width)
        holders = row.cell("held_by")
        made += _holders(holders if isinstance(holders, tuple) else (), now_s, width)
        return made
    made += _told("evidence", row.text("evidence"), width)
    made += _told("do (x)", row.text("action"), width, "key")
    return [*made, *_told("rule", row.text("rule"), width)]


def _holders(holders: Iterable[Holder], now_s: float, width: int) -> list[Line]:
    made: list[Line] = []
    for holder in holders:
        text = f"{clean(holder.ref)} {cells.holder(holder, now_s)}"
        made += _told("held by" if not made else "", text, width)
    return made


def _told(name: str, text: str, width: int, style: Style = "plain") -> list[Line]:
    """A name, and what it is, on as many lines as that takes."""
    pad = 10
    parts = wrap_words(clean(text), max(8, width - pad - 2)) or ["-"]
    return [
        (Styled(f"  {name if not at else '':<{pad}}", "dim"), Styled(part, style))
        for at, part in enumerate(parts)
    ]


class Detail(Canvas):
    """Shows ``detail_lines``, at most as many as there is room for."""

    def __init__(self) -> None:
        super().__init__(id="detail")

    def show(self, row: NamedRow | None, now_s: float, most: int, *, is_waiting: bool) -> int:
        """Paint it; how many lines it takes, at most ``most``."""
        lines = detail_lines(row, now_s, max(20, self.size.width), is_waiting=is_waiting)
        self.paint(lines[:most])
        return min(len(lines), most)


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
        tokens = Sources(*(round(growth) for growth in grown))
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
    return [(Styled("  "), *line) for line in made]


# ---- events --------------------------------------------------------------------------------------


def _remarkable(log: Log) -> Iterator[Event]:
    """The newest first, without handoffs that went well: they would hide the one that did not."""
    for chunk in reversed(log.chunks):
        for event in reversed(chunk):
            is_fine = isinstance(event, HandoffEnded) and event.outcome in event_words.DELIVERED
            if not isinstance(event, EventGap) and not is_fine:
                yield event


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
        self._words = {
            event.seq: self._words.get(event.seq) or self._told(event) for event in self._shown
        }
        title = (Styled("last events ", "head"), Styled("(6: what went well too)", "dim"))
        made = [spans.headed(title, width)]
        for event in self._shown:
            ago = age(snapshot.now_s - event.at_s)
            made.append(spans.fit((Styled(f"{ago:>8} ", "dim"), *self._words[event.seq]), width))
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
