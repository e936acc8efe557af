"""Small pieces are packed into slots before they travel, and a slot is in one place at a time."""

from __future__ import annotations

import ctypes
import mmap
from functools import partial

import numpy as np
import pytest

from kvd.core.effects import Post
from kvd.core.inputs import PostDone, PostFailed, WritePath
from kvd.core.layout.spec import Mha, Mla, PageOrder, companion_pages
from kvd.transfer.copies import mapped_area
from kvd.transfer.descriptors import CUT_BYTES, packed_writes
from kvd.transfer.nixl import NixlUnusable
from kvd.transfer.post_queue import IN_FLIGHT_HANDLES, PostQueue
from kvd.transfer.staging import (
    SLOT_BYTES,
    SLOTS,
    STAGING_BYTES,
    Band,
    Packing,
    Staging,
    is_worth_packing,
)
from tests.transfer.layouts import ids, note, shaped, slots

LATENT = Mla(480, 32, "bfloat16")
"""A page of 64 tokens of 16 layers is 1 MiB: two fit into a slot."""


class Memory:
    """A component at a real address of this process."""

    def __init__(self, layout, page_size, pages, order=PageOrder.PAGE_FIRST):
        self.shape = shaped(layout, page_size, pages, order, layers=16)
        self._map = mmap.mmap(-1, self.shape.total_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.note = note(self.shape, self.bytes.ctypes.data)
        self.area = mapped_area(self.note)


class Wire:
    """Stands in for NIXL: a handle writes when it is let through, reading its source only then."""

    def __init__(self):
        self.waiting = []
        self.done = set()
        self.broken = set()
        self.is_gone = False

    def post(self, source, destination, _sides):
        self.waiting.append((source.copy(), destination.copy()))
        return len(self.waiting) - 1

    def let_through(self, handle):
        source, destination = self.waiting[handle]
        for (at, size, _), (to, _, _) in zip(source.tolist(), destination.tolist(), strict=True):
            ctypes.memmove(to, at, size)
        self.done.add(handle)

    def step(self, handle):
        if handle in self.broken:
            raise NixlUnusable("broken")
        return handle in self.done

    def destroy(self):
        self.is_gone = True


class Bench:
    """A lane that writes a pool of pages of 64 tokens into one of pages of 16."""

    def __init__(self, pages=16):
        self.ours, self.theirs = Memory(LATENT, 64, pages + 1), Memory(LATENT, 16, 4 * pages + 4)
        self.ours.bytes[:] = np.random.default_rng(7).integers(0, 256, self.ours.bytes.size, "u1")
        self.pages = pages
        self._staged = mmap.mmap(-1, STAGING_BYTES)
        self.staging = Staging(np.frombuffer(self._staged, np.uint8).ctypes.data)
        self.wire, self.reports = Wire(), []
        self.lane = PostQueue(
            self.wire,
            path=WritePath.NETWORK,
            regions={"kv": self.theirs.note},
            staging=self.staging,
            report=self.reports.append,
        )

    def post(self, number):
        pages = companion_pages(ids(range(1, self.pages + 1)), 4)
        onto = ids(range(4, 4 * self.pages + 4))
        self.lane.add(Post(number, "p", 1, "kv", pages, onto, split=4), {"kv": self.ours.area})

    def posted(self):
        """How often and with what the post has ended well; how far it had come is told by time."""
        return [report for report in self.reports if isinstance(report, PostDone)]

    def fill_up(self):
        while self.lane.can_post:
            self.lane.post_next()


def test_a_packed_post_brings_every_slot_to_its_place_though_slots_are_used_again():
    bench = Bench()
    bench.post(1)

    handle = 0
    while not bench.posted():
        bench.fill_up()
        bench.wire.let_through(handle)
        bench.lane.step()
        handle += 1

    (posted,) = bench.posted()
    assert (posted.post, posted.moved_bytes, handle) == (1, 16 * 2**20, 8)
    for ours, theirs in zip(
        slots(bench.ours.bytes, bench.ours.shape),
        slots(bench.theirs.bytes, bench.theirs.shape),
        strict=True,
    ):
        assert np.array_equal(ours[1:].reshape(-1, 1024), theirs[4:].reshape(-1, 1024))
    assert len(bench.staging.free) == SLOTS


def test_handles_in_flight_hold_slots_of_their_own():
    bench = Bench()
    bench.post(1)

    bench.fill_up()

    begins = {int(source[0, 0]) for source, _ in bench.wire.waiting}
    assert len(begins) == IN_FLIGHT_HANDLES
    assert len(bench.staging.free) == SLOTS - IN_FLIGHT_HANDLES
    assert begins.isdisjoint(slot.address for slot in bench.staging.free)


def test_a_packed_post_waits_while_no_slot_is_free_and_goes_on_with_the_next():
    bench = Bench()
    taken, bench.staging.free[:] = bench.staging.free[:], []
    bench.post(1)
    assert not bench.lane.can_post

    bench.staging.free.append(taken.pop())
    bench.fill_up()
    assert len(bench.wire.waiting) == 1
    bench.wire.let_through(0)
    bench.lane.step()

    assert bench.lane.can_post


def test_the_slot_of_a_failed_handle_is_not_used_again_before_the_agent_is_gone():
    bench = Bench()
    bench.post(1)
    bench.fill_up()
    bench.wire.broken.add(0)
    for handle in range(1, IN_FLIGHT_HANDLES):
        bench.wire.let_through(handle)
    failed = int(bench.wire.waiting[0][0][0, 0])

    bench.lane.step()

    assert [type(report) for report in bench.reports] == [PostFailed]
    assert failed not in {slot.address for slot in bench.staging.free}
    assert bench.lane.destroy("dropped") == SLOT_BYTES
    assert bench.wire.is_gone
    assert len({slot.address for slot in bench.staging.free}) == SLOTS


def test_slots_of_handles_in_flight_are_free_when_the_agent_is_gone():
    bench = Bench()
    bench.post(1)
    bench.fill_up()

    assert bench.lane.destroy("dropped") == IN_FLIGHT_HANDLES * SLOT_BYTES
    assert len({slot.address for slot in bench.staging.free}) == SLOTS
    assert not bench.posted()


def test_handles_of_packed_pages_begin_at_byte_0_and_join_what_touches():
    theirs = note(shaped(LATENT, 16, 40, PageOrder.PAGE_FIRST, layers=16))
    onto = [5, 6, 7, 8, 20, 21, 9, 10, 11]

    plan = packed_writes(ids(onto), theirs, handle_pages=4)

    assert theirs.page_bytes == CUT_BYTES // 2
    assert plan.source[:, :2].tolist() == [
        [0, CUT_BYTES],
        [CUT_BYTES, CUT_BYTES],
        [0, CUT_BYTES],
        [CUT_BYTES, CUT_BYTES],
        [0, CUT_BYTES // 2],
    ]
    assert (plan.destination[:, 0] // theirs.page_bytes).tolist() == [5, 7, 20, 9, 11]
    assert (plan.bounds, plan.sizes) == (
        [0, 2, 4, 5],
        [2 * CUT_BYTES, 2 * CUT_BYTES, CUT_BYTES // 2],
    )


def test_pieces_are_packed_tensor_by_tensor_from_wherever_they_begin():
    ours = Memory(Mha(2, 6, 4, "uint8"), 8, 5)
    ours.bytes[:] = np.random.default_rng(3).integers(0, 256, ours.bytes.size, "u1")
    pieces = [7, 6, 11, 12, 13, 14, 5]
    band = Band(partial(ours.area.gather, 4), ours.shape.page_bytes // 4)
    packing = Packing(ids(pieces), [band])
    packed = np.zeros(SLOT_BYTES, np.uint8)

    packing.fill(0, packed)

    wanted = [
        tensor[piece // 4, piece % 4 * 2 : piece % 4 * 2 + 2].ravel()
        for piece in pieces
        for tensor in slots(ours.bytes, ours.shape)
    ]
    assert np.array_equal(
        packed[: len(pieces) * ours.shape.page_bytes // 4], np.concatenate(wanted)
    )


FIRST, LAYERS = PageOrder.PAGE_FIRST, PageOrder.LAYER_FIRST
WIDE = Mla(4096, 0, "float32")


@pytest.mark.parametrize(
    ("layout", "here", "there", "sizes", "is_packed"),
    [
        (LATENT, FIRST, FIRST, (64, 16), True),
        (LATENT, LAYERS, FIRST, (64, 16), True),
        (LATENT, LAYERS, FIRST, (32, 32), True),
        (LATENT, FIRST, FIRST, (32, 32), False),
        (LATENT, FIRST, LAYERS, (64, 16), False),
        (LATENT, LAYERS, LAYERS, (64, 16), False),
        (WIDE, FIRST, FIRST, (64, 2), True),
        (WIDE, FIRST, FIRST, (64, 4), False),
    ],
)
def test_only_small_pieces_for_whole_pages_are_packed(layout, here, there, sizes, is_packed):
    ours, theirs = (
        note(shaped(layout, size, 9, order, layers=16))
        for order, size in zip((here, there), sizes, strict=True)
    )

    assert is_worth_packing(ours, theirs, sizes[0] // sizes[1]) is is_packed


def test_pieces_of_a_single_tensor_are_not_packed_because_they_touch():
    ours, theirs = (note(shaped(LATENT, size, 9, FIRST, layers=1)) for size in (64, 16))

    assert not is_worth_packing(ours, theirs, 4)
