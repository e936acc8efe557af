"""Numbers of batches go on over lives, however those end; and what is kept of batches."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvd.daemon import kv_events
from kvd.daemon.kv_event_numbers import BLOCK, MOST_UNUSED, KvEventNumbers
from kvd.daemon.kv_events import KeptBatch, KeptBatches
from kvd.daemon.socket_activation import UnfitConfig
from kvd.wire.kv_events import encode


@pytest.fixture
def path(tmp_path):
    return tmp_path / "state" / "n0.kv-events"


async def test_a_stopped_daemon_leaves_no_gap_and_a_killed_one_what_it_may_have_used(path):
    first = KvEventNumbers(path)
    assert [first.take() for _ in range(3)] == [0, 1, 2]
    await first.close()
    second = KvEventNumbers(path)
    assert (second.unused, second.first, second.take()) == (3, 3, 3)
    # Killed: no close.
    third = KvEventNumbers(path)
    assert (third.unused, third.first) == (3, 3 + BLOCK)
    # Killed before it used any: what the two before may have used is still unused for sure.
    fourth = KvEventNumbers(path)
    assert (fourth.unused, fourth.first) == (3, 3 + 2 * BLOCK)


async def test_no_number_is_given_before_it_is_on_disk(path):
    numbers = KvEventNumbers(path)
    told = []
    numbers.on_more = lambda: told.append(numbers.next)
    given = []
    while (number := numbers.take()) is not None:
        given.append(number)
        assert json.loads(path.read_bytes())["end"] > number
    assert given == list(range(BLOCK))
    for _ in range(200):
        if told:
            break
        await asyncio.sleep(0.05)
    assert told == [BLOCK]
    assert numbers.take() == BLOCK
    await numbers.close()
    assert KvEventNumbers(path).first == BLOCK + 1


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnfitConfig, match=r"cannot be (read|written)"):
        KvEventNumbers(tmp_path / "file" / "n0.kv-events")


def test_a_daemon_that_is_killed_again_and_again_leaves_few_numbers_to_serve(path):
    for _ in range(9):
        numbers = KvEventNumbers(path)
    assert numbers.first - numbers.unused == MOST_UNUSED


@pytest.mark.parametrize("said", [b"", b"{}", b'{"first": -1, "end": 0}', b"\xff", b"[1, 2]"])
def test_a_damaged_file_is_not_guessed_at(path, said):
    path.parent.mkdir()
    path.write_bytes(said)
    with pytest.raises(UnfitConfig, match="cannot be read"):
        KvEventNumbers(path)


def kept(unused, first, most, n_batches):
    batches = KeptBatches(unused, first, most)
    for at in range(n_batches):
        batches.add(KeptBatch(first + at, b"%d" % at))
    return batches


def numbers_since(batches, number):
    found = batches.since(number)
    return None if found is None else [batch.number for batch in found]


def test_what_is_kept_is_served_without_a_gap_unused_numbers_as_empty_batches():
    batches = kept(unused=3, first=10, most=100, n_batches=4)
    assert numbers_since(batches, 2) is None
    assert numbers_since(batches, 3) == list(range(3, 14))
    assert numbers_since(batches, 12) == [12, 13]
    assert numbers_since(batches, 14) == []
    assert numbers_since(batches, 99) == []
    empty = batches.since(9)[0]
    assert len(empty.payload) == len(encode([], 0.0))


def test_what_is_too_much_or_too_large_is_not_kept_nor_what_was_before(monkeypatch):
    batches = kept(unused=3, first=10, most=2, n_batches=4)
    assert numbers_since(batches, 11) is None
    assert numbers_since(batches, 3) is None
    assert numbers_since(batches, 12) == [12, 13]
    monkeypatch.setattr(kv_events, "MOST_KEPT_BYTES", 100)
    batches.add(KeptBatch(14, bytes(99)))
    assert numbers_since(batches, 13) == [13, 14]
    batches.add(KeptBatch(15, bytes(99)))
    assert numbers_since(batches, 15) == [15]
