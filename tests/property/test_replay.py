"""A recorded log of inputs replays: the same effects, the same events, the same state.

So the core has no clock, no dice and no hidden input, and a recording is a bug report.
"""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.freeze import freeze, state_hash
from kvd.core.inputs import Input
from kvd.core.node import Node
from kvd.core.thaw import thaw
from tests.property.chaos import Chaos

LOG = msgspec.msgpack.Decoder(list[Input])


@pytest.mark.parametrize("seed", range(8))
def test_a_log_of_inputs_replays_to_the_same_effects_events_and_state(seed):
    chaos = Chaos(seed)
    for _ in range(250):
        chaos.step()

    for side in chaos.world.sides.values():
        again = Node(side.config, side.born_s)
        effects, events = [], []
        for happened in LOG.decode(msgspec.msgpack.encode(side.log)):
            step = again.step(happened)
            effects += step.effects
            events += step.events
        assert effects == side.effects
        assert events == side.events
        assert state_hash(again) == state_hash(side.node)


@pytest.mark.parametrize("seed", range(100, 108))
def test_a_node_that_was_frozen_and_thawed_on_the_way_goes_on_as_the_original(seed):
    chaos = Chaos(seed)
    for _ in range(250):
        chaos.step()

    for side in chaos.world.sides.values():
        again = Node(side.config, side.born_s)
        effects, events = [], []
        for number, happened in enumerate(side.log):
            if number % 40 == 20:
                frozen = freeze(again)
                again = thaw(frozen)
                assert freeze(again) == frozen
            step = again.step(happened)
            effects += step.effects
            events += step.events
        assert effects == side.effects
        assert events == side.events
        assert state_hash(again) == state_hash(side.node)
