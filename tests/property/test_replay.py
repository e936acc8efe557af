"""A recorded log of inputs replays: the same effects, the same events, the same state.

So the core has no clock, no dice and no hidden input, and a recording is a bug report.
"""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.inputs import Input
from kvd.core.node import NodeState
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from tests.core.families import SPECS, worked
from tests.property.recorded import recorded

LOG = msgspec.msgpack.Decoder(list[Input])


@pytest.mark.parametrize(
    ("seed", "profile"),
    [
        *((seed, "storm") for seed in range(8)),
        (8, "swa"),
        (9, "recurrent"),
        (10, "hisparse"),
        (11, "tiers"),
        (12, "tiers"),
    ],
)
def test_a_log_of_inputs_replays_to_the_same_effects_events_and_state(seed, profile):
    for life in recorded(seed, profile):
        again = NodeState(life.settings, life.born_s)
        effects, events = [], []
        for happened in LOG.decode(msgspec.msgpack.encode(life.log)):
            step = again.step(happened)
            effects += step.effects
            events += step.events
        assert effects == life.effects
        assert events == life.said
        assert state_hash(again) == state_hash(life.node)


@pytest.mark.parametrize(
    ("seed", "profile"),
    [
        *((seed, "storm") for seed in range(100, 108)),
        *((seed, profile) for profile in ("swa", "recurrent", "hisparse") for seed in (108, 109)),
        *((seed, "tiers") for seed in (110, 111)),
    ],
)
def test_a_node_that_was_frozen_and_thawed_on_the_way_goes_on_as_the_original(seed, profile):
    for life in recorded(seed, profile):
        again = NodeState(life.settings, life.born_s)
        effects, events = [], []
        for number, happened in enumerate(life.log):
            if number % 40 == 20:
                frozen = freeze(again)
                again = thaw(frozen)
                assert freeze(again) == frozen
            step = again.step(happened)
            effects += step.effects
            events += step.events
        assert effects == life.effects
        assert events == life.said
        assert state_hash(again) == state_hash(life.node)


@pytest.mark.parametrize("family", SPECS)
def test_a_node_of_any_pool_replays_and_goes_on_after_it_was_frozen_and_thawed(family):
    """With windows at nodes, snapshots and buffers: all that is kept beside the first component."""
    for seed in range(3):
        engine = worked(family, seed, steps=300)
        again = NodeState(engine.node.settings, 1.0)
        for number, happened in enumerate(LOG.decode(msgspec.msgpack.encode(engine.log))):
            if number % 40 == 20:
                frozen = freeze(again)
                again = thaw(frozen)
                assert freeze(again) == frozen, f"seed {seed}"
            assert again.step(happened) == engine.steps[number], f"seed {seed}"
        assert state_hash(again) == state_hash(engine.node), f"seed {seed}"
