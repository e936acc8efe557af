"""What is saved by itself: a bug in a step, once a minute, and whatever a daemon did to its end."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvd.config.schema import RecorderSection
from kvd.core import inputs
from kvd.core.node import NodeState
from kvd.daemon.reactor import Reactor
from kvd.daemon.recording import FlightRecorder
from kvd.observe.bus import Bus
from kvd.recorder import recording
from kvd.recorder.input_records import input_of
from kvd.wire import events
from tests.core.side import settings


@pytest.fixture
async def recorded(tmp_path):
    """A reactor whose node is recorded by a real process, and what is set when a file is there."""
    bus, saved = Bus(), asyncio.Event()
    bus.subscribe(lambda event: saved.set(), wants=lambda kind: kind is events.RecordingSaved)
    node = NodeState(settings("b", 40), time.monotonic())

    def on_bug(task: str, error: BaseException) -> None:
        made.bug(task, error)

    reactor = Reactor(node, bus, clock=time.monotonic, on_bug=on_bug)
    made = FlightRecorder(reactor, RecorderSection(enabled=True), tmp_path / "recordings")
    made.begin()
    yield made, reactor, saved
    await made.stop(is_clean=True)


async def test_a_step_that_raises_is_saved_with_its_input_and_not_twice(recorded, tmp_path):
    _, reactor, is_saved = recorded

    def planted(got: inputs.Quiet) -> None:
        raise RuntimeError(f"lease {got.lease}")

    reactor.node._handlers[inputs.Quiet] = planted
    reactor.feed(inputs.Tick(time.monotonic()))
    for lease in (7, 8, 9):
        reactor.feed(inputs.Quiet(time.monotonic(), lease))
    async with asyncio.timeout(30.0):
        await is_saved.wait()

    (file,) = (tmp_path / "recordings").iterdir()
    saved = recording.read(file)
    taped = [input_of(one) for one in recording.records_in(saved.records) if not one.is_mark]
    assert "-bug-" in file.name
    assert saved.header.why == "a bug in step Quiet: RuntimeError('lease 7')"
    assert [type(one).__name__ for one in taped] == ["RecorderSaid", "Tick", "Quiet"]
    assert taped[-1].lease == 7


async def test_the_inputs_of_a_daemon_that_was_killed_are_all_there(recorded, tmp_path):
    made, reactor, _ = recorded
    child = made._child
    for lease in range(300):
        reactor.feed(inputs.Quiet(time.monotonic(), lease))

    # As the kernel does for a process that was killed; nothing has ticked since.
    child.hang_up()
    async with asyncio.timeout(30.0):
        await child.gone.wait()

    (file,) = (tmp_path / "recordings").iterdir()
    saved = recording.read(file)
    taped = [input_of(one) for one in recording.records_in(saved.records)]
    assert "-crash-" in file.name
    assert [one.lease for one in taped if type(one) is inputs.Quiet] == list(range(300))
