"""Nodes of a simulated storm, with all that went into each and came out."""

from __future__ import annotations

from kvd.core.node import NodeState
from kvd.sim.profile import PROFILES
from kvd.sim.world import World


class Recorded:
    """A node that keeps what went in and came out; otherwise it is that node."""

    def __init__(self, settings, at_s):
        self.born_s = at_s
        self.node = NodeState(settings, at_s)
        self.log, self.effects, self.said = [], [], []

    def step(self, happened):
        self.log.append(happened)
        step = self.node.step(happened)
        self.effects += step.effects
        self.said += step.events
        return step

    def __getattr__(self, name):
        return getattr(self.node, name)


def recorded(seed, profile="storm"):
    """Every life of every node of a storm, or of other weather."""
    lives = []

    def make_node(settings, at_s):
        lives.append(Recorded(settings, at_s))
        return lives[-1]

    world = World(seed, PROFILES[profile], 2, make_node)
    while world.steps < 600:
        world.agenda.step()
    return lives
