from __future__ import annotations

import hashlib
import random
import re
import stat

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.replay.freeze import freeze
from kvd.recorder import recording, replay
from kvd.recorder.input_records import record_of
from kvd.recorder.record_layout import ALIGNMENT
from tests.core.test_freeze import a_node

TICKS = [record_of(inputs.Tick(float(number))) for number in range(5, 15)]


def laid_out(records) -> bytes:
    """Records as they lie in the ring."""
    bare = [one.headed() + one.tokens for one in records]
    return b"".join(one + bytes(-len(one) % ALIGNMENT) for one in bare)


@pytest.fixture
def file(tmp_path):
    """A good recording of ten ticks."""
    path = tmp_path / "one.kvdrec"
    base, records = freeze(a_node()), laid_out(TICKS)
    header = recording.Header(
        recording.FORMAT, "0.1.0", "x", "0" * 32, "a test", "today", 9.0, 10, len(base),
        len(records),
    )  # fmt: skip
    recording.write(path, header, base, [records[:100], records[100:]])
    return path


def resealed(path, change) -> None:
    """Change the bytes before the checksum and make that right again: what a stranger could do."""
    data = change(bytearray(path.read_bytes()[:-32]))
    path.write_bytes(bytes(data) + hashlib.sha256(data).digest())


def test_a_recording_is_read_as_it_was_written_and_is_for_its_owner_only(file):
    saved = recording.read(file)

    assert saved.base == freeze(a_node())
    assert list(recording.records_in(saved.records)) == TICKS
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_recording_that_cannot_be_written_leaves_nothing_behind(file, tmp_path):
    def broken():
        yield b"something"
        raise OSError(28, "No space left on device")

    other = tmp_path / "other.kvdrec"
    with pytest.raises(OSError, match="No space left"):
        recording.write(other, recording.read(file).header, b"", broken())

    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: b"", "0 bytes that are no recording of kvd"),
        (lambda data: b"PK" + data[2:], "that are no recording of kvd"),
        (lambda data: data[:-1], "it was cut, or put together"),
        (lambda data: data + b"more", "it was cut, or put together"),
        (lambda data: data[:-60] + b"!" + data[-59:], "its checksum is not that of its content"),
        (lambda data: data[:8] + b"\xff\xff\xff\xff" + data[12:], "at most 65536 are read"),
        (lambda data: data[:12] + b"\xc1" + data[13:], "its header cannot be read"),
    ],
    ids=["empty", "magic", "cut", "longer", "flipped", "header length", "header"],
)
def test_a_damaged_file_is_refused_and_said_why(file, change, said):
    file.write_bytes(change(file.read_bytes()))

    with pytest.raises(recording.Damaged, match=said):
        recording.read(file)


def test_a_format_of_another_version_is_refused_with_the_version_that_can_read_it(tmp_path):
    head = msgspec.msgpack.encode({"format": 9, "kvd": "7.0.0", "things": [1, 2]})
    path = tmp_path / "one.kvdrec"
    path.write_bytes(recording.MAGIC + len(head).to_bytes(4, "little") + head + bytes(40))

    with pytest.raises(recording.Damaged, match=r"format 9, written by kvd 7.0.0.*that version"):
        recording.read(path)


def test_an_input_that_this_version_does_not_know_ends_the_replay_with_its_number(file):
    tick, tack = b"\xa4Tick", b"\xa4Tack"
    # The first is the name of the kind in the frozen node, the others are inputs.
    resealed(file, lambda data: data.replace(tick, tack, 4).replace(tack, tick, 3))
    saved = recording.read(file)

    with pytest.raises(recording.Damaged, match=r"input 3 is none that this kvd knows"):
        replay.replay(saved, replay.begin(saved), lambda event: None)


def test_a_node_that_lacks_what_every_node_has_is_refused(file):
    resealed(file, lambda data: data.replace(b"\xa5steps", b"\xa5stepz"))
    saved = recording.read(file)

    with pytest.raises(recording.Damaged, match="steps"):
        replay.replay(saved, replay.begin(saved), lambda event: None)


def places_that_tell(data: bytes) -> list[int]:
    """Between the magic and the checksum, without empty tables: most of a frozen node is these."""
    empty = [found.span() for found in re.finditer(rb"\0{64,}", data)]
    starts, ends = [12, *[end for _, end in empty]], [*[at for at, _ in empty], len(data) - 32]
    return [at for span in zip(starts, ends, strict=True) for at in range(*span)]


def test_a_resealed_file_replays_or_is_refused_and_nothing_else(file):
    seed = 11
    rng = random.Random(seed)
    good = file.read_bytes()
    told = places_that_tell(good)
    refused = 0
    for _ in range(150):
        file.write_bytes(good)
        places = [(rng.choice(told), rng.randrange(256)) for _ in range(3)]

        def flip(data, places=places):
            for place, value in places:
                data[place] = value
            return data

        resealed(file, flip)
        try:
            saved = recording.read(file)
            replay.replay(saved, replay.begin(saved), lambda event: None)
        except recording.Damaged:
            refused += 1

    assert refused > 30, f"seed {seed}"
