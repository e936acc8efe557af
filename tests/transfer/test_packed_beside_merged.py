"""Packed posts and small ones that share a handle, under way on one lane at once."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kvd.core.effects import Post
from kvd.core.inputs import PostDone, PostFailed, PostMoved
from kvd.core.layout.seal import Seal
from kvd.transfer import post_queue
from kvd.transfer.post_queue import IN_FLIGHT_HANDLES
from kvd.transfer.staging import PACKER, SLOT_BYTES, SLOTS
from kvd.wire.peer import Integrity
from tests.transfer.layouts import ids, slots
from tests.transfer.test_staging import (
    LATENT,
    LIMIT_S,
    Bench,
    Memory,
    wait_for_slots,
    wait_for_the_packer,
)

SMALL_PAGES = 200
SMALL_BYTES = 16 * 1024
PIECES = SLOT_BYTES // (16 * SMALL_BYTES)
"""Pages of the peer in a packed handle."""
HALF_BYTES = 2 * SLOT_BYTES // PIECES
"""Of two of them: small enough to share a handle, were they not packed."""


class Both(Bench):
    """Beside the pool that is packed one whose pages are alike on both sides."""

    def __init__(self, pages=16):
        super().__init__(pages)
        self.small, self.small_there = (
            Memory(LATENT, 1, SMALL_PAGES),
            Memory(LATENT, 1, SMALL_PAGES),
        )
        self.small.bytes[:] = np.random.default_rng(8).integers(0, 256, self.small.bytes.size, "u1")
        self.lane._theirs["small"] = self.small_there.note
        self.let = threading.Event()
        self.let.set()
        self.entered = threading.Event()
        self._gather = self.ours.area.gather
        self.ours.area.gather = self._gated

    def _gated(self, split, pages, into):
        if threading.current_thread().name == PACKER:
            self.entered.set()
            assert self.let.wait(LIMIT_S)
        self._gather(split, pages, into)

    def post_packed(self, number, first, n_pages, seal=None):
        """Pages of the peer, each a quarter of one of ours."""
        pages = ids(range(first, first + n_pages))
        more = {} if seal is None else {"seal": seal}
        order = Post(number, "p", 1, "kv", pages, pages, split=4, **more)
        self.lane.add(order, {"kv": self.ours.area})

    def post_small(self, number, first, n_pages):
        pages = ids(range(first, first + n_pages))
        self.lane.add(Post(number, "p", 1, "small", pages, pages), {"small": self.small.area})

    def post_all(self):
        while self.lane.can_post:
            self.lane.post_next()

    def sizes(self):
        return [int(source[:, 1].sum()) for source, _ in self.wire.waiting]

    def packed_there(self):
        """Which of the peer's pages, 16 tokens each, hold what they should."""
        here, there = (slots(one.bytes, one.shape) for one in (self.ours, self.theirs))
        are_alike = [
            (ours.reshape(-1, 1024) == theirs.reshape(-1, 1024)).all(axis=1)
            for ours, theirs in zip(here, there, strict=True)
        ]
        return np.flatnonzero(np.all(are_alike, axis=0).reshape(-1, 16).all(axis=1)).tolist()

    def small_pages_there(self):
        here, there = (
            one.bytes.reshape(SMALL_PAGES, SMALL_BYTES) for one in (self.small, self.small_there)
        )
        return np.flatnonzero((here == there).all(axis=1)).tolist()


def test_small_posts_share_a_handle_beside_packed_ones_in_flight():
    lane = Both()
    lane.post_packed(1, 4, 16)
    for number in (2, 3, 4):
        lane.post_small(number, 10 * number, number)
    lane.post_packed(5, 20, 2)

    lane.lane.post_next()
    lane.lane.post_next()
    assert lane.sizes() == [SLOT_BYTES, 9 * SMALL_BYTES]
    while len(lane.wire.waiting) < 4:
        lane.post_all()
        if len(lane.wire.waiting) < 4:
            wait_for_the_packer(lane.staging)

    assert sorted(lane.sizes()) == [9 * SMALL_BYTES, HALF_BYTES, SLOT_BYTES, SLOT_BYTES]
    wait_for_slots(lane.staging, SLOTS - 3)

    for handle in range(4):
        lane.wire.let_through(handle)
    lane.lane.step()

    assert sorted((one.post, one.moved_bytes) for one in lane.posted()) == [
        (1, 2 * SLOT_BYTES),
        *((number, number * SMALL_BYTES) for number in (2, 3, 4)),
        (5, HALF_BYTES),
    ]
    assert lane.packed_there() == list(range(4, 22))
    assert lane.small_pages_there() == [20, 21, 30, 31, 32, 40, 41, 42, 43]
    wait_for_slots(lane.staging, SLOTS)


def test_small_posts_share_a_handle_past_a_packed_one_that_is_still_being_packed():
    lane = Both()
    lane.let.clear()
    lane.post_packed(1, 4, 16)
    lane.lane.post_next()
    assert lane.entered.wait(LIMIT_S)
    for number in (2, 3):
        lane.post_small(number, 10 * number, number)

    lane.post_all()

    assert lane.sizes() == [SLOT_BYTES, 5 * SMALL_BYTES]
    lane.let.set()
    wait_for_the_packer(lane.staging)
    lane.post_all()
    assert lane.sizes()[2:] == [SLOT_BYTES]


def test_pages_are_told_of_only_when_all_before_them_have_arrived(monkeypatch):
    monkeypatch.setattr(post_queue, "PROGRESS_EVERY_S", 0.0)
    lane = Both()
    lane.let.clear()
    lane.post_packed(1, 4, 32, Seal(Integrity.FULL, b"k" * 16, 0, 32))
    lane.lane.post_next()
    assert lane.entered.wait(LIMIT_S)
    # The packer stands still with the second handle: the loop goes on with the third and fourth.
    lane.post_all()
    assert len(lane.wire.waiting) == 3

    told = []
    for handle in range(4):
        if handle == 3:
            lane.let.set()
            wait_for_the_packer(lane.staging)
            lane.post_all()
        lane.wire.let_through(handle)
        lane.lane.step()
        told += [
            (one.moved_bytes // SLOT_BYTES, one.pages)
            for one in lane.reports[len(told) :]
            if isinstance(one, PostMoved)
        ]
        there = lane.packed_there()
        assert set(range(4, 4 + told[-1][1])) <= set(there)

    assert told == [(1, PIECES), (2, PIECES), (3, PIECES)]
    (done,) = lane.posted()
    assert done.moved_bytes == 4 * SLOT_BYTES
    assert lane.packed_there() == list(range(4, 36))
    wait_for_slots(lane.staging, SLOTS)


@pytest.mark.parametrize("seed", range(6))
def test_each_post_is_answered_once_and_every_slot_comes_back_whatever_fails(seed):
    rng = np.random.default_rng(seed)
    lane = Both(150)
    wire, queue = lane.wire, lane.lane
    first_packed, first_small, seen, wanted = 4, 1, 0, {}
    packed, small = {}, {}
    for number in range(30):
        n_pages = int(rng.integers(1, 6))
        if rng.random() < 0.4:
            n_pages *= int(rng.choice((1, 4)))
            lane.post_packed(number, first_packed, n_pages)
            wanted[number] = n_pages * HALF_BYTES // 2
            packed[number] = range(first_packed, first_packed + n_pages)
            first_packed += n_pages
        else:
            lane.post_small(number, first_small, n_pages)
            wanted[number] = n_pages * SMALL_BYTES
            small[number] = range(first_small, first_small + n_pages)
            first_small += n_pages
        for _ in range(int(rng.integers(0, 3))):
            if queue.can_post:
                queue.post_next()
        while seen < len(wire.waiting) and rng.random() < 0.5:
            if rng.random() < 0.1:
                wire.broken.add(seen)
            else:
                wire.let_through(seen)
            seen += 1
        queue.step()
    lost = [lane.sizes()[handle] for handle in wire.broken]
    # What a failed handle was packed into is held until the agent is gone.
    in_flight = [lane.sizes()[handle] for handle in range(seen, len(wire.waiting))]
    assert len(in_flight) <= IN_FLIGHT_HANDLES

    assert queue.destroy("dropped") == sum(lost) + sum(in_flight), f"seed {seed}"

    wait_for_slots(lane.staging, SLOTS)
    done = {one.post: one.moved_bytes for one in lane.posted()}
    for posts, there in ((packed, lane.packed_there()), (small, lane.small_pages_there())):
        assert {page for number in posts.keys() & done.keys() for page in posts[number]} <= {*there}
    failed = {one.post for one in lane.reports if isinstance(one, PostFailed)}
    assert done.items() <= wanted.items(), f"seed {seed}"
    assert sorted([*done, *failed]) == sorted(wanted), f"seed {seed}"
    ends = [one for one in lane.reports if isinstance(one, PostDone | PostFailed)]
    assert len(ends) == len(wanted), f"seed {seed}"
