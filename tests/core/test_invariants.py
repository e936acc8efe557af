"""Every rule of the full check finds what breaks it, and says what it is about."""

from __future__ import annotations

import pytest

from kvd.core.invariants import faults
from tests.core.breakage import BREAKAGES, busy


def test_a_busy_world_breaks_no_rule():
    world = busy()

    assert [faults(side.node) for side in (world.p, world.d)] == [[], []]


@pytest.mark.parametrize("name", BREAKAGES)
def test_full_check_names_what_is_broken(name):
    breakage = BREAKAGES[name]
    node = getattr(busy(), breakage.side).node

    words = breakage.apply(node)

    said = {fault.check: fault.sentence for fault in faults(node)}
    assert words in said[breakage.check]
