"""The log's stream never makes its writer wait, whatever its reader does."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time

import pytest

from kvd.observe import log as spill_module
from kvd.observe.log import GATHER_S, EventLog, Fed, JsonLines, Spill
from kvd.wire import events


class Stuck(io.StringIO):
    """Takes nothing until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def write(self, text: str) -> int:
        self.go_on.wait(10)
        return super().write(text)


def test_lines_come_out_in_order() -> None:
    stream = io.StringIO()
    spill = Spill(stream)
    for number in range(1000):
        spill.put(f"{number}\n")
    spill.close(10)
    assert stream.getvalue().split() == [str(number) for number in range(1000)]
    assert spill.take_lost() == 0


def test_a_writer_does_not_wait_for_a_reader_that_does_not_read() -> None:
    """A pipe that nobody reads takes 64 KiB; the writer goes on, and what is lost is counted."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w")
    spill = Spill(stream)
    line = "x" * 1023 + "\n"
    n_lines = 2 * spill_module.MAX_WAITING_CHARS // len(line)
    slowest_s = 0.0
    for _ in range(n_lines):
        begin_s = time.monotonic()
        spill.put(line)
        slowest_s = max(slowest_s, time.monotonic() - begin_s)
    spill.close(0.05)

    assert slowest_s < 0.5
    assert n_lines // 2 <= spill.take_lost() < n_lines
    os.close(reading)
    spill.close(10)
    with contextlib.suppress(OSError):
        stream.close()


class Counting(io.StringIO):
    """Counts how often it is written to."""

    writes = 0

    def write(self, text: str) -> int:
        self.writes += 1
        return super().write(text)


def test_lines_of_a_busy_loop_are_written_together_and_an_urgent_one_with_all_before_it() -> None:
    stream = Counting()
    spill = Spill(stream)
    begin_s = time.monotonic()
    for number in range(100):
        spill.put(f"{number}\n")
        time.sleep(0.0005)
    spill.put("urgent\n", is_urgent=True)
    took_s = time.monotonic() - begin_s
    while "urgent" not in stream.getvalue() and time.monotonic() - begin_s < 10:
        time.sleep(0.0005)
    spill.close(10)

    assert stream.getvalue().split() == [*map(str, range(100)), "urgent"]
    assert stream.writes <= 3 + took_s / GATHER_S


def test_a_warning_does_not_wait_for_others_and_takes_along_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spill_module, "GATHER_S", 60)
    stream = io.StringIO()
    log = EventLog(level="info", processors=[JsonLines("n")], stream=stream, spill=Spill(stream))
    log.write(events.Flushed(1, 0.0, freed_pages=2, kept_pages=3))
    time.sleep(0.05)
    early = stream.getvalue()
    log.write(Fed(unfed_s=1.0))
    deadline_s = time.monotonic() + 10
    while "watchdog-fed" not in stream.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    said = stream.getvalue().splitlines()
    log.close()

    assert early == ""
    assert ['"event":"flushed"' in said[0], '"event":"watchdog-fed"' in said[1]] == [True, True]


def test_what_cannot_be_written_is_counted() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stream = os.fdopen(writing, "w")
    spill = Spill(stream)
    spill.put("a\n")
    spill.put("b\n")
    spill.close(10)
    assert spill.take_lost() == 2
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_the_log_says_how_many_lines_its_reader_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stuck()
    spill = Spill(stream)
    monkeypatch.setattr(spill_module, "MAX_WAITING_CHARS", 300)
    log = EventLog(level="info", processors=[JsonLines("n")], stream=stream, spill=spill)
    for number in range(100):
        log.crashed(f"task {number}", ValueError("x"))

    stream.go_on.set()
    deadline_s = time.monotonic() + 10
    while "task" not in stream.getvalue() and time.monotonic() < deadline_s:
        time.sleep(0.001)
    log.crashed("the last", ValueError("x"))
    log.close()

    said = stream.getvalue().splitlines()
    assert '"event":"lines-lost"' in said[-2]
    assert "the last" in said[-1]
