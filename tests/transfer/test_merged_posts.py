"""Small posts that wait together share a handle: what each is told, and where its bytes go."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from kvd.core.effects import Post
from kvd.core.inputs import PostDone, PostFailed, PostMoved, WritePath
from kvd.core.layout.seal import Seal
from kvd.core.layout.spec import Mla
from kvd.transfer.paths import AgentKey
from kvd.transfer.post_queue import ALONE_HANDLES, IN_FLIGHT_HANDLES, MERGED_BYTES, PostQueue
from kvd.transfer.staging import STAGING_BYTES, Staging
from kvd.wire.peer import Integrity
from tests.transfer.layouts import ids
from tests.transfer.test_staging import Memory, Wire

PAGES = 2800
PAGE_BYTES = 16 * 1024
"""A slot of 16 layers."""
LARGE = 1100
"""Pages of a post that takes two handles."""

MUCH = 2700
"""Pages of one that takes more handles than go as one, if they lie backwards."""


class Lane:
    """A lane between two pools of pages of one token."""

    def __init__(self, path=WritePath.NETWORK):
        latent = Mla(480, 32, "bfloat16")
        self.ours, self.theirs = Memory(latent, 1, PAGES), Memory(latent, 1, PAGES)
        self.ours.bytes[:] = np.random.default_rng(5).integers(0, 256, self.ours.bytes.size, "u1")
        self._staged = mmap.mmap(-1, STAGING_BYTES)
        self.wire, self.reports, self.paced = Wire(), [], []
        self.queue = PostQueue(
            self.wire,
            key=AgentKey("p", 1),
            path=path,
            regions={"kv": self.theirs.note},
            staging=Staging(np.frombuffer(self._staged, np.uint8).ctypes.data),
            report=self.reports.append,
            posting=lambda post, share: self.paced.append((post, share)),
        )

    def add(self, number, first, n_pages, step=1, **more):
        pages = ids(range(first, first + n_pages)[::step])
        self.queue.add(Post(number, "p", 1, "kv", pages, pages, **more), {"kv": self.ours.area})

    def post_all(self):
        while self.queue.can_post:
            self.queue.post_next()

    def pages_there(self):
        """Which pages have arrived over there."""
        here, there = (one.bytes.reshape(PAGES, PAGE_BYTES) for one in (self.ours, self.theirs))
        assert not there[(there != here).any(axis=1)].any()
        return np.flatnonzero((there == here).all(axis=1)).tolist()


def test_small_posts_share_a_handle_and_each_is_told_of():
    lane = Lane()
    for number in range(3):
        lane.add(number, 10 * (number + 1), 4)

    lane.post_all()
    assert len(lane.wire.waiting) == 1
    assert lane.paced == [(0, 1.0), (1, 1.0), (2, 1.0)]
    lane.wire.let_through(0)
    lane.queue.step()

    assert [(one.post, one.moved_bytes) for one in lane.reports] == [
        (number, 4 * PAGE_BYTES) for number in range(3)
    ]
    assert lane.pages_there() == [10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33]


def test_what_is_not_small_together_goes_in_handles_of_its_own():
    lane = Lane()
    half = MERGED_BYTES // 2 // PAGE_BYTES
    lane.add(1, 1, half)
    lane.add(2, 200, half)
    lane.add(3, 400, 1)
    lane.add(4, 500, LARGE)

    lane.post_all()

    sizes = [int(source[:, 1].sum()) // PAGE_BYTES for source, _ in lane.wire.waiting]
    assert sizes[:2] == [2 * half, 1]
    assert sum(sizes) == 2 * half + 1 + LARGE


def test_the_posts_of_a_handle_that_fails_all_fail_and_their_bytes_count_as_open():
    lane = Lane()
    lane.add(1, 10, 4)
    lane.add(2, 20, 3)
    lane.post_all()
    lane.wire.broken.add(0)

    lane.queue.step()

    assert [(type(one), one.post) for one in lane.reports] == [(PostFailed, 1), (PostFailed, 2)]
    assert lane.queue.destroy("dropped") == 7 * PAGE_BYTES


def handle_pages(lane):
    return [int(source[:, 1].sum()) // PAGE_BYTES for source, _ in lane.wire.waiting]


def test_a_post_alone_on_one_host_takes_some_handles_at_a_time():
    lane = Lane(WritePath.SAME_HOST)
    lane.add(1, 1, MUCH, step=-1)
    plain = Lane()
    plain.add(1, 1, MUCH, step=-1)
    plain.post_all()
    one, *_ = handle_pages(plain)
    assert one * (ALONE_HANDLES + 1) < MUCH

    lane.queue.post_next(is_alone=True)
    lane.add(2, 2790, 1, seal=Seal(Integrity.FULL, b"k" * 16, 0, 1))
    lane.queue.post_next(is_alone=True)

    assert handle_pages(lane) == [ALONE_HANDLES * one, one]
    lane.post_all()
    for handle in range(len(lane.wire.waiting)):
        lane.wire.let_through(handle)
    lane.queue.step()
    done = [one.post for one in lane.reports if isinstance(one, PostDone)]
    assert sorted(done) == [1, 2]
    assert lane.pages_there() == [*range(1, MUCH + 1), 2790]


@pytest.mark.parametrize(
    ("path", "integrity"),
    [(WritePath.NETWORK, Integrity.SAMPLED), (WritePath.SAME_HOST, Integrity.FULL)],
)
def test_over_a_network_or_summed_whole_it_takes_one(path, integrity):
    lane = Lane(path)
    lane.add(1, 1, LARGE, seal=Seal(integrity, b"k" * 16, 0, LARGE))

    lane.queue.post_next(is_alone=True)
    lane.queue.post_next(is_alone=True)

    assert len(lane.wire.waiting) == 2
    assert sum(handle_pages(lane)) == LARGE


def test_handles_that_go_as_one_and_fail_together_fails_once():
    lane = Lane(WritePath.SAME_HOST)
    lane.add(1, 1, LARGE)
    lane.queue.post_next(is_alone=True)
    lane.wire.broken.add(0)

    lane.queue.step()

    assert [(type(one), one.post) for one in lane.reports] == [(PostFailed, 1)]
    assert not lane.queue.can_post


def test_a_handle_that_is_done_before_an_older_one_is_told_of():
    lane = Lane()
    lane.add(1, 1, 60)
    lane.add(2, 100, 60)
    lane.add(3, 200, 60)
    lane.post_all()
    assert len(lane.wire.waiting) == 3

    lane.wire.let_through(1)
    lane.wire.broken.add(2)
    lane.queue.step()

    assert [(type(one), one.post) for one in lane.reports] == [(PostDone, 2), (PostFailed, 3)]
    assert lane.queue.has_flights
    lane.wire.let_through(0)
    lane.queue.step()
    assert not lane.queue.has_flights
    assert lane.reports[-1].post == 1


def test_a_post_that_is_ordered_twice_goes_once_and_is_answered_once():
    lane = Lane()
    lane.add(1, 1, 4)
    lane.add(1, 100, 4)

    lane.post_all()
    lane.wire.let_through(0)
    lane.queue.step()

    assert [(type(one), one.post) for one in lane.reports] == [(PostDone, 1)]
    assert lane.pages_there() == [1, 2, 3, 4]


@pytest.mark.parametrize("seed", range(8))
def test_posts_of_any_size_are_each_answered_once_and_whole(seed):
    rng = np.random.default_rng(seed)
    lane, wanted, first = Lane(), {}, 1
    let_through = 0
    for number in range(40):
        n_pages = int(rng.choice((1, 2, 40, 64, 300)))
        if first + n_pages < PAGES:
            lane.add(number, first, n_pages)
            wanted[number] = n_pages
            first += n_pages
        for _ in range(int(rng.integers(0, 3))):
            if lane.queue.can_post:
                lane.queue.post_next()
        while let_through < len(lane.wire.waiting) and rng.random() < 0.4:
            lane.wire.let_through(let_through)
            let_through += 1
        lane.queue.step()
        assert let_through >= len(lane.wire.waiting) - IN_FLIGHT_HANDLES
    while lane.queue.can_post or lane.queue.has_flights:
        lane.post_all()
        while let_through < len(lane.wire.waiting):
            lane.wire.let_through(let_through)
            let_through += 1
        lane.queue.step()

    done = {one.post: one.moved_bytes for one in lane.reports if isinstance(one, PostDone)}
    assert done == {number: n * PAGE_BYTES for number, n in wanted.items()}, f"seed {seed}"
    assert sum(isinstance(one, PostDone) for one in lane.reports) == len(wanted)
    assert lane.pages_there() == list(range(1, first))


def test_whole_pages_are_told_of_before_the_last_handle_where_all_are_summed():
    lane = Lane()
    lane.add(1, 1, LARGE, seal=Seal(Integrity.FULL, b"k" * 16, 0, LARGE))

    lane.post_all()
    lane.wire.let_through(0)
    lane.queue.step()

    (moved,) = lane.reports
    assert isinstance(moved, PostMoved)
    assert moved.moved_bytes // PAGE_BYTES == moved.pages
    assert lane.pages_there()[: moved.pages] == list(range(1, moved.pages + 1))
