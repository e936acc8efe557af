"""What two engines took of a prompt, put beside each other: without any engine."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from benchmarks import vllm_costs as bench
from benchmarks.served_vllm import Answer

SHAPE = bench.RoundShape(rounds=2, prompt_tokens=100, answer_tokens=4)
WHOLE = 96
"""Of 99 tokens that can be found, those in whole blocks."""


class PlayedEngines:
    """Two, as one round asks them; ``saying`` is what an engine says to what, and has cached."""

    def __init__(self, monkeypatch):
        served = SimpleNamespace(port=1, pid=1, name=bench.ALONE)
        self.alone = bench.MeasuredVllm(served)
        served = SimpleNamespace(port=2, pid=2, name=bench.WITH_KVD)
        self.with_kvd = bench.MeasuredVllm(served, {3})
        self.saying = {}
        self.idle = {bench.ALONE: 0.01, bench.WITH_KVD: 0.01}
        self._clock = itertools.count(1.0)
        self._has = {1: False, 2: False}
        monkeypatch.setattr(bench, "QUIET_S", 0.0)
        monkeypatch.setattr(bench, "busy_of", lambda leaders: next(self._clock))
        monkeypatch.setattr(bench, "answer_of", self._answer)
        monkeypatch.setattr(bench.MeasuredVllm, "lose_cache", lambda engine: None)

    def _answer(self, port, ids, *, tokens):
        n_cached = WHOLE if len(ids) == SHAPE.prompt_tokens and self._has[port] else 0
        self._has[port] = len(ids) == SHAPE.prompt_tokens
        said = self.saying.get((port, tokens), (7,) * tokens)
        return Answer(said, 0.0, n_cached)

    def measured(self):
        engines = {engine.name: engine for engine in (self.alone, self.with_kvd)}
        bench.measure(lambda told: None, list(engines.values()), SHAPE)
        self.found = bench.found_of(engines, SHAPE, self.idle)
        return list(self.found.wrong)


@pytest.fixture
def played(monkeypatch):
    return PlayedEngines(monkeypatch)


def test_engines_that_say_the_same_have_no_flaw(played):
    assert played.measured() == []
    for engine in (played.alone, played.with_kvd):
        assert len(engine.costs[bench.COLD]) == SHAPE.rounds, "those that warm up do not count"
    assert bench.HIT not in played.alone.costs
    wanted = [goal.wanted for goal in played.found.goals]
    assert wanted == [1.15, 1.01, 1.02], "there was no LMCache"


@pytest.mark.parametrize("tokens", [1, bench.PROOF_TOKENS, SHAPE.answer_tokens])
def test_another_answer_is_a_flaw(played, tokens):
    played.saying[2, tokens] = (8,) * tokens
    assert any("differ" in flaw for flaw in played.measured())


def test_a_hit_that_is_none_is_a_flaw(played, monkeypatch):
    monkeypatch.setattr(bench, "answer_of", lambda port, ids, *, tokens: Answer((7,), 0.0, 0))
    flaws = played.measured()
    assert any(f"{bench.WITH_KVD}, {bench.HIT}" in flaw for flaw in flaws)
    assert not any(bench.COLD in flaw for flaw in flaws)


def test_an_engine_that_looks_for_work_without_a_pause_is_a_flaw(played):
    played.idle[bench.ALONE] = 0.35
    assert played.measured() == ["alone takes 0.35 of a processor while nothing is asked"]


def test_a_ratio_is_of_answers_of_one_round():
    over = [bench.Cost(4.0, 2.0, 1.0), bench.Cost(8.0, 40.0, 0.0), bench.Cost(1.0, 3.0, 3.0)]
    under = [bench.Cost(2.0, 1.0, 0.0), bench.Cost(8.0, 10.0, 0.0), bench.Cost(1.0, 1.0, 0.0)]
    row = bench.ratio_row("it", over, under)
    assert (row["busy"], row["with_servers"], row["wall"]) == (3.0, 4.0, 1.0)
