"""The other nodes, as this one knows them: a row for each, both directions."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from textual.binding import Binding
from typing_extensions import override

from kvd.text import age, bytes_per_second, clean, counted
from tui.draw import chart, spans
from tui.draw.chart import Series
from tui.draw.spans import Line, Styled, TextBlock, cleaned
from tui.model import cells, peers
from tui.model.columns import ComputedColumns
from tui.screens.page import FENCE, Page
from tui.widgets.canvas import Canvas, console
from tui.widgets.table import ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from textual.app import ComposeResult
    from textual.binding import BindingType

    from kvd.wire.console import Cell
    from tui.app import KvdTui
    from tui.draw.spans import Style
    from tui.model.columns import NamedRow
    from tui.model.snapshots import DaemonSnapshot


class PeersPage(Page):
    """Us and each peer above, the peer under the cursor below.

    What goes between two other nodes no single daemon knows: it is not drawn.
    """

    NAME = "peers"
    FAULTS: ClassVar[Mapping[str, str]] = {"peers": "!state:up"}
    REFS = ("peer",)
    BINDINGS: ClassVar[list[BindingType]] = [Binding("h", "handoffs('peer')", "handoffs"), FENCE]

    DEFAULT_CSS = """
    PeersPage > #table-peers { height: 40%; }
    PeersPage > #peer { height: 1fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._path = ""

    @override
    def compose(self) -> ComposeResult:
        yield WindowedTable(
            "peers",
            computed=ComputedColumns(peers.COLUMNS, self._made, peers.FIRST),
            painters=peers.PAINTERS,
            title="peers",
            rules=ColumnRules(peers.MATTERS, peers.HIDDEN),
            stands_for=peers.STANDS_FOR,
        )
        yield Canvas(id="peer")

    @property
    def peers(self) -> WindowedTable:
        """The table, a peer a row."""
        return self.query_one("#table-peers", WindowedTable)

    def _made(self, row: NamedRow) -> tuple[Cell, ...]:
        return console(self).traffic.made(row, self._path)

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        if snapshot.vitals is not None:
            self._path = snapshot.vitals.transport
            self.peers.title = f"{clean(snapshot.vitals.node)} <-> peers"
        super().show(snapshot)
        self.fit_height(self.peers)
        panel = self.query_one("#peer", Canvas)
        width, height = panel.size
        if panel.display and width:
            row = self.peers.named_row()
            lines = panel_lines(row, console(self), snapshot.now_s, width, height)
            panel.paint(lines[:height])


LEAST_CHART_LINES = 3
UNKNOWN = "what goes between two other nodes, only they can tell"


def panel_lines(
    row: NamedRow | None, app: KvdTui, now_s: float, width: int, height: int
) -> list[Line]:
    """Its head, the charts where there is room for them, and the words."""
    if row is None:
        head = spans.headed((Styled("a peer", "head"),), width)
        return [head, spans.line("  no peer is known", "dim")]
    words = word_lines(row, now_s, width)
    room = min(12, height - 1 - len(words))
    made = [_head(row, width)]
    if room >= LEAST_CHART_LINES:
        each, step_s = (width - 2) // 2, app.chart_step_s
        ways = {"from it": app.traffic.incoming, "to it": app.traffic.outgoing}
        charts = []
        for title, rates in ways.items():
            values = rates.per_second(row.row.key, 2 * each, step_s=step_s, end_s=row.at_s)
            series = Series(title, values, bytes_per_second, step_s)
            charts.append(TextBlock(chart.chart(series, each, room), each))
        made += spans.side_by_side(charts, 2)
    return [*made, *words]


def _head(row: NamedRow, width: int) -> Line:
    state, style = peers.state(row)
    means = peers.MEANS.get(row.text("state"), "")
    title = (
        cleaned(row.text("name"), "head"),
        Styled(f"  {state}", style),
        Styled(f": {means}" if means else ""),
    )
    return spans.headed(title, width)


def word_lines(row: NamedRow, now_s: float, width: int) -> list[Line]:
    """What it is, whether pages can go, and what went; two to a line where there is room."""
    heard_s, rtt_ms = row.number("heard"), row.number("rtt")
    receives, sends = row.number("receives") or 0, row.number("sends") or 0
    posts, credits_ = row.number("posts"), row.number("credits")
    posts_words = "" if posts is None else f", {counted(posts, 'post')} under way"
    if credits_ is not None:
        posts_words += f" of {credits_:.0f}"
    facts: list[tuple[str, str, Style]] = [
        ("heard", "never" if heard_s is None else f"{age(now_s - heard_s)} ago", "plain"),
        ("round trip", "-" if rtt_ms is None else cells.figure(rtt_ms, "ms", 0.0), "plain"),
        ("layout", *peers.layout(row)),
        ("agent", clean(row.text("agent")), "plain"),
        ("open", f"{receives:.0f} from it, {sends:.0f} to it{posts_words}", "plain"),
        ("path", clean(row.text("path")) or "-", "plain"),
    ]
    if row.text("trouble"):
        facts.insert(0, ("trouble", *peers.trouble(row)))
    items = [(Styled(f"{name} ", "dim"), Styled(text, style)) for name, text, style in facts]
    made = spans.wrapped(items, width, 3)
    return [*made, spans.fit((Styled(UNKNOWN, "dim"),), width)]
