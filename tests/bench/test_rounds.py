"""Calls in small rounds: what is made of turns, their order, and what is counted beside."""

from __future__ import annotations

import os

from kvd.bench.counts import READS_AND_WRITES, STRACE, SystemCalls, total_in
from kvd.bench.rounds import CallKind, ComparedCalls, Turn, spread

SUMMARY = """\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 60.00    0.000003           1         3         1 futex
 40.00    0.000002           0        12           newfstatat
------ ----------- ----------- --------- --------- ----------------
100.00    0.000005           0        15         1 total
"""


def turn(p50_us: float, seconds: float = 1.0, cpu_us: float = 0.0) -> Turn:
    return Turn([p50_us / 1e6] * 4, seconds, {"client": cpu_us}, 2.0)


def kind_of(*turns: Turn) -> CallKind:
    async def call(_: int) -> None: ...

    kind = CallKind(call, {"client": os.getpid()})
    kind.turns += turns
    return kind


def test_spread_is_the_median_and_the_middle_half():
    assert spread([1.0, 5.0, 2.0, 4.0, 3.0]) == (3.0, 2.0, 4.0)


def test_a_ratio_is_taken_within_each_round_when_the_machine_slows_down_meanwhile():
    ours, echo = kind_of(turn(20), turn(200), turn(2000)), kind_of(turn(10), turn(100), turn(1000))
    compared = ComparedCalls("call", 1, 4, {"ours": ours, "echo": echo})

    assert compared.ratio("ours", "echo", lambda one: round(one.p50_us)) == (2.0, 2.0, 2.0)


def test_figures_of_a_kind_are_of_all_its_turns():
    kind = kind_of(turn(10, 1.0, 0.0), turn(20, 2.0, 0.0), turn(30, 4.0, 90.0))

    assert (kind.per_s, kind.switches) == (2.0, 2.0)
    assert (kind.cpu_us("client"), round(kind.quantile_us(50))) == (30.0, 20)


async def test_kinds_take_turns_in_the_other_order_each_round():
    called: list[str] = []

    def kind(name: str) -> CallKind:
        async def call(number: int) -> None:
            called.append(f"{name}{number}")

        return CallKind(call, {"client": os.getpid()})

    compared = ComparedCalls("call", 1, 2, {"a": kind("a"), "b": kind("b")})

    for number in range(2):
        await compared.play_round(number)

    assert called == ["b0", "b1", "a0", "a1", "a0", "a1", "b0", "b1"]
    (first, _) = compared.kinds["a"].turns
    assert len(first.latencies_s) == 2
    assert first.cpu_us["client"] > 0


def test_total_of_a_summary_is_its_calls():
    assert (total_in(SUMMARY), total_in("")) == (15, 0)


def test_system_calls_of_a_block_are_counted_in_either_way(monkeypatch, tmp_path):
    file = tmp_path / "file"

    def counted() -> SystemCalls:
        calls = SystemCalls({"me": os.getpid()})
        with calls.count():
            for _ in range(50):
                file.write_bytes(b"x")
        return calls

    best = counted()
    monkeypatch.setattr("shutil.which", lambda _: None)
    least = counted()

    assert best.way in {STRACE, READS_AND_WRITES}
    assert least.way == READS_AND_WRITES
    assert 50 <= least.counts["me"] <= 100
    # Opening, and closing, and what else a file takes: strace sees all of them.
    assert best.counts["me"] >= (150 if best.way == STRACE else 50)
