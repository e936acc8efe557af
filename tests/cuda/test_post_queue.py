"""How a lane looks after handles of device memory: what wakes the loop, and what its end leaves."""

from __future__ import annotations

import mmap

import msgspec
import numpy as np
import pytest

from kvd.core.effects import Post
from kvd.core.inputs import PostFailed, WritePath
from kvd.core.layout.spec import Mla
from kvd.transfer.copies import Area, Reach
from kvd.transfer.metadata import MemoryKind, MemorySite
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
        self.far, self.wire, self.reports = Far(), Polled(), []
        area = ours.area
        if here is not None:
            area = Area(msgspec.structs.replace(ours.note, place=here), ours.bytes, self.far)
        onto = theirs.note if there is None else msgspec.structs.replace(theirs.note, place=there)
        self._memories = ours, theirs, mmap.mmap(-1, STAGING_BYTES)
        self._staging = Staging(np.frombuffer(self._memories[2], np.uint8).ctypes.data)
        self.lane = PostQueue(
            self.wire,
            path=path,
            regions={"kv": onto},
            staging=self._staging,
            report=self.reports.append,
            posting=lambda post, share: None,
        )
        pages = ids(range(1, 81))
        self.lane.add(Post(1, "p", 1, "kv", pages, pages), {"kv": area})
        while self.lane.can_post:
            self.lane.post_next()
        assert len(self.wire.waiting) == IN_FLIGHT_HANDLES


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
