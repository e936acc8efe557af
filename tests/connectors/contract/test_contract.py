"""Every connector, in every state of a request: its tokens are right, and nothing is held after.

What an engine computes is checked where it computes it (``PlayedEngine.answer``), pages of others
where these give them back (``Others.close``).
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvd.client import KvdError
from tests.connectors.contract.cases import CASES, steps_of
from tests.connectors.contract.engine import (
    ADAPTERS,
    PAGE,
    PREFIX,
    PROMPT,
    Happening,
    adapter,
    prompt_of,
)
from tests.connectors.contract.stage import stage_for

# The first of an adapter has its engine's library imported, which a busy machine takes minutes for.
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).parents[3]
COMES_S = 60.0
WRITTEN_S = 0.05
"""What is next to be evicted is written in that time, most often; what was not is done anew."""
CACHED = (len(PREFIX) - 1) // PAGE * PAGE
OTHER = prompt_of(5 * PAGE + 1, 3)


def kind_of(name):
    try:
        return adapter(name)
    except ImportError as error:
        pytest.skip(f"{name} is not here: {error}")


@pytest.fixture(params=ADAPTERS)
def name(request):
    return request.param


@pytest.fixture
def kind(name):
    return kind_of(name)


@pytest.fixture(scope="module")
def shared():
    """A daemon for all cases that need no fault of it, by the name of its adapter."""
    with pytest.MonkeyPatch.context(), _Stages() as stages:
        yield stages


class _Stages:
    def __init__(self):
        self._open = {}

    def of(self, name, kind):
        if name not in self._open:
            manager = stage_for(kind.pool)
            self._open[name] = manager, manager.__enter__()
        stage = self._open[name][1]
        stage.clear()
        return stage

    def __enter__(self):
        return self

    def __exit__(self, *how):
        for manager, _ in self._open.values():
            manager.__exit__(*how)


@pytest.fixture
def stage(shared, name, kind):
    return shared.of(name, kind)


class Patience:
    """What a daemon does is waited for as long as it takes; ``lose`` it where it does nothing."""

    def __init__(self, kind, patch):
        self._kind, self._patch = kind, patch
        self._before = {}
        for place, within_s in kind.hurries.items():
            patch.setattr(place, within_s)
        self._waits = pytest.MonkeyPatch()
        self.regain()

    def regain(self):
        for place, within_s in self._kind.waits.items():
            self._waits.setattr(place, within_s)

    def lose(self):
        self._waits.undo()


@pytest.fixture(autouse=True)
def patience(kind, monkeypatch):
    patience = Patience(kind, monkeypatch)
    yield patience
    patience.lose()


@pytest.fixture
def engine_of(kind):
    engines = []

    def make(stage, **how):
        engines.append(kind(stage.endpoint, **how))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def in_steps(deed):
    return pytest.mark.parametrize("step", steps_of(deed), ids=lambda step: step.value)


def skip_without(kind, step):
    if step not in kind.steps:
        pytest.skip("this engine has no such step")


def begun(engine, stage, kind, step):
    """One whose prompt's first pages are cached."""
    skip_without(kind, step)
    assert engine.answer(PREFIX) == 0
    engine.settle()
    stage.wait_until_free()


def is_well(engine, stage):
    """It uses the cache again, and holds nothing of it."""
    stage.disperse()
    end_s = time.monotonic() + COMES_S
    for attempt in itertools.count():
        # Each twice: the first time it is saved, if the session is there again by then.
        found = engine.answer(prompt := prompt_of(4 * PAGE + 1, 100 + attempt // 2))
        engine.settle()
        if found:
            break
        assert time.monotonic() < end_s, "the cache is never used again"
        time.sleep(0.01)
    assert found == len(prompt) // PAGE * PAGE
    stage.wait_until_free()


@in_steps("crowded")
def test_crowded(kind, stage, engine_of, step):
    """Others take every page that this engine does not hold."""
    engine = engine_of(stage)
    begun(engine, stage, kind, step)
    crowd = Happening(step, stage.crowd)
    assert engine.answer(PROMPT, crowd) is not None
    assert crowd.has_come
    engine.settle()
    is_well(engine, stage)


def test_full(stage, engine_of):
    """What is cached is served, also right behind a save for which there is no room."""
    engine = engine_of(stage)
    assert engine.answer(PREFIX) == 0
    engine.settle()
    stage.wait_until_free()
    stage.fill()
    for _ in range(3):
        assert engine.answer(PROMPT) == CACHED
        engine.settle()
    is_well(engine, stage)


def test_tiered(kind, engine_of, tmp_path):
    """What was evicted to a disk is loaded from there, once all of it was written before that."""
    disk = {"directory": str(tmp_path / "disk"), "size": "64MiB", "max_moving": "1MiB"}
    below = {f"tiers.disk.{key}": value for key, value in disk.items()}
    with stage_for({**kind.pool, **below, "tiers.disk.wait_s": "60"}) as stage:
        engine = engine_of(stage)
        end_s = time.monotonic() + COMES_S
        for seed in itertools.count(200):
            loaded = engine.answer(PREFIX) if not engine.cached(PREFIX[:-1]) else 0
            engine.settle()
            if loaded == CACHED:
                break
            assert time.monotonic() < end_s, "nothing ever comes from the disk"
            engine.answer(prompt_of(4 * PAGE + 1, seed))
            engine.settle()
            time.sleep(WRITTEN_S)
        is_well(engine, stage)
        engine.close()


@in_steps("aborted")
def test_aborted(kind, stage, engine_of, step):
    engine = engine_of(stage)
    begun(engine, stage, kind, step)
    assert engine.answer(PROMPT, Happening(step, aborts=True)) is None
    engine.settle()
    stage.wait_until_free()
    assert engine.answer(PROMPT) >= CACHED
    is_well(engine, stage)


@in_steps("reset")
def test_reset(kind, stage, engine_of, step):
    """What was cached before it is found by nobody."""
    engine = engine_of(stage)
    begun(engine, stage, kind, step)
    assert engine.answer(OTHER) == 0
    assert engine.answer(PROMPT, Happening(step, engine.reset)) is not None
    engine.settle()
    assert engine.answer(OTHER) == 0
    is_well(engine, stage)


@in_steps("killed")
def test_killed(kind, engine_of, step):
    with stage_for(kind.pool) as stage:
        engine = engine_of(stage)
        begun(engine, stage, kind, step)
        kill = Happening(step, stage.kill)
        assert engine.answer(PROMPT, kill) is not None
        assert kill.has_come
        assert engine.answer(PROMPT) == 0
        stage.start()
        is_well(engine, stage)
        engine.close()


@in_steps("restarted")
def test_restarted(kind, engine_of, step):
    """Each page number of before is another engine's page at once."""
    with stage_for(kind.pool) as stage:
        engine = engine_of(stage)
        begun(engine, stage, kind, step)
        assert engine.answer(PROMPT, Happening(step, stage.restart)) is not None
        assert engine.answer(PROMPT) == 0
        engine.settle()
        is_well(engine, stage)
        engine.close()


@in_steps("returned")
def test_returned(kind, engine_of, step):
    """What was cached is found again, and no lease of before holds anything."""
    with stage_for(kind.pool, outlives=True) as stage:
        engine = engine_of(stage)
        begun(engine, stage, kind, step)
        # What is cached last before a kill is lost until its sum is noted.
        stage.wait_until_proven()
        assert engine.answer(PROMPT, Happening(step, stage.come_back)) is not None
        assert engine.cached(PREFIX[:-1]) == CACHED
        is_well(engine, stage)
        engine.close()


@in_steps("hung")
def test_hung(kind, engine_of, step, patience):
    with stage_for(kind.pool) as stage:
        engine = engine_of(stage)
        begun(engine, stage, kind, step)

        def hang():
            patience.lose()
            stage.hang()

        try:
            assert engine.answer(PROMPT, Happening(step, hang)) is not None
            assert engine.answer(PROMPT) == 0
        finally:
            stage.go_on()
        patience.regain()
        engine.settle()
        is_well(engine, stage)
        engine.close()


@pytest.mark.timeout(600)
def test_ended(name, kind, stage, engine_of):
    """An engine is killed at each step, and another one started."""
    first = engine_of(stage)
    begun(first, stage, kind, kind.steps[0])
    module = "tests.connectors.contract.killed"
    with subprocess.Popen(
        [sys.executable, "-m", module, name, stage.endpoint],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as engines:
        for step in (step for step in steps_of("ended") if step in kind.steps):
            engines.stdin.write(f"{step.value}\n")
            engines.stdin.flush()
            assert engines.stdout.readline() == "-9\n", f"it did not end {step.value}"
            stage.wait_until_free()
            assert first.answer(PREFIX) == CACHED
            first.settle()
        engines.stdin.close()
    is_well(engine_of(stage), stage)


def test_absent(kind):
    with tempfile.TemporaryDirectory() as nowhere:
        engine = kind(f"ipc://{nowhere}/client.sock")
        assert engine.answer(PREFIX) == 0
        assert engine.answer(PREFIX) == 0
        engine.settle()
        engine.close()


@pytest.mark.parametrize(
    "what", ["page size", "dtype", "tag", "layers", "heads", "family", "ranks"]
)
def test_unlike(kind, engine_of, what, caplog):
    """Once an engine is started without a word, and once the daemon comes back with such a pool."""
    if what not in kind.unlike:
        pytest.skip("of this engine's pools that is never unlike")
    settings, told = kind.unlike[what]
    with stage_for(kind.pool) as stage:
        engine = engine_of(stage)
        assert engine.answer(PREFIX) == 0
        engine.settle()
        stage.kill()
        of_pool = settings if "pool.family" in settings else {**kind.pool, **settings}
        before = stage.daemon._settings
        kept = {key: value for key, value in before.items() if not key.startswith("pool.")}
        stage.daemon._settings = kept | of_pool
        stage.start()
        end_s = time.monotonic() + COMES_S
        while told not in caplog.text:
            assert time.monotonic() < end_s, "it is never said"
            assert engine.answer(PROMPT) == 0
            engine.settle()
            time.sleep(0.01)
        assert engine.answer(PROMPT) == 0
        engine.settle()
        stage.wait_until_free()
        with pytest.raises(KvdError) as refused:
            kind(stage.endpoint)
        assert refused.value.code == "layout-mismatch"
        assert told in str(refused.value)
        assert "[pool]" in str(refused.value), "it says which section fits"
        engine.close()


def test_other_model(stage, engine_of):
    one, other = engine_of(stage), engine_of(stage, model="other")
    for engine in (one, other):
        assert engine.answer(PREFIX) == 0
        engine.settle()
    for engine in (one, other):
        assert engine.answer(PROMPT) == CACHED
        engine.settle()
    stage.wait_until_free()


def test_other_version(kind, stage, monkeypatch):
    told = kind.with_other_version(stage.endpoint, monkeypatch)
    assert "tested with" in told
    assert "any_version" in told
    stage.wait_until_free()


def test_every_case_has_a_test():
    assert {f"test_{case.deed}" for case in CASES} <= set(globals())
