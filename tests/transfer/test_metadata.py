"""Metadata is whole and sane, or it is refused before NIXL sees it."""

from __future__ import annotations

import contextlib
import struct

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.layout.geometry import PieceRow
from kvd.transfer.descriptors import objection, writes
from kvd.transfer.metadata import (
    VERSION,
    BadMetadata,
    MemoryKind,
    MemorySite,
    Metadata,
    RegionNote,
    pack,
    unpack,
)
from kvd.types import Pages, pack_ids

REGION = RegionNote("kv", 2**40, 3 * 4096, 3, 4096, (PieceRow(0, 4096, 4096),))
GOOD = Metadata(VERSION, "node-1", b"nixl", 2**41, 4096, (REGION,))


def test_metadata_comes_back_as_it_was():
    assert unpack(pack(GOOD)) == GOOD


@given(st.integers(0, len(pack(GOOD)) - 1), st.integers(1, 255))
def test_any_changed_byte_is_noticed(at, change):
    framed = bytearray(pack(GOOD))
    framed[at] ^= change
    with pytest.raises(BadMetadata):
        unpack(bytes(framed))


@given(st.integers(0, len(pack(GOOD)) - 1))
def test_any_truncation_is_noticed(size):
    with pytest.raises(BadMetadata):
        unpack(pack(GOOD)[:size])


@pytest.mark.parametrize(
    "change",
    [
        {"pages": 4},
        {"pages": 0},
        {"address": -1},
        {"address": 2**63},
        {"rows": (PieceRow(1, 4096, 4096),)},
        {"rows": (PieceRow(-4096, 4096, 4096),)},
        {"rows": (PieceRow(0, 4096, 0),)},
        {"rows": (PieceRow(0, 0, 4096),)},
        {"rows": (PieceRow(0, 2**63, 4096),), "pages": 1},
        {"rows": (PieceRow(0, 4096, 2048),)},
        {"rows": ()},
        {"page_bytes": 8192},
        {"pages": 2**31 + 1},
    ],
)
def test_a_region_that_would_reach_beyond_itself_is_refused(change):
    wrong = msgspec.structs.replace(REGION, **change)
    with pytest.raises(BadMetadata, match="region 'kv' of 12288 bytes cannot hold"):
        unpack(pack(msgspec.structs.replace(GOOD, regions=(wrong,))))


def test_a_region_of_a_device_is_told_with_its_place():
    region = msgspec.structs.replace(REGION, place=MemorySite(MemoryKind.VRAM, 7))
    told = msgspec.structs.replace(GOOD, regions=(region,))

    assert unpack(pack(told)) == told


@pytest.mark.parametrize(
    "place",
    [
        MemorySite(MemoryKind.VRAM, -1),
        MemorySite(MemoryKind.VRAM, 2**16 + 1),
        MemorySite(MemoryKind.DRAM, 1),
    ],
)
def test_a_region_that_lies_nowhere_is_refused(place):
    wrong = msgspec.structs.replace(REGION, place=place)
    with pytest.raises(BadMetadata, match=rf"in {place.kind.value} of device {place.device}: no"):
        unpack(pack(msgspec.structs.replace(GOOD, regions=(wrong,))))


WIDE = RegionNote(
    "kv",
    2**40,
    3 * 4096,
    3,
    4096,
    (PieceRow(0, 1024, 1024), PieceRow(3072, 3072, 3072)),
    16,
    (1024, 2048, 1024),
)


def test_the_tensors_of_a_page_come_back_as_they_were():
    metadata = msgspec.structs.replace(GOOD, regions=(WIDE,))
    assert unpack(pack(metadata)) == metadata


@pytest.mark.parametrize(
    "change",
    [
        {"strips": (1024, 2048, 1025)},
        {"strips": (1024, 2048)},
        {"strips": (2048, 2048)},
        {"strips": (1024, 4096, -1024)},
        {"strips": (1024, 0, 3072)},
        {"strips": (1024, 2**64 - 1, 3072)},
        {"strips": (1,) * 4096},
        {"strips": (1,) * (2**16 + 1), "page_tokens": 0},
        {"page_tokens": -1},
        {"page_tokens": 3},
        {"page_tokens": 2048},
        {"page_tokens": 2**63},
        {"page_tokens": 3, "strips": ()},
    ],
)
def test_tensors_that_are_not_the_bytes_of_a_page_are_refused(change):
    wrong = msgspec.structs.replace(WIDE, **change)
    with pytest.raises(BadMetadata, match="says that the 4096 bytes of a page are"):
        unpack(pack(msgspec.structs.replace(GOOD, regions=(wrong,))))


SHARDED = msgspec.structs.replace(
    REGION, page_tokens=4, strips=(1024, 512, 1024, 512, 512, 512), layers=3, heads=8
)
EVEN = msgspec.structs.replace(SHARDED, strips=(1536, 512) * 2, layers=2)


@pytest.mark.parametrize(
    "region",
    [
        EVEN,
        msgspec.structs.replace(EVEN, heads=128),
        msgspec.structs.replace(EVEN, layers=1, strips=(1024,) * 4),
        msgspec.structs.replace(EVEN, layers=4, strips=(1024,) * 4),
        msgspec.structs.replace(WIDE, layers=1, heads=1, strips=(1024, 2048, 1024)),
    ],
)
def test_layers_and_heads_come_back_as_they_were(region):
    metadata = msgspec.structs.replace(GOOD, regions=(region,))
    assert unpack(pack(metadata)) == metadata


@pytest.mark.parametrize(
    "wrong",
    [
        SHARDED,
        *(
            msgspec.structs.replace(EVEN, **change)
            for change in (
                {"layers": 0},
                {"heads": 0},
                {"layers": -1},
                {"heads": -1},
                {"layers": 3},
                {"layers": 3, "strips": (1024,) * 4},
                {"layers": 4},
                {"layers": 8},
                {"heads": 3},
                {"heads": 256},
                {"heads": 2**63},
                {"page_tokens": 0},
                {"strips": ()},
                {"strips": (1536, 512, 512, 1536)},
            )
        ),
        msgspec.structs.replace(WIDE, layers=3, heads=1),
    ],
)
def test_layers_and_heads_that_are_not_those_of_the_tensors_are_refused(wrong):
    with pytest.raises(BadMetadata, match=r"says that the \d tensors of a page are those of"):
        unpack(pack(msgspec.structs.replace(GOOD, regions=(wrong,))))


def test_layers_that_are_not_evenly_spaced_are_refused():
    rows = (PieceRow(0, 1024, 1024), PieceRow(3072, 1024, 1024), PieceRow(9216, 1024, 1024))
    wrong = RegionNote("kv", 2**40, 2**14, 3, 3072, rows, 4, (1024,) * 3, 3, 1)

    with pytest.raises(BadMetadata, match="are those of 3 layers, all alike"):
        unpack(pack(msgspec.structs.replace(GOOD, regions=(wrong,))))


def test_metadata_of_a_node_that_knows_nothing_of_tensors_is_read():
    old = msgspec.msgpack.decode(msgspec.msgpack.encode(GOOD))
    for field in ("page_tokens", "strips", "layers", "heads"):
        del old["regions"][0][field]

    assert unpack(framed(msgspec.msgpack.encode(old))) == GOOD


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"agent": ""}, "holds an empty name"),
        ({"agent": "n" * 257}, "one of 257 characters"),
        ({"blob": bytes(2**24 + 1)}, "holds 16777217 bytes of NIXL's"),
        ({"scratch": -1}, "at address -1 is no memory to write to"),
        ({"scratch": 2**63}, "scratch memory of 4096 bytes"),
        ({"scratch_bytes": -1}, "scratch memory of -1 bytes"),
        ({"scratch_bytes": 0}, "scratch memory of 0 bytes"),
        ({"scratch_bytes": 2**64 - 1}, "is no memory to write to"),
        ({"regions": (REGION, REGION)}, "2 regions of 1 names"),
        ({"regions": (msgspec.structs.replace(REGION, name=""),)}, "holds an empty name"),
    ],
)
def test_fields_beyond_all_reason_are_refused(change, complaint):
    with pytest.raises(BadMetadata, match=complaint):
        unpack(pack(msgspec.structs.replace(GOOD, **change)))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x81\xa5agent\xa2\xff\xfe",
        b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0",
        b"\xc1",
        b"\x80",
    ],
)
def test_a_whole_frame_of_nonsense_is_refused(body):
    with pytest.raises(BadMetadata, match="is whole but not understood"):
        unpack(framed(body))


@given(st.binary(max_size=200))
def test_random_bytes_in_a_whole_frame_raise_nothing_else(body):
    with contextlib.suppress(BadMetadata):
        unpack(framed(body))


NUMBERS = st.one_of(
    st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 4096, 12288, 2**31, 2**32, 2**62, 2**63, 2**64 - 1]),
    st.integers(-(2**63), 2**64 - 1),
)


@st.composite
def regions(draw):
    """A region that is right but for up to three fields, and may say anything of its tensors."""
    row = {"offset_bytes": 0, "stride_bytes": 4096, "piece_bytes": 4096}
    region = {"address": 2**40, "region_bytes": 12288, "pages": 3, "page_bytes": 4096}
    for field in draw(st.lists(st.sampled_from([*row, *region]), max_size=3)):
        (row if field in row else region)[field] = draw(NUMBERS)
    strips = draw(
        st.sampled_from([(), (4096,), (1024, 3072)]) | st.lists(NUMBERS, max_size=3).map(tuple)
    )
    region |= {"page_tokens": draw(st.sampled_from([0, 1, 512]) | NUMBERS), "strips": strips}
    return RegionNote(draw(st.sampled_from(["kv", "swa"])), rows=(PieceRow(**row),), **region)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "version": NUMBERS,
            "agent": st.text(max_size=300),
            "scratch": NUMBERS,
            "scratch_bytes": NUMBERS,
            "regions": st.lists(regions(), max_size=3).map(tuple),
        },
    )
)
def test_random_fields_are_refused_or_can_be_computed_with(fields):
    try:
        peer = unpack(pack(msgspec.structs.replace(GOOD, **fields)))
    except BadMetadata:
        return
    np.array([[peer.scratch, peer.scratch_bytes, 0]], np.uint64)
    for region in peer.regions:
        last = Pages(pack_ids([min(region.pages, 2**31) - 1]))
        for ours, split in ((region, 1), (by_tensor(region), 1), (twice(region), 2)):
            if not objection(last, last, ours, region, split):
                plan = writes(last, last, ours, region, split)
                end = int(plan.destination.max(axis=0)[0]) + int(plan.destination[-1, 1])
                assert plan.destination[:, 0].min() >= region.address
                assert end <= region.address + region.region_bytes


def by_tensor(region):
    """A region whose rows are the tensors of this one, so that what is written goes by tensor."""
    rows = tuple(PieceRow(2**20 * i, size, size) for i, size in enumerate(region.strips))
    return msgspec.structs.replace(region, rows=rows or region.rows)


def twice(region):
    """A region whose pages are two of this one."""
    rows = tuple(PieceRow(0, 2 * row.piece_bytes, 2 * row.piece_bytes) for row in region.rows)
    strips = tuple(2 * size for size in region.strips)
    return msgspec.structs.replace(
        region, rows=rows, strips=strips, page_tokens=2 * region.page_tokens
    )


def framed(body: bytes) -> bytes:
    """A frame whose length and checksum are right, whatever it holds."""
    return struct.pack("<4sIQ", b"kvdT", len(body), xxhash.xxh3_64_intdigest(body)) + body


def test_another_version_is_refused_by_its_number():
    with pytest.raises(BadMetadata, match="has version 99; this node speaks 1"):
        unpack(pack(msgspec.structs.replace(GOOD, version=99)))
