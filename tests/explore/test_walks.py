"""Long walks at random from every start, each followed by calm."""

from __future__ import annotations

import pytest

from tests.explore.case import STARTS
from tests.explore.search import walks


@pytest.mark.slow
@pytest.mark.parametrize("start", STARTS)
def test_walks_of_25_steps_are_safe_and_end(start):
    walks(start, range(12))
