"""The audit's turns cost what was set, and no more; a finding recalls what happened to it."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.audit import EVERY_S
from kvd.core.node import NodeState
from kvd.daemon.auditor import AT_REST_S, LONGEST_REST_S, MAX_SLICE_S, Auditor
from kvd.daemon.reactor import Reactor
from kvd.observe.bus import Bus
from kvd.types import ID_BYTES
from kvd.wire import client
from tests.core.breakage import engine_lease
from tests.core.side import settings, tokens

TICK_S = 0.05


class Bench:
    """A reactor, an auditor, and a processor whose every unit of audit costs ``unit_s``."""

    def __init__(self, share: float, unit_s: float = 1e-5, pages: int = 20_000) -> None:
        self.now_s = self.spent_s = 0.0
        self.unit_s = unit_s
        self.turns: list[inputs.AuditTurn] = []
        self.node = NodeState(settings("n", pages), 0.0)
        bus = Bus()
        self.reactor = Reactor(self.node, bus, clock=lambda: self.now_s, on_bug=self.crashed)
        self.auditor = Auditor(self.reactor, bus, share, lambda: self.spent_s)
        self.reactor.perform = {
            effects.Recall: self.auditor.recall,
            effects.AnswerEngine: lambda _answer: None,
        }
        turn = self.node.audit.turn

        def taken(got: inputs.AuditTurn) -> None:
            self.turns.append(got)
            turn(got)
            self.spent_s += self.node.audit.work_done * self.unit_s

        self.node._handlers[inputs.AuditTurn] = taken

    def crashed(self, what: str, error: BaseException) -> None:
        raise AssertionError(what) from error

    def tick(self, times: int, busy_s: float = 0.0) -> None:
        """Ticks, between any two of which the loop computes for ``busy_s``."""
        for _ in range(times):
            self.now_s += TICK_S
            self.spent_s += busy_s
            self.auditor.turn(self.now_s)


@pytest.mark.parametrize("unit_s", [1e-7, 1e-5, 1e-4])
def test_turns_never_cost_more_than_the_budget_whatever_a_unit_costs(unit_s):
    bench = Bench(0.01, unit_s)

    bench.tick(2000)

    slack_s = 2 * MAX_SLICE_S + 300 * unit_s
    assert bench.spent_s <= 0.01 * bench.now_s + slack_s
    assert bench.node.audit.sweeps > 0


def test_slices_stay_short_when_a_unit_comes_to_cost_more():
    # So many that it never rests for long.
    bench = Bench(0.01, 1e-6, pages=200_000)
    bench.tick(400)
    learned = len(bench.turns) + 20
    bench.unit_s *= 4

    bench.tick(400)

    assert len(bench.turns) > learned
    longest = max(turn.spent_s for turn in bench.turns[learned:])
    assert longest <= 1.5 * MAX_SLICE_S


def test_what_was_spent_is_told_with_the_next_turn():
    bench = Bench(0.01)

    bench.tick(200)

    assert bench.node.audit.spent_s == pytest.approx(sum(turn.spent_s for turn in bench.turns))
    assert bench.spent_s - bench.node.audit.spent_s <= 1.5 * MAX_SLICE_S, "the last turn alone"
    assert bench.node.audit.state().share <= 0.011


def test_busy_loop_gives_the_audit_a_quarter_of_its_budget_and_the_rest_when_it_is_idle_again():
    bench = Bench(0.01, pages=2_000_000)  # it never rests for long
    bench.tick(100)

    def share_over(ticks: int, busy_s: float) -> float:
        begun, begun_s = bench.spent_s, bench.now_s
        bench.tick(ticks, busy_s)
        return (bench.spent_s - begun - ticks * busy_s) / (bench.now_s - begun_s)

    assert share_over(1000, busy_s=TICK_S) == pytest.approx(0.0025, rel=0.3)
    assert share_over(1000, busy_s=TICK_S / 2) == pytest.approx(0.005, rel=0.3)
    assert share_over(1000, busy_s=0.0) == pytest.approx(0.01, rel=0.3)


def test_no_turn_is_taken_between_two_sweeps():
    bench = Bench(0.01, unit_s=1e-7, pages=64)

    bench.tick(2000)

    assert bench.node.audit.sweeps > 15
    assert len(bench.turns) <= bench.node.audit.sweeps + 2


def test_node_of_which_nothing_is_heard_is_swept_ever_less_often_and_a_busy_one_at_full_pace():
    bench = Bench(0.01, unit_s=1e-7, pages=64)
    bench.tick(200)
    first = bench.node.audit.sweeps
    bench.tick(800)
    at_rest = bench.node.audit.sweeps - first

    for number in range(200):
        bench.reactor.feed(inputs.ClientJoined(bench.now_s, number + 1, "engine", 7))
        bench.tick(1)

    # It rests for 0.5, 1, 2 and then 4 s.
    assert first == pytest.approx(4 + 2.5 / LONGEST_REST_S, abs=1)
    assert at_rest == pytest.approx(40 / LONGEST_REST_S, abs=1)
    # With the tick that comes when it is due, or the next: both are sums of fractions.
    busy = bench.node.audit.sweeps - first - at_rest
    assert 10 / (EVERY_S + TICK_S) - 1 <= busy <= 10 / EVERY_S + 1


@pytest.mark.parametrize("wait_s", [1.0, 30.0, 61.3])
def test_memory_that_breaks_while_nothing_happens_is_found_after_the_longest_rest(wait_s):
    bench = Bench(0.01, unit_s=1e-7, pages=64)
    bench.tick(round(wait_s / TICK_S))

    # As a flipped bit would: no step has done it, so no event says that something happened.
    del bench.node.leases.pool._free[:ID_BYTES]
    began_s = bench.now_s
    while not bench.node.audit.violations and bench.now_s < began_s + 60:
        bench.tick(1)

    assert bench.node.audit.violations
    assert bench.now_s - began_s <= LONGEST_REST_S + 4 * TICK_S


def test_sweeps_come_often_again_while_something_is_broken():
    bench = Bench(0.01, unit_s=1e-7, pages=64)
    bench.tick(600)
    del bench.node.leases.pool._free[:ID_BYTES]
    bench.tick(100)
    before = bench.node.audit.sweeps

    bench.tick(200)

    assert bench.node.audit.findings.broken
    assert bench.node.audit.sweeps - before == pytest.approx(10 / AT_REST_S, abs=2)


def test_budget_of_nothing_turns_the_audit_off():
    bench = Bench(0.0)

    bench.tick(100)

    assert bench.turns == []


def test_finding_carries_the_last_events_about_its_lease():
    bench = Bench(0.01)
    bench.reactor.feed(inputs.ClientJoined(0.0, 1, "engine", 7))
    for first in (1, 1000):
        opening = client.OpenLease(1)
        bench.reactor.feed(inputs.FromClient(0.0, 1, opening, tokens((first, 40))))
    lease = engine_lease(bench.node)
    lease.session = 77

    bench.tick(100)

    (found,) = bench.node.audit.state().found
    assert (found.lease, found.owner) == (lease.id, "session 77 (gone)")
    assert [line.partition(": ")[2] for line in found.transitions[1:]] == [
        f"lease-opened lease={lease.id} session=1 reason=lease room=0 prefix_tokens=0 held_pages=3 "
        "prompt_tokens=40 missed_tokens=32 why_missed=new locked_node=0"
    ]
