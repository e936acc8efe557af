"""Gives the standing audit its turns: as much work as a set share of one core allows, no more.

Every tick earns the audit ``budget`` times the time that has passed. A turn gets the work that this
buys, by what a unit of work has cost lately; what a slice took more is paid back before the next
turn. Processor time is counted, not the clock: being preempted is not work. What counts is a whole
turn, from the tick to the last effect of what was found. What is earned while there is nothing to
do is kept up to ``MAX_SLICE_S``, the longest that the loop should wait for it.

The busier the loop is with other things, the less is earned, down to ``LEAST_EARNED`` of it: who
asks for something comes first, and what is broken is still found. Between two sweeps there are no
turns, and a node of which nothing is heard rests for longer between them.

What must not live here: what is looked at, and what is found (``kvd.core.audit.audit``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from kvd.core.inputs import AuditTurn, Recalled

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core import effects
    from kvd.core.audit.audit import StandingAudit
    from kvd.daemon.reactor import Reactor
    from kvd.observe.bus import Bus
    from kvd.wire.events import Event

MAX_SLICE_S = 0.002

FIRST_UNIT_S = 2e-6
"""What a unit of work is taken to cost until it was measured."""

LEAST_WORK = 256
"""Units asked for at least: what a turn costs whatever it does must not be most of it."""

LEAST_EARNED = 0.25
"""Of the budget, while the loop has no time to spare."""

AT_REST_S = 0.5
"""From one sweep to the next while no event happens; a step that breaks something has some."""

LONGEST_REST_S = 4.0
"""The pause doubles up to this while sweeps find nothing: only what no step does, as a flipped bit,
can have broken something by then, and is found later by so much."""

LEARN = 0.25
"""Weight of the last turn in what a unit is taken to cost."""

LINES_RECALLED = 8


class Auditor:
    """The audit's hours. ``share`` is its budget as a share of one core; 0 turns it off."""

    def __init__(
        self,
        reactor: Reactor,
        bus: Bus,
        share: float,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        self.share = share
        self._reactor = reactor
        self._bus = bus
        self._timer = timer
        self._last_s: float | None = None
        self._busy_s = 0.0
        """Processor time of this thread until the last turn was over."""
        self._credit_s = 0.0
        self._unit_s = FIRST_UNIT_S
        self._spent_s = 0.0
        """Of the last turn, not yet reported."""
        self._swept_seq = -1
        """The last event when the last sweep began."""
        self._rest_s = AT_REST_S
        self._rests_until_s = float("-inf")

    @property
    def due_s(self) -> float:
        """When it looks on, if nothing happens until then; in the past in the middle of a sweep."""
        if not self.share:
            return float("inf")
        audit = self._reactor.node.audit
        if audit.is_sweeping or self._reactor.node.out.seq != self._swept_seq:
            return audit.due_s
        return max(audit.due_s, self._rests_until_s)

    def turn(self, now_s: float) -> None:
        """A tick: look at something, if it is earned and there is something to look at."""
        begun_s = self._timer()
        self._earn(now_s, begun_s)
        audit = self._reactor.node.audit
        if self._credit_s > 0.0 and now_s >= self.due_s:
            self._look(audit, now_s, begun_s)
        self._busy_s = self._timer()

    def _earn(self, now_s: float, begun_s: float) -> None:
        elapsed_s = now_s - self._last_s if self._last_s is not None else 0.0
        self._last_s = now_s
        if elapsed_s <= 0.0:
            return
        idle = max(LEAST_EARNED, 1.0 - (begun_s - self._busy_s) / elapsed_s)
        # What was not needed is not saved up: the loop would stand still for all of it at once.
        self._credit_s = min(self._credit_s + elapsed_s * self.share * idle, MAX_SLICE_S)

    def _look(self, audit: StandingAudit, now_s: float, begun_s: float) -> None:
        if not audit.is_sweeping:
            seq = self._reactor.node.out.seq
            is_still = seq == self._swept_seq and not audit.findings.broken
            self._rest_s = min(2 * self._rest_s, LONGEST_REST_S) if is_still else AT_REST_S
            self._swept_seq = seq
            # On the beat that asks the transfer process: two beats cost twice as much as one.
            self._rests_until_s = now_s // AT_REST_S * AT_REST_S + self._rest_s
        work = max(LEAST_WORK, int(self._credit_s / self._unit_s))
        spent_s, self._spent_s = self._spent_s, 0.0
        self._reactor.feed(AuditTurn(now_s, work, spent_s))
        self._spent_s = self._timer() - begun_s
        self._credit_s -= self._spent_s
        # A turn that found nothing to do says nothing about what work costs.
        if audit.work_done >= LEAST_WORK:
            unit_s = self._spent_s / audit.work_done
            self._unit_s += LEARN * (unit_s - self._unit_s)

    def recall(self, wanted: effects.Recall) -> None:
        """Carry out ``Recall``: search the ring for what happened to it."""
        now_s = self._reactor.clock()
        _, events = self._bus.after(0)
        about = [event for event in events if _is_about(event, wanted)][-LINES_RECALLED:]
        lines = tuple(f"{now_s - event.at_s:.3f} s ago: {_in_words(event)}" for event in about)
        self._reactor.feed(Recalled(now_s, wanted.finding, lines))


def _is_about(event: Event, wanted: effects.Recall) -> bool:
    """Whether it names the lease or the room; where there is neither, whether pages moved."""
    fields = event.__struct_fields__
    if wanted.lease and "lease" in fields:
        return _figure(event, "lease") == wanted.lease
    if wanted.room and "room" in fields:
        return _figure(event, "room") == wanted.room
    moves_pages = "freed_pages" in fields or "held_pages" in fields or "pages" in fields
    return not (wanted.lease or wanted.room) and moves_pages


def _figure(event: Event, name: str) -> int:
    figure: int = getattr(event, name)
    return figure


def _in_words(event: Event) -> str:
    """``lease-opened lease=7 held_pages=3``: the tag, and what is not empty."""
    fields = msgspec.structs.asdict(event)
    said = [f"{name}={fields[name]}" for name in fields if name not in {"seq", "at_s"}]
    return " ".join([str(event.__struct_config__.tag), *said])
