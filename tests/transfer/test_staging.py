"""Small pieces are packed into slots before they travel, and a slot is in one place at a time."""

from __future__ import annotations

import ctypes
import mmap
import random
import select
import threading
import time

import numpy as np
import pytest

from kvd.core.effects import Post
from kvd.core.inputs import PostDone, PostFailed, WritePath
from kvd.core.layout.spec import Mha, Mla, PageOrder, companion_pages
from kvd.transfer.copies import mapped_area
from kvd.transfer.core_waits import CoreWaits
from kvd.transfer.descriptors import CUT_BYTES, packed_writes
from kvd.transfer.mapping import HUGE_BYTES, map_scratch
from kvd.transfer.nixl import NixlUnusable
from kvd.transfer.paths import AgentKey
from kvd.transfer.plans import FoundRegions, plan
from kvd.transfer.post_queue import IN_FLIGHT_HANDLES, PostQueue
from kvd.transfer.staging import (
    AHEAD,
    IN_TURNS_BYTES,
    RESERVED,
    RESTS,
    SLOT_BYTES,
    SLOTS,
    STAGING_BYTES,
    Band,
    Packing,
    Staging,
    is_worth_packing,
)
from tests.transfer.layouts import ids, note, shaped, slots

LIMIT_S = 20
KEPT = []
"""Memory in which a packer may still be at work when its test is over."""
LATENT = Mla(480, 32, "bfloat16")
"""A page of 64 tokens of 16 layers is 1 MiB: two fit into a slot."""
FIRST, LAYERS = PageOrder.PAGE_FIRST, PageOrder.LAYER_FIRST


class Memory:
    """A component at a real address of this process."""

    def __init__(self, layout, page_size, pages, order=PageOrder.PAGE_FIRST):
        self.shape = shaped(layout, page_size, pages, order, layers=16)
        self._map = mmap.mmap(-1, self.shape.total_bytes)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.note = note(self.shape, self.bytes.ctypes.data)
        self.area = mapped_area(self.note)


class Cores:
    """As many as there are threads, or none to spare."""

    def __init__(self, is_scarce=False):
        self._is_scarce = is_scarce

    def is_scarce(self):
        return self._is_scarce


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
        KEPT.append(self)
        self.ours, self.theirs = Memory(LATENT, 64, pages + 1), Memory(LATENT, 16, 4 * pages + 4)
        self.ours.bytes[:] = np.random.default_rng(7).integers(0, 256, self.ours.bytes.size, "u1")
        self.pages = pages
        self._staged = mmap.mmap(-1, STAGING_BYTES)
        self.staging = Staging(np.frombuffer(self._staged, np.uint8).ctypes.data, Cores)
        self.wire, self.reports = Wire(), []
        self.lane = PostQueue(
            self.wire,
            key=AgentKey("p", 1),
            path=WritePath.NETWORK,
            regions={"kv": self.theirs.note},
            staging=self.staging,
            report=self.reports.append,
            posting=lambda post, share: None,
        )

    def post(self, number):
        pages = companion_pages(ids(range(1, self.pages + 1)), 4)
        onto = ids(range(4, 4 * self.pages + 4))
        self.lane.add(Post(number, "p", 1, "kv", pages, onto, split=4), {"kv": self.ours.area})

    def posted(self):
        """How often and with what the post has ended well; how far it had come is told by time."""
        return [report for report in self.reports if isinstance(report, PostDone)]

    def fill_up(self):
        """As many handles in flight as there can be."""
        handles = self.pages * 2**20 // SLOT_BYTES
        while True:
            while self.lane.can_post:
                self.lane.post_next()
            under_way = len(self.wire.waiting) - len(self.wire.done)
            if under_way >= IN_FLIGHT_HANDLES or len(self.wire.waiting) >= handles:
                return
            wait_for_the_packer(self.staging)


def wait_for_the_packer(staging):
    assert select.select([staging.descriptor], [], [], LIMIT_S)[0]


def wait_for_slots(staging, slots):
    """Until so many are free; what is being packed for nobody is given back when it is packed."""
    news = select.poll()
    for _ in range(int(LIMIT_S * 1000)):
        if len(staging.free) == slots:
            break
        news.poll(1)
    assert len({slot.address for slot in staging.free}) == slots


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
    assert 0 <= SLOTS - IN_FLIGHT_HANDLES - len(bench.staging.free) <= AHEAD
    assert begins.isdisjoint(slot.address for slot in bench.staging.free)


def test_a_packed_post_waits_while_no_slot_is_free_and_goes_on_with_the_next():
    bench = Bench()
    taken, bench.staging.free[:] = bench.staging.free[:], []
    bench.post(1)
    assert not bench.lane.can_post

    bench.staging.give([taken.pop()])
    bench.lane.post_next()
    assert not bench.lane.can_post
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
    wait_for_slots(bench.staging, SLOTS - 1)
    assert failed not in {slot.address for slot in bench.staging.free}
    assert bench.lane.destroy("dropped") == SLOT_BYTES
    assert bench.wire.is_gone
    wait_for_slots(bench.staging, SLOTS)


def test_slots_of_handles_in_flight_are_free_when_the_agent_is_gone():
    bench = Bench()
    bench.post(1)
    bench.fill_up()

    assert bench.lane.destroy("dropped") == IN_FLIGHT_HANDLES * SLOT_BYTES
    wait_for_slots(bench.staging, SLOTS)
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
    order = Post(1, "p", 1, "kv", ids(pieces), ids(range(1, 8)), split=4)
    theirs = note(shaped(Mha(2, 6, 4, "uint8"), 2, 20, FIRST, layers=16))
    packing = plan(order, FoundRegions((ours.area,), theirs)).packing
    packed = np.zeros(SLOT_BYTES, np.uint8)

    assert list(packing.steps(0, packed, SLOT_BYTES)) == [None]

    wanted = [
        tensor[piece // 4, piece % 4 * 2 : piece % 4 * 2 + 2].ravel()
        for piece in pieces
        for tensor in slots(ours.bytes, ours.shape)
    ]
    assert np.array_equal(
        packed[: len(pieces) * ours.shape.page_bytes // 4], np.concatenate(wanted)
    )


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


class Source:
    """Pages of two to a slot, whose bytes say which page and which post they are of."""

    def __init__(self, mark, pages, regions=("kv",)):
        self.mark = mark
        self.steps_done = []
        self.let = threading.Event()
        self.let.set()
        self.entered = threading.Event()
        self.packing = Packing(regions, ids(pages), [Band(self._steps, SLOT_BYTES // 2)])

    def _steps(self, pages, rows, step_bytes):
        for page, row in zip(pages.tolist(), rows, strict=True):
            self.entered.set()
            assert self.let.wait(LIMIT_S)
            row[:] = self.value(page)
            self.steps_done.append((page, step_bytes))
            yield

    def value(self, page):
        return (self.mark * 100 + page) % 256

    def is_packed(self, portion, pages):
        halves = portion.slot.memory.reshape(2, -1)
        wanted = pages[2 * portion.handle : 2 * portion.handle + 2]
        return all(
            (half == self.value(page)).all() for half, page in zip(halves, wanted, strict=False)
        )


@pytest.fixture
def staging():
    return staged(Cores)


def staged(waits):
    KEPT.append(memory := mmap.mmap(-1, STAGING_BYTES))
    return Staging(np.frombuffer(memory, np.uint8).ctypes.data, waits)


def take(staging, post):
    """The next handle, however long the packer takes with it."""
    while True:
        portion = staging.take(post) if staging.can_take(post) else None
        if portion is not None:
            return portion
        wait_for_the_packer(staging)


def test_the_packer_is_ahead_of_the_post_by_a_few_handles(staging):
    source = Source(1, range(1, 21))
    post = staging.begin(source.packing)
    first = take(staging, post)

    wait_for_slots(staging, SLOTS - 1 - AHEAD)
    while len(post.ready) < AHEAD:
        wait_for_the_packer(staging)
    assert (first.handle, [one.handle for one in post.ready]) == (0, [1, 2])
    portions = [first, *(take(staging, post) for _ in range(9))]

    assert sorted(one.handle for one in portions) == list(range(10))
    assert len({one.slot.address for one in portions}) == 10
    assert all(source.is_packed(one, range(1, 21)) for one in portions)
    assert not staging.can_take(post)


def test_a_handle_is_packed_by_whoever_asks_while_the_packer_is_at_another(staging):
    source = Source(1, range(1, 9))
    post = staging.begin(source.packing)
    take(staging, post)
    while len(source.steps_done) < 6:  # it packs two handles of two pages ahead
        wait_for_the_packer(staging)
    source.let.clear()
    source.entered.clear()
    assert [take(staging, post).handle for _ in range(2)] == [1, 2]
    assert source.entered.wait(LIMIT_S)

    assert not staging.can_take(post)
    assert staging.take(post) is None
    source.let.set()

    assert take(staging, post).handle == 3


def test_a_slot_being_packed_for_a_post_that_is_over_is_free_when_it_is_packed(staging):
    source = Source(1, range(1, 9))
    post = staging.begin(source.packing)
    portions = [staging.take(post)]
    while len(source.steps_done) < 6:
        wait_for_the_packer(staging)
    source.let.clear()
    source.entered.clear()
    portions.append(take(staging, post))
    assert source.entered.wait(LIMIT_S)

    staging.drop(post)
    staging.give([one.slot for one in portions])
    assert len(staging.free) == SLOTS - 1
    source.let.set()

    wait_for_slots(staging, SLOTS)
    assert not staging.can_take(post)


def test_posts_that_read_the_same_pages_are_packed_in_turns_by_one_go(staging):
    sources = Source(1, (1, 2)), Source(2, (1, 2)), Source(3, (1, 2), ("kv#1",))
    posts = [staging.begin(one.packing) for one in sources]

    first = staging.take(posts[0])

    assert len(posts[1].ready) == 1
    portions = [first, *(take(staging, post) for post in posts[1:])]
    for source, portion in zip(sources, portions, strict=True):
        assert source.is_packed(portion, (1, 2))
    step_bytes = [{size for _, size in one.steps_done} for one in sources]
    assert step_bytes == [{IN_TURNS_BYTES}, {IN_TURNS_BYTES}, {SLOT_BYTES}]


def test_a_packer_that_finds_no_core_rests_and_the_loop_packs():
    staging = staged(lambda: Cores(is_scarce=True))
    pages = range(1, 4 * RESTS)
    source = Source(1, pages)
    post = staging.begin(source.packing)
    first = take(staging, post)
    while not post.ready:
        wait_for_the_packer(staging)
    handles = [first.handle, take(staging, post).handle]
    staging.give([first.slot])
    wakes: list[int] = []
    staging._news.notify = lambda n=1: wakes.append(n)

    for _ in range(RESTS - 1):
        assert not post.ready
        portion = staging.take(post)
        assert source.is_packed(portion, pages)
        handles.append(portion.handle)
        if len(handles) < RESTS + 1:
            assert not wakes, "it is not woken for nothing"
        staging.give([portion.slot])
    del staging._news.notify
    staging.give([])
    while not post.ready:
        wait_for_the_packer(staging)

    assert sorted(handles) == list(range(RESTS + 1))


def test_slots_are_whole_huge_pages():
    address = map_scratch(STAGING_BYTES, in_huge_pages=True)

    assert address % HUGE_BYTES == 0
    assert SLOT_BYTES % HUGE_BYTES == 0
    memory = (ctypes.c_ubyte * STAGING_BYTES).from_address(address)
    memory[0] = memory[STAGING_BYTES - 1] = 1
    assert (memory[0], memory[1], memory[STAGING_BYTES - 1]) == (1, 0, 1)


def test_what_the_kernel_counts_is_read():
    waits = CoreWaits()
    until = time.thread_time() + 0.01
    while time.thread_time() < until:
        pass

    ran, waited = waits._times()
    assert ran - waits._ran >= 5_000_000
    assert waited >= waits._waited
    assert waits.is_scarce() in {True, False}


def test_nothing_is_packed_ahead_into_the_last_slots(staging):
    sources = [Source(number, (1, 2, 3, 4)) for number in range(SLOTS)]
    posts = [staging.begin(one.packing) for one in sources]
    staging.take(posts[0])
    wait_for_slots(staging, RESERVED)
    others = [staging.take(post) for post in posts[-RESERVED:] if staging.can_take(post)]

    assert len(others) == RESERVED
    assert not staging.free


@pytest.mark.parametrize("seed", range(6))
def test_every_handle_is_packed_once_and_every_slot_comes_back_whatever_fails(staging, seed):
    rng = random.Random(seed)
    wanted = [list(range(1, rng.randrange(2, 30))) for _ in range(3)]
    sources = [Source(at, pages) for at, pages in enumerate(rng.choices(wanted, k=6))]
    open_posts = {staging.begin(one.packing): one for one in sources}
    pages = {one: np.frombuffer(one.packing.reads[1], "<i4") for one in sources}
    taken = {post: [] for post in open_posts}
    held = []
    while open_posts:
        post = rng.choice(list(open_posts))
        source = open_posts[post]
        if rng.random() < 0.05:
            staging.drop(post)
            del open_posts[post]
            continue
        while len(held) > 8:
            staging.give([held.pop(rng.randrange(len(held)))])
        portion = take(staging, post)
        held.append(portion.slot)
        taken[post].append(portion.handle)
        assert source.is_packed(portion, pages[source]), f"seed {seed}"
        if len(taken[post]) == source.packing.handles:
            assert sorted(taken[post]) == list(range(source.packing.handles)), f"seed {seed}"
            del open_posts[post]
    staging.give(held)

    wait_for_slots(staging, SLOTS)
