"""How the node is, at one look: what moves, what is full, what is wrong, what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec
from textual.binding import Binding
from typing_extensions import override

from kvd.text import age, bytes_per_second, compact, duration, lasting, thousands
from kvd.wire.console import Filter, Query, Sources
from tui import actions
from tui.draw import bars, chart, spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import cells
from tui.model.columns import named_row_of
from tui.model.rates import RowRates
from tui.screens import engines
from tui.screens.page import PROPOSE, Page
from tui.widgets.canvas import Canvas, Ground, console, wrap_words
from tui.widgets.pools import POOLS_QUERY, PoolTable
from tui.widgets.problems import FailedHandoffs, ProblemCards
from tui.widgets.table import HEAD_LINES, ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from textual.app import ComposeResult
    from textual.binding import BindingType
    from textual.widget import Widget

    from kvd.wire.console import Vitals
    from tui.app import KvdTui
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow
    from tui.model.rates import NodeRates
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot, TableData


WIDE_COLUMNS = 120
"""From here on pools and charts stand side by side."""
SMALL_LINES = 14
"""Lower screens have problems and failures, and nothing else that these leave no room for."""
CHARTS_FROM_LINES = 28
CHART_LINES = 6
"""Of each chart, its head included."""
MOST_WAITING = 3
"""Rows of the queue that are shown at once."""
WAITING = ColumnRules(
    first=("place", "kind", "owner", "since", "why", "until", "missing_pages", "held_by"),
    never=("ahead", "client", "overtaken", "lacks"),
    narrow=("why", "held_by"),
)


class OverviewPage(Page):
    """Problems and what failed on top, at every size; then figures, pools, and the books."""

    NAME = "overview"
    FAULTS: ClassVar[Mapping[str, str]] = {"concerns": "!severity:low"}
    REFS = ("concern", "waiting")
    BINDINGS: ClassVar[list[BindingType]] = [
        PROPOSE,
        Binding("a", "app.audit", "audit", tooltip="check every invariant now"),
    ]

    DEFAULT_CSS = """
    OverviewPage > #middle { layout: vertical; height: 6; }
    OverviewPage > #middle > #left { layout: vertical; width: 1fr; height: 6; }
    OverviewPage > #middle > #charts { width: 1fr; height: 0; }
    OverviewPage > #ledger { height: 2; }
    OverviewPage.wide > #middle { layout: horizontal; }
    OverviewPage.wide > #middle > #left { height: 1fr; width: 55%; }
    OverviewPage.wide > #middle > #charts { height: 1fr; margin-left: 2; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield ProblemCards()
        yield FailedHandoffs()
        waiting = WindowedTable("waiting", rules=WAITING)
        waiting.restrict((Filter("lacks", "is-not", "a peer"),), "requests that wait for pages")
        yield waiting
        yield Canvas(id="figures")
        with Ground(id="middle"):
            with Ground(id="left"):
                yield PoolTable(is_brief=True)
                yield Canvas(id="sources")
            yield Canvas(id="charts")
        yield Canvas(id="ledger")
        yield WindowedTable(
            "clients",
            title="who holds pages",
            sort="-held",
            painters={"state": engines.state, "kind": engines.kind},
            rules=ColumnRules(engines.HOLDING, ("locked", "calls")),
        )

    def __init__(self) -> None:
        super().__init__()
        self._read = RowRates("read_tokens", MINUTE_S)
        """Of each tier."""

    def _lines(self, name: str) -> Canvas:
        """A panel that has nothing but lines."""
        return self.query_one(f"#{name}", Canvas)

    @property
    def problems(self) -> ProblemCards:
        """The gravest on top."""
        return self.query_one(ProblemCards)

    @property
    def waiting(self) -> WindowedTable:
        """The admission queue, in its order."""
        return self.query_one("#table-waiting", WindowedTable)

    @property
    def holders(self) -> WindowedTable:
        """Engines by what they hold, where there is room."""
        return self.query_one("#table-clients", WindowedTable)

    @override
    def seek(self, ref: str) -> bool:
        """An engine has a page of its own."""
        return not ref.startswith("client:") and super().seek(ref)

    @override
    def queries(self) -> tuple[Slot, ...]:
        asks = [self.problems.asks(), self.query_one(FailedHandoffs).asks(), self.waiting.asks()]
        asks += [self.holders.asks()] if self.holders.display else []
        return (POOLS_QUERY, *asks, AUDIT, TIERS)

    # ---- showing ----------------------------------------------------------------------------

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        vitals = snapshot.vitals
        for table in self._tables:  # those that are not to be seen have to know
            table.show(snapshot)
        self.query_one(PoolTable).show(snapshot)
        if vitals is not None and self.size.width and self.size.height:
            self._arrange(snapshot, vitals)

    def _arrange(self, snapshot: DaemonSnapshot, vitals: Vitals) -> None:
        """What hurts has its lines first; the rest has what is left, in the order of its weight."""
        width, height, app = self.size.width, self.size.height, console(self)
        rates = app.mirror.rates
        end_s = snapshot.now_s if app.mirror.history.is_frozen else None
        is_wide, is_small = width >= WIDE_COLUMNS, height < SMALL_LINES
        self.set_class(is_wide, "wide")
        figures, sources, charts = map(self._lines, ("figures", "sources", "charts"))
        panel = width * 11 // 20 if is_wide else width
        figures.paint(figure_lines(vitals, rates, end_s, app.compared(snapshot), width))
        flow = len(figures.lines)
        pool_lines = self.query_one(PoolTable).needed_lines

        failed = self.query_one(FailedHandoffs)
        most = 1 if is_small else 3 if height < CHARTS_FROM_LINES else 8
        room = height - self._give(failed, failed.needs(most), height)
        kept = 0 if is_small else flow + pool_lines
        room -= self._give(self.problems, self.problems.fit_into(max(3, room - kept)), room)
        queue = self.waiting.data.total if self.waiting.data is not None else 0
        room -= self._give(figures, flow, room)
        wanted = HEAD_LINES + min(queue, MOST_WAITING) if queue else 0
        room -= self._give(self.waiting, wanted, room - pool_lines)
        if self.table() is None:
            self.activate(self.problems)

        has_charts = is_wide and height >= CHARTS_FROM_LINES
        self._read.take(snapshot.table(TIERS))
        sources.paint(source_lines(snapshot, rates, end_s, self._read, panel, room - pool_lines))
        source_height = len(sources.lines)
        left = pool_lines + (source_height if room >= pool_lines + source_height else 0)
        charts.display = has_charts
        sources.display = left > pool_lines
        middle = max(left, 2 * CHART_LINES if has_charts and room >= 2 * CHART_LINES + 4 else left)
        ledger, held = self._lines("ledger"), self.holders.data
        ledger.paint(ledger_lines(snapshot, app, width))
        wanted = HEAD_LINES + (held.total if held is not None else MOST_WAITING)
        spare = room - middle - len(ledger.lines) - wanted
        middle += max(0, min(spare, CHART_LINES)) if has_charts else 0
        self.set_height(sources, source_height)
        self.set_height(self.query_one("#left"), left)
        room -= self._give(self.query_one("#middle"), middle, room)
        if has_charts and charts.size.width:
            charts.paint(chart_lines(rates, end_s, app.chart_step_s, charts.size.width, middle))
        room -= self._give(ledger, len(ledger.lines), room)
        self._give(self.holders, min(wanted, room) if room > HEAD_LINES else 0, room)

    def _give(self, panel: Widget, lines: int, room: int) -> int:
        """So many lines, or none where there is no room for them."""
        panel.display = 0 < lines <= room
        if panel.display:
            self.set_height(panel, lines)
        return lines if panel.display else 0

    def _under_cursor(self) -> NamedRow | None:
        table = self.table()
        return table.named_row() if table is not None else None

    # ---- keys -------------------------------------------------------------------------------

    @override
    def chosen(self) -> str:
        """What the finding under the cursor is about; the finding itself where that is nothing."""
        table = self.table()
        row = self._under_cursor() if table is self.problems else None
        if table is None:
            return ""
        return table.chosen() if row is None else row.text("subject") or row.row.key

    def action_propose(self) -> None:
        """Put the command that is proposed into the bar."""
        row = self._under_cursor()
        if row is not None:
            actions.propose(console(self), _proposed(row))

    async def on_pool_table_chosen(self, message: PoolTable.Chosen) -> None:
        """A component was clicked."""
        await console(self).open(f"pool:{message.component}")


def _proposed(row: NamedRow) -> str:
    """Of a finding its action; of a request that waits: who has the most of what it lacks."""
    holders = row.cell("held_by")
    if isinstance(holders, tuple) and holders:
        return f"open {holders[0].ref}"
    return row.text("action") or row.text("why") or f"open {row.row.key}"


SPARK_COLUMNS = 10
RATE_S = 10.0
MINUTE_S = 60.0
MOST_POOLS = 8


def chart_lines(
    rates: NodeRates, end_s: float | None, step_s: float, width: int, height: int
) -> list[Line]:
    """Bytes in and out over time, one above the other; out only where anything has gone out."""
    found = {
        name: rates.per_second(name, 2 * width, step_s=step_s, end_s=end_s)
        for name in ("in_bytes", "out_bytes")
    }
    shown = [name for name, values in found.items() if any(values)] or ["in_bytes"]
    made: list[Line] = []
    for name in shown:
        title = f"bytes {name.partition('_')[0]}"
        series = chart.Series(title, found[name], bytes_per_second, step_s)
        made += chart.chart(series, width, height // len(shown))
    return made


def figure_lines(
    vitals: Vitals, rates: NodeRates, end_s: float | None, compared: Sequence[str], width: int
) -> list[Line]:
    """What is another since what it is compared with; then everything that is a figure."""

    def per_s(*names: str, over_s: float = RATE_S) -> float:
        grown, known_s = rates.grown(names, over_s=over_s, end_s=end_s)
        return sum(grown) / known_s if known_s else 0.0

    lately, made = vitals.latency, list[Line]()
    again = round(rates.grown(("from_evicted",), over_s=MINUTE_S, end_s=end_s)[0][0])
    for title, name in (("in", "in_bytes"), ("out", "out_bytes")):
        values = rates.per_second(name, int(MINUTE_S), end_s=end_s)
        steps = chart.spark(values, SPARK_COLUMNS)
        now = per_s(name, over_s=1.0)
        top = max([now, *(value for value in values if value is not None)])
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
        _figure("p50", lasting(lately.p50_s) if timed else "-"),
        _figure("p99", lasting(lately.p99_s) if timed else "-"),
        _figure("in flight", str(vitals.rooms)),
        _figure("waiting", str(vitals.waiting), "warn" if vitals.waiting else "plain"),
        _figure("failed", f"{lately.failed} in 1m", "bad" if lately.failed else "plain"),
        _figure("leases", compact(vitals.leases)),
        _figure("evicted", f"{per_s('evicted_pages'):.1f}/s"),
        _figure("asked for again", f"{compact(again)} tokens in 1m", "warn" if again else "plain"),
        _figure("consoles", f"{100 * vitals.console_share:.1f}% of a core"),
    ]
    since = [spans.line(words, "plain" if at else "key") for at, words in enumerate(compared)]
    return [*spans.wrapped(since, width), *spans.wrapped(made, width)]


def _figure(name: str, text: str, style: Style = "plain") -> Line:
    return (Styled(f"{name} ", "dim"), Styled(text, style))


# ---- findings and books ----------------------------------------------------------------------


INSET = Styled("  ")
AUDIT = Query("audit", limit=1)
TIERS = Query("tiers", limit=8)
PARTS = ("free", "held", "cached", "quarantined")
NULL_PAGES = 1
"""Of each component: the page that stands for none is never anybody's."""


def ledger_lines(snapshot: DaemonSnapshot, app: KvdTui, width: int) -> list[Line]:
    """A line for each component, then the audit."""
    made = [spans.headed((Styled("ledger", "head"),), width)]
    pools, audit = snapshot.table(POOLS_QUERY), snapshot.table(AUDIT)
    for key in pools.order[:MOST_POOLS] if pools is not None else ():
        facts = named_row_of(pools, key) if pools is not None else None
        if facts is not None:
            made.append(spans.fit(_component(facts), width))
    if pools is not None and len(pools.order) > MOST_POOLS:
        made.append(spans.line(f"  and {len(pools.order) - MOST_POOLS} more on page 2", "dim"))
    return [*made, *_audit(audit, app, width)]


def _component(row: NamedRow) -> Line:
    """Whether null + free + held + cached + quarantined is the total."""
    name, total = row.text("component"), round(row.number("total") or 0)
    parts = [(part, round(row.number(part) or 0)) for part in PARTS]
    known = NULL_PAGES + sum(pages for _, pages in parts)
    terms = "".join(f" + {thousands(pages)} {name}" for name, pages in parts)
    off = total - known
    verdict: Styled = Styled("balanced", "ok")
    if off:
        what = f"{thousands(off)} NOWHERE" if off > 0 else f"{thousands(-off)} TWICE"
        verdict = Styled(what, "bad")
    return (
        Styled("! " if off else "  ", "bad"),
        cleaned(f"{name}: "),
        verdict,
        Styled(f"  {thousands(known)} of {thousands(total)} = {NULL_PAGES} null{terms}"),
    )


def _audit(data: TableData | None, app: KvdTui, width: int) -> list[Line]:
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
            f"last sweep ended {app.time_of_day(ended_s)}, took "
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


# ---- sources -------------------------------------------------------------------------------------


def source_lines(
    snapshot: DaemonSnapshot,
    rates: NodeRates,
    end_s: float | None,
    read: RowRates,
    width: int,
    room: int,
) -> list[Line]:
    """Where tokens came from, why others had to be computed where there is room, and the tiers."""
    assert snapshot.vitals is not None
    names = [f"from_{name}" for name in Sources.__struct_fields__]
    grown, known_s = rates.grown(names, over_s=MINUTE_S, end_s=end_s)
    tokens, when = Sources(*map(round, grown)), f"last {known_s:.0f}s"
    if not any(grown):
        tokens, when = snapshot.vitals.sources, f"since it began, none in the {when}"
    title = (Styled("where tokens came from ", "head"), Styled(when, "dim"))
    parts, missed = bars.sources(tokens), bars.misses(tokens)
    came, because = [spans.line("no prompt has come yet", "dim")], list[Line]()
    if any(msgspec.structs.astuple(tokens)):
        came = [bars.stacked(parts, width - 3), *bars.key(parts, width - 3)]
    if any(part.size for part in missed):
        because = [spans.line("computed because", "dim"), *bars.key(missed, width - 3)]
    tiers = snapshot.table(TIERS)
    found = [named_row_of(tiers, key) for key in tiers.order] if tiers is not None else ()
    below = [line for row in found if row is not None for line in _tier(row, read, width)]
    if 1 + len(came) + len(because) + len(below) > room:
        because = []
        if 1 + len(came) + len(below) > room:
            below = [line for line in below if line[0] == INSET]
    told = [(Styled("  "), *line) for line in (*came, *because)]
    return [spans.headed(title, width - 1), *told, *below]


def _tier(row: NamedRow, read: RowRates, width: int) -> list[Line]:
    """What came from a tier below the pool into the cache, and who waits for it."""

    def figure(name: str) -> str:
        return compact(row.number(name) or 0)

    since_s, why = row.number("waiting_since"), row.text("why")
    state = cells.show(row.text("state"), "state", row.at_s, 12)
    lately = compact(round(MINUTE_S * (read.rate(row.row.key) or 0)))
    waits = "nobody waits"
    if since_s is not None:
        waits = f"{figure('waiting')} wait, for {age(row.at_s - since_s)}"
    words = (
        f"{figure('read_tokens')} tokens read, {lately} in 1m",
        f"{figure('hits')} of {figure('waits')} waits got pages",
        f"{figure('objects')} of {figure('capacity_objects')} pages there",
    )
    head = (
        *(Styled("tier ", "dim"), cleaned(row.text("tier")), Styled(" ")),
        *(Styled(*state), cleaned(f": {why}" if why else ""), Styled(", ")),
        Styled(waits, "plain" if since_s is None else "warn"),
    )
    made = spans.wrapped((head, *map(spans.line, words)), width - 4)
    return [(Styled("    ") if at else INSET, *line) for at, line in enumerate(made)]
