"""Storms in which nodes are drained and serve again: nothing new begins, and everything ends.

What is checked at every step by the storm itself (I1 to I8, one answer a call, what pages hold)
holds while a node drains; beside that, no lease is opened in it and no handoff begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvd.core import inputs
from kvd.core.operators import rehearse
from kvd.wire import admin, events
from tests.property.drawn import FAMILIES
from tests.property.handoffs import hand_off
from tests.property.storms import Storm
from tests.property.test_family_storm import step
from tests.property.trouble import calm, let_all_go
from tests.support.seeds import repeatable, seed_range

if TYPE_CHECKING:
    from tests.core.side import Side

FIRST, LAST = seed_range("0:1")
STEPS = 25


def drain(storm: Storm, side: Side) -> None:
    """As its rehearsal says."""
    request = admin.Drain(1, "op", "a storm", storm.rng.choice((0.0, 0.0, 0.5)))
    told = rehearse(side.node, admin.Rehearse(1, request))
    n_reports = len(side.reports)
    side.feed(inputs.FromOperator(storm.world.now_s, b"op", request))
    assert side.reports[n_reports] == told
    storm.world.run()
    storm.hear()


def check_nothing_began(side: Side, first: int, is_drained: bool) -> None:
    """Of all events since ``first``, in a node that drained before them and drains still."""
    if not is_drained or side.node.drainer.drain is None:
        return
    opened = [one for one in side.events[first:] if isinstance(one, events.LeaseOpened)]
    assert opened == [], side.name


def drained(seed: int, family: str) -> None:
    """One storm; a failure says how to repeat it."""
    with repeatable(seed, __file__, family):
        storm = Storm(seed, family)
        for _ in range(STEPS):
            before = [
                (one, len(one.events), one.node.drainer.drain is not None) for one in storm.sides
            ]
            step(storm)
            hand_off(storm)
            for one, first, is_drained in before:
                check_nothing_began(one, first, is_drained)
            side = storm.rng.choice(storm.sides)
            dice = storm.rng.random()
            if dice < 0.2:
                drain(storm, side)
            elif dice < 0.5:
                side.ask(admin.Undrain(1))
                storm.hear()
        for side in storm.sides:
            drain(storm, side)
        storm.world.hold_posts = storm.world.hold_copies = False
        storm.world.hold_verify = storm.world.hold_quiet = False
        storm.world.lost = set()
        for _ in range(4):
            let_all_go(storm)
            storm.world.pass_time(10, 0.5)
        let_all_go(storm)
        for side in storm.sides:
            receives, sends = side.node.drainer.under_way()
            assert (side.name, receives, sends) == (side.name, [], [])
            side.ask(admin.Undrain(1))
        storm.hear()
        calm(storm)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_drained_node_begins_nothing_and_comes_to_rest(family: str):
    for seed in range(FIRST, LAST):
        drained(seed, family)
