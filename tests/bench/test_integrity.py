"""What ``benchmarks integrity`` is made of, without daemons."""

from __future__ import annotations

import pytest

from benchmarks.integrity import PAGE_TOKENS, SHAPES
from kvd.core.layout.spec import Component, Mha, page_bytes


@pytest.mark.parametrize("size", SHAPES)
def test_the_shapes_have_pages_of_the_size_that_the_table_names(size):
    layers, heads, dim = (int(value) for value in SHAPES[size].values())

    assert (
        page_bytes(Component("kv", layers, Mha(heads, dim, dim, "bfloat16"), PAGE_TOKENS)) == size
    )
