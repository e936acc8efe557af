"""What an operator should look at, with the evidence; the books; and who waits for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from kvd.text import age, clean, compact, duration, thousands
from kvd.wire.console import Query
from tui import actions
from tui.draw import spans
from tui.draw.spans import Line, Styled, cleaned
from tui.model import cells
from tui.model.columns import NamedRow, named_row_of, places
from tui.screens.page import Page
from tui.widgets.canvas import Canvas, console
from tui.widgets.dialogs import wrap_words
from tui.widgets.pools import POOLS_QUERY as POOLS
from tui.widgets.table import HEAD_LINES, ColumnRules, WindowedTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from textual.app import ComposeResult

    from kvd.wire.console import Holder
    from tui.draw.spans import Style
    from tui.model.snapshots import DaemonSnapshot
    from tui.model.tables import Slot, TableData


CONCERNS = ColumnRules(
    first=("severity", "kind", "subject", "since", "evidence", "action", "rule"),
    narrow=("evidence", "rule"),
)
WAITING = ColumnRules(
    first=("place", "kind", "owner", "since", "why", "until", "missing_pages", "held_by"),
    never=("ahead", "client", "overtaken"),
    narrow=("why", "held_by"),
)
DETAIL_SHARE = 3
"""The detail has at most one line of so many."""


class InspectPage(Page):
    """Concerns, what is under the cursor in full, the ledger, the admission queue."""

    NAME = "inspect"
    FAULTS: ClassVar[Mapping[str, str]] = {"concerns": "!severity:low"}
    REFS = ("waiting",)

    DEFAULT_CSS = """
    InspectPage > #table-concerns { height: 6; }
    InspectPage > #detail { height: 1; }
    InspectPage > #ledger { height: 3; }
    InspectPage > #table-waiting { height: 1fr; }
    """

    @override
    def compose(self) -> ComposeResult:
        yield WindowedTable(
            "concerns",
            painters={"severity": cells.severity},
            title="findings",
            rules=CONCERNS,
        )
        yield Detail()
        yield Ledger()
        yield WindowedTable("waiting", title="waiting for room", rules=WAITING)

    @property
    def findings(self) -> WindowedTable:
        """The concerns, the gravest on top."""
        return self.query_one("#table-concerns", WindowedTable)

    @property
    def waiting(self) -> WindowedTable:
        """The admission queue, in its order."""
        return self.query_one("#table-waiting", WindowedTable)

    @override
    def queries(self) -> tuple[Slot, ...]:
        return (*super().queries(), POOLS, AUDIT)

    @override
    def show(self, snapshot: DaemonSnapshot) -> None:
        super().show(snapshot)
        detail, ledger, findings = self.query_one(Detail), self.query_one(Ledger), self.findings
        height = self.size.height
        is_waiting = self.table() is self.waiting
        row = self._under_cursor(snapshot.now_s)
        told = detail.show(
            row, snapshot.now_s, max(5, height // DETAIL_SHARE), is_waiting=is_waiting
        )
        booked = ledger.show(snapshot)
        # At least two rows of the queue, whatever is above.
        data = findings.data
        rows = HEAD_LINES + max(1, data.total if data is not None else 1)
        room = max(HEAD_LINES + 1, height - told - booked - HEAD_LINES - 2)
        for widget, lines in ((detail, told), (ledger, booked), (findings, min(rows, room))):
            self.set_height(widget, lines)

    def _under_cursor(self, now_s: float) -> NamedRow | None:
        table = self.table()
        row = table.row() if table is not None else None
        return NamedRow(row, places(table.columns), now_s) if row is not None and table else None

    @override
    async def act(self, action: str) -> bool:
        if action != "propose":
            return await super().act(action)
        row = self._under_cursor(0.0)
        if row is not None:
            actions.propose(console(self), _proposed(row))
        return True


def _proposed(row: NamedRow) -> str:
    """Of a finding its action; of a request that waits: who has the most of what it lacks."""
    holders = row.cell("held_by")
    if isinstance(holders, tuple) and holders:
        return f"open {holders[0].ref}"
    return row.text("action") or row.text("why")


AUDIT = Query("audit", limit=1)
MOST_POOLS = 6
PARTS = ("free", "held", "cached", "quarantined")
NULL_PAGES = 1
"""Of each component: the page that stands for none is never anybody's."""


def ledger_lines(snapshot: DaemonSnapshot, width: int) -> list[Line]:
    """A line for each component, then the audit."""
    made = [spans.headed((Styled("ledger", "head"),), width)]
    pools, audit = snapshot.table(POOLS), snapshot.table(AUDIT)
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
    parts = [(one, round(row.number(one) or 0)) for one in PARTS]
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
        *((Styled(" " * (width - room)), Styled(one)) for one in rest),
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
    made += _told("rule", row.text("rule"), width)
    return [*made, *_told("do (x)", row.text("action"), width, "key")]


def _holders(holders: Iterable[Holder], now_s: float, width: int) -> list[Line]:
    made: list[Line] = []
    for one in holders:
        text = f"{clean(one.ref)} {cells.holder(one, now_s)}"
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
