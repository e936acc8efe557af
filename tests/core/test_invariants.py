"""Every rule of the full check finds what breaks it, and says what it is about."""

from __future__ import annotations

import pytest

from kvd.core.audit.invariants import faults
from tests.core.breakage import BREAKAGES, busy
from tests.core.breakage_beside import BESIDE_BREAKAGES, busy_beside


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


def test_a_node_with_every_kind_of_component_breaks_no_rule():
    assert faults(busy_beside().node) == []


@pytest.mark.parametrize("name", BESIDE_BREAKAGES)
def test_full_check_names_what_is_broken_beside_the_first_component(name):
    breakage = BESIDE_BREAKAGES[name]
    node = busy_beside().node

    words = breakage.apply(node)

    found = [fault for fault in faults(node) if fault.check == breakage.check]
    assert any(words in fault.sentence for fault in found), found
    assert all(fault.component or fault.lease for fault in found)
