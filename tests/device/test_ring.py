"""Where blocks lie: by hand, and by properties."""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.device.arena import ALIGNMENT, ArenaArea, aligned

CAPACITY = 16 * ALIGNMENT
SIZES = st.lists(st.integers(0, CAPACITY + ALIGNMENT), max_size=30)


class SpanRing:
    """Where the blocks of an area of so many bytes begin and end."""

    def __init__(self, capacity: int) -> None:
        self._area = ArenaArea(
            torch.empty(capacity, dtype=torch.uint8, device="meta"), is_symmetric=False
        )

    def take(self, size: int) -> tuple[int, int] | None:
        block = self._area.take(size)
        return None if block is None else (block.start, block.end)


def test_blocks_lie_one_behind_the_other_and_begin_again() -> None:
    ring = SpanRing(1000)

    taken = [ring.take(size) for size in (500, 300, 100, 1000, 1)]

    assert taken == [
        (0, 500),
        (512, 812),
        (0, 100),
        (0, 1000),
        (0, 1),
    ]


def test_what_is_larger_than_the_memory_has_no_place_and_moves_nothing() -> None:
    """scenario F10: 1001 bytes of 1000; the next block lies where it would have lain."""
    ring = SpanRing(1000)
    ring.take(300)

    assert ring.take(1001) is None
    assert ring.take(300) == (512, 812)


def test_memory_of_no_bytes_has_room_for_nothing() -> None:
    assert SpanRing(0).take(1) is None


@settings(deadline=None)
@given(SIZES)
def test_every_block_is_aligned_and_inside(sizes: list[int]) -> None:
    ring = SpanRing(CAPACITY)
    for size in sizes:
        span = ring.take(size)
        if span is None:
            assert size > CAPACITY
            continue
        start, end = span
        assert start % ALIGNMENT == 0
        assert 0 <= start <= end <= CAPACITY
        assert end - start == size


@settings(deadline=None)
@given(SIZES)
def test_a_block_lies_over_earlier_ones_only_after_a_whole_round(sizes: list[int]) -> None:
    """Neighbours never overlap as long as they fit together: that is what keeps them in flight."""
    ring = SpanRing(CAPACITY)
    spans = [(size, span) for size in sizes if (span := ring.take(size)) is not None]
    for (size, span), (next_size, following) in itertools.pairwise(spans):
        if aligned(size) + aligned(next_size) <= CAPACITY // 2:
            assert span[1] <= following[0] or following[1] <= span[0]


@settings(deadline=None)
@given(SIZES)
def test_two_ranks_have_every_block_at_the_same_place(sizes: list[int]) -> None:
    """scenario F10: the same sizes in the same order are all that it depends on."""
    one, other = SpanRing(CAPACITY), SpanRing(CAPACITY)

    assert [one.take(size) for size in sizes] == [other.take(size) for size in sizes]
