"""Metadata is whole and sane, or it is refused before NIXL sees it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.core.geometry import Row
from kvd.transfer.metadata import VERSION, BadMetadata, Metadata, RegionNote, pack, unpack

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
    ],
)
def test_a_region_that_would_reach_beyond_itself_is_refused(change):
    wrong = msgspec.structs.replace(REGION, **change)
    with pytest.raises(BadMetadata, match="region 'kv' of 12288 bytes cannot hold"):
        unpack(pack(msgspec.structs.replace(GOOD, regions=(wrong,))))


def test_another_version_is_refused_by_its_number():
    with pytest.raises(BadMetadata, match="has version 99; this node speaks 1"):
        unpack(pack(msgspec.structs.replace(GOOD, version=99)))
