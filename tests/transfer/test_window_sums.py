"""Sums over a window: the writer takes them from its pieces, the receiver from its own pages.

Both are those of the window's bytes layer by layer, tensor by tensor, slot by slot, head by head.
scenario G23.
"""

from __future__ import annotations

from itertools import product

import msgspec
import numpy as np
import pytest

from kvd.core.effects import Verify
from kvd.core.inputs import Verified
from kvd.core.layout.seal import Seal, page_sum
from kvd.core.layout.shards import PageWindow, Piece, Pieced, Straight, lanes
from kvd.core.layout.spec import PageOrder
from kvd.transfer.copies import Area
from kvd.transfer.orders import UNSTAMPED
from kvd.transfer.sums import post_job, verify_job
from kvd.wire.peer import Integrity
from tests.transfer.layouts import ids
from tests.transfer.sharded import CASES, ONTO, PAGES, delivered, post, sides

FIRST = 3
FULL = Seal(Integrity.FULL, b"w" * 16, FIRST, FIRST + len(PAGES))
SAMPLED = msgspec.structs.replace(FULL, integrity=Integrity.SAMPLED)

each_order = pytest.mark.parametrize("orders", list(product(PageOrder, repeat=2)))


def written(here, lane, making, seal):
    """The sums of the writer."""
    order = post(making, lane.peer_shard)
    job = post_job(msgspec.structs.replace(order, seal=seal, first_page=FIRST), here.areas)
    job.sum_slice(0, job.ids.size)
    return job.packed()


def verified(there, lane, sums, seal=FULL):
    """What the receiver finds."""
    job = verify_job(
        Verify(9, "kv", seal, ids(ONTO), sums, lane.peer_shard, lane.window), there.areas
    )
    if isinstance(job, Verified):
        return job
    job.sum_slice(0, job.ids.size)
    return job.report()


def modelled(there, lane):
    """The sums of what the receiver has, one head of one slot of one tensor at a time."""
    shard = there.shards[lane.peer_shard]
    window = lane.window or PageWindow(
        0, shard.end_layer - shard.first_layer, 0, shard.end_head - shard.first_head
    )
    inside = [
        one.pages
        for one in there.elements(lane.peer_shard)
        if window.first_layer <= one.layer - shard.first_layer < window.end_layer
        and window.first_head <= one.head - shard.first_head < window.end_head
    ]
    return [
        page_sum(FULL, logical, [pages[page].tobytes() for pages in inside])
        for logical, page in enumerate(ONTO, FIRST)
    ]


@each_order
@pytest.mark.parametrize("name", CASES)
def test_writer_and_receiver_come_to_the_sums_of_the_windows_bytes(name, orders):
    here, there = sides(name, orders)

    for lane in lanes(here.shards, there.shards):
        there.memory[:], _ = delivered(here, there, lane)
        wanted = modelled(there, lane)
        for making in lane.copies:
            sums = written(here, lane, making, FULL)

            assert np.frombuffer(sums, "<u8").tolist() == wanted
            assert verified(there, lane, sums) == Verified(UNSTAMPED, 9, ())
            some = written(here, lane, making, SAMPLED)
            assert 2 * 8 <= len(some) <= len(sums)
            assert verified(there, lane, some, SAMPLED) == Verified(UNSTAMPED, 9, ())


@each_order
@pytest.mark.parametrize(
    "name", ["4 heads, 2 to 1", "one rank of two", "stage 1 of all", "latent, a stage"]
)
def test_every_byte_of_the_window_counts_and_no_other(name, orders):
    here, there = sides(name, orders)
    (lane,) = lanes(here.shards, there.shards)
    there.memory[:], inside = delivered(here, there, lane)
    sums = written(here, lane, lane.copies[0], FULL)

    for at in range(0, there.shapes[0].total_bytes, 7):
        there.memory[at] ^= 16
        assert bool(verified(there, lane, sums).bad_pages) is bool(inside[at]), at
        there.memory[at] ^= 16


def test_a_window_of_another_place_has_other_sums():
    here, there = sides("one rank of two", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    (lane,) = lanes(here.shards, there.shards)
    there.memory[:], _ = delivered(here, there, lane)
    sums = written(here, lane, lane.copies[0], FULL)

    moved = msgspec.structs.replace(lane, window=PageWindow(0, 4, 1, 3))

    assert verified(there, moved, sums).bad_pages == tuple(range(FIRST, FIRST + len(PAGES)))


@pytest.mark.parametrize(
    ("shard", "window", "why"),
    [
        (1, None, "there is no region 'kv#1' here"),
        (-1, None, "there is no region 'kv#-1' here"),
        (
            0,
            PageWindow(0, 5, 0, 4),
            "layers 0 to 5 and heads 0 to 4 are no part of a page of region",
        ),
        (0, PageWindow(0, 4, -1, 4), "heads -1 to 4 are no part of a page of region 'kv' here"),
        (0, PageWindow(2, 2, 0, 4), "layers 2 to 2 and heads 0 to 4 are no part"),
    ],
)
def test_windows_that_are_not_there_are_not_summed(shard, window, why):
    _, there = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))

    found = verify_job(Verify(9, "kv", FULL, ids(ONTO), b"", shard, window), there.areas)

    assert why in found.why


LOW, HIGH, OWN = PageWindow(0, 4, 0, 2), PageWindow(0, 4, 2, 4), PageWindow(0, 4, 0, 2)
MERGED = Pieced(PageWindow(0, 4, 0, 4), (Piece(0, OWN, LOW), Piece(1, OWN, HIGH)))


@pytest.mark.parametrize(
    ("making", "change"),
    [
        (Straight(2), {}),
        (Straight(), {"split": 3}),
        (Pieced(MERGED.window, ()), {}),
        (Pieced(MERGED.window, MERGED.pieces[:1]), {}),
        (Pieced(MERGED.window, (Piece(0, OWN, LOW), Piece(2, OWN, HIGH))), {}),
        (Pieced(LOW, (Piece(0, PageWindow(0, 4, 1, 3), LOW),)), {}),
        (MERGED, {"source": ids([1, 2, 3, 4, 6])}),
    ],
)
def test_a_post_that_will_be_refused_is_not_summed(making, change):
    here, _ = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    order = msgspec.structs.replace(post(making), seal=FULL, first_page=FIRST, **change)

    assert post_job(order, here.areas) is None


def test_shards_that_are_laid_out_otherwise_are_not_summed_together():
    here, _ = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    other = msgspec.structs.replace(here.notes["kv#1"], strips=(24, 40) * 4)
    areas = here.areas | {"kv#1": Area(other, here.memory)}
    order = msgspec.structs.replace(post(MERGED), seal=FULL, first_page=FIRST)

    assert post_job(order, areas) is None
