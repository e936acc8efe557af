"""The directory of a tier behind the seam, without a process: what is there, and what goes."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.core.layout.geometry import PieceRow
from kvd.storage.backend import ObjectName, StorageLost
from kvd.storage.orders import ObjectPart
from kvd.storage.pages import ObjectPages
from kvd.storage.posix import DirectoryTier
from kvd.storage.sizes import object_bytes
from kvd.transfer.metadata import RegionNote
from tests.storage.site import KIB, PAGE_FIRST, key

LAYOUT = b"l" * 20
NOTE = RegionNote("kv", 2**20, PAGE_FIRST.total_bytes, 33, 64 * KIB, PAGE_FIRST.rows)
PAGES = ObjectPages({"kv": NOTE}, [ObjectPart("kv")])


@pytest.fixture
def tier(tmp_path):
    return DirectoryTier(str(tmp_path / "tier"), LAYOUT, PAGES)


def place(tmp_path, name: ObjectName, size: int = object_bytes(64 * KIB)) -> None:
    """Put a file where that object would lie."""
    digits = name.key.hex()
    path = tmp_path / "tier" / LAYOUT.hex() / f"={name.namespace}" / digits[:2] / digits
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(size))


def test_what_is_there_is_there_until_it_is_dropped(tier, tmp_path):
    names = [ObjectName("n", key(n)) for n in range(4)] + [ObjectName("m", key(0))]
    for name in names:
        place(tmp_path, name)

    assert tier.exists([*names, ObjectName("m", key(1))]).there == [True] * 5 + [False]
    tier.drop([names[1], ObjectName("m", key(9))])
    assert tier.exists(names).there == [True, False, True, True, True]
    tier.drop_namespace("n")
    tier.drop_namespace("nobody's")
    assert tier.exists(names).there == [False] * 4 + [True]
    assert [found.name for found in tier.search().objects] == [names[4]]


def test_an_object_of_another_size_is_none(tier, tmp_path):
    place(tmp_path, ObjectName("n", key(1)), size=4096)

    outcome = tier.search()

    assert (outcome.objects, outcome.removed) == ([], 1)
    assert "has 4096 bytes where 69632 are right" in outcome.why


def test_a_second_one_of_a_directory_is_refused(tier, tmp_path, monkeypatch):
    monkeypatch.setattr("kvd.storage.posix.LOCK_S", 0.0)

    with pytest.raises(StorageLost, match="is in use by another process"):
        DirectoryTier(str(tmp_path / "tier"), LAYOUT, PAGES)


def test_the_pieces_of_a_page_are_those_of_every_region_and_what_goes_with_it():
    scales = RegionNote("scale", 2**30, 2 * 33 * 96, 66, 96, (PieceRow(0, 96, 96),))
    pages = ObjectPages({"kv": NOTE, "scale": scales}, [ObjectPart("kv"), ObjectPart("scale", 2)])

    assert pages.page_bytes == 64 * KIB + 2 * 96
    assert pages.addresses(3).tolist() == [2**20 + 3 * 64 * KIB, 2**30 + 6 * 96, 2**30 + 7 * 96]
    assert np.array_equal(pages.offsets, [0, 64 * KIB, 64 * KIB + 96])
    assert pages.strays(b"\x00\x00\x00\x00") == [0]
