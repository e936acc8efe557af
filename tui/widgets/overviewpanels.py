"""What the overview has beside its findings: figures and charts, pools, sources, last events."""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING

import msgspec
from textual.message import Message

from kvd.text import clean, duration
from kvd.wire.console import EventQuery, Sources
from kvd.wire.events import HandoffEnded
from tui.draw import bars, chart, spans
from tui.draw.spans import Block, Line, Span, said
from tui.model import cells, happenings
from tui.model.log import Gap
from tui.model.rates import RowRates
from tui.widgets.canvas import Canvas
from tui.widgets.poollines import ASKS, pages_of
from tui.widgets.reach import missing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from textual import events

    from kvd.wire.console import Vitals
    from kvd.wire.events import Event
    from tui.draw.spans import Style
    from tui.model.log import Log
    from tui.model.moments import Moment
    from tui.model.rates import Rates
    from tui.model.sheets import Sheet

SPARK_COLUMNS = 10
RATE_S = 10.0
MINUTE_S = 60.0
MOST_POOLS = 8
NAME_COLUMNS = 12
LAST_EVENTS = EventQuery(0, 100, happenings.NOTABLE)
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

    def show(self, vitals: Vitals, rates: Rates, end_s: float | None) -> None:
        """Paint the head of a frame, and what it was over time, up to ``end_s``."""
        width = self.size.width
        if width:
            self.paint(self._lines_of(vitals, rates, end_s, width))

    def lines_needed(self, vitals: Vitals, rates: Rates, width: int) -> int:
        """How many there are without charts."""
        return len(_flow(vitals, rates, None, width, has_bytes=not self.charts_height))

    def _lines_of(
        self, vitals: Vitals, rates: Rates, end_s: float | None, width: int
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


def _charts(rates: Rates, end_s: float | None, width: int, height: int) -> list[Line]:
    """Bytes in and out, side by side."""
    each = (width - 2) // 2
    made = []
    for title, name in (("bytes in", "in_bytes"), ("bytes out", "out_bytes")):
        values = rates.per_second(name, 2 * each, end_s=end_s)
        made.append(Block(chart.chart(chart.Series(title, values, _per_s), each, height), each))
    return spans.beside(made, 2)


def _per_s(value: float) -> str:
    return f"{cells.size(value)}/s"


def _flow(
    vitals: Vitals, rates: Rates, end_s: float | None, width: int, *, has_bytes: bool
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
        made.append((*_figure(title, _per_s(now)), Span(" "), steps, *_figure(" max", _per_s(top))))
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
        _figure("leases", cells.compact(vitals.leases)),
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
    return (Span(f"{name} ", "dim"), Span(text, style))


def _lasting(seconds: float) -> str:
    return f"{1000 * seconds:.1f}ms" if seconds < 1 else duration(seconds)


# ---- pools ---------------------------------------------------------------------------------------


class PoolBars(Canvas):
    """A line for each component: its pages as a bar, how much is used, and where that goes."""

    def __init__(self) -> None:
        super().__init__(id="pool-bars")
        self.sheet: Sheet | None = None
        self._taken: Sheet | None = None
        self._evicted = RowRates("evicted", RATE_S)
        self._used: dict[str, deque[tuple[int, float]]] = {}

    def take(self, newest: Moment) -> None:
        """Remember how much is used; also while the screen stands still."""
        sheet = newest.sheet(ASKS)
        if sheet is None or sheet is self._taken:
            return
        self._taken = sheet
        self._evicted.take(sheet)
        used = {}
        for key in sheet.order:
            points = self._used.get(key) or deque(maxlen=SPARK_COLUMNS * 6)
            if not points or points[-1][0] != int(sheet.at_s):
                points.append((int(sheet.at_s), _used(sheet, key)))
            used[key] = points
        self._used = used

    def show(self, moment: Moment) -> None:
        """Paint what there is."""
        self.sheet = moment.sheet(ASKS) or self.sheet
        if self.size.width:
            self.paint(self._make(self.size.width, int(moment.now_s)))

    @property
    def lines_needed(self) -> int:
        """How many there are."""
        count = len(self.sheet.order) if self.sheet is not None else 0
        return 1 + max(1, min(count, MOST_POOLS + 1))

    def _make(self, width: int, now_s: int) -> list[Line]:
        sheet = self.sheet
        tail = f"{'used':>5} {'evict/s':>8}  {'1m':>{SPARK_COLUMNS}}"
        bar = max(8, width - 2 - NAME_COLUMNS - 1 - len(tail) - 1)
        title = spans.spread(
            (Span("─ ", "border"), Span("pools", "head")), (Span(tail, "dim"),), width - 1,
            Span("─", "border"),
        )  # fmt: skip
        if sheet is None or not sheet.order:
            why = sheet.trouble if sheet is not None else missing(self)
            return [title, (Span("  "), said(why or "no components", "dim"))]
        made = [title, *[self._line(sheet, key, bar, now_s) for key in sheet.order[:MOST_POOLS]]]
        if len(sheet.order) > MOST_POOLS:
            made.append(spans.line(f"  and {len(sheet.order) - MOST_POOLS} more", "dim"))
        return made

    def _line(self, sheet: Sheet, key: str, bar: int, now_s: int) -> Line:
        share = _used(sheet, key)
        state = sheet.cell(key, "state")
        rate = self._evicted.rate(key)
        points = [value for at_s, value in self._used.get(key, ()) if at_s <= now_s]
        style: Style = "plain" if state == "ok" else "warn"
        name = spans.left(clean(str(sheet.cell(key, "component"))), NAME_COLUMNS)
        return (
            Span(f"  {name} ", style),
            *bars.stacked(bars.pool(pages_of(sheet, key)), bar),
            Span(f" {100 * share:>4.0f}%", style),
            Span(f" {'-' if rate is None else f'{rate:.1f}':>8}  ", "warn" if rate else "dim"),
            chart.spark(points[-SPARK_COLUMNS:], SPARK_COLUMNS, 1.0),
        )

    def on_click(self, event: events.Click) -> None:
        """The component of this line."""
        at = event.y - 1
        if self.sheet is not None and 0 <= at < min(len(self.sheet.order), MOST_POOLS):
            self.post_message(Opened(self.sheet.order[at]))


def _used(sheet: Sheet, key: str) -> float:
    """The share of the pages that are not free."""
    pages = pages_of(sheet, key)
    total = sum(pages) - pages.locked
    return 1 - pages.free / total if total else 0.0


# ---- sources -------------------------------------------------------------------------------------


class SourceBar(Canvas):
    """Where tokens came from, and why those that had to be computed were not there."""

    def __init__(self) -> None:
        super().__init__(id="sources")
        self._made: list[Line] = []

    def make(self, vitals: Vitals, rates: Rates, end_s: float | None, width: int) -> int:
        """Make the lines for this width; how many they are."""
        names = [f"from_{name}" for name in Sources.__struct_fields__]
        grown, known_s = rates.grown(names, over_s=MINUTE_S, end_s=end_s)
        tokens = Sources(*(round(one) for one in grown))
        when = f"last {known_s:.0f}s"
        if not any(grown):
            tokens, when = vitals.sources, f"since it began, none in the {when}"
        title = (Span("where tokens came from ", "head"), Span(when, "dim"))
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
        made += [(Span("computed because", "dim"),), *bars.key(missed, width)]
    return [(Span("  "), *one) for one in made]


# ---- events --------------------------------------------------------------------------------------


def _remarkable(log: Log) -> Iterator[Event]:
    """The newest first, without handoffs that went well: they would hide the one that did not."""
    for chunk in reversed(log.chunks):
        for one in reversed(chunk):
            is_fine = isinstance(one, HandoffEnded) and one.outcome in happenings.DELIVERED
            if not isinstance(one, Gap) and not is_fine:
                yield one


class LastEvents(Canvas):
    """The last things that happened beside what every request does, the newest first."""

    def __init__(self) -> None:
        super().__init__(id="last-events")
        self._shown: Sequence[Event] = ()
        self._words: dict[int, Line] = {}

    def show(self, moment: Moment) -> None:
        """Paint as many as there is room for."""
        width, room = self.size.width, self.size.height - 1
        if not width or room < 1:
            return
        self._shown = list(itertools.islice(_remarkable(moment.log(LAST_EVENTS)), room))
        self._words = {one.seq: self._words.get(one.seq) or self._told(one) for one in self._shown}
        title = (Span("last events ", "head"), Span("(6: what went well too)", "dim"))
        made = [spans.headed(title, width)]
        for one in self._shown:
            ago = cells.age(moment.now_s - one.at_s)
            made.append(spans.fit((Span(f"{ago:>8} ", "dim"), *self._words[one.seq]), width))
        if not self._shown:
            made.append(spans.line("  nothing worth a word", "dim"))
        self.paint(made)

    @staticmethod
    def _told(event: Event) -> Line:
        level = happenings.level_of(event)
        style = happenings.STYLES[level]
        kind = happenings.tag_of(event)
        return (
            Span(f"{happenings.LETTERS[level]} {kind} ", style),
            Span(happenings.words(event)),
        )

    def on_click(self, event: events.Click) -> None:
        """The event of this line."""
        at = event.y - 1
        if 0 <= at < len(self._shown):
            self.post_message(Opened(happenings.key_of(self._shown[at])))
