"""How a lane looks after handles of device memory: what wakes the loop, and what its end leaves."""

from __future__ import annotations

import mmap

import msgspec
import numpy as np
import pytest

from kvd.core.effects import Post
from kvd.core.inputs import PathFound, PathSide, PostFailed, WritePath
from kvd.core.layout.spec import Mla
from kvd.transfer.copies import Area, Reach
from kvd.transfer.descriptors import CUT_BYTES
from kvd.transfer.metadata import MemoryKind, MemorySite
from kvd.transfer.nixl import Sides
from kvd.transfer.paths import AgentKey, SeenPaths
from kvd.transfer.post_queue import IN_FLIGHT_HANDLES, PostQueue
from kvd.transfer.staging import STAGING_BYTES, Staging
from tests.transfer.layouts import ids
from tests.transfer.test_staging import Memory, Wire

LATENT = Mla(480, 32, "bfloat16")
GPU = MemorySite(MemoryKind.VRAM, 0)
HANDLE_BYTES = 16 * 2**20


class Polled(Wire):
    """NIXL with TCP, whose sockets tell of what comes through them and of nothing else."""

    polls = (3,)


class Sent(Polled):
    """Its sockets have sent ``sent`` bytes so far."""

    sent = 0

    def socket_bytes(self) -> int:
        return self.sent


class Far(Reach):
    """Counts how often somebody waited for the device."""

    is_direct = False

    def __init__(self) -> None:
        self.settled = 0

    def settle(self) -> None:
        self.settled += 1


class Rig:
    def __init__(self, here: MemorySite | None, there: MemorySite | None, path: WritePath) -> None:
        ours, theirs = Memory(LATENT, 64, 81), Memory(LATENT, 64, 81)
        self.far, self.wire, self.reports = Far(), Sent(), []
        area = ours.area
        if here is not None:
            area = Area(msgspec.structs.replace(ours.note, place=here), ours.bytes, self.far)
        onto = theirs.note if there is None else msgspec.structs.replace(theirs.note, place=there)
        self._memories = ours, theirs, mmap.mmap(-1, STAGING_BYTES)
        self._staging = Staging(np.frombuffer(self._memories[2], np.uint8).ctypes.data)
        self.lane = PostQueue(
            self.wire,
            key=AgentKey("p", 1),
            path=path,
            regions={"kv": onto},
            staging=self._staging,
            report=self.reports.append,
            posting=lambda post, share: None,
        )
        self.areas = {"kv": area}
        self.post(1)
        assert len(self.wire.waiting) == IN_FLIGHT_HANDLES

    def post(self, number: int) -> None:
        pages = ids(range(1, 81))
        self.lane.add(Post(number, "p", 1, "kv", pages, pages), self.areas)
        while self.lane.can_post:
            self.lane.post_next()


@pytest.mark.parametrize(
    ("here", "there", "path", "is_blind", "is_fast"),
    [
        (None, None, WritePath.SAME_HOST, False, False),
        (None, None, WritePath.NETWORK, False, False),
        (GPU, GPU, WritePath.SAME_HOST, True, True),
        (GPU, None, WritePath.SAME_HOST, True, False),
        (None, GPU, WritePath.SAME_HOST, True, False),
        (GPU, GPU, WritePath.NETWORK, False, False),
    ],
)
def test_the_loop_looks_by_itself_where_a_device_copies_on_this_host(
    here, there, path, is_blind, is_fast
):
    rig = Rig(here, there, path)
    assert (rig.lane.is_blind, rig.lane.is_fast) == (is_blind, is_fast)

    rig.wire.done |= set(range(IN_FLIGHT_HANDLES))
    rig.lane.step()

    assert (rig.lane.is_blind, rig.lane.is_fast) == (False, False)


@pytest.mark.parametrize(
    ("here", "there", "path", "is_open"),
    [
        (None, None, WritePath.SAME_HOST, False),
        (GPU, GPU, WritePath.SAME_HOST, True),
        (None, GPU, WritePath.SAME_HOST, True),
        (GPU, None, WritePath.NETWORK, True),
        (None, None, WritePath.NETWORK, True),
    ],
)
def test_an_agent_that_is_destroyed_counts_what_a_device_may_still_copy(here, there, path, is_open):
    rig = Rig(here, there, path)

    left = rig.lane.destroy("dropped")

    assert [type(one) for one in rig.reports] == [PostFailed]
    assert rig.wire.is_gone
    assert (left > 3 * HANDLE_BYTES // 2) if is_open else left == 0
    assert rig.far.settled == (here is not None)


@pytest.mark.parametrize(
    ("here", "there", "path", "sent", "seen"),
    [
        (GPU, GPU, WritePath.SAME_HOST, 0.001, WritePath.SAME_HOST),
        (GPU, GPU, WritePath.SAME_HOST, 1.1, WritePath.EMULATED),
        (GPU, None, WritePath.SAME_HOST, 1.1, WritePath.EMULATED),
        (None, GPU, WritePath.SAME_HOST, 1.1, WritePath.EMULATED),
        (GPU, GPU, WritePath.NETWORK, 0.0, WritePath.NETWORK),
        (GPU, None, WritePath.NETWORK, 1.0, WritePath.EMULATED),
    ],
)
def test_bytes_of_a_device_that_pass_a_socket_are_emulated(here, there, path, sent, seen):
    rig = Rig(here, there, path)
    rig.wire.sent = int(sent * HANDLE_BYTES)
    rig.wire.done.add(0)
    rig.lane.step()

    (found,) = [one for one in rig.reports if isinstance(one, PathFound)]
    assert (found.incarnation, found.generation) == ("p", 1)
    sides = [PathSide.HOST if one is None else PathSide.DEVICE for one in (here, there)]
    assert [found.source, found.destination] == sides
    assert found.path is seen
    assert found.bytes_s > 0
    rig.wire.done |= set(range(IN_FLIGHT_HANDLES))
    rig.lane.step()
    rig.post(2)
    rig.wire.done |= set(range(len(rig.wire.waiting)))
    rig.lane.step()
    assert sum(isinstance(one, PathFound) for one in rig.reports) == 1, "once an agent"


def test_how_host_memory_travels_was_seen_before():
    rig = Rig(None, None, WritePath.SAME_HOST)
    rig.wire.done |= set(range(IN_FLIGHT_HANDLES))
    rig.lane.step()
    assert not [one for one in rig.reports if isinstance(one, PathFound)]


@pytest.mark.parametrize(
    ("there", "sent", "is_large"),
    [(GPU, 0, True), (GPU, 2 * HANDLE_BYTES, False), (None, 0, False)],
    ids=["direct", "emulated", "to the host"],
)
def test_pieces_between_devices_are_as_large_as_pages_allow_once_the_way_is_known(
    there, sent, is_large
):
    rig = Rig(GPU, there, WritePath.SAME_HOST)
    assert rig.wire.waiting[0][0][:, 1].max() == CUT_BYTES, "nobody knows yet"
    rig.wire.sent = sent
    while len(rig.wire.done) < len(rig.wire.waiting):
        rig.wire.done |= set(range(len(rig.wire.waiting)))
        rig.lane.step()
        while rig.lane.can_post:
            rig.lane.post_next()
    before = len(rig.wire.waiting)

    rig.post(2)

    source, destination = rig.wire.waiting[before]
    assert (source[:, 1] == destination[:, 1]).all()
    if is_large:
        assert len(rig.wire.waiting) == before + 1
        assert source[:, 1].sum() == 80 * rig.areas["kv"].note.page_bytes
        assert source[:, 1].max() > 64 * CUT_BYTES
    else:
        assert source[:, 1].max() == CUT_BYTES


def test_of_two_kinds_beside_each_other_nothing_is_told():
    """A socket does not say whose bytes it has sent."""
    wire = Sent()
    paths = SeenPaths(wire, WritePath.SAME_HOST)
    away, across = (Sides(MemoryKind.VRAM, kind) for kind in (MemoryKind.DRAM, MemoryKind.VRAM))
    first = paths.look(across, set())
    assert first is not None
    assert paths.look(away, {across}) is None
    wire.sent += 2 * HANDLE_BYTES
    assert paths.seen(first, HANDLE_BYTES) is None
    again = paths.look(across, {across})
    assert paths.seen(again, 1000) is None, "too little to tell"
    assert paths.seen(again, HANDLE_BYTES)[0] is WritePath.SAME_HOST
    assert paths.look(across, {across}) is None
    assert paths.is_direct(across)
    assert not paths.is_direct(away)
