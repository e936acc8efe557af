"""The shadow follows the ring, and what is saved replays: over random worlds, without processes."""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.handoff.quarantine import Quarantines
from kvd.core.node import NodeState
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.recorder import recording, replay, ring
from kvd.recorder.input_records import mark_of, record_of, record_of_mark
from kvd.recorder.kept_records import KeptRecords
from kvd.recorder.orders import BeginRecording
from kvd.recorder.player import Strayed
from kvd.recorder.process import FULL_SHARE
from kvd.recorder.shadow_node import ShadowNode
from kvd.wire.events import DrainEnded
from tests.core.families import SPECS, worked
from tests.property.recorded import recorded

if TYPE_CHECKING:
    from kvd.core.settings import Settings

BEGIN = BeginRecording("x", "0" * 32, "0.1.0", 3.0, "/nowhere", 1.0)
SIZE = 16 * 4096


class Life(NamedTuple):
    """What went into a node, from its birth on."""

    settings: Settings
    born_s: float
    log: list[inputs.Input]


def of_family(family: str) -> Life:
    """A node of that pool, and what a random engine did with it."""
    engine = worked(family, seed=6, steps=500)
    return Life(engine.node.settings, 1.0, engine.log)


class Taped:
    """One node of a storm, or of another life, fed again into a node that is taped."""

    def __init__(self, source: int | Life, begin: BeginRecording = BEGIN) -> None:
        if isinstance(source, int):
            source = max(recorded(source), key=lambda life: len(life.log))
        self.life = source
        self.node = NodeState(self.life.settings, self.life.born_s)
        self._descriptor = ring.create(SIZE)
        self.writer, self.reader = (
            ring.RecordRing(self._descriptor),
            ring.RecordRing(self._descriptor),
        )
        self.begin = begin
        self.records = KeptRecords(self.reader, self.life.born_s)
        self.shadow = ShadowNode(thaw(freeze(self.node)), self.records, begin)
        self.events = []

    def close(self) -> None:
        self.writer.close()
        self.reader.close()
        os.close(self._descriptor)

    def feed(self, happened: inputs.Input) -> None:
        if self.node.steps % 20 == 0:
            assert self.writer.write(record_of_mark(mark_of(self.node), happened.at_s).headed())
        record = record_of(happened)
        assert self.writer.write(record.headed(), record.tokens)
        self.events += self.node.step(happened).events

    def follow(self, now_s: float = 0.0) -> None:
        self.records.look()
        now_s = now_s or self.node.out.at_s
        while self.records.is_due(now_s, keep_s=self.begin.keep_s, full_share=FULL_SHARE):
            self.shadow.step()


@pytest.fixture
def tape(request):
    """A ``Taped`` world that is closed afterwards."""
    made = Taped(of_family(request.param) if isinstance(request.param, str) else request.param)
    yield made
    made.close()


@pytest.mark.parametrize("tape", [*range(6), *SPECS], indirect=True)
def test_what_is_saved_at_any_time_replays_to_the_state_of_the_live_node(tape, tmp_path):
    rng = random.Random(tape.life.born_s)
    for number, happened in enumerate(tape.life.log):
        tape.feed(happened)
        if rng.random() < 0.2:
            tape.follow()
        if number % 97 == 50:
            file = tmp_path / f"{number}.kvdrec"
            tape.shadow.save(file, "a test", tape.writer.end, state_hash(tape.node))
            saved = recording.read(file)
            node = replay.begin(saved)
            first = node.out.seq
            told = []
            outcome = replay.replay(saved, node, told.append, is_checking=True)
            assert outcome.is_equal
            assert (outcome.state_hash, outcome.broken) == (state_hash(tape.node), ())
            assert outcome.inputs == saved.header.inputs
            assert told == tape.events[first:]
            assert freeze(node) == freeze(tape.node)


@pytest.mark.parametrize("tape", [6], indirect=True)
def test_what_the_daemon_writes_after_the_save_was_ordered_is_not_counted_in_it(tape, tmp_path):
    for happened in tape.life.log[:30]:
        tape.feed(happened)
    upto, at_s = tape.writer.end, tape.node.out.at_s
    for happened in tape.life.log[30:60]:
        tape.feed(happened)

    header = tape.shadow.save(tmp_path / "saved", "test", upto, "")

    assert (header.inputs, header.seconds) == (30, at_s - tape.life.born_s)


@pytest.mark.parametrize("tape", [3], indirect=True)
def test_the_ring_reaches_back_as_far_as_was_asked_and_no_farther(tape):
    for happened in tape.life.log:
        tape.feed(happened)
        tape.follow()
        covered = tape.records.covered()
        assert covered.n_bytes <= SIZE * 3 // 4
        assert covered.inputs <= tape.node.steps

    oldest_s = tape.reader.read(tape.reader.begin)[0].at_s
    assert tape.node.out.at_s - oldest_s <= BEGIN.keep_s
    assert covered.seconds <= BEGIN.keep_s + 1.0


def test_many_inputs_at_once_push_older_ones_out_by_their_bytes():
    tape = Taped(1, msgspec.structs.replace(BEGIN, keep_s=1e9))
    for number in range(3000):
        tape.feed(inputs.Tick(1.0 + number / 1000))
        tape.follow()

    assert SIZE // 2 < tape.records.covered().n_bytes <= SIZE * 3 // 4
    tape.close()


@pytest.mark.parametrize("tape", [2], indirect=True)
def test_a_twin_that_is_not_what_the_node_was_is_found_at_the_next_mark(tape):
    for happened in tape.life.log[:60]:
        tape.feed(happened)
    tape.node.out.seq += 1  # something that no input did
    for happened in tape.life.log[60:100]:
        tape.feed(happened)

    with pytest.raises(Strayed, match="last seen equal at step 40"):
        tape.follow(float("inf"))


@pytest.mark.parametrize("tape", [4], indirect=True)
def test_a_step_that_raised_raises_again_and_the_replay_goes_on(tape, tmp_path, monkeypatch):
    def quiet(quarantines, got):
        quarantines._out.emit(DrainEnded(lasted_s=1.0))
        raise RuntimeError("planted")

    monkeypatch.setattr(Quarantines, "quiet", quiet)
    node = NodeState(tape.life.settings, tape.life.born_s)
    tape.node, tape.shadow = node, ShadowNode(thaw(freeze(node)), tape.records, BEGIN)
    for number in range(40):
        happened = inputs.Quiet(1.0, 1) if number == 25 else inputs.Tick(1.0 + number / 100)
        try:
            tape.feed(happened)
        except RuntimeError:
            tape.node.out.drain()
    file = tmp_path / "one.kvdrec"
    tape.shadow.save(file, "a test", tape.writer.end, state_hash(tape.node))

    saved = recording.read(file)
    outcome = replay.replay(saved, replay.begin(saved), tape.events.append)

    assert outcome.is_equal
    assert [(one.step, one.happened, one.error) for one in outcome.bugs] == [
        (26, "Quiet", "RuntimeError('planted')")
    ]


@pytest.mark.parametrize("tape", [5], indirect=True)
def test_another_state_than_the_live_node_had_is_no_equal_replay(tape, tmp_path):
    for happened in tape.life.log[:50]:
        tape.feed(happened)
    file = tmp_path / "one.kvdrec"
    tape.shadow.save(file, "a test", tape.writer.end, "0" * 64)
    saved = recording.read(file)

    outcome = replay.replay(saved, replay.begin(saved), tape.events.append)

    assert not outcome.is_equal
    assert outcome.state_hash == state_hash(tape.node)


@pytest.mark.parametrize("tape", [6], indirect=True)
def test_a_replay_stops_after_the_step_that_makes_the_event_it_was_asked_for(tape, tmp_path):
    for happened in tape.life.log[:80]:
        tape.feed(happened)
    file = tmp_path / "one.kvdrec"
    tape.shadow.save(file, "a test", tape.writer.end, state_hash(tape.node))
    saved = recording.read(file)
    told = []

    outcome = replay.replay(saved, replay.begin(saved), told.append, until=10)

    assert outcome.last_event >= 10 > told[0].seq
    assert outcome.inputs < 80
    assert outcome.stopped == f"event {outcome.last_event} was reached, as asked"
    assert outcome.is_equal
