"""Bars of a whole and its parts: whatever exists shows, and the figures add up."""

from __future__ import annotations

import random

import pytest

from kvd.wire.console import Level, PageMap, Sources
from tui.draw.bars import (
    BarPart,
    PoolPages,
    allotted,
    histogram,
    key,
    levels,
    misses,
    pool,
    sources,
    stacked,
)
from tui.draw.spans import Styled, text_of, width_of

PARTS = (
    BarPart("H", "held", 50, "held"),
    BarPart("c", "cached", 49, "cached"),
    BarPart("Q", "quarantined", 1, "quarantined"),
    BarPart(".", "free", 0, "free"),
)


def test_columns_are_shared_by_size_and_what_exists_has_one():
    assert allotted([50, 49, 1, 0], 20) == [10, 9, 1, 0]
    assert allotted([1_000_000, 1, 1], 10) == [8, 1, 1]
    assert allotted([0, 0], 10) == [0, 0]


def test_with_fewer_columns_than_parts_the_first_ones_have_them():
    assert allotted([5, 5, 0, 5], 2) == [1, 1, 0, 0]
    assert allotted([5, 5], 0) == allotted([5, 5], -4) == [0, 0]


def test_all_columns_are_given_away_whatever_the_sizes():
    """With the seed that fails."""
    for seed in range(300):
        chance = random.Random(seed)
        sizes = [chance.choice((0, 1, 7, 10**6)) for _ in range(chance.randrange(1, 8))]
        width = chance.randrange(1, 60)
        given = allotted(sizes, width)
        assert sum(given) == (width if sum(sizes) else 0), seed
        shown = [bool(columns) for columns in given]
        assert width < len(sizes) or shown == [bool(size) for size in sizes], seed


def test_every_part_of_a_stack_begins_with_its_letter():
    assert stacked(PARTS, 20) == (
        Styled("H", "label", "held"),
        Styled("█" * 9, "held"),
        Styled("c", "label", "cached"),
        Styled("█" * 8, "cached"),
        Styled("Q", "label", "quarantined"),
    )


def test_a_stack_of_nothing_is_blank():
    assert stacked(PARTS[3:], 6) == (Styled(" " * 6),)


def test_locked_pages_are_cached_ones_that_cannot_go():
    parts = pool(PoolPages(free=1, held=2, cached=10, quarantined=3, locked=4))
    assert [(part.name, part.size) for part in parts] == [
        ("held", 2),
        ("locked", 4),
        ("cached", 6),
        ("quarantined", 3),
        ("free", 1),
    ]


def test_what_had_to_be_computed_is_split_by_its_cause():
    tokens = Sources(cached=10, received=5, restored=1, new=4, evicted=3, lost=2, unaligned=1)
    assert [part.size for part in sources(tokens)] == [10, 5, 1, 10]
    assert [part.size for part in misses(tokens)] == [4, 3, 2, 1]


def test_the_key_says_letter_name_size_and_share():
    assert [text_of(one) for one in key(PARTS, 40)] == [
        "H held 50 50%  c cached 49 49%          ",
        "Q quarantined 1 1%  . free 0 0%         ",
    ]


def test_a_histogram_has_the_largest_first_and_nothing_that_is_not():
    assert [text_of(one) for one in histogram(PARTS[::-1], 50, 9)] == [
        "H held        █████████▌░░░░░░░░░  50%          50",
        "c cached      █████████▎░░░░░░░░░  49%          49",
        "Q quarantined ▏░░░░░░░░░░░░░░░░░░   1%           1",
    ]


def test_what_does_not_fit_is_summed_up_in_the_last_line():
    assert [text_of(one) for one in histogram(PARTS, 40, 2)] == [
        "H held     ██████░░░░░░  50%          50",
        "+ 2 others ██████░░░░░░  50%          50",
    ]
    assert len(histogram(PARTS, 40, 3)) == 3
    assert text_of(histogram(PARTS, 40, 3)[-1]).startswith("Q quarantined")
    assert histogram(PARTS, 40, 0) == []


@pytest.mark.parametrize("width", [0, 5, 20, 45, 120])
def test_every_line_takes_the_width_at_any_width(width):
    lines = [*histogram(PARTS, width, 9), *key(PARTS, width), stacked(PARTS, width)]
    assert {width_of(one) for one in lines} == {width}


def test_the_owners_of_pages_are_the_levels_of_that_lens():
    owners = (Level(".", "free", 5), Level("a", "engine\x1b", 7))
    shown = PageMap("kv", "owner", 1, 0.0, 0.0, 12, 1, 0, 1, owners, b"")
    parts = levels(shown)
    assert [(part.letter, part.size, part.style) for part in parts] == [
        (".", 5, "free"),
        ("a", 7, "hue-0"),
    ]
    assert "\x1b" not in "".join(text_of(one) for one in histogram(parts, 60, 9))
