"""One peer: what goes both ways as charts over time, and what is known of it in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import clean, counted
from tui.draw import chart, spans
from tui.draw.chart import Series
from tui.draw.spans import Block, Line, Span, said
from tui.model import cells, neighbours
from tui.widgets.canvas import Canvas

if TYPE_CHECKING:
    from tui.draw.spans import Style
    from tui.model.dress import Facts
    from tui.model.neighbours import Traffic, Way

STEP_S = 0.5
"""Of a dot of the charts; a column has two."""
LEAST_CHART_LINES = 3
UNKNOWN = "what goes between two other nodes, this daemon does not know: ask one of them"


def panel_lines(row: Facts, traffic: Traffic, now_s: float, width: int, height: int) -> list[Line]:
    """Its head, the charts where there is room for them, and the words."""
    words = word_lines(row, now_s, width)
    room = min(12, height - 1 - len(words))
    made = [_head(row, width)]
    if room >= LEAST_CHART_LINES:
        each = (width - 2) // 2
        ways = traffic.ways(row.row.key, row.at_s, 2 * each, STEP_S)
        charts = [
            Block(_chart(title, way, each, room), each)
            for title, way in zip(("from it", "to it"), ways, strict=True)
        ]
        made += spans.beside(charts, 2)
    return [*made, *words]


def _chart(title: str, way: Way, width: int, height: int) -> list[Line]:
    return chart.chart(Series(title, way.lately, _per_second), width, height)


def _per_second(value: float) -> str:
    return f"{cells.size(value)}/s"


def _head(row: Facts, width: int) -> Line:
    state, style = neighbours.state(row)
    means = neighbours.MEANS.get(row.text("state"), "")
    title = (
        said(row.text("name"), "head"),
        Span(f"  {state}", style),
        Span(f": {means}" if means else ""),
    )
    return spans.headed(title, width)


def word_lines(row: Facts, now_s: float, width: int) -> list[Line]:
    """What it is, whether pages can go, and what went; two to a line where there is room."""
    heard_s, rtt_ms = row.number("heard"), row.number("rtt")
    receives, sends = row.number("receives") or 0, row.number("sends") or 0
    posts, credits_ = row.number("posts"), row.number("credits")
    posts_words = "" if posts is None else f", {counted(posts, 'post')} under way"
    if credits_ is not None:
        posts_words += f" of {credits_:.0f}"
    facts: list[tuple[str, str, Style]] = [
        ("heard", "never" if heard_s is None else f"{cells.age(now_s - heard_s)} ago", "plain"),
        ("round trip", "-" if rtt_ms is None else cells.figure(rtt_ms, "ms", 0.0), "plain"),
        ("layout", *neighbours.layout(row)),
        ("agent", clean(row.text("agent")), _agent_style(row)),
        ("open", f"{receives:.0f} from it, {sends:.0f} to it{posts_words}", "plain"),
        ("ended", _ended(row), "plain"),
        ("path", clean(row.text("path")) or "-", "plain"),
        ("address", clean(row.text("address")), "plain"),
        ("incarnation", clean(row.text("incarnation")) or "-", "plain"),
        ("generation", _count(row.number("generation")), "plain"),
    ]
    if row.text("trouble"):
        facts.insert(0, ("trouble", *neighbours.trouble(row)))
    items = [(Span(f"{name} ", "dim"), Span(text, style)) for name, text, style in facts]
    made = spans.wrapped(items, width, 3)
    return [*made, spans.fit((Span(UNKNOWN, "dim"),), width)]


def _ended(row: Facts) -> str:
    delivered, failed = row.number("delivered") or 0, row.number("failed") or 0
    got, gave = row.number("in_bytes") or 0, row.number("out_bytes") or 0
    return (
        f"{delivered:.0f} delivered, {failed:.0f} failed; "
        f"{cells.size(got)} from it, {cells.size(gave)} to it"
    )


def _agent_style(row: Facts) -> Style:
    word = row.text("agent").partition(":")[0]
    return {"loaded": "ok", "failed": "bad"}.get(word, "plain")  # type: ignore[return-value]


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


class PeerPanel(Canvas):
    """Shows ``panel_lines``."""

    def show(self, row: Facts | None, traffic: Traffic, now_s: float) -> None:
        """Show this peer as of ``now_s``; None: nothing is chosen."""
        width, height = self.size.width, self.size.height
        if not width or not height:
            return
        if row is None:
            head = spans.headed((Span("a peer", "head"),), width)
            self.paint([head, (Span("  no peer is known", "dim"),)])
            return
        self.paint(panel_lines(row, traffic, now_s, width, height)[:height])
