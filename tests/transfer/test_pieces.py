"""Pages between pools that are sharded differently: each byte goes to its place, exactly once.

Compared with a model that moves one head of one slot of one tensor at a time.
"""

from __future__ import annotations

from itertools import pairwise, product

import msgspec
import numpy as np
import pytest

from kvd.core.shards import Piece, Pieced, Shard, Straight, Window, lanes, tp_shards
from kvd.core.spec import Mha, Order, shard_region
from kvd.transfer.copies import Area, Mapped
from kvd.transfer.descriptors import packed_writes
from kvd.transfer.metadata import Kind, Place
from kvd.transfer.orders import Post
from kvd.transfer.plans import direct, found, plan
from kvd.transfer.staging import SLOT_BYTES
from tests.transfer.layouts import ids, note
from tests.transfer.sharded import LATENT, MHA, Model, elements, fill, memory_of

OURS, THEIRS = 6, 7
PAGES, ONTO = [4, 1, 2, 3, 5], [6, 2, 3, 4, 1]
SPACE = 2**20
"""Addresses from one region to the next."""


def tp(model: Model, size: int) -> tuple[Shard, ...] | None:
    try:
        return tp_shards(model.heads, size, (0, size), (0, model.layers))
    except ValueError:
        return None


def with_heads(heads: int) -> Model:
    return MHA._replace(layout=msgspec.structs.replace(MHA.layout, heads=heads))


STAGES = (Shard(0, 1, 0, 4), Shard(1, 4, 0, 4))
HALVES = (Shard(0, 4, 0, 2), Shard(0, 4, 2, 4))
CASES = {
    **{
        f"{model.heads} heads, {here} to {there}": (model, ours, theirs)
        for model in (*map(with_heads, (1, 2, 3, 4)), LATENT)
        for here, there in product((1, 2, 4), repeat=2)
        if (ours := tp(model, here)) and (theirs := tp(model, there))
    },
    "latent, 4 to 2": (LATENT, (LATENT.all,) * 4, (LATENT.all,) * 2),
    "stage 0 of all": (MHA, STAGES[:1], (MHA.all,)),
    "stage 1 of all": (MHA, STAGES[1:], (MHA.all,)),
    "all to stages": (MHA, (MHA.all,), STAGES),
    "stages of one node": (MHA, STAGES, (MHA.all,)),
    "stages to other stages": (MHA, STAGES, (Shard(0, 3, 0, 4), Shard(3, 4, 0, 4))),
    "one rank of two": (MHA, HALVES[:1], (MHA.all,)),
    "the other rank": (MHA, HALVES[1:], (MHA.all,)),
    "two ranks of a stage": (MHA, (Shard(1, 4, 0, 2), Shard(1, 4, 2, 4)), (MHA.all,)),
    "heads to a stage": (MHA, HALVES, STAGES),
    "latent, a stage": (LATENT, (Shard(2, 4, 0, 1),), (LATENT.all,)),
    "a slot of one token": (MHA._replace(page_tokens=1), HALVES, (MHA.all,)),
    "one layer": (MHA._replace(layers=1), (Shard(0, 1, 0, 4),), tp_shards(4, 2, (0, 2), (0, 1))),
    "K without V": (MHA._replace(layout=Mha(4, 3, 0, "uint8")), HALVES, (MHA.all,)),
}


class Side:
    """The shards of one pool in memory of their own, at addresses of their own."""

    def __init__(self, model, shards, pages, order, first):
        self.model, self.shards = model, shards
        self.shapes = [memory_of(model, shard, pages, order) for shard in shards]
        self.memory = np.zeros(SPACE * len(shards), np.uint8)
        self.first = first
        self.areas = {}
        for index, shape in enumerate(self.shapes):
            name, at = shard_region("kv", index), index * SPACE
            assert shape.total_bytes <= SPACE
            told = note(shape, first + at, name)
            self.areas[name] = Area(told, self.memory[at : at + shape.total_bytes])

    @property
    def notes(self):
        return {name: area.note for name, area in self.areas.items()}

    def elements(self, index):
        at, shape = index * SPACE, self.shapes[index]
        memory = self.memory[at : at + shape.total_bytes]
        return elements(memory, shape, self.shards[index])

    def fill(self, seed):
        for index, (shard, shape) in enumerate(zip(self.shards, self.shapes, strict=True)):
            fill(self.memory[index * SPACE :], shape, shard, seed)


def sides(name, orders):
    model, ours, theirs = CASES[name]
    here = Side(model, ours, OURS, orders[0], SPACE)
    there = Side(model, theirs, THEIRS, orders[1], 100 * SPACE)
    here.fill(1)
    return here, there


def post(making, peer_shard=0, pages=PAGES, onto=ONTO, split=1):
    return Post(
        1,
        "decode-0",
        1,
        "kv",
        ids(pages),
        ids(onto),
        split=split,
        peer_shard=peer_shard,
        making=making,
    )


def delivered(here, there, lane):
    """What the peer's memory must be when the lane is done, and which bytes of it were written."""
    expected, written = np.zeros_like(there.memory), np.zeros_like(there.memory)
    have = {}
    for index in range(len(here.shards)):
        for one in here.elements(index):
            have[one[:4]] = one.pages
    for memory, is_mark in ((expected, False), (written, True)):
        at, shape = lane.peer_shard * SPACE, there.shapes[lane.peer_shard]
        shard = there.shards[lane.peer_shard]
        for one in elements(memory[at : at + shape.total_bytes], shape, shard):
            if one[:4] in have:
                for page, onto in zip(PAGES, ONTO, strict=True):
                    one.pages[onto] = 1 if is_mark else have[one[:4]][page]
    return expected, written


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


each_order = pytest.mark.parametrize("orders", list(product(Order, repeat=2)))
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
    slot = np.zeros(SLOT_BYTES, np.uint8)

    for order, regions, expected, written in every_post(here, there):
        packing = plan(order, regions).packing
        if packing is None:
            continue
        packing.handle_pages = 2
        window = order.making.window if isinstance(order.making, Pieced) else None
        rows = packed_writes(order.destination, regions.theirs, 2, window)
        often = np.zeros_like(there.memory)
        for handle, (low, high) in enumerate(pairwise(rows.bounds)):
            slot[:] = 255
            packing.fill(handle, slot)
            for (at, size, _), (to, _, _) in zip(
                rows.source[low:high].tolist(), rows.destination[low:high].tolist(), strict=True
            ):
                onto = slice(to - there.first, to - there.first + size)
                there.memory[onto] = slot[at : at + size]
                often[onto] += 1

        assert np.array_equal(often, written)
        assert np.array_equal(there.memory, expected)
        assert len(rows.source) < len(direct(order, regions).source)
        assert rows.handles == 3


class Afar(Mapped):
    is_direct = False


def test_memory_that_the_processor_cannot_read_goes_as_it_lies_each_from_its_device():
    here, there = sides("4 heads, 2 to 1", (Order.PAGE_FIRST, Order.PAGE_FIRST))
    (order, regions, _, _) = next(every_post(here, there))
    packed_first = plan(order, regions)
    assert packed_first.packing is not None
    assert packed_first.sides == (Kind.DRAM, Kind.DRAM)

    notes = [
        msgspec.structs.replace(area.note, place=Place(Kind.VRAM, device))
        for device, area in enumerate(regions.ours)
    ]
    onto = msgspec.structs.replace(regions.theirs, place=Place(Kind.VRAM, 5))
    ours = tuple(Area(one, here.memory, Afar()) for one in notes)
    made = plan(order, regions._replace(ours=ours, theirs=onto))

    assert made.packing is None
    assert made.sides == (Kind.VRAM, Kind.VRAM)
    lying = direct(order, regions)
    assert np.array_equal(made.writes.source[:, :2], lying.source[:, :2])
    begin = np.uint64(notes[1].address)
    is_second = (lying.source[:, 0] >= begin) & (lying.source[:, 0] < begin + np.uint64(SPACE))
    assert 0 < is_second.sum() < len(is_second)
    assert np.array_equal(made.writes.source[:, 2], is_second.astype(np.uint64))
    assert (made.writes.destination[:, 2] == 5).all()


FIRST, LAYERS = Order.PAGE_FIRST, Order.LAYER_FIRST


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


WHOLE, LOW, HIGH = Window(0, 4, 0, 4), Window(0, 4, 0, 2), Window(0, 4, 2, 4)
OWN = Window(0, 4, 0, 2)
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
            Pieced(Window(0, 5, 0, 4), MERGED.pieces),
            {},
            "layers 0 to 5 and heads 0 to 4 are no part of a page of region 'kv' there, which "
            "has 4 layers of 4 heads",
        ),
        (
            Pieced(Window(0, 4, 2, 2), ()),
            {},
            "layers 0 to 4 and heads 2 to 2 are no part of a page of region 'kv' there",
        ),
        (
            Pieced(LOW, (Piece(1, Window(0, 4, 1, 3), LOW),)),
            {},
            "layers 0 to 4 and heads 1 to 3 are no part of a page of region 'kv#1' here",
        ),
        (
            Pieced(LOW, (Piece(1, Window(-1, 3, 0, 2), LOW),)),
            {},
            "layers -1 to 3 and heads 0 to 2 are no part of a page of region 'kv#1' here",
        ),
        (
            Pieced(LOW, (Piece(0, Window(0, 2, 0, 2), LOW),)),
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
