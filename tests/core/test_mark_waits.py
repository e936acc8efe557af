"""Orders to copy that wait for a late mark: said wherever somebody asks, and held by nobody."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvd.core import inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.core.leases.mark_waits import MOST_LATE
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.errors import Code
from kvd.types import page_ids
from kvd.wire import admin, client, events
from kvd.wire.attach import CopyEnds, CopyWaits
from tests.console.stage import Stage
from tests.core.side import PAGE
from tests.core.test_engine_copies import Engine
from tests.core.world import World

WAITS = "a save of 2 pages of lease 1 waits for the mark of engine rank 1 on cuda:0 since"


@pytest.fixture
def engine() -> Engine:
    return Engine(World())


def waits(engine: Engine, *, worker: int = 1, rank: int = 1, **more: object) -> int:
    engine.calls += 1
    message = CopyWaits(engine.calls, engine.lease, True, 2, 1_200_000, 58_800_000, "cuda:0")
    refusal = engine.side.copy_said(replace(message, **more), rank=rank, ranks=2, worker=worker)
    assert refusal is None, refusal
    return engine.calls


def why(engine: Engine, kind: str, number: int) -> str:
    said = engine.side.ask(admin.Why(1, kind, number))
    assert isinstance(said, admin.Because), said
    return "\n".join((said.sentence, *said.facts))


def marks(engine: Engine) -> list[int]:
    return [wait.call for wait in engine.side.node.engine_copies.marks]


def test_whoever_asks_hears_which_mark_is_waited_for_and_until_when(engine: Engine) -> None:
    waits(engine)
    (mark,) = snapshot(engine.side.node).late_marks
    assert (mark.session, mark.lease) == (1, engine.lease)
    assert mark.waited_s == pytest.approx(1.2)
    assert mark.left_s == pytest.approx(58.8)
    assert mark.words == f"{WAITS} 1.2 s, until 60.0 s"
    assert mark.words in why(engine, "lease", engine.lease)
    assert mark.words in why(engine, "client", 1)
    assert mark.words in why(engine, "page", page_ids(engine.row)[0])


def test_a_snapshot_has_the_oldest_of_an_engine_and_how_many_there_are(engine: Engine) -> None:
    waits(engine, waited_us=5_000_000)
    waits(engine, worker=2, waited_us=9_000_000)
    waits(engine, device="")
    oldest, other = snapshot(engine.side.node).late_marks
    assert (oldest.device, oldest.orders, oldest.waited_s) == ("cuda:0", 2, 9.0)
    assert oldest.words.endswith(", and 1 more")
    assert (other.device, other.orders) == ("", 1)


def test_a_console_is_told_and_more_gravely_once_its_process_should_have_given_up(
    engine: Engine,
) -> None:
    stage = Stage(engine.side)
    waits(engine)
    waits(engine)

    def late() -> list[tuple[str, str, str]]:
        rows = stage.rows("concerns").values()
        return [
            (row["severity"], row["subject"], row["evidence"])
            for row in rows
            if row["kind"] == "late-mark"
        ]

    ((severity, subject, evidence),) = late()
    assert (severity, subject) == ("low", "client:1")
    assert evidence == f"{WAITS} 1.2 s, until 60.0 s, and 1 more"
    engine.world.pass_time(60)
    ((severity, _, evidence),) = late()
    assert severity == "medium"
    assert "since 61.2 s, which was to end after 60.0 s" in evidence


def test_the_oldest_mark_of_an_engine_is_the_first_that_is_told_whichever_process_waits(
    engine: Engine,
) -> None:
    stage = Stage(engine.side)
    for worker, rank, waited_us in ((1, 0, 2_000_000), (2, 1, 9_000_000), (1, 0, 3_000_000)):
        waits(engine, worker=worker, rank=rank, waited_us=waited_us)
    (told,) = [row["evidence"] for row in stage.rows("concerns").values()]
    assert "rank 1 on cuda:0 since 9.0 s" in told
    assert told.endswith(", and 2 more")
    client = why(engine, "client", 1)
    ages = [client.index(f"since {age} s") for age in ("9.0", "3.0", "2.0")]
    assert ages == sorted(ages)


@pytest.mark.parametrize("is_refused", [False, True])
def test_it_is_over_when_the_mark_comes_whatever_becomes_of_the_copy(
    engine: Engine, *, is_refused: bool
) -> None:
    call = waits(engine)
    message = engine.begins(0, 2, waited=call, lease=99 if is_refused else engine.lease)
    refusal = engine.side.copy_said(message, rank=1, ranks=2)
    assert (refusal is not None) is is_refused
    assert not marks(engine)
    assert not snapshot(engine.side.node).late_marks


def test_one_that_is_given_up_is_told_as_a_copy_that_failed(engine: Engine) -> None:
    call = waits(engine)
    engine.over(call, rank=1, ranks=2, is_done=False, why="its mark hangs", waited_us=60_000_000)
    assert not marks(engine)
    (told,) = [event for event in engine.side.events if isinstance(event, events.EngineCopied)]
    assert (told.why, told.pages, told.n_bytes) == ("its mark hangs", 2, 0)
    assert (told.way, told.device, told.waited_us) == ("save", "cuda:0", 60_000_000)
    assert engine.record.said == (), "nothing counts or is undone by it"
    engine.refused(CopyEnds(999, call, False), Code.BAD_REQUEST, "has no copy")


def test_nothing_is_held_for_it(engine: Engine) -> None:
    waits(engine)
    engine.side.call(client.ReleaseLease, lease=engine.lease)
    assert engine.lease not in engine.side.node.leases.leases
    assert marks(engine)
    assert "waits for the mark" in why(engine, "client", 1)


def test_of_a_process_that_is_gone_none_is_left(engine: Engine) -> None:
    waits(engine)
    other = waits(engine, worker=2, rank=0)
    engine.side.feed(inputs.WorkerGone(engine.world.now_s, 1, 1))
    assert marks(engine) == [other]
    engine.side.feed(inputs.ClientHungUp(engine.world.now_s, 1))
    assert not marks(engine)


def test_one_process_may_have_so_many(engine: Engine) -> None:
    for _ in range(MOST_LATE):
        waits(engine)
    engine.calls += 1
    one_more = CopyWaits(engine.calls, engine.lease, True, 2)
    refusal = engine.side.copy_said(one_more)
    assert refusal is not None
    assert refusal.code is Code.NO_ROOM
    waits(engine, worker=2)


@pytest.mark.parametrize(
    "more", [{"waited_us": -(2**63)}, {"left_us": -1}, {"lease": -7}, {"n_pages": 2**63 - 1}]
)
def test_figures_of_a_stranger_are_shown_as_they_are(
    engine: Engine, more: dict[str, object]
) -> None:
    waits(engine, **more)
    assert "waits for the mark" in why(engine, "client", 1)
    snapshot(engine.side.node)


def test_a_device_with_an_unprintable_name_is_refused(engine: Engine) -> None:
    message = CopyWaits(901, engine.lease, True, PAGE, device="cuda\x1b[2J")
    refusal = engine.side.copy_said(message)
    assert refusal is not None
    assert refusal.code is Code.BAD_REQUEST


def test_it_goes_on_in_a_recording(engine: Engine) -> None:
    waits(engine)
    node = thaw(freeze(engine.side.node))
    assert state_hash(node) == state_hash(engine.side.node)
    assert [wait.call for wait in node.engine_copies.marks] == marks(engine)
