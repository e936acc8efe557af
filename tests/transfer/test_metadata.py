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

from kvd.core.geometry import Row
from kvd.transfer.descriptors import objection, writes
from kvd.transfer.metadata import VERSION, BadMetadata, Metadata, RegionNote, pack, unpack
from kvd.types import Pages, pack_ids

REGION = RegionNote("kv", 2**40, 3 * 4096, 3, 4096, (Row(0, 4096, 4096),))
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
        {"rows": (Row(1, 4096, 4096),)},
        {"rows": (Row(-4096, 4096, 4096),)},
        {"rows": (Row(0, 4096, 0),)},
        {"rows": (Row(0, 0, 4096),)},
        {"rows": (Row(0, 2**63, 4096),), "pages": 1},
        {"rows": (Row(0, 4096, 2048),)},
        {"rows": ()},
        {"page_bytes": 8192},
        {"pages": 2**31 + 1},
    ],
)
def test_a_region_that_would_reach_beyond_itself_is_refused(change):
    wrong = msgspec.structs.replace(REGION, **change)
    with pytest.raises(BadMetadata, match="region 'kv' of 12288 bytes cannot hold"):
        unpack(pack(msgspec.structs.replace(GOOD, regions=(wrong,))))


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
    """A region that is right but for up to three fields."""
    row = {"offset_bytes": 0, "stride_bytes": 4096, "piece_bytes": 4096}
    region = {"address": 2**40, "region_bytes": 12288, "pages": 3, "page_bytes": 4096}
    for field in draw(st.lists(st.sampled_from([*row, *region]), max_size=3)):
        (row if field in row else region)[field] = draw(NUMBERS)
    return RegionNote(draw(st.sampled_from(["kv", "swa"])), rows=(Row(**row),), **region)


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
        if not objection(last, last, region, region):
            plan = writes(last, last, region, region)
            end = int(plan.destination[-1, :2].sum())
            assert plan.destination[0, 0] >= region.address
            assert end <= region.address + region.region_bytes


def framed(body: bytes) -> bytes:
    """A frame whose length and checksum are right, whatever it holds."""
    return struct.pack("<4sIQ", b"kvdT", len(body), xxhash.xxh3_64_intdigest(body)) + body


def test_another_version_is_refused_by_its_number():
    with pytest.raises(BadMetadata, match="has version 99; this node speaks 1"):
        unpack(pack(msgspec.structs.replace(GOOD, version=99)))
