"""What a request costs vLLM's scheduler, in calls of Python: they are counted, whatever the load.

Against a real daemon, in the engine of the benchmark. What is not of the request is left out: the
look at the session that is due now and then, and an answer that comes late, which is looked for
again. So the cheapest of a few rounds is what counts.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from benchmarks import connector as bench
from kvd.harness.daemons import one_daemon

ROUNDS = 6
PAUSE_S = 0.01

MOST_CALLS = 194
"""Of Python functions, in all hooks of a request; some ten of them are of the played engine."""

MOST_STEP_CALLS = 8
"""Of them, in both hooks of a step in which all that run decode, and nothing is copied."""

MOST = {
    "socket.send": 2,  # the prompt, whose answer is a lease; and that it is over
    "Encoder.encode": 2,
    "Struct.pack": 1,  # of all tokens of the prompt
    "poll.poll": 2,  # a look at the daemon before each message
}
"""Of what is not Python: what one more of costs as much as twenty calls."""


class CountedHooks(bench.HookTimes):
    """What is called in the hooks, by name; functions of Python together, under an empty one."""

    def __init__(self):
        super().__init__()
        self.counted = Counter()

    def run(self, hook, call, *args, **more):
        counted = self.counted

        def count(frame, event, what):
            if event == "call":
                counted[""] += 1
            elif event == "c_call":
                counted[what.__qualname__] += 1

        sys.setprofile(count)
        try:
            return call(*args, **more)
        finally:
            sys.setprofile(None)

    def taken(self):
        found, self.counted = self.counted, Counter()
        return found


def step_of(engine, prompts):
    """The cheapest of some steps of a request that decodes."""
    request = prompts.new()
    engine.arrive(request)
    engine.schedule(request, bench.BLOCK)
    engine.step()
    engine.step()
    steps = []
    for _ in range(ROUNDS):
        engine.sample()
        engine.times.taken()
        engine.step()
        steps.append(engine.times.taken())
    engine.finish(request)
    engine.settle()
    return steps


@pytest.fixture(scope="module")
def counted():
    """Of misses, of hits, and of steps in which a request decodes, the cheapest."""
    prompts, rounds = bench.Prompts(), {"miss": [], "hit": []}
    with (
        tempfile.TemporaryDirectory() as name,
        one_daemon(Path(name), bench.SHAPE) as daemon,
    ):
        engine = bench.PlayedEngine(daemon.client, "all", PAUSE_S)
        engine.half.look_every_s = math.inf
        engine.times = CountedHooks()
        for _ in range(ROUNDS):
            former = bench.miss(engine, prompts)
            rounds["miss"].append(engine.times.taken())
            if bench.hit(engine, prompts, former):
                rounds["hit"].append(engine.times.taken())
            engine.times.taken()
        rounds["step"] = step_of(engine, prompts)
        engine.half.close()
    return {
        case: min(found, key=lambda counts: (counts[""], counts.total()))
        for case, found in rounds.items()
    }


@pytest.mark.parametrize("case", ["miss", "hit"])
def test_a_request_costs_the_scheduler_no_more_calls(case, counted):
    assert 0 < counted[case][""] <= MOST_CALLS


def test_a_step_in_which_all_decode_costs_few_calls(counted):
    assert 0 < counted["step"][""] <= MOST_STEP_CALLS


@pytest.mark.parametrize("case", ["miss", "hit"])
@pytest.mark.parametrize("what", MOST)
def test_a_request_costs_the_scheduler_no_more_of_what_is_dear(case, what, counted):
    assert counted[case][what] == MOST[what]
