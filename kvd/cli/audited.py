"""The audit in words for people: one line in the status, everything in ``kvd audit``.

Every text of the daemon goes through ``clean``, as in ``render``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from kvd.text import clean, duration

if TYPE_CHECKING:
    from kvd.wire.admin import Report
    from kvd.wire.snapshot import AuditState, Finding

BROKEN = "broken"
"""The state of a finding that is there now."""


def summary(state: AuditState) -> str:
    """How the standing audit stands, on one line."""
    found = f"{state.findings} finding{'' if state.findings == 1 else 's'}"
    if not state.sweeps:
        return f"{found}; no sweep has ended yet"
    return (
        f"{found}; the last sweep took {duration(state.sweep_s)}, ended "
        f"{duration(state.last_sweep_ago_s)} ago; {100 * state.share:.2f} % of a core"
    )


def broken(state: AuditState) -> list[Text]:
    """What is wrong now, one line each."""
    return [
        Text(f"! {clean(one.rule)}: {clean(one.what)}: kvd audit", style="bold red")
        for one in state.found
        if one.state == BROKEN
    ]


def audit(answer: Report) -> RenderableType:
    """What was checked, each rule that does not hold, and how the standing audit runs."""
    lines = [Text(f"{clean(name.replace('_', ' '))}: {n}") for name, n in answer.changed.items()]
    state = answer.standing
    if state is None:
        lines += [Text(f"broken: {clean(what)}", style="bold red") for what in answer.refused]
    else:
        lines += _standing(state)
        for one in state.found:
            lines += _finding(one)
    if not is_broken(answer):
        lines.append(Text("every invariant holds", style="green"))
    return Group(*lines)


def is_broken(answer: Report) -> bool:
    """Whether anything does not hold now."""
    return bool(answer.refused) or (answer.standing is not None and answer.standing.findings > 0)


def _standing(state: AuditState) -> list[Text]:
    per_s = (state.objects + state.pages) / max(state.sweep_s, 1e-3)
    return [
        Text(f"standing audit: {summary(state)}"),
        Text(
            f"    {state.sweeps} sweeps, {state.spent_s:.2f} s of processor time; {state.objects} "
            f"objects and {state.pages} pages in the last one, {per_s:,.0f} a second",
            "dim",
        ),
    ]


def _finding(one: Finding) -> list[Text]:
    style = "bold red" if one.state == BROKEN else "yellow"
    about = [
        *([f"lease {one.lease}"] if one.lease else []),
        *([f"node {one.node}"] if one.node else []),
        *([f"{one.owner}[{one.pid}]"] if one.owner else []),
        *([f"room {one.room}"] if one.room else []),
        *([_pages(one)] if one.pages else []),
        f"first seen {duration(one.first_seen_ago_s)} ago",
        f"last {duration(one.last_seen_ago_s)} ago",
    ]
    return [
        Text(f"{clean(one.state)}: {clean(one.rule)}: {clean(one.what)}", style=style),
        Text(f"    {clean(', '.join(about))}"),
        *([Text(f"    done: {clean(one.done)}")] if one.done else []),
        *(Text(f"    {clean(line)}", "dim") for line in one.transitions),
    ]


def _pages(one: Finding) -> str:
    return f"{one.pages} pages{f' of {one.component}' if one.component else ''}: {_some(one)}"


def _some(one: Finding) -> str:
    more = "..." if one.pages > len(one.first_pages) else ""
    return " ".join([*(str(page) for page in one.first_pages), *([more] if more else [])])
