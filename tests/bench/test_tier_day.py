"""A load through the disk of kvd, as beside those of others."""

from __future__ import annotations

import pytest

from benchmarks.tier_day import ENDLESS, ReplayedLoad, of_kvd, repeated
from benchmarks.tier_trace import made_trace, reuse_of

PAGE_BYTES = 4096


def load_of(requests, blocks):
    return ReplayedLoad(
        requests=list(repeated(requests, 1)),
        tokens=sum(request.input_length for request in requests),
        page_bytes=PAGE_BYTES,
        bound=blocks * PAGE_BYTES,
    )


def test_others_who_repeat_a_load_come_later_and_have_blocks_of_their_own():
    requests = made_trace(5)

    first, second = list(repeated(requests, 2))[:5], list(repeated(requests, 2))[5:]

    assert [len(blocks) for _, blocks in first] == [len(blocks) for _, blocks in second]
    assert not {block for _, blocks in first for block in blocks} & {
        block for _, blocks in second for block in blocks
    }
    assert first[-1][0] < second[0][0]


def test_a_disk_with_room_finds_what_a_perfect_tree_does(tmp_path):
    requests = made_trace(40)

    row = of_kvd(load_of(requests, 10_000), tmp_path / "tier")

    assert row["found"] == pytest.approx(reuse_of(requests, ENDLESS))
    assert row["wrong"] == 0
    # A head beside each page.
    assert row["disk"] >= 2 * row["written"]


def test_a_disk_without_room_keeps_to_its_bound(tmp_path):
    requests = made_trace(80)
    load = load_of(requests, 200)

    row = of_kvd(load, tmp_path / "tier")

    assert 0 < row["found"] < reuse_of(requests, ENDLESS)
    assert 0.8 * load.bound < 1e9 * row["disk"] < load.bound + 200 * PAGE_BYTES / 10
    assert row["wrong"] == 0
