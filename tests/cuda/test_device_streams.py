"""Streams with a stage: registered memory is copied as it lies, other by the stage; waits end."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.core.effects import Copy
from kvd.core.layout.geometry import Geometry, PieceRow
from kvd.device.copies import KnownMemory, OutOfReach, Pieces, Stretch, cut_rows
from kvd.transfer import device_streams
from kvd.transfer.copies import Area, CopyTurns, copy_job
from kvd.transfer.device_streams import (
    SLICE_BYTES,
    STAGE_BYTES,
    DeviceReach,
    DeviceStuck,
    StagedStream,
)
from tests.gpu.face import address_of, shared
from tests.transfer.layouts import ids, note

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 3 * STAGE_BYTES
MIB = 2**20


class Rig:
    """Memory of a device, and memory of the host of which the middle third is registered."""

    def __init__(self, runtime) -> None:
        self.runtime = runtime
        self.known = KnownMemory(runtime)
        self.device = runtime.allocate(0, SIZE)
        self.known.add(Stretch(self.device, SIZE, "cuda:0"))
        self.host = shared(SIZE)
        self.low = address_of(self.host)
        self.known.register(self.low + STAGE_BYTES, STAGE_BYTES)
        self.stream = StagedStream(runtime, 0, self.known)

    def there(self) -> np.ndarray:
        found = np.empty(SIZE, np.uint8)
        self.runtime.copy(address_of(found), self.device, SIZE)
        return found

    def close(self) -> None:
        for address in (self.low + STAGE_BYTES, self.stream._at, self.device):
            self.known.forget(address)
        self.runtime.free(self.device)


@pytest.fixture
def rig(double) -> Iterator[Rig]:
    found = Rig(double.runtime)
    yield found
    found.close()


def one(to: int, source: int, size: int) -> Pieces:
    return Pieces(*(np.array([word], np.uint64) for word in (to, source, size)))


@pytest.mark.parametrize("late_us", ["0", "3000"])
def test_a_piece_over_registered_memory_and_other_arrives_whole(rig, monkeypatch, late_us):
    """In three parts, of which two are larger than the stage together."""
    monkeypatch.setenv("DOUBLE_LATE_US", late_us)
    rig.host[:] = np.random.default_rng(1).integers(0, 256, SIZE, np.uint8)
    before = rig.host.copy()

    rig.stream.begin(one(rig.device, rig.low, SIZE))
    rig.stream.end()
    assert np.array_equal(rig.there(), before)

    rig.host[:] = 0
    rig.stream.begin(one(rig.low + 5, rig.device + 5, SIZE - 9))
    rig.stream.end()
    assert np.array_equal(rig.host[5:-4], before[5:-4])
    assert not rig.host[:5].any()
    assert not rig.host[-4:].any()


def test_a_copy_between_two_places_of_the_host_is_none_for_a_stream(rig):
    """It would be no fault of CUDA's, and is one of ours: nothing is copied."""
    with pytest.raises(OutOfReach):
        rig.stream.begin(one(rig.low, rig.low + 2 * STAGE_BYTES, 64))


def test_a_device_that_does_not_go_on_is_not_waited_for_without_end(rig, double, monkeypatch):
    monkeypatch.setattr(device_streams, "WITHIN_S", 0.05)
    stream = rig.stream._stream._stream
    double.hold(stream)
    rig.stream.begin(one(rig.device, rig.low + STAGE_BYTES, 64))

    with pytest.raises(DeviceStuck, match="copies on cuda:0 have not ended within 0 s"):
        rig.stream.end()

    double.release(stream)
    rig.stream.end()


@pytest.mark.parametrize(
    ("edges", "parts"),
    [
        ([], [(0, 0, 10), (1, 0, 4)]),
        ([100, 110, 120, 124], [(0, 0, 10), (1, 0, 4)]),
        ([101, 122], [(0, 0, 1), (0, 1, 9), (1, 0, 2), (1, 2, 2)]),
        ([99, 101, 103, 109, 110], [(0, 0, 1), (0, 1, 2), (0, 3, 6), (0, 9, 1), (1, 0, 4)]),
    ],
)
def test_rows_are_cut_where_an_edge_is_inside(edges, parts):
    starts, sizes = np.array([100, 120], np.uint64), np.array([10, 4], np.uint64)

    found = cut_rows(starts, sizes, np.array(edges, np.uint64))

    assert list(zip(*(column.tolist() for column in found), strict=True)) == parts


def test_no_rows_are_no_parts():
    none = np.zeros(0, np.uint64)
    assert [column.size for column in cut_rows(none, none, np.array([5], np.uint64))] == [0, 0, 0]


# ---- copies --------------------------------------------------------------------------------------

PAGE = 4 * MIB
PAGES = 33


class Desk:
    """Copies of pages of a device, a slice at each step."""

    def __init__(self, runtime) -> None:
        shape = Geometry(PAGES, PAGE, (PieceRow(0, PAGE, PAGE),), ())
        self.runtime, self.size = runtime, shape.total_bytes
        self.known = KnownMemory(runtime)
        self.address = runtime.allocate(0, self.size)
        self.known.add(Stretch(self.address, self.size, "cuda:0"))
        self.reach = DeviceReach(runtime, 0, self.known)
        far = (ctypes.c_ubyte * self.size).from_address(self.address)
        here = shared(self.size)
        self.known.register(address_of(here), self.size)
        self.areas = {
            "a": Area(note(shape, self.address, "a"), np.ctypeslib.as_array(far), self.reach),
            "b": Area(note(shape, address_of(here), "b"), here),
        }
        self.turns = CopyTurns()

    def want(self, ticket, pages, source="a", destination="b") -> None:
        order = Copy(ticket, source, ids(pages), destination, ids(pages))
        self.turns.jobs.append(copy_job(order, self.areas))

    def done(self, steps) -> list[int]:
        ended = [self.turns.step() for _ in range(steps)]
        return [job.ticket for job in ended if job is not None]

    def close(self) -> None:
        for stretch in list(self.known._stretches):
            self.known.forget(stretch.address)
        self.runtime.free(self.address)


@pytest.fixture
def desk(double) -> Iterator[Desk]:
    found = Desk(double.runtime)
    yield found
    found.close()


def test_a_copy_is_over_when_its_last_slice_is_there(desk, double, monkeypatch):
    monkeypatch.setenv("DOUBLE_LATE_US", "3000")
    desk.areas["b"]._memory[:] = 7
    desk.want(1, range(1, PAGES), "b", "a")
    steps = (PAGES - 1) * PAGE // SLICE_BYTES
    assert desk.done(steps) == [1]

    desk.areas["b"]._memory[:] = 0
    desk.want(2, range(1, PAGES))
    assert desk.done(steps) == [2]

    assert (desk.areas["b"]._memory[PAGE:] == 7).all()
    assert not desk.areas["b"]._memory[:PAGE].any()


def test_a_small_copy_passes_a_large_one_and_each_is_whole_when_it_is_told(desk, monkeypatch):
    monkeypatch.setenv("DOUBLE_LATE_US", "3000")
    desk.areas["b"]._memory[:] = np.repeat(np.arange(PAGES, dtype=np.uint8), PAGE)
    desk.want(1, range(4, PAGES), "b", "a")
    assert desk.done(2) == []
    desk.want(2, [1], "b", "a")
    assert desk.done(1) == [2]
    desk.want(3, [1, 2])
    assert desk.done(1) == [3]
    assert (desk.areas["b"]._memory[PAGE : 2 * PAGE] == 1).all()
    assert not desk.areas["b"]._memory[2 * PAGE : 3 * PAGE].any(), "nobody has written page 2"
    assert desk.done(6) == [1]


def test_sums_need_no_more_than_the_streams_that_there_are(desk):
    """Of whoever reads and stops in the middle they come back."""
    pages = np.arange(1, PAGES, dtype=np.int32)
    for _ in range(3 * device_streams.READERS):
        stretches = desk.areas["a"].stretches(1, pages)
        assert next(stretches).size == STAGE_BYTES
        stretches.close()
    assert sum(stretch.size for stretch in desk.areas["a"].stretches(1, pages)) == 32 * PAGE
