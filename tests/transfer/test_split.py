"""Pages of ours that are several of the peer's: which bytes of which slot go where.

scenario E1, scenario E2, scenario E4.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.layout.geometry import PieceRow
from kvd.core.layout.spec import (
    Mha,
    Mla,
    PageOrder,
    Raw,
    State,
    StateTensor,
    companion_pages,
)
from kvd.transfer.descriptors import objection, writes
from kvd.transfer.metadata import RegionNote, strips
from tests.transfer.layouts import ids, note, shaped, slots

OURS, THEIRS = 7, 40
LAYOUTS = (
    Mha(2, 6, 4, "bfloat16"),
    Mla(5, 2, "uint8"),
    Mha(3, 1, 1, "float32"),
    Mha(1, 9, 0, "int8"),
)


@given(
    layout=st.sampled_from(LAYOUTS),
    orders=st.tuples(st.sampled_from(PageOrder), st.sampled_from(PageOrder)),
    split=st.sampled_from([1, 2, 4, 8]),
    pages=st.lists(st.integers(1, OURS - 1), min_size=1, max_size=4, unique=True),
    onto=st.permutations(range(1, THEIRS)),
    is_sorted=st.booleans(),
    trimmed=st.integers(0, 7),
)
def test_every_slot_lands_where_the_peer_looks_for_it(
    layout, orders, split, pages, onto, is_sorted, trimmed
):
    ours = shaped(layout, 8, OURS, orders[0])
    theirs = shaped(layout, 8 // split, THEIRS, orders[1])
    pieces = np.frombuffer(companion_pages(ids(pages), split), "<i4")
    pieces = pieces[: max(1, pieces.size - trimmed)]
    onto = sorted(onto[: pieces.size]) if is_sorted else onto[: pieces.size]
    here = np.random.default_rng(1).integers(0, 256, ours.total_bytes, np.uint8)
    there = np.random.default_rng(2).integers(0, 256, theirs.total_bytes, np.uint8)
    expected = there.copy()
    size = 8 // split
    for of, to in zip(slots(here, ours), slots(expected, theirs), strict=True):
        for piece, page in zip(pieces.tolist(), onto, strict=True):
            first = piece % split * size
            to[page] = of[piece // split, first : first + size]
    assert not objection(ids(pieces), ids(onto), note(ours), note(theirs), split)

    plan = writes(ids(pieces), ids(onto), note(ours), note(theirs), split)
    for (at, n_bytes, _), (to, also, _) in zip(
        plan.source.tolist(), plan.destination.tolist(), strict=True
    ):
        assert n_bytes == also
        there[to : to + also] = here[at : at + n_bytes]

    assert np.array_equal(there, expected)
    assert sum(plan.sizes) == pieces.size * theirs.page_bytes


FIRST, LAYERS = PageOrder.PAGE_FIRST, PageOrder.LAYER_FIRST


@pytest.mark.parametrize(
    ("here", "there", "split", "descriptors"),
    [
        (FIRST, FIRST, 1, 1),
        (FIRST, FIRST, 4, 16 * 6),
        (FIRST, LAYERS, 4, 4 * 6),
        (LAYERS, LAYERS, 4, 6),
        (LAYERS, FIRST, 4, 16 * 6),
    ],
)
def test_pieces_that_touch_on_both_sides_travel_as_one(here, there, split, descriptors):
    ours = note(shaped(LAYOUTS[0], 8, 9, here))
    theirs = note(shaped(LAYOUTS[0], 8 // split, 40, there))
    pieces = companion_pages(ids([2, 3, 4, 5]), split)

    plan = writes(pieces, ids(range(7, 7 + len(pieces) // 4)), ours, theirs, split)

    assert len(plan.source) == descriptors


@pytest.mark.parametrize("order", PageOrder)
def test_the_tensors_of_a_page_follow_each_other_through_its_rows(order):
    shape = shaped(LAYOUTS[0], 8, 9, order)

    assert strips(note(shape)) == tuple(
        PieceRow(place.offset_bytes, place.page_stride_bytes, size)
        for place, size in zip(shape.tensors, shape.strips, strict=True)
    )


def test_a_region_without_tensors_has_its_rows():
    rows = (PieceRow(0, 64, 64), PieceRow(640, 32, 32))

    assert strips(RegionNote("kv", 0, 960, 10, 96, rows)) == rows


STATE = State((StateTensor("ssm", (4, 2), "float32"), StateTensor("conv", (4,), "float32")))


@pytest.mark.parametrize(
    ("ours", "theirs", "split", "source", "complaint"),
    [
        (LAYOUTS[0], LAYOUTS[0], 0, [4], "cannot be cut into 0 pieces"),
        (LAYOUTS[0], LAYOUTS[0], -1, [4], "cannot be cut into -1 pieces"),
        (LAYOUTS[0], LAYOUTS[0], 3, [4], "have 8 slots, which do not make 3 equal pieces"),
        (
            LAYOUTS[0],
            LAYOUTS[0],
            2,
            [4],
            "cut into 2, are not the pages of 2 slots",
        ),
        (LAYOUTS[0], LAYOUTS[1], 4, [4], "6 pieces of 960 bytes a page here and 3 of 42 there"),
        (LAYOUTS[0], Raw(40), 4, [4], "are not the pages of 0 slots"),
        (Raw(480), LAYOUTS[0], 4, [4], "cannot be cut into 4 pieces: what they hold is not laid"),
        (STATE, STATE, 4, [4], "cannot be cut into 4 pieces: what they hold is not laid"),
        (LAYOUTS[0], LAYOUTS[0], 4, [3], "source page 3 .*, cut into 4, are 4 to 27"),
        (LAYOUTS[0], LAYOUTS[0], 4, [28], "source page 28 is not a page of region 'kv'"),
        (LAYOUTS[0], LAYOUTS[0], 4, [-1], "source page -1 is not a page"),
    ],
)
def test_pages_that_do_not_correspond_are_refused(ours, theirs, split, source, complaint):
    here, there = (note(shaped(one, size, 7, FIRST)) for one, size in ((ours, 8), (theirs, 2)))

    assert re.search(complaint, objection(ids(source), ids([1]), here, there, split))


def test_pages_of_equal_bytes_cut_differently_are_refused():
    wide, tall = (
        note(shaped(one, 8, 7, LAYERS)) for one in (Mha(1, 8, 4, "int8"), Mha(1, 4, 8, "int8"))
    )

    assert "lay both out alike" in objection(ids([1]), ids([1]), wide, tall)


def test_the_pieces_of_a_page_are_its_slots_in_order():
    """Pages 3 and 7 of four tokens, six tokens in use, for pages of one token."""
    assert companion_pages(ids([3, 7]), 4)[: 6 * 4] == ids([12, 13, 14, 15, 28, 29])


def test_nothing_to_split_is_nothing_to_write():
    ours, theirs = note(shaped(LAYOUTS[0], 8, 7, FIRST)), note(shaped(LAYOUTS[0], 2, 7, FIRST))

    plan = writes(ids([]), ids([]), ours, theirs, 4)

    assert (plan.handles, plan.sizes, len(plan.source)) == (0, [], 0)
    assert not objection(ids([]), ids([]), ours, theirs, 4)
