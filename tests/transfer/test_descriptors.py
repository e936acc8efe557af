"""Descriptors cover the addressed pages exactly once; runs are joined, large pieces cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.layout.geometry import PieceRow
from kvd.transfer.descriptors import CUT_BYTES, writes
from kvd.transfer.metadata import RegionNote
from kvd.types import Pages, pack_ids

PAGES = 40


def note(address: int, *, pieces: list[int], gap: int, pages: int = PAGES) -> RegionNote:
    """A region whose rows leave ``gap`` bytes after each piece."""
    rows, at = [], 0
    for piece in pieces:
        rows.append(PieceRow(at, piece + gap, piece))
        at += pages * (piece + gap)
    return RegionNote("kv", address, at, pages, sum(pieces), tuple(rows))


@given(
    pages=st.lists(
        st.tuples(st.integers(1, PAGES - 1), st.integers(1, PAGES - 1)),
        unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
        min_size=1,
    ),
    in_order=st.booleans(),
    pieces=st.lists(st.sampled_from([64, 4096, CUT_BYTES, CUT_BYTES * 3 + 64]), min_size=1),
    gaps=st.tuples(st.sampled_from([0, 64]), st.sampled_from([0, 64])),
)
def test_every_byte_of_every_page_is_written_once(pages, in_order, pieces, gaps):
    source, destination = zip(*(sorted(pages) if in_order else pages), strict=True)
    ours, theirs = (note(10**9 * (i + 1), pieces=pieces, gap=gap) for i, gap in enumerate(gaps))

    plan = writes(Pages(pack_ids(list(source))), Pages(pack_ids(list(destination))), ours, theirs)

    assert (plan.source[:, 1] == plan.destination[:, 1]).all()
    assert plan.source[:, 1].max() <= CUT_BYTES
    assert plan.bounds == sorted({0, *plan.bounds, len(plan.source)})
    assert joined(
        (at, to, size)
        for (at, size, _), (to, _, _) in zip(
            plan.source.tolist(), plan.destination.tolist(), strict=True
        )
    ) == joined(
        (
            ours.address + a.offset_bytes + p * a.stride_bytes,
            theirs.address + b.offset_bytes + q * b.stride_bytes,
            a.piece_bytes,
        )
        for a, b in zip(ours.rows, theirs.rows, strict=True)
        for p, q in zip(source, destination, strict=True)
    )


@given(
    n_pages=st.integers(1, PAGES - 1),
    seed=st.one_of(st.none(), st.integers(0, 9)),
    pieces=st.lists(
        st.sampled_from([4096, CUT_BYTES // 16, CUT_BYTES + 64]), min_size=1, max_size=4
    ),
)
def test_of_the_first_groups_of_handles_every_page_is_whole(n_pages, seed, pieces):
    pages = np.arange(1, n_pages + 1)
    if seed is not None:
        pages = np.random.default_rng(seed).permutation(pages)
    region = note(0, pieces=pieces, gap=0)
    ids, page_bytes = Pages(pack_ids(pages.tolist())), sum(pieces)

    plan = writes(ids, ids, region, region)

    assert plan.whole_pages > 0
    group_bytes = plan.whole_pages * page_bytes
    landed = np.zeros(region.region_bytes // 64, bool)
    for handle in range(plan.handles):
        for at, size, _ in plan.destination[plan.bounds[handle] : plan.bounds[handle + 1]].tolist():
            landed[at // 64 : (at + size) // 64] = True
        whole = sum(plan.sizes[: handle + 1]) // group_bytes * plan.whole_pages
        for row in region.rows:
            begin, step = row.offset_bytes // 64, row.stride_bytes // 64
            rows = landed[begin : begin + PAGES * step].reshape(PAGES, step)
            assert rows[pages[:whole]].all()


def test_pages_that_are_whole_group_by_group_cost_no_descriptor_more():
    """64 tensors of 32 KiB a page: sixteen pages of each are one descriptor."""
    region = note(0, pieces=[CUT_BYTES // 16] * 64, gap=0, pages=129)
    ids = Pages(pack_ids(list(range(1, 129))))

    plan = writes(ids, ids, region, region)

    assert set(plan.source[:, 1].tolist()) == {CUT_BYTES}
    assert plan.whole_pages == 16
    assert plan.handles == 16


def test_groups_of_few_tensors_fill_a_handle():
    region = note(0, pieces=[CUT_BYTES // 16] * 2, gap=0, pages=1025)
    ids = Pages(pack_ids(list(range(1, 1025))))

    plan = writes(ids, ids, region, region)

    assert [size // 2**20 for size in plan.sizes] == [16] * 4


def joined(moves):
    """Moves (from, to, bytes) in their shortest form: neighbours on both sides are one."""
    out: list[tuple[int, int, int]] = []
    for at, to, size in sorted(moves):
        first, second, before = out[-1] if out else (-1, -1, 0)
        if (at, to) == (first + before, second + before):
            out[-1] = (first, second, before + size)
        else:
            out.append((at, to, size))
    return out


@pytest.mark.parametrize(
    ("source", "destination", "descriptors"),
    [
        ([1, 2, 3, 4], [5, 6, 7, 8], 1),
        ([1, 2, 3, 4], [5, 6, 8, 9], 2),
        ([1, 2, 3, 4], [8, 7, 6, 5], 4),
        (list(range(1, 33)), list(range(1, 33)), 4),
    ],
)
def test_neighbours_on_both_sides_are_joined_up_to_the_cut(source, destination, descriptors):
    dense = note(0, pieces=[CUT_BYTES // 8], gap=0)

    plan = writes(Pages(pack_ids(source)), Pages(pack_ids(destination)), dense, dense)

    assert len(plan.source) == descriptors


def test_handles_hold_sixteen_mebibytes_or_fewer_small_pieces():
    huge = note(0, pieces=[4 * CUT_BYTES], gap=0)
    tiny = note(0, pieces=[4096] * 80, gap=64)
    ids = Pages(pack_ids(list(range(1, 33))))

    by_handle = [
        np.diff(writes(ids, ids, region, region).bounds).tolist() for region in (huge, tiny)
    ]

    assert by_handle == [[32] * 4, [845, 845, 845, 25]]


@pytest.mark.parametrize("pieces", [[2**20], [CUT_BYTES // 2, 64], [4096] * 3])
def test_addresses_beyond_32_bits_are_not_cut_off(pieces):
    """scenario G14: page numbers have 32 bits, what they are multiplied to has 64."""
    pages = 2_000_000
    rows, at = [], 0
    for piece in pieces:
        rows.append(PieceRow(at, piece + 64, piece))
        at += pages * (piece + 64)
    here, there = (
        RegionNote("kv", address, at, pages, sum(pieces), tuple(rows))
        for address in (2**40, 2**46 + 64)
    )
    source, destination = [1, 2_047, 65_537, pages - 1], [pages - 1, 3, 1_048_577, 7]

    plan = writes(Pages(pack_ids(source)), Pages(pack_ids(destination)), here, there)

    assert {
        (at, to, size)
        for (at, size, _), (to, _, _) in zip(
            plan.source.tolist(), plan.destination.tolist(), strict=True
        )
    } == {
        (
            2**40 + row.offset_bytes + p * row.stride_bytes + cut,
            2**46 + 64 + row.offset_bytes + q * row.stride_bytes + cut,
            min(CUT_BYTES, row.piece_bytes - cut),
        )
        for row in rows
        for p, q in zip(source, destination, strict=True)
        for cut in range(0, row.piece_bytes, CUT_BYTES)
    }
    assert at > 2**34
