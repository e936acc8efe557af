"""Pages between pools that are sharded differently: each byte goes to its place, exactly once.

Compared with a model that moves one head of one slot of one tensor at a time.
"""

from __future__ import annotations

from itertools import pairwise, product

import msgspec
import numpy as np
import pytest

from kvd.core.layout.geometry import PieceRow
from kvd.core.layout.shards import PageWindow, Piece, Pieced, Shard, Straight, lanes, tp_shards
from kvd.core.layout.spec import Mha, PageOrder
from kvd.transfer.copies import Area, Reach
from kvd.transfer.descriptors import packed_writes
from kvd.transfer.metadata import MemoryKind, MemorySite, RegionNote
from kvd.transfer.plans import direct, found, plan
from kvd.transfer.staging import SLOT_BYTES
from kvd.transfer.window_layout import WindowSource, pieced
from tests.transfer.sharded import (
    CASES,
    OURS,
    PAGES,
    SPACE,
    THEIRS,
    Model,
    Side,
    delivered,
    post,
    sides,
)


def write(rows, here, there):
    """Carry out descriptors; how often each byte was written."""
    often = np.zeros_like(there.memory)
    assert (rows.source[:, 1] == rows.destination[:, 1]).all()
    for (at, size, _), (to, _, _) in zip(
        rows.source.tolist(), rows.destination.tolist(), strict=True
    ):
        onto = slice(to - there.first, to - there.first + size)
        there.memory[onto] = here.memory[at - here.first : at - here.first + size]
        often[onto] += 1
    return often


STEPS = (1, 700, SLOT_BYTES)


def write_packed(rows, packing, there):
    """Pack and carry out one handle after the other; how often each byte was written."""
    assert packing.handles == rows.handles
    slot, often = np.zeros(SLOT_BYTES, np.uint8), np.zeros_like(there.memory)
    for handle, (low, high) in enumerate(pairwise(rows.bounds)):
        slot[:] = 255
        for _ in packing.steps(handle, slot, STEPS[handle % 3]):
            pass
        for (at, size, _), (to, _, _) in zip(
            rows.source[low:high].tolist(), rows.destination[low:high].tolist(), strict=True
        ):
            onto = slice(to - there.first, to - there.first + size)
            there.memory[onto] = slot[at : at + size]
            often[onto] += 1
    return often


each_order = pytest.mark.parametrize("orders", list(product(PageOrder, repeat=2)))
each_case = pytest.mark.parametrize("name", CASES)


def every_post(here, there):
    """Each copy of each lane as a post, with what it must bring about; onto empty memory."""
    sent = lanes(here.shards, there.shards)
    assert sent
    for lane in sent:
        expected, written = delivered(here, there, lane)
        for making in lane.copies:
            there.memory[:] = 0
            order = post(making, lane.peer_shard)
            regions = found(order, here.areas, there.notes)
            assert not isinstance(regions, str), regions
            yield order, regions, expected, written


@each_order
@each_case
def test_each_byte_goes_to_its_place_once(name, orders):
    here, there = sides(name, orders)

    for order, regions, expected, written in every_post(here, there):
        rows = direct(order, regions)

        assert np.array_equal(write(rows, here, there), written)
        assert np.array_equal(there.memory, expected)
        assert sum(rows.sizes) == int(written.sum())


@each_order
@each_case
def test_pieces_that_are_packed_go_to_the_same_places(name, orders):
    here, there = sides(name, orders)

    for order, regions, expected, written in every_post(here, there):
        packing = plan(order, regions).packing
        if packing is None:
            continue
        packing.handle_pages = 2
        window = order.making.window if isinstance(order.making, Pieced) else None
        rows = packed_writes(order.destination, regions.theirs, 2, window)

        assert np.array_equal(write_packed(rows, packing, there), written)
        assert np.array_equal(there.memory, expected)
        assert len(rows.source) < len(direct(order, regions).source)
        assert rows.handles == 3


DEEP = Model(5, Mha(2, 2048, 2048, "float32"), 32)
"""A layer is 1 MiB, two of them a slot."""


@pytest.mark.parametrize("orders", list(product(PageOrder, repeat=2)))
@pytest.mark.parametrize("ours", [(2, 0, 5), (2, 1, 4)])
def test_pages_larger_than_a_slot_are_packed_some_layers_at_a_time(ours, orders):
    size, *layers = ours
    here = Side(DEEP, tp_shards(2, size, (0, size), tuple(layers)), OURS, orders[0], SPACE, 2**24)
    there = Side(DEEP, (DEEP.all,), THEIRS, orders[1], 100 * SPACE, 2**26)
    here.fill(1)

    ((order, regions, expected, written),) = every_post(here, there)
    rows, packing, _ = plan(order, regions)

    assert np.array_equal(write_packed(rows, packing, there), written)
    assert np.array_equal(there.memory, expected)
    assert rows.handles == len(PAGES) * -(-(layers[1] - layers[0]) // 2)
    assert rows.sizes == [
        int(rows.source[low:high, 1].sum()) for low, high in pairwise(rows.bounds)
    ]


class Afar(Reach):
    is_direct = False


def test_memory_that_the_processor_cannot_read_goes_as_it_lies_each_from_its_device():
    here, there = sides("4 heads, 2 to 1", (PageOrder.PAGE_FIRST, PageOrder.PAGE_FIRST))
    (order, regions, _, _) = next(every_post(here, there))
    packed_first = plan(order, regions)
    assert packed_first.packing is not None
    assert packed_first.sides == (MemoryKind.DRAM, MemoryKind.DRAM)

    notes = [
        msgspec.structs.replace(area.note, place=MemorySite(MemoryKind.VRAM, device))
        for device, area in enumerate(regions.ours)
    ]
    onto = msgspec.structs.replace(regions.theirs, place=MemorySite(MemoryKind.VRAM, 5))
    ours = tuple(Area(one, here.memory, Afar()) for one in notes)
    made = plan(order, regions._replace(ours=ours, theirs=onto))

    assert made.packing is None
    assert made.sides == (MemoryKind.VRAM, MemoryKind.VRAM)
    lying = direct(order, regions)
    assert np.array_equal(made.writes.source[:, :2], lying.source[:, :2])
    begin = np.uint64(notes[1].address)
    is_second = (lying.source[:, 0] >= begin) & (lying.source[:, 0] < begin + np.uint64(SPACE))
    assert 0 < is_second.sum() < len(is_second)
    assert np.array_equal(made.writes.source[:, 2], is_second.astype(np.uint64))
    assert (made.writes.destination[:, 2] == 5).all()


FIRST, LAYERS = PageOrder.PAGE_FIRST, PageOrder.LAYER_FIRST


@pytest.mark.parametrize(
    ("name", "orders", "descriptors", "is_packed"),
    [
        # of 5 pages, 3 of them neighbours on both sides; 4 layers of K and V, 4 slots
        ("4 heads, 1 to 1", (FIRST, FIRST), 3, False),
        ("4 heads, 2 to 1", (FIRST, FIRST), 3, True),
        ("4 heads, 2 to 1", (FIRST, LAYERS), 5 * 8, True),
        ("4 heads, 1 to 2", (LAYERS, FIRST), 3, True),
        ("4 heads, 1 to 2", (LAYERS, LAYERS), 5 * 8, True),
        ("stage 1 of all", (FIRST, FIRST), 5, False),
        ("stage 1 of all", (LAYERS, LAYERS), 3 * 6, False),
        ("stage 1 of all", (LAYERS, FIRST), 5, True),
        ("stage 1 of all", (FIRST, LAYERS), 5 * 6, False),
        ("two ranks of a stage", (FIRST, FIRST), 5, True),
        ("one rank of two", (FIRST, FIRST), 5 * 8 * 4, False),
        ("one rank of two", (LAYERS, LAYERS), 5 * 8 * 4, False),
    ],
)
def test_pieces_are_packed_where_that_makes_fewer_descriptors(name, orders, descriptors, is_packed):
    here, there = sides(name, orders)
    (order, regions, _, _) = next(every_post(here, there))

    made = plan(order, regions)

    assert (len(made.writes.source), made.packing is not None) == (descriptors, is_packed)


def test_pieces_as_large_as_a_good_descriptor_are_not_packed():
    wide = Model(2, Mha(2, 512, 512, "float32"), 16)
    here = Side(wide, (Shard(0, 1, 0, 2), Shard(1, 2, 0, 2)), 2, FIRST, SPACE)
    there = Side(wide, (wide.all,), 2, FIRST, 100 * SPACE)
    (lane,) = lanes(here.shards, there.shards)

    order = post(lane.copies[0], pages=[1], onto=[1])
    regions = found(order, here.areas, there.notes)

    assert plan(order, regions).packing is None


WHOLE, LOW, HIGH = PageWindow(0, 4, 0, 4), PageWindow(0, 4, 0, 2), PageWindow(0, 4, 2, 4)
OWN = PageWindow(0, 4, 0, 2)
MERGED = Pieced(WHOLE, (Piece(0, OWN, LOW), Piece(1, OWN, HIGH)))


@pytest.mark.parametrize(
    ("making", "change", "complaint"),
    [
        (Straight(2), {}, "this node has no region 'kv#2'"),
        (Straight(-1), {}, "this node has no region 'kv#-1'"),
        (MERGED, {"peer_shard": 1}, "peer decode-0 has no region 'kv#1'"),
        (
            Pieced(WHOLE, (Piece(0, OWN, LOW), Piece(7, OWN, HIGH))),
            {},
            "this node has no region 'kv#7'",
        ),
        (MERGED, {"split": 2}, "cannot be cut into 2 pieces on their way between shards"),
        (Straight(1), {"split": 2}, "cannot be cut into 2 pieces on their way between shards"),
        (Straight(1), {}, "8 pieces of 512 bytes a page here and 8 of 1024 there"),
        (
            Pieced(PageWindow(0, 5, 0, 4), MERGED.pieces),
            {},
            "layers 0 to 5 and heads 0 to 4 are no part of a page of region 'kv' there, which "
            "has 4 layers of 4 heads",
        ),
        (
            Pieced(PageWindow(0, 4, 2, 2), ()),
            {},
            "layers 0 to 4 and heads 2 to 2 are no part of a page of region 'kv' there",
        ),
        (
            Pieced(LOW, (Piece(1, PageWindow(0, 4, 1, 3), LOW),)),
            {},
            "layers 0 to 4 and heads 1 to 3 are no part of a page of region 'kv#1' here",
        ),
        (
            Pieced(LOW, (Piece(1, PageWindow(-1, 3, 0, 2), LOW),)),
            {},
            "layers -1 to 3 and heads 0 to 2 are no part of a page of region 'kv#1' here",
        ),
        (
            Pieced(LOW, (Piece(0, PageWindow(0, 2, 0, 2), LOW),)),
            {},
            "layers 0 to 2 and heads 0 to 2 of shard 0 here cannot be layers 0 to 4 and heads",
        ),
        (
            Pieced(LOW, (Piece(0, OWN, HIGH),)),
            {},
            "layers 0 to 4 and heads 2 to 4 of a piece are not within layers 0 to 4 and heads 0",
        ),
        (Pieced(WHOLE, MERGED.pieces[:1]), {}, "pieces fill 8 of the 16 heads in layers 0 to 4"),
        (Pieced(WHOLE, ()), {}, "pieces fill 0 of the 16 heads"),
        (
            Pieced(WHOLE, (Piece(0, OWN, LOW), Piece(1, OWN, LOW))),
            {},
            "two pieces go over layers 0 to 4 and heads 0 to 2 and layers 0 to 4 and heads 0 to 2",
        ),
        (MERGED, {"pages": [4, 1, 2, 3, 6]}, "source page 6 is not a page of region 'kv', whose"),
        (MERGED, {"pages": [4, 1, 2, 3, 0]}, "source page 0 is not a page of region 'kv', whose"),
        (MERGED, {"onto": [1, 2, 3, 4, 7]}, "destination page 7 is not a page of region 'kv'"),
        (MERGED, {"onto": [1, 2, 3, 4]}, "5 source pages for 4 destination pages"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(making, change, complaint):
    here, there = sides("4 heads, 2 to 1", (FIRST, LAYERS))

    assert complaint in found(post(making, **change), here.areas, there.notes)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (
            {"layers": 0, "heads": 0},
            "pages of region 'kv' there are not laid out by layers and heads",
        ),
        ({"page_tokens": 2}, "has 4 slots of [12, 4] bytes in region 'kv' here and 2 slots of"),
        (
            {"strips": (96, 160) * 4},
            "[12, 4] bytes in region 'kv' here and 4 slots of [6, 10]",
        ),
        ({"strips": (128,) * 4}, "and 4 slots of [8] bytes in 'kv' there; lay both out"),
    ],
)
def test_pages_of_the_peer_that_are_laid_out_otherwise_are_refused(change, complaint):
    here, there = sides("4 heads, 2 to 1", (FIRST, FIRST))
    theirs = {"kv": msgspec.structs.replace(there.notes["kv"], **change)}

    assert complaint in found(post(MERGED), here.areas, theirs)


def test_shards_of_ours_that_are_laid_out_otherwise_are_refused():
    here, there = sides("4 heads, 2 to 1", (FIRST, FIRST))
    other = msgspec.structs.replace(here.notes["kv#1"], strips=(24, 40) * 4)
    areas = here.areas | {"kv#1": Area(other, here.memory)}

    assert "in 'kv#1' here; lay both out alike" in found(post(MERGED), areas, there.notes)


@pytest.mark.parametrize("far", [(64, 128), (128, 64)])
def test_tensors_whose_pages_are_not_equally_far_apart_are_not_joined(far):
    """They touch in page 0 and, on one of the sides, in no other."""
    ours, theirs = (
        RegionNote("kv", at, 4096, 5, 64, rows, 4, (32, 32), layers=1, heads=2)
        for at, step in zip((2**20, 2**30), far, strict=True)
        for rows in [(PieceRow(0, 64, 32), PieceRow(32, step, 32))]
    )

    found = pieced(
        (WindowSource(ours, Piece(0, PageWindow(0, 1, 0, 2), PageWindow(0, 1, 0, 2))),), theirs
    )

    assert found.at.tolist() == [2**20, 2**20 + 32]
    assert (found.at_step.tolist(), found.to_step.tolist()) == ([64, far[0]], [64, far[1]])
    assert found.size.tolist() == [32, 32]
