"""Recordings: what was seen is seen again, at any place, from whatever is left of a file."""

from __future__ import annotations

import asyncio
import contextlib
import stat
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from kvd.errors import Code
from kvd.wire.admin import Flush
from kvd.wire.codec import ADMIN_REPLIES
from kvd.wire.console import EventQuery, MapQuery, Query, TableRow
from kvd.wire.events import Evicted
from tests.tui.frames import COLUMNS, LEASES, changes, frame, lease, page_map, table, vitals
from tui.model.mirror import Mirror, Subscription
from tui.replay import ReplayLink
from tui.tape import KEY_S, TABLES, BadRecording, RecordingFile, RecordingWriter, everything

LIMIT_S = 15.0
MAP = MapQuery("kv", "state", cells=2, pages_each=4)
WANTED = Subscription((LEASES, MAP), EventQuery(0))


class Session:
    """A console that records: ten frames a second, in which one lease holds more and more."""

    def __init__(self, recorder):
        self.mirror = Mirror()
        self.recorder = recorder
        self.frames = 0
        self.seen = {}

    def run(self, seconds, *, size=2):
        for _ in range(int(seconds * 10)):
            self.turn(size)

    def turn(self, size):
        self.frames += 1
        n, heard_s = self.frames, 1000.0 + self.frames / 10
        look = self.mirror.look(n, WANTED)
        if look.queries[0].have:
            first = changes(lease(1, held=n), since=n - 1, revision=n, total=size)
        else:
            rows = [lease(1, held=n), *(lease(at) for at in range(2, size + 1))]
            first = table(*rows, revision=n)
        cells = bytes([n % 2, 0])
        events = [Evicted(n, 1.0, pages=n, nodes=1, reason="room")]
        made = frame(
            n,
            *(first, page_map(cells, revision=n)),
            head=vitals(n / 10),
            events=events,
            upto=n,
        )
        self.mirror.take(made, heard_s)
        self.recorder.write(look, ADMIN_REPLIES.encode(made), heard_s, self.mirror)
        self.seen[round(heard_s - 1000.1, 1)] = plain(self.mirror.snapshot())


class Told(Mirror):
    """A mirror that says when the frame of a daemon's moment has come."""

    def __init__(self, last_s):
        super().__init__()
        self._last_s = last_s
        self.ended = asyncio.Event()

    def take(self, frame, heard_s):
        is_fit = super().take(frame, heard_s)
        if frame.vitals.at_s > self._last_s:
            self.ended.set()
        return is_fit


def plain(snapshot):
    """What a moment shows, without when it was heard here."""
    return msgspec.structs.replace(snapshot, heard_s=0.0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "incident.tape"


@pytest.fixture
def session(path):
    """Forty seconds of one."""
    recorder = RecordingWriter.open(path)
    made = Session(recorder)
    made.run(40)
    recorder.close()
    return made


@contextlib.asynccontextmanager
async def playing(path, mirror=None, **options):
    """A link that plays, and its mirror; it must end when it is told to."""
    mirror = mirror if mirror is not None else Mirror()
    link = ReplayLink(RecordingFile.open(path), mirror, **options)
    task = asyncio.ensure_future(link.run())
    await settle()
    try:
        yield link, mirror
    finally:
        task.cancel()
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def settle():
    """Let the player do what it can do at once."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_any_place_shows_what_was_seen_there(path, session):
    async with playing(path) as (link, mirror):
        link.hold()
        for position_s in (0.0, 39.9, 3.3, 14.9, 15.0, 15.1, 30.2, 0.1, 22.2):
            link.seek(position_s)
            await settle()

            assert plain(mirror.snapshot()) == session.seen[position_s], position_s
            assert list(mirror.notices) == []


async def test_a_recording_goes_at_its_own_pace_and_ends_at_its_end(path, session):
    async with playing(path, Told(39.9), speed=100.0) as (link, mirror):
        begun_s = asyncio.get_running_loop().time()
        async with asyncio.timeout(LIMIT_S):
            await mirror.ended.wait()
        took_s = asyncio.get_running_loop().time() - begun_s
        await settle()

        assert took_s >= 0.38
        assert link.at_end
        assert plain(mirror.snapshot()) == session.seen[39.9]
        assert link.position_s == pytest.approx(39.9)
        link.play()
        await settle()
        assert (link.at_end, link.position_s < 5) == (False, True)


async def test_a_held_recording_stands_still(path, session):
    async with playing(path, speed=100.0) as (link, mirror):
        await settle()
        link.hold()
        await settle()
        before = mirror.frames
        await asyncio.sleep(0.05)

        assert mirror.frames == before
        link.play()
        await asyncio.sleep(0.05)
        assert mirror.frames > before


async def test_places_beyond_both_ends_are_the_ends(path, session):
    async with playing(path) as (link, mirror):
        link.hold()
        link.seek(1e9)
        await settle()
        assert plain(mirror.snapshot()) == session.seen[39.9]

        link.seek(-1.0)
        await settle()
        assert plain(mirror.snapshot()) == session.seen[0.0]


async def test_a_recording_answers_no_questions(path, session):
    async with playing(path) as (link, _):
        answer = await link.ask(Flush(0))

    assert answer.refusal.code is Code.NOT_SUPPORTED


def test_a_recording_says_of_what_it_is_and_is_for_its_owner_only(path, session):
    tape = RecordingFile.open(path)

    assert (tape.head.node, tape.head.incarnation) == ("decode-0", "a" * 32)
    assert tape.length_s == pytest.approx(39.9)
    assert tape.trouble == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().startswith(b"kvd-tui tape 1\n")
    tape.close()


def test_a_file_that_breaks_off_anywhere_is_played_up_to_there(path, tmp_path):
    recorder = RecordingWriter.open(path)
    session = Session(recorder)
    session.run(0.6)
    recorder.close()
    whole = path.read_bytes()
    cut = tmp_path / "cut"
    played = set()

    for size in range(0, len(whole), 11):
        cut.write_bytes(whole[:size])
        tape = RecordingFile.open(cut)
        if isinstance(tape, BadRecording):
            played.add(0)
            assert str(cut) in tape.why
            continue
        mirror, count = Mirror(), 0
        while (record := tape.next()) is not None:
            mirror.expect(record.shot.look)
            mirror.take(record.shot.frame, 0.0)
            count += 1
        played.add(count)
        tape.close()
        assert list(mirror.notices) == []

    assert played == set(range(7))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "was not written by kvd-tui --record"),
        (b"\x7fELF" * 100, "was not written by kvd-tui --record"),
        (b"kvd-tui tape 9\nwhatever", "is a tape of version 9, and this kvd-tui plays 1"),
        (b"kvd-tui tape 1\n", "does not say what it is a tape of"),
        (b"kvd-tui tape 1\n" + b"\xff" * 99, "does not say what it is a tape of"),
    ],
)
def test_a_file_that_is_no_tape_is_told_in_a_sentence(path, content, why):
    path.write_bytes(content)

    assert RecordingFile.open(path) == BadRecording(f"{path} {why}")


def test_a_file_that_is_not_there_is_told_in_a_sentence(path, tmp_path):
    assert RecordingFile.open(path) == BadRecording(
        f"{path} cannot be read: No such file or directory"
    )
    assert RecordingFile.open(tmp_path) == BadRecording(
        f"{tmp_path} cannot be read: Is a directory"
    )


def test_a_recording_never_writes_over_a_file(path):
    path.write_text("mine")

    assert RecordingWriter.open(path) == BadRecording(
        f"nothing can be recorded to {path}: File exists"
    )
    assert path.read_text() == "mine"


def test_a_full_recording_ends_with_a_notice_and_can_be_played(path):
    recorder = RecordingWriter.open(path, max_bytes=50_000)
    session = Session(recorder)
    session.run(60)

    assert 50_000 <= path.stat().st_size < 70_000
    assert [(one.kind, one.text) for one in session.mirror.notices] == [
        ("tape", "the recording has ended: it has 0 MiB, and gets no more")
    ]
    tape = RecordingFile.open(path)
    assert tape.trouble == ""
    tape.close()


def test_a_full_disk_ends_the_recording_with_a_notice():
    recorder = RecordingWriter(Path("/dev/full").open("wb"))  # noqa: SIM115 - the recorder closes it
    session = Session(recorder)

    session.run(2)

    assert not recorder.is_running
    assert [one.text for one in session.mirror.notices] == [
        "the recording has ended: it cannot be written: No space left on device"
    ]


def test_playing_a_long_recording_takes_no_more_memory_than_a_frame(path):
    recorder = RecordingWriter.open(path)
    session = Session(recorder)
    session.run(200, size=200)
    recorder.close()
    size_bytes = path.stat().st_size
    assert size_bytes > 700_000

    tracemalloc.start()
    tape = RecordingFile.open(path)
    while tape.next() is not None:
        pass
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    tape.close()

    assert peak_bytes < size_bytes / 2


def test_all_tables_and_maps_are_asked_for_once_a_second(path):
    """A replay can then show pages that nobody looked at."""
    recorder = RecordingWriter.open(path)
    session = Session(recorder)
    assert recorder.wants(session.mirror, 0.0) is None
    session.turn(2)

    asked = []
    while (wanted := recorder.wants(session.mirror, 1.0)) is not None:
        asked.append(wanted)

    assert [one.view for wanted in asked for one in wanted.queries] == list(TABLES)
    assert asked[-1].events == EventQuery(0, limit=500)
    assert recorder.wants(session.mirror, 1.9) is None
    assert recorder.wants(session.mirror, 2.0) is not None
    recorder.close()
    assert recorder.wants(session.mirror, 9.0) is None


def test_the_maps_of_all_components_are_asked_for_in_some_thousand_cells():
    mirror = Mirror()
    columns = (COLUMNS[0], msgspec.structs.replace(COLUMNS[2], name="component"))
    columns = (*columns, msgspec.structs.replace(COLUMNS[3], name="total"))
    rows = (
        TableRow("pool:kv", ("pool:kv", "kv", 1_000_000)),
        TableRow("pool:x", ("pool:x", "x", None)),
    )
    mirror.look(1, Subscription((Query("pools"),)))
    mirror.take(frame(1, table(*rows, columns=columns, view="pools")), 0.0)

    wanted = everything(mirror.snapshot())[-1]

    assert wanted.queries == (MapQuery("kv", "state", pages_each=245, cells=4096),)


def test_a_key_is_written_every_quarter_minute(path, session):
    assert KEY_S == 15.0
    kinds = []
    tape = RecordingFile.open(path)
    while (record := tape.next()) is not None:
        kinds.append(record.kind)
    tape.close()

    assert kinds.count(2) == 3
