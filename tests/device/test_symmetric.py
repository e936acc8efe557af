"""The window of an arena: what is decided without a GPU, between real ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.device.ranks import Ranks

MIB = 2**20


def test_a_window_is_registered_once_and_gathers_use_it(four: Ranks) -> None:
    answers = four.run("open_one", 3, window_bytes=MIB, poor=[])

    assert [one.found for one in answers] == [[MIB, MIB, 1, True]] * 3


@pytest.mark.parametrize("poor", [[1], [0, 2], [0, 1, 2]])
def test_if_one_rank_has_no_memory_for_its_window_none_has_one(
    four: Ranks, poor: list[int]
) -> None:
    """scenario F10: all take plain memory, nobody registers, nobody waits for anybody."""
    answers = four.run("open_one", 3, window_bytes=MIB, poor=poor)

    assert [one.found for one in answers] == [[0, 0, 0, True]] * 3


@pytest.mark.parametrize(
    ("window_bytes", "is_possible"), [(0, True), (MIB, False)], ids=["not wanted", "not available"]
)
def test_without_a_window_nothing_is_asked_of_other_ranks(
    four: Ranks, window_bytes: int, is_possible: bool
) -> None:
    """scenario F10: switched off, or on a CPU: one rank of four opens its arena by itself."""
    four.tell([0], "open_by_itself", 4, window_bytes=window_bytes, is_possible=is_possible)

    assert four.hear(0).found == [0, 0]


def test_one_rank_alone_needs_no_window(four: Ranks) -> None:
    """scenario F11: whatever there would be."""
    assert four.run("open_one", 1, window_bytes=MIB, poor=[])[0].found == [0, 0, 0, True]
