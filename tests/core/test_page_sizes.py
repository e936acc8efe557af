"""Which sizes of pages are right is said in one place."""

from __future__ import annotations

import pytest

from kvd.core.layout.page_sizes import (
    buffer_flaw,
    companion_flaw,
    kernel_flaw,
    pages_in,
    window_flaw,
)
from tests.core.sentences import sentence_of


@pytest.mark.parametrize(
    ("large", "small", "count"),
    [(16, 16, 1), (64, 16, 4), (16, 1, 16), (16, 5, None), (4, 16, None), (16, 0, None)],
)
def test_a_page_holds_a_whole_number_of_smaller_ones_or_none(large, small, count):
    assert pages_in(large, small) == count


def test_each_flaw_names_the_numbers_and_nothing_where_all_is_well():
    assert companion_flaw(16, 4) is None
    assert companion_flaw(16, 5) == sentence_of(
        "each flaw names the numbers and nothing where all is well 1"
    )
    assert buffer_flaw(16, 4096) is None
    assert buffer_flaw(16, 100) == sentence_of(
        "each flaw names the numbers and nothing where all is well 2"
    )
    assert window_flaw(2) is None
    assert "no page boundary" in (window_flaw(1) or "")
    assert kernel_flaw(512) is None
    assert kernel_flaw(0) is None
    assert kernel_flaw(64) == sentence_of(
        "each flaw names the numbers and nothing where all is well 3"
    )
