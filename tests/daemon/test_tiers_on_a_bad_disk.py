"""A disk that is slow, and one that does not answer at all, so that no signal ends who waits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.daemon.kv import PAGE_BYTES
from tests.daemon.test_tiers import LIMIT_S, PROMPT_TOKENS, Tiered, settings
from tests.support.daemons import Daemon, DaemonFailed
from tests.support.disks import LoopDisk, loop_disk

if TYPE_CHECKING:
    from collections.abc import Iterator

N_BYTES = 64 * 2**20
DEADLINE_S, WAIT_S = 2, 1


@pytest.fixture
def disk(tmp_path) -> Iterator[LoopDisk]:
    with loop_disk(tmp_path / "tier", N_BYTES) as found:
        yield found


@pytest.fixture
def tiered(tmp_path, disk) -> Iterator[Tiered]:
    """With prompts on that disk of which nothing is in the kernel's memory."""
    sets = {"tiers.disk.wait_s": str(WAIT_S), "tiers.disk.deadline_s": str(DEADLINE_S)}
    made = Tiered(Daemon("solo", tmp_path, settings(tmp_path, **sets)), tmp_path)
    made.start()
    disk.take(made.daemon.pid)
    disk.take(made.daemon.storage_pid())
    made.fill()
    disk.forget()
    yield made
    disk.thaw()
    made.daemon.stop()


def hangs(pid: int) -> bool:
    """Whether it is in the kernel for good."""
    states = [path.read_text().rpartition(")")[2].split()[0] for path in tasks(pid)]
    return "D" in states


def tasks(pid: int) -> list[Path]:
    return list(Path(f"/proc/{pid}/task").glob("*/stat"))


def until_hanging(tiered: Tiered) -> int:
    """Have something written until the storage process hangs; its pid."""
    storage = tiered.daemon.storage_pid()
    number = 0
    until_s = time.monotonic() + LIMIT_S
    while not hangs(storage):
        tiered.compute(number % len(tiered.prompts))
        number += 1
        assert time.monotonic() < until_s, "nobody hangs"
    return storage


@pytest.mark.skipif(not LoopDisk.can_be_slow, reason="there is no cgroup that slows a loop device")
def test_a_slow_disk_costs_the_time_that_a_request_waits_for_it_and_no_more(tiered, disk):
    storage = tiered.daemon.storage_pid()
    disk.read_at(8 * PAGE_BYTES)  # three seconds for a prompt

    began_s = time.monotonic()
    found = tiered.lease(0)
    took_s = time.monotonic() - began_s
    disk.read_at(0)

    assert found < PROMPT_TOKENS
    assert WAIT_S / 2 < took_s < LIMIT_S
    tiered.until_found(1)
    tiered.assert_nothing_is_held()
    # It has answered within its deadline, piece by piece.
    assert tiered.tier.bad == 0
    assert storage in {tiered.daemon.storage_pid(), 0}


def test_a_disk_that_does_not_answer_costs_hits_until_it_does(tiered, disk):
    before = dict(tiered.digests)
    disk.freeze()
    storage = until_hanging(tiered)

    began_s = time.monotonic()
    for number in range(6):
        tiered.lease(number)
        tiered.compute(number)
    took_s = time.monotonic() - began_s
    tiered.daemon.wait_for(
        lambda: not tiered.daemon.snapshot().waiting, "somebody waits for it", LIMIT_S
    )
    # Ordered to end, and it does not: what it may still read is its lease's.
    tiered.until(lambda: tiered.tier.state == "away", "is ordered still")
    assert "its process is being killed: " in tiered.tier.why
    assert hangs(storage)
    waits = tiered.tier.waits
    tiered.lease(5)
    assert tiered.tier.waits == waits
    held = [lease.reason for lease in tiered.daemon.snapshot().leases]
    assert held
    assert all(reason.startswith(("demotion", "promotion")) for reason in held)
    disk.thaw()

    tiered.until(lambda: tiered.tier.generation > 1, "there is no next one")
    assert took_s < LIMIT_S
    assert tiered.digests == before
    tiered.compute(0)
    tiered.until_found(0)
    tiered.assert_nothing_is_held()


def test_a_daemon_ends_in_time_whose_disk_does_not_answer(tiered, disk):
    disk.freeze()
    until_hanging(tiered)

    tiered.daemon.ask_to_stop()
    until_s = time.monotonic() + LIMIT_S
    while tiered.daemon.is_running:
        assert time.monotonic() < until_s, tiered.daemon.quoted_log()
        time.sleep(0.1)
    assert "Traceback" not in tiered.daemon.quoted_log()
    assert "pending" not in tiered.daemon.quoted_log()


def test_a_daemon_that_was_killed_and_whose_disk_does_not_answer_is_told_of(tiered, disk):
    disk.freeze()
    storage, daemon = until_hanging(tiered), tiered.daemon.pid

    tiered.daemon.kill()
    tiered.daemon.start()
    with pytest.raises(DaemonFailed) as refused:
        tiered.daemon.wait_ready()
    disk.thaw()
    tiered.start()

    assert f"is locked by pid {storage}, which kvd {daemon} has left behind" in str(refused.value)
    tiered.compute(0)
    tiered.until_found(1)
    tiered.assert_nothing_is_held()
