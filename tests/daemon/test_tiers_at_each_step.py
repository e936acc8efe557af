"""A storage process and a daemon that are killed at each step of what moves between pool and disk.

The steps are data; a real process stands at one of them when it, or its daemon, is killed. Then
nothing of what lay on the disk is lost, nothing there is torn, nobody has a page, and both ways
work again. At every other step it is the daemon that is killed, or with ``KVD_EVERY_VICTIM=1`` both
in turn.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from kvd.daemon.beats import TICK_S
from kvd.errors import KvdError
from kvd.storage.objects import BadObject, read_head, sum_of
from kvd.storage.sizes import HEAD_BYTES
from kvd.wire import admin
from tests.daemon.kv import PAGE, PAGE_BYTES
from tests.daemon.test_tiers import (
    LIMIT_S,
    OBJECT_BYTES,
    PATIENT,
    Tiered,
    settings,
)
from tests.support.breakpoints import Breakpoints, Step
from tests.support.compiled import IS_COMPILED
from tests.support.daemons import Daemon

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORKER, LANE, POSIX, FILES = (
    f"kvd/storage/{name}.py" for name in ("worker", "lane", "posix", "nixl_files")
)
SUPERVISOR, PROCESS, REACTOR = (
    "kvd/daemon/storage_supervisor.py",
    "kvd/transfer/process.py",
    "kvd/daemon/reactor.py",
)

DEMOTION = (
    Step("the order is decided", "daemon", f"{SUPERVISOR}:order", "call", of="Demote"),
    Step("the order is sent", "daemon", f"{PROCESS}:order", "return", of="Demote"),
    Step("the order is taken", "storage", f"{LANE}:want", "call", of="Demote"),
    Step("pages are summed", "storage", f"{LANE}:_writes", "return"),
    Step("a file is made", "storage", f"{POSIX}:_reserve", "call"),
    Step("there is room for it", "storage", f"{POSIX}:_reserve", "return", nth=3),
    Step("its head is written", "storage", f"{POSIX}:_draft", "return", nth=3),
    # Two rows for each of them: of memory, and of its file.
    Step("some bodies are written", "storage", f"{FILES}:_rows", "call", nth=7),
    Step("all bodies are written", "storage", f"{FILES}:_move", "return"),
    Step("before the first rename", "storage", f"{POSIX}:_named", "c_call rename"),
    Step("behind the first rename", "storage", f"{POSIX}:_named", "return"),
    Step("some have their names", "storage", f"{POSIX}:_named", "c_call rename", nth=5),
    Step("all have, before the answer", "storage", f"{LANE}:_demoted", "call"),
    Step("the answer is on its way", "storage", f"{WORKER}:_report", "return", of="Demoted"),
    Step("the answer is read", "daemon", f"{SUPERVISOR}:_on_reports", "call", of="Demoted"),
    Step("the answer is heard", "daemon", f"{REACTOR}:_carry_out", "call", of="Demoted"),
    Step("and what it led to is done", "daemon", f"{REACTOR}:_carry_out", "return", of="Demoted"),
)
PROMOTION = (
    Step("the order is decided", "daemon", f"{SUPERVISOR}:order", "call", of="Promote"),
    Step("the order is sent", "daemon", f"{PROCESS}:order", "return", of="Promote"),
    Step("the order is taken", "storage", f"{LANE}:want", "call", of="Promote"),
    Step("some files are open", "storage", f"{POSIX}:_opened", "return", nth=5),
    Step("a head is judged", "storage", f"{POSIX}:_source", "return"),
    Step("the read is begun", "storage", f"{FILES}:_rows", "call", nth=3),
    Step("some of it is read", "storage", f"{FILES}:_rows", "call", nth=11),
    Step("all of it is read", "storage", f"{FILES}:_move", "return"),
    Step("it counts as used", "storage", f"{POSIX}:get", "return"),
    Step("a sum is compared", "storage", f"{LANE}:_wrong", "return", nth=4),
    Step("all sums are, before the answer", "storage", f"{LANE}:_promoted", "call"),
    Step("the answer is on its way", "storage", f"{WORKER}:_report", "return", of="Promoted"),
    Step("the answer is read", "daemon", f"{SUPERVISOR}:_on_reports", "call", of="Promoted"),
    Step("pages are handed over", "daemon", f"{REACTOR}:_carry_out", "call", of="Promoted"),
    Step("and who waited is told", "daemon", f"{REACTOR}:_carry_out", "return", of="Promoted"),
)
VICTIMS = ("storage", "daemon")
PAGES = 60
"""Of a prompt; some orders each, and the pool has room for four of them."""
N_CACHED = 6
"""Prompts before a step: the disk has what the pool has no room for, and the next one to go."""

IDLE_TICKS = 3


def cases(steps: tuple[Step, ...]) -> list:
    """Each step with its victim; compiled functions cannot be watched."""
    each_has = 1 if "KVD_EVERY_VICTIM" in os.environ else len(VICTIMS)
    return [
        pytest.param(
            step,
            victim,
            id=f"{step.words}: {victim}".replace(" ", "-"),
            marks=pytest.mark.skipif(
                IS_COMPILED and REACTOR in step.at, reason="compiled functions cannot be watched"
            ),
        )
        for number, step in enumerate(steps)
        for victim in VICTIMS[number % each_has :: each_has]
    ]


@pytest.fixture(scope="module")
def stops(tmp_path_factory) -> Breakpoints:
    return Breakpoints(tmp_path_factory.mktemp("steps") / "stops", (*DEMOTION, *PROMOTION))


@pytest.fixture(scope="module")
def serving(tmp_path_factory, stops) -> Iterator[Tiered]:
    place = tmp_path_factory.mktemp("each")
    tiered = Tiered(Daemon("solo", place, settings(place, **PATIENT)), place, PAGES)
    with stops.inherited():
        tiered.start()
        yield tiered
        tiered.daemon.stop()


@pytest.fixture
def tiered(serving) -> Tiered:
    """With some prompts cached, and nothing else."""
    if not serving.daemon.is_running:
        serving.start()
    is_serving(serving)
    serving.daemon.ask(admin.Flush(1), admin.Report)
    serving.digests.clear()
    for number in range(N_CACHED):
        serving.compute(number)
        until_written(serving)
    return serving


def until_written(tiered: Tiered) -> None:
    """Return when nothing has been written for some ticks."""
    idle = 0
    while idle < IDLE_TICKS:
        time.sleep(TICK_S)
        idle = 0 if tiered.tier.writing else idle + 1


def is_serving(tiered: Tiered) -> None:
    """Return when it is."""
    tiered.until(lambda: tiered.tier.state == "serving", "does not serve")


class Killing:
    """What is done by a client that may meet the end of its daemon, until that is over."""

    def __init__(self, tiered: Tiered, stops: Breakpoints) -> None:
        self.tiered, self.stops = tiered, stops

    def at(self, step: Step, victim: str, work) -> object:
        """Kill the victim when somebody stands at the step; what ``work`` gave, if it did."""
        tiered, stops, daemon = self.tiered, self.stops, self.tiered.daemon
        generation = tiered.tier.generation
        storage = daemon.storage_pid()
        stops.arm(step)
        with ThreadPoolExecutor(1) as pool:
            given = pool.submit(work)
            try:
                tiered.until(stops.stopped, f"nobody comes to {step.words!r}")
                stands = stops.stopped()
                assert stands == (storage if step.process == "storage" else daemon.pid)
                if victim == "daemon":
                    daemon.kill()
                    tiered.start()
                else:
                    os.kill(storage, signal.SIGKILL)
                    if stands != storage:
                        os.kill(stands, signal.SIGCONT)
                    tiered.until(
                        lambda: tiered.tier.generation > generation, "there is no next one"
                    )
                is_serving(tiered)
                with contextlib.suppress(*((KvdError,) if victim == "daemon" else ())):
                    return given.result(LIMIT_S)
            finally:
                stops.disarm()
                for pid in filter(None, [stops.stopped()]):
                    os.kill(pid, signal.SIGCONT)
        return None


@pytest.fixture
def killing(tiered, stops) -> Killing:
    return Killing(tiered, stops)


def lying(tiered: Tiered) -> set[Path]:
    """The files of objects; each is whole, and says what it is."""
    found = set(tiered.objects())
    for path in found:
        data, key = path.read_bytes(), bytes.fromhex(path.name)
        layout = bytes.fromhex(path.parents[2].name)
        assert len(data) == OBJECT_BYTES
        head = read_head(data[:HEAD_BYTES], key, layout, PAGE_BYTES)
        assert not isinstance(head, BadObject), head.why
        assert sum_of(key, [data[HEAD_BYTES:]]) == head.page_sum
    return found


def assert_is_whole(tiered: Tiered) -> None:
    """What lies there is what it should be and all that there is, and nobody has anything."""
    until_written(tiered)
    tiered.assert_nothing_is_held()
    lies = lying(tiered)
    assert not list(tiered.directory.glob("*/writing/*"))
    tiered.until(lambda: tiered.tier.objects == len(lies), f"{len(lies)} objects are not all known")
    assert tiered.tier.bad == 0
    assert (tiered.tier.writing, tiered.tier.reading, tiered.tier.waiting) == (0, 0, 0)


def on_disk(tiered: Tiered) -> list[int]:
    """Which prompts are there as a whole."""
    return [
        number
        for number in tiered.digests
        if all(tiered.object_of(number, page).exists() for page in range(PAGES))
    ]


@pytest.mark.parametrize(("step", "victim"), cases(DEMOTION))
def test_a_kill_within_a_demotion_loses_nothing(tiered, killing, step, victim):
    before = lying(tiered)

    killing.at(step, victim, lambda: tiered.compute(N_CACHED))

    assert before <= lying(tiered)
    assert_is_whole(tiered)
    there = on_disk(tiered)
    assert {0, 1, 2} <= set(there)
    # What is not there is in a pool that lives on.
    for number in there if victim == "daemon" else tiered.digests:
        assert tiered.lease(number) == PAGES * PAGE
        until_written(tiered)
    # Another pool full of prompts, of which the first ones leave it.
    for number in range(N_CACHED + 1, N_CACHED + 7):
        tiered.compute(number)
        until_written(tiered)
    assert len(lying(tiered)) > len(before)
    assert_is_whole(tiered)


@pytest.mark.parametrize(("step", "victim"), cases(PROMOTION))
def test_a_kill_within_a_promotion_costs_the_hit_and_nothing_else(tiered, killing, step, victim):
    before = lying(tiered)
    assert tiered.match(0) == 0

    found = killing.at(step, victim, lambda: tiered.lease(0))

    # What had come before counts; a long prompt takes several orders.
    assert found is None if victim == "daemon" else found in range(0, PAGES * PAGE + 1, PAGE)
    assert before <= lying(tiered)
    assert_is_whole(tiered)
    assert tiered.lease(0) == PAGES * PAGE
    assert tiered.lease(1) == PAGES * PAGE
    assert_is_whole(tiered)
