"""The books of the pools, which must balance to the page, and how the standing audit runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.text import clean, duration
from kvd.wire.console import Query
from tui.draw import spans
from tui.draw.pages import thousands
from tui.draw.spans import Line, Span, said
from tui.model import cells
from tui.model.dress import Facts, facts_of
from tui.widgets.canvas import Canvas
from tui.widgets.poollines import ASKS as POOLS
from tui.widgets.popup import broken

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvd.wire.console import Holder
    from tui.draw.spans import Style
    from tui.model.moments import Moment
    from tui.model.sheets import Sheet

AUDIT = Query("audit", limit=1)
MOST_POOLS = 6
PARTS = ("free", "held", "cached", "quarantined")
NULL_PAGES = 1
"""Of each component: the page that stands for none is never anybody's."""


def ledger_lines(moment: Moment, width: int) -> list[Line]:
    """A line for each component, then the audit."""
    made = [spans.headed((Span("ledger", "head"),), width)]
    pools, audit = moment.sheet(POOLS), moment.sheet(AUDIT)
    for key in pools.order[:MOST_POOLS] if pools is not None else ():
        facts = facts_of(pools, key) if pools is not None else None
        if facts is not None:
            line = _component(facts, "quarantined", " + ")
            if spans.width_of(line) > width:
                line = _component(facts, "quar", "+")
            made.append(spans.fit(line, width))
    if pools is not None and len(pools.order) > MOST_POOLS:
        made.append(spans.line(f"  and {len(pools.order) - MOST_POOLS} more on page 2", "dim"))
    return [*made, *_audit(audit, moment.now_s, width)]


def _component(row: Facts, last: str, plus: str) -> Line:
    """Whether null + free + held + cached + quarantined is the total."""
    name, total = row.text("component"), round(row.number("total") or 0)
    parts = [(one, round(row.number(one) or 0)) for one in PARTS]
    known = NULL_PAGES + sum(pages for _, pages in parts)
    named = [*PARTS[:-1], last]
    terms = plus.join(
        f"{thousands(pages)} {name}" for name, (_, pages) in zip(named, parts, strict=True)
    )
    off = total - known
    verdict: Span = Span("balanced", "ok")
    if off:
        what = f"{thousands(off)} NOWHERE" if off > 0 else f"{thousands(-off)} TWICE"
        verdict = Span(what, "bad")
    return (
        Span("! " if off else "  ", "bad"),
        said(f"{name}: "),
        verdict,
        Span(f"  {thousands(known)} of {thousands(total)} = {NULL_PAGES} null{plus}{terms}"),
    )


def _audit(sheet: Sheet | None, now_s: float, width: int) -> list[Line]:
    """How the standing audit stands, when it last looked, and what that costs."""
    row = facts_of(sheet, sheet.order[0]) if sheet is not None and sheet.order else None
    if row is None:
        why = sheet.trouble if sheet is not None else "asked for; not here yet"
        return [(Span("  audit: "), said(why or "not here", "dim"))]
    findings = round(row.number("findings") or 0)
    style: Style = "bad" if findings else "ok"
    found = f"{findings} broken rule{'' if findings == 1 else 's'}" if findings else "nothing found"
    ended_s = row.number("ended")
    if ended_s is None:
        words = "no sweep has ended yet"
    else:
        words = (
            f"last sweep {cells.age(now_s - ended_s)} ago took "
            f"{duration(row.number('took_s') or 0)} for {cells.compact(row.number('objects') or 0)}"
            f" objects, {cells.compact(row.number('pages') or 0)} pages; cost "
            f"{100 * (row.number('core') or 0):.2f}% of a core, "
            f"{duration(row.number('spent_s') or 0)} in {row.number('sweeps') or 0:.0f} sweeps"
        )
    head = (Span("! " if findings else "  ", "bad"), Span("audit: "), Span(found, style))
    room = width - spans.width_of(head) - 2
    first, *rest = broken(words, max(20, room))
    return [
        (*head, Span(f"  {first}")),
        *((Span(" " * (width - room)), Span(one)) for one in rest),
    ]


class Ledger(Canvas):
    """Shows ``ledger_lines``."""

    def __init__(self) -> None:
        super().__init__(id="ledger")

    def show(self, moment: Moment) -> int:
        """Paint it; how many lines it takes."""
        lines = ledger_lines(moment, max(20, self.size.width))
        self.paint(lines)
        return len(lines)


def detail_lines(row: Facts | None, now_s: float, width: int, *, is_waiting: bool) -> list[Line]:
    """What is under the cursor in full: of a finding what to do, of a request who is in its way."""
    if row is None:
        told = "nothing waits" if is_waiting else "nothing to look at"
        return [spans.headed((Span(told, "ok"),), width)]
    made = [spans.headed((said(row.row.key, "head"),), width)]
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
    parts = broken(clean(text), max(8, width - pad - 2)) or ["-"]
    return [
        (Span(f"  {name if not at else '':<{pad}}", "dim"), Span(part, style))
        for at, part in enumerate(parts)
    ]


class Detail(Canvas):
    """Shows ``detail_lines``, at most as many as there is room for."""

    def __init__(self) -> None:
        super().__init__(id="detail")

    def show(self, row: Facts | None, now_s: float, most: int, *, is_waiting: bool) -> int:
        """Paint it; how many lines it takes, at most ``most``."""
        lines = detail_lines(row, now_s, max(20, self.size.width), is_waiting=is_waiting)
        self.paint(lines[:most])
        return min(len(lines), most)
