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
from kvd.sim.profile import PROFILES
from kvd.sim.world import World

LOG = msgspec.msgpack.Decoder(list[Input])


class Recorded:
    """A node that keeps what went in and came out; otherwise it is that node."""

    def __init__(self, settings, at_s):
        self.born_s = at_s
        self.node = Node(settings, at_s)
        self.log, self.effects, self.said = [], [], []

    def step(self, happened):
        self.log.append(happened)
        step = self.node.step(happened)
        self.effects += step.effects
        self.said += step.events
        return step

    def __getattr__(self, name):
        return getattr(self.node, name)


def recorded(seed):
    """Every life of every node of a storm."""
    lives = []

    def make_node(settings, at_s):
        lives.append(Recorded(settings, at_s))
        return lives[-1]

    world = World(seed, PROFILES["storm"], 2, make_node)
    while world.steps < 600:
        world.agenda.step()
    return lives


@pytest.mark.parametrize("seed", range(8))
def test_a_log_of_inputs_replays_to_the_same_effects_events_and_state(seed):
    for life in recorded(seed):
        again = Node(life.settings, life.born_s)
        effects, events = [], []
        for happened in LOG.decode(msgspec.msgpack.encode(life.log)):
            step = again.step(happened)
            effects += step.effects
            events += step.events
        assert effects == life.effects
        assert events == life.said
        assert state_hash(again) == state_hash(life.node)


@pytest.mark.parametrize("seed", range(100, 108))
def test_a_node_that_was_frozen_and_thawed_on_the_way_goes_on_as_the_original(seed):
    for life in recorded(seed):
        again = Node(life.settings, life.born_s)
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
