"""A clean stop writes what is cached before the pool goes; cut at any moment, it leaves no half."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.daemon.kv import PAGE
from tests.daemon.test_tiers import LIMIT_S, PROMPT_PAGES, PROMPT_TOKENS, Tiered, settings
from tests.support.daemons import Daemon

N_PROMPTS = 7
"""They have room in the pool, and none is next to be evicted."""
PATIENT = {"log.level": "info", "tiers.disk.deadline_s": "30", "tiers.disk.stop_s": "30"}
"""A host may be busy."""
N_PAGES = N_PROMPTS * PROMPT_PAGES


@pytest.fixture
def make(tmp_path):
    """Makes a daemon with a tier and cached prompts, of which nothing is written."""
    made: list[Tiered] = []

    def one(**sets) -> Tiered:
        daemon = Daemon("solo", tmp_path, settings(tmp_path, **(PATIENT | sets)))
        made.append(tiered := Tiered(daemon, tmp_path))
        tiered.start()
        tiered.until(lambda: tiered.tier.state == "serving", "the tier does not serve")
        for number in range(N_PROMPTS):
            tiered.compute(number)
        return tiered

    yield one
    for tiered in made:
        tiered.daemon.stop()


def slow_down(tiered: Tiered) -> None:
    """Stop the storage process."""
    os.kill(tiered.daemon.storage_pid(), signal.SIGSTOP)


def ended(tiered: Tiered) -> int:
    """Its status, once it has ended by itself."""
    status = tiered.daemon._process.wait(LIMIT_S)
    tiered.daemon.stop()  # its other processes
    return status


def found_again(tiered: Tiered) -> list[int]:
    """Start it again: of each prompt how many tokens are found, with the bytes that it had."""
    tiered.start()
    tiered.until(lambda: tiered.tier.state == "serving", "the tier does not serve")
    return [tiered.lease(number) for number in range(N_PROMPTS)]


def test_what_is_cached_at_a_clean_stop_is_found_by_the_next_daemon(make):
    tiered = make()
    before = tiered.files()
    assert before < N_PAGES

    tiered.daemon.ask_to_stop()

    assert ended(tiered) == 0
    assert tiered.files() == N_PAGES
    assert found_again(tiered) == [PROMPT_TOKENS] * N_PROMPTS
    assert tiered.tier.bad == 0
    tiered.assert_nothing_is_held()


def test_the_hottest_is_the_youngest_on_disk_also_where_it_was_there_before(make):
    tiered = make(**{"tiers.disk.max_moving": "64KiB"})
    tiered.fill(N_PROMPTS + 2)
    written = [number for number in range(N_PROMPTS) if tiered.object_of(number, 0).exists()]
    assert 0 in written
    # In the pool too, and used last: its files are the oldest there.
    assert tiered.lease(0) == PROMPT_TOKENS

    tiered.daemon.ask_to_stop()
    assert ended(tiered) == 0

    hottest_first = [0, *reversed(range(1, N_PROMPTS + 2))]
    assert tiered.objects()[::-1] == [
        tiered.object_of(number, page) for number in hottest_first for page in range(PROMPT_PAGES)
    ]


@pytest.mark.parametrize("stop_s", ["0", "30"])
def test_a_stop_says_what_it_writes_or_loses_it(make, stop_s):
    tiered = make(**{"tiers.disk.stop_s": stop_s})

    tiered.daemon.ask_to_stop()
    assert ended(tiered) == 0

    words = tiered.daemon.quoted_log()
    assert ("stop-demotion-ended" in words) == (stop_s == "30")
    assert (found_again(tiered) == [PROMPT_TOKENS] * N_PROMPTS) == (stop_s == "30")


def test_a_disk_that_hangs_delays_a_stop_by_its_bound_and_no_longer(make):
    tiered = make(**{"tiers.disk.stop_s": "1"})
    slow_down(tiered)
    began_s = time.monotonic()

    tiered.daemon.ask_to_stop()

    assert ended(tiered) == 0
    assert time.monotonic() - began_s >= 1.0
    assert "its time was over" in tiered.daemon.quoted_log()


def test_a_second_signal_ends_it_at_once_and_what_is_there_is_whole(make):
    tiered = make()
    slow_down(tiered)
    tiered.daemon.ask_to_stop()
    tiered.until(lambda: tiered.tier.writing > 0, "writes nothing")
    owners = {lease.reason for lease in tiered.daemon.snapshot().leases}
    assert owners == {"demotion to disk at stop"}

    tiered.daemon._process.send_signal(signal.SIGTERM)

    assert ended(tiered) == 1
    found = found_again(tiered)
    assert all(tokens % PAGE == 0 for tokens in found)
    assert tiered.tier.bad == 0
    tiered.assert_nothing_is_held()


@pytest.mark.parametrize("who", ["daemon", "storage"])
@pytest.mark.parametrize("n_files", [1, 30, 90])
def test_a_kill_at_any_moment_leaves_whole_objects_and_the_hottest(make, who, n_files):
    tiered = make(**{"tiers.disk.max_moving": "64KiB"})
    before = tiered.files()
    storage = tiered.daemon.storage_pid()

    tiered.daemon.ask_to_stop()
    until_s = time.monotonic() + LIMIT_S
    while tiered.files() < min(before + n_files, N_PAGES) and time.monotonic() < until_s:
        time.sleep(0.0005)
    if who == "daemon":
        tiered.daemon.kill()
        tiered.daemon.stop()
    else:
        with contextlib.suppress(ProcessLookupError):  # it may have ended with its daemon
            os.kill(storage, signal.SIGKILL)
        assert ended(tiered) == 0

    n_there = tiered.files()
    found = found_again(tiered)
    # The last one was written first: of a prompt nothing is found before all of the one after it.
    assert found == sorted(found)
    assert tiered.tier.bad == 0
    assert sum(found) <= n_there * PAGE
    tiered.assert_nothing_is_held()
