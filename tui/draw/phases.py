"""The life of a handoff: its phases at each end, over one axis of time.

The axis is elastic: a stretch between two marks gets columns by its length, and at least one, so
that what took a millisecond stays to be seen beside what takes seconds. Durations are in words.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from kvd.text import clean, lasting
from tui.draw import spans
from tui.draw.spans import EMPTY, Line, Style, Styled, fit, line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.wire.admin import Mark

STYLES: dict[str, Style] = {
    **dict.fromkeys(("queued", "offered", "await-engine", "await-offer"), "locked"),
    **dict.fromkeys(("streaming", "flushing"), "sending"),
    **dict.fromkeys(("ready", "settled"), "ok"),
    "receiving": "arriving",
    "verifying": "cached",
    "draining": "quarantined",
}
"""Of a phase by its state; any other is dim."""

OVER = {"closed", "forgotten"}
"""States in which nothing happens any more."""

NAME_COLUMNS = 24
"""Of a peer and its side, before the chart."""
LEAST_COLUMNS = 20
"""Of a chart; where there are fewer, the words have to do."""
QUIET_S = 2.0
"""A silence is worth a look from here on."""
ASKED = "asked; no answer yet"
"""What is no trouble yet."""
MAX_MARKS = 64
"""Of one end; a daemon tells sixteen."""
ARROW = " -> "
OPEN_END = ">"


class HandoffEnd(NamedTuple):
    """What one daemon knows of a handoff.

    ``marks``: oldest first; a transition is ``before -> after (why)``.
    ``trouble``: why nothing is known, in place of everything else.
    """

    name: str
    side: str
    state: str
    marks: tuple[Mark, ...]
    waiting_for: str = ""
    trouble: str = ""


class HandoffPhase(NamedTuple):
    """A state and when the handoff was in it; ``until_ago_s`` is 0 for the one it is in."""

    state: str
    began_ago_s: float
    until_ago_s: float
    why: str
    runs: bool

    @property
    def lasted_s(self) -> float:
        """So far, if it is not over."""
        return max(0.0, self.began_ago_s - self.until_ago_s)


def phases(end: HandoffEnd) -> tuple[HandoffPhase, ...]:
    """The phases of one end, oldest first; marks that are no transition stand in a phase."""
    marks = sound(end.marks)
    moves = [(mark.ago_s, *_move(mark.what)) for mark in marks if ARROW in mark.what]
    found: list[HandoffPhase] = []
    first_ago_s = marks[0].ago_s if marks else 0.0
    starts = [(ago_s, after, why) for ago_s, before, after, why in moves if before != after]
    if moves and first_ago_s > moves[0][0]:
        starts.insert(0, (first_ago_s, moves[0][1], marks[0].what))
    elif not moves and marks:
        starts = [(first_ago_s, end.state, marks[0].what)]
    for at, (ago_s, state, why) in enumerate(starts):
        is_last = at + 1 == len(starts)
        if is_last and state in OVER:
            break
        until_ago_s = 0.0 if is_last else starts[at + 1][0]
        found.append(HandoffPhase(state, ago_s, until_ago_s, why, is_last))
    return tuple(found)


def sound(marks: Sequence[Mark]) -> list[Mark]:
    """The last marks in the order of time: nobody has checked what a peer tells of itself."""
    known = [mark for mark in marks[-MAX_MARKS:] if math.isfinite(mark.ago_s)]
    return sorted(known, key=lambda mark: -mark.ago_s)


def draw(ends: Sequence[HandoffEnd], width: int, deadline_in_s: float | None = None) -> list[Line]:
    """In one sentence what it waits for; then the chart, a line for each end, and its phases."""
    known = [end for end in ends if not end.trouble]
    quiet, quiet_s = silence(known)
    lines = _verdict(known, width)
    room = width - NAME_COLUMNS
    if room >= LEAST_COLUMNS and any(phases(end) for end in known):
        axis = _Axis(known, room)
        lines.append(_scale(axis, deadline_in_s, width))
        lines += [fit((_name(end), *_row(end, axis)), width) for end in known]
    elif deadline_in_s is not None:
        lines.append(fit(_deadline(deadline_in_s), width))
    for end in ends:
        lines += _words(end, width)
    if quiet:
        lines.append(fit(line(quiet, "warn" if quiet_s > QUIET_S else "dim"), width))
    return lines


def _verdict(ends: Sequence[HandoffEnd], width: int) -> list[Line]:
    """What each end waits for, ours first, and for how long nothing has happened."""
    waits = [f"{clean(end.name)} waits for {clean(end.waiting_for)}" for end in ends]
    waits = [words for words, end in zip(waits, ends, strict=True) if end.waiting_for]
    quiet_s = min((mark.ago_s for end in ends for mark in sound(end.marks)), default=0.0)
    is_stuck = bool(waits) and quiet_s > QUIET_S
    words = f"nothing for {lasting(quiet_s)}: " * is_stuck + ", as ".join(waits)
    style: Style = "warn" if is_stuck else "plain"
    return spans.wrapped([line(word, style) for word in words.split()], width, 1)


def silence(ends: Sequence[HandoffEnd]) -> tuple[str, float]:
    """The longest time in which neither end did anything, in words; empty if nothing ever did."""
    marks = sorted(
        ((mark.ago_s, end.name, mark.what) for end in ends for mark in sound(end.marks)),
        reverse=True,
    )
    if not marks:
        return "", 0.0
    is_over = all(end.state in OVER for end in ends)
    laters = [ago_s for ago_s, _, _ in marks[1:]] + [marks[-1][0] if is_over else 0.0]
    gaps = [mark[0] - later for mark, later in zip(marks, laters, strict=True)]
    at = max(range(len(gaps)), key=gaps.__getitem__)
    _, name, what = marks[at]
    cleaned = f"longest silence {lasting(gaps[at])}, after {clean(name)}: {clean(what)}"
    lasts = "; it lasts" if at + 1 == len(marks) and not is_over else ""
    return cleaned + lasts, gaps[at]


def _move(what: str) -> tuple[str, str, str]:
    """Before, after and why of ``before -> after (why)``."""
    before, _, rest = what.partition(ARROW)
    after, _, why = rest.partition(" (")
    return before, after, why.removesuffix(")")


class _Axis:
    """From how long ago to columns: every stretch between two marks of any end has some."""

    def __init__(self, ends: Sequence[HandoffEnd], width: int) -> None:
        found = {phase.began_ago_s for end in ends for phase in phases(end)}
        found |= {phase.until_ago_s for end in ends for phase in phases(end)}
        self.edges = sorted(found, reverse=True)
        self.width = width
        stretches = [a - b for a, b in zip(self.edges, self.edges[1:], strict=False)]
        least = 1 if len(stretches) <= width else 0
        spare = width - least * len(stretches)
        total_s = sum(stretches) or 1.0
        self._columns = {self.edges[0]: 0} if self.edges else {}
        passed_s = 0.0
        for at, stretch in enumerate(stretches, 1):
            passed_s += stretch
            self._columns[self.edges[at]] = least * at + round(spare * passed_s / total_s)

    def column(self, ago_s: float) -> int:
        """Where an edge of a phase is."""
        return self._columns[ago_s]


def _row(end: HandoffEnd, axis: _Axis) -> list[Styled]:
    """One end's phases, each with its name at its beginning where there is room."""
    made: list[Styled] = []
    at = 0
    for phase in phases(end):
        start, stop = axis.column(phase.began_ago_s), axis.column(phase.until_ago_s)
        made.append(Styled(" " * (start - at)))
        made.append(Styled(_bar(phase, stop - start), "label", STYLES.get(phase.state, "dim")))
        at = stop
    return [*made, Styled(" " * (axis.width - at))]


def _bar(phase: HandoffPhase, columns: int) -> str:
    """``│receiving 8.4s──>`` in so many columns."""
    if columns <= 0:
        return ""
    tail = OPEN_END if phase.runs and columns > 1 else ""
    room = columns - 1 - len(tail)
    name = clean(phase.state)
    label = next(
        (
            words
            for words in (f"{name} {lasting(phase.lasted_s)}", name)
            if spans.columns(words) <= room
        ),
        "",
    )
    return f"│{label}{'─' * (room - spans.columns(label))}{tail}"


def _scale(axis: _Axis, deadline_in_s: float | None, width: int) -> Line:
    """How long ago the chart begins, where now is, and when the deadline is."""
    last_ago_s = axis.edges[-1]
    end = "now" if last_ago_s == 0 else f"{lasting(last_ago_s)} ago"
    begin = f"{lasting(axis.edges[0])} ago"
    scale = spans.spread(line(begin, "dim"), line(end, "dim"), axis.width)
    at_left = EMPTY if deadline_in_s is None else _deadline(deadline_in_s)
    return fit((*fit(at_left, NAME_COLUMNS - 1), Styled(" "), *scale), width)


def _deadline(deadline_in_s: float) -> Line:
    if deadline_in_s < 0:
        return line(f"deadline {lasting(-deadline_in_s)} ago", "bad")
    return line(f"deadline in {lasting(deadline_in_s)}", "dim")


def _name(end: HandoffEnd) -> Styled:
    return Styled(
        spans.left(f"{spans.cut(clean(end.name), 14)} {clean(end.side)}", NAME_COLUMNS), "head"
    )


def _words(end: HandoffEnd, width: int) -> list[Line]:
    """An end's phases with their durations; what it waits for; or why nothing is known of it."""
    name = Styled(f"{clean(end.name)}: ", "head")
    if end.trouble:
        style: Style = "dim" if end.trouble == ASKED else "warn"
        return [fit((name, Styled(clean(end.trouble), style)), width)]
    items: list[Line] = []
    for phase in phases(end):
        figure = f"{clean(phase.state)} {lasting(phase.lasted_s)}"
        items.append(line(f"{figure} so far") if phase.runs else line(figure, "dim"))
    if end.state in OVER or not items:
        items.append(line(clean(end.state)))
    room = width - spans.width_of((name,))
    return [
        fit((name if at == 0 else Styled(" " * (width - room)), *wrapped_line), width)
        for at, wrapped_line in enumerate(spans.wrapped(items, room))
    ]
