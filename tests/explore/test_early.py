"""Every order of three steps with a fault, of two with two, while nothing is written yet.

Two files, so that two workers take half each.
"""

from __future__ import annotations

import pytest

from tests.explore.case import STARTS
from tests.explore.search import explore

EARLY = STARTS[:4]


@pytest.mark.slow
@pytest.mark.parametrize(("depth", "faults"), [(3, 1), (2, 2)])
@pytest.mark.parametrize("start", EARLY)
def test_every_order_of_a_few_steps_is_safe_and_ends(start, depth, faults):
    found = explore(start, depth=depth, faults=faults)

    assert found.ends > 50, found
