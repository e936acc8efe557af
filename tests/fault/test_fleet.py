"""What the campaign relies on."""

from __future__ import annotations

import subprocess
import sys
import time

from tests.fault.fleet import frozen
from tests.fault.load import Stops


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def test_a_process_goes_on_when_the_last_of_those_who_stopped_it_lets_go() -> None:
    """Faults overlap: the end of one must not end the other."""
    waits = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with frozen(waits.pid):
            with frozen(waits.pid):
                inner = _wait_for(waits.pid, "T")
            between = _state(waits.pid)
        after = _wait_for(waits.pid, "SRD")
    finally:
        waits.kill()
        waits.communicate()

    assert (inner, between) == ("T", "T")
    assert after in "SRD"


def _wait_for(pid: int, states: str) -> str:
    """Its state once that is one of ``states``, or after many looks."""
    for _ in range(100_000):
        state = _state(pid)
        if state in states:
            return state
    return state


def test_absences_that_overlap_count_once_and_only_since_then(monkeypatch) -> None:
    now = [10.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    absences = Stops()
    with absences.span():  # from 10 to 14
        now[0] = 12.0
        with absences.span():
            now[0] = 14.0
    now[0] = 20.0

    assert absences.since(0.0) == 4.0
    assert absences.since(13.0) == 1.0
    assert absences.since(15.0) == 0.0
    with absences.span():
        now[0] = 23.0
        assert absences.since(15.0) == 3.0
