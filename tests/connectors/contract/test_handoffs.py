"""Every connector that hands over between two nodes, in every state of a handoff.

Whatever happens on either side: what came is the prompt's own KV, what did not come has failed with
a reason, nothing is held afterwards, and handoffs go well again.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import signal
import tempfile
import time
from pathlib import Path
from typing import ClassVar

import pytest

from tests.connectors.contract.cases import HANDOFFS, HandoffStep
from tests.connectors.contract.engine import PAGE, Happening, prompt_of
from tests.connectors.contract.handoffs import HANDOFF_ADAPTERS, SIDES, handoff_adapter
from tests.connectors.contract.stage import Others
from tests.connectors.sglang.world import held
from tests.support.daemons import two_daemons
from tests.support.seeds import repeatable, seed_range

pytestmark = pytest.mark.timeout(300)

COMES_S = 120.0
ROUNDS = 10

logger = logging.getLogger(__name__)
"""What a test that draws has drawn is in its report, if it fails."""

_seeds = itertools.count(7000)


def fresh():
    """A prompt that nobody has had: all of it is copied, and sent."""
    return [token % 1000 for token in prompt_of(6 * PAGE + 5, next(_seeds))]


@pytest.fixture(scope="module", params=HANDOFF_ADAPTERS)
def kind(request):
    try:
        return handoff_adapter(request.param)
    except ImportError as error:
        pytest.skip(f"{request.param} is not here: {error}")


@pytest.fixture(scope="module")
def daemons(kind):
    with (
        tempfile.TemporaryDirectory(prefix="kvd-h-") as directory,
        two_daemons(Path(directory), kind.pool) as found,
    ):
        yield found


@pytest.fixture
def pair_of(kind, daemons):
    """Two engines, over daemons that are there."""
    pairs = []
    for side in SIDES:
        if not getattr(daemons, side).is_running:
            _started(getattr(daemons, side))

    def make(**how):
        pairs.append(kind(daemons, **how))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def _started(daemon):
    daemon.start()
    daemon.wait_ready()


def in_steps(deed):
    steps = [step for case in HANDOFFS if case.deed == deed for step in case.at]
    return pytest.mark.parametrize("step", steps, ids=lambda step: step.value)


on_either_side = pytest.mark.parametrize("side", SIDES)


def is_well(pair, daemons):
    """Handoffs go well again, and nothing is held."""
    end_s = time.monotonic() + COMES_S
    while any(end := pair.hand_over(fresh())):
        assert time.monotonic() < end_s, end
        time.sleep(0.3)
    pair.settle()
    for side in SIDES:
        daemon = getattr(daemons, side)
        daemon.wait_for(lambda daemon=daemon: held(daemon) == 0, "something is held", 60)


@in_steps("crowded")
def test_crowded(pair_of, daemons, step):
    """Others take every page of both nodes that the handoff does not hold, and go later."""
    pair = pair_of()
    others = []

    def crowd():
        for side in SIDES:
            others.append(Others(getattr(daemons, side).client))
            others[-1].take_all(int(pair.pool["pool.pages"]))

    pair.begin(fresh(), Happening(step, crowd))
    assert others
    for other in others:
        other.close()
    end = pair.end()
    assert not (pair.waits_for_room and any(end)), end
    is_well(pair, daemons)


@on_either_side
@in_steps("aborted")
def test_aborted(pair_of, daemons, side, step):
    pair = pair_of()
    abort = Happening(step, lambda: pair.abort(side))
    pair.hand_over(fresh(), abort)
    assert abort.has_come
    is_well(pair, daemons)


@on_either_side
@in_steps("daemon_killed")
def test_daemon_killed(pair_of, daemons, side, step):
    pair, daemon = pair_of(), getattr(daemons, side)
    kill = Happening(step, daemon.kill)
    pair.hand_over(fresh(), kill)
    assert kill.has_come
    _started(daemon)
    is_well(pair, daemons)


@on_either_side
@in_steps("daemon_restarted")
def test_daemon_restarted(pair_of, daemons, side, step):
    """With other memory, where the pages of before are another engine's at once."""
    pair, daemon = pair_of(), getattr(daemons, side)
    others = []

    def restart():
        daemon.kill()
        _started(daemon)
        others.append(Others(daemon.client))
        others[-1].take_all(int(pair.pool["pool.pages"]))

    pair.begin(fresh(), Happening(step, restart))
    time.sleep(0.3)
    for other in others:
        other.close()
    pair.end()
    is_well(pair, daemons)


@on_either_side
@in_steps("daemon_hung")
def test_daemon_hung(pair_of, daemons, side, step):
    pair, daemon = pair_of(is_impatient=True), getattr(daemons, side)
    hang = Happening(step, lambda: os.kill(daemon.pid, signal.SIGSTOP))
    try:
        pair.hand_over(fresh(), hang)
        assert hang.has_come
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    is_well(pair, daemons)


@on_either_side
@in_steps("engine_killed")
def test_engine_killed(pair_of, daemons, side, step):
    """Where the other one has not heard of the request yet, timeouts alone are left to it."""
    pair = pair_of(is_impatient=True)
    pair.hand_over(fresh(), Happening(step, lambda: pair.kill(side)))
    pair.start(side)
    is_well(pair, daemons)


def test_unlike(pair_of):
    """The engines have pools whose pages are of as many bytes, and of another kind."""
    pair = pair_of(unlike="pool")
    assert all(pair.hand_over(fresh()))
    pair.settle()


def test_other_model(pair_of):
    pair = pair_of(unlike="model")
    assert pair.hand_over(fresh()).decode
    pair.settle()


class Faults:
    """What is done to either side, by a name; ``mend`` has back what ended."""

    def __init__(self, pair, daemons, rng):
        self._pair, self._daemons, self._rng = pair, daemons, rng
        self._killed, self._stopped = [], []

    def __call__(self):
        """One or two of them."""
        sides = [(deed, side) for deed in self.DEEDS for side in SIDES]
        for deed, side in self._rng.sample(sides, self._rng.choice((1, 1, 2))):
            if side not in self._killed:
                logger.warning("%s %s", deed, side)
                self.DEEDS[deed](self, side)

    def _abort(self, side):
        self._pair.abort(side)

    def _kill_engine(self, side):
        self._pair.kill(side)
        self._killed.append(side)

    def _stop_daemon(self, side):
        daemon = getattr(self._daemons, side)
        if daemon.is_running:
            os.kill(daemon.pid, signal.SIGSTOP)
            self._stopped.append(daemon.pid)

    def _kill_daemon(self, side):
        getattr(self._daemons, side).kill()

    def _restart_daemon(self, side):
        self._kill_daemon(side)
        _started(getattr(self._daemons, side))

    def mend(self):
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for side in self._killed:
            self._pair.start(side)
        self._killed, self._stopped = [], []

    DEEDS: ClassVar = {
        "abort": _abort,
        "kill the engine": _kill_engine,
        "stop the daemon": _stop_daemon,
        "kill the daemon": _kill_daemon,
        "restart the daemon": _restart_daemon,
    }


@pytest.mark.timeout(600)
def test_faults_in_any_order(pair_of, daemons):
    """One or two of them at any step, and the next prompt behind it, daemon or none."""
    drawn = random.SystemRandom().randrange(2**32)
    seed, _ = seed_range(f"{drawn}:{drawn + 1}")
    rng = random.Random(seed)
    pair = pair_of(is_impatient=True)
    faults = Faults(pair, daemons, rng)
    with repeatable(seed, __file__, "faults_in_any_order"):
        for _ in range(ROUNDS):
            step = rng.choice([*HandoffStep])
            logger.warning("at %s", step)
            pair.hand_over(fresh(), Happening(step, faults))
            faults.mend()
            pair.hand_over(fresh())
            for side in SIDES:
                if not getattr(daemons, side).is_running:
                    _started(getattr(daemons, side))
        is_well(pair, daemons)


def test_every_case_has_a_test():
    assert {f"test_{case.deed}" for case in HANDOFFS} <= set(globals())
