"""The recorder process holds little while nothing must give way, and nothing is lost by that."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from kvd.core import inputs
from kvd.core.node import NodeState
from kvd.core.replay.freeze import freeze, state_hash
from kvd.recorder import orders, recording, replay, ring
from kvd.recorder.input_records import mark_of, record_of, record_of_mark
from tests.core.side import settings

KEEP_S = 1.0
WAIT_S = 60.0


class Recorded:
    """A node that is fed and recorded by a real process."""

    def __init__(self, directory: Path) -> None:
        self.node = NodeState(settings("n", 40), time.monotonic())
        self.directory = directory
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.link.settimeout(WAIT_S)
        memory = ring.create(2**16)
        self.ring = ring.RecordRing(memory)
        base = os.memfd_create("base")
        os.pwrite(base, freeze(self.node), 0)
        passed = (theirs.fileno(), memory, base)
        self.process = subprocess.Popen(orders.command(passed), pass_fds=passed)
        for one in (memory, base):
            os.close(one)
        theirs.close()
        begin = orders.BeginRecording(
            "n", "0" * 32, "0.1.0", KEEP_S, str(directory), self.node.out.at_s
        )
        self.link.send(orders.encode(begin))

    def tick(self) -> None:
        now_s = time.monotonic()
        if self.node.steps % 10 == 5:
            assert self.ring.write(record_of_mark(mark_of(self.node), now_s).headed())
        tick = inputs.Tick(now_s)
        assert self.ring.write(record_of(tick).headed())
        self.node.step(tick)

    @property
    def command(self) -> list[bytes]:
        return Path(f"/proc/{self.process.pid}/cmdline").read_bytes().split(b"\0")[:-1]

    def loaded(self, library: str) -> bool:
        return library in Path(f"/proc/{self.process.pid}/maps").read_text("ascii")

    def tick_until(self, is_so) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while not is_so():
            assert time.monotonic() < deadline_s
            assert self.process.poll() is None
            self.tick()
            time.sleep(0.02)

    def saved(self) -> recording.Recording:
        self.link.send(orders.encode(orders.Save(1, "record", "a test", self.ring.end, self.hash)))
        while True:
            report = orders.REPORTS.decode(self.link.recv(orders.PACKET_BYTES))
            assert not isinstance(report, orders.ShadowStrayed | orders.NotSaved)
            if isinstance(report, orders.SavedFile):
                return recording.read(Path(report.path))

    @property
    def hash(self) -> str:
        return state_hash(self.node)


@pytest.fixture
def recorded(tmp_path):
    made = Recorded(tmp_path)
    yield made
    made.process.kill()
    made.process.wait()
    made.link.close()
    made.ring.close()


def test_the_core_is_loaded_when_something_must_give_way_and_gone_again_behind_it(recorded):
    recorded.tick_until(lambda: recorded.node.steps > 20)
    assert not recorded.loaded("numpy")
    number = recorded.process.pid

    recorded.tick_until(lambda: recorded.loaded("numpy"))
    assert recorded.ring.end > recorded.ring.begin
    # With inputs that come, and fall due, all the time.
    recorded.tick_until(lambda: not recorded.loaded("numpy") and len(recorded.command) == 8)
    steps = recorded.node.steps

    recorded.tick_until(lambda: recorded.node.steps > steps + 20)
    saved = recorded.saved()
    outcome = replay.replay(saved, replay.begin(saved), lambda event: None)
    assert (outcome.is_equal, outcome.stopped, outcome.state_hash) == (True, "", recorded.hash)
    assert outcome.inputs == saved.header.inputs
    assert recorded.process.pid == number


def test_a_recording_of_what_was_only_watched_replays_and_so_does_that_of_a_crash(
    recorded, tmp_path
):
    recorded.tick_until(lambda: recorded.node.steps > 20)

    saved = recorded.saved()
    recorded.tick()
    recorded.link.close()
    recorded.process.wait(WAIT_S)

    (crashed,) = tmp_path.glob("n-crash-*")
    for one, steps in (
        (saved, recorded.node.steps - 1),
        (recording.read(crashed), recorded.node.steps),
    ):
        node = replay.begin(one)
        assert replay.replay(one, node, lambda event: None).is_equal
        assert node.steps == steps
    assert state_hash(node) == recorded.hash
