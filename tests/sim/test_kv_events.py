"""KV events in every weather: what a router knows by them alone is what the tree has.

After each step, with budgets that a prompt exceeds, among restarts, flushes and epochs, while
everything is told anew; ``kvd.sim.router`` says what is asked of them.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvd.sim.profile import PROFILES
from kvd.sim.violation import Violated
from kvd.sim.world import World
from tests.support.seeds import repeatable, seed_range


@pytest.mark.parametrize("profile", PROFILES)
def test_a_router_knows_what_the_tree_has_in_any_weather(profile):
    stored = 0
    for seed in range(*seed_range("0:2")):
        with repeatable(seed, __file__, profile):
            world = World(seed, replace(PROFILES[profile], has_routers=True), 2)
            world.run(500, 250)
            stored += sum(host.router.stored for host in world.hosts)
    assert stored > 50


def test_a_world_that_tells_no_router_is_as_it_was():
    world = World(1, PROFILES["storm"], 2)
    world.run(100, 50)
    assert all(host.node.announcer is None for host in world.hosts)


class WatchedTiers(World):
    """Looks at each audit whether what was told to lie in a tier does."""

    def audit(self):
        super().audit()
        for host in self.hosts:
            if host.is_up and host.node.announcer is not None:
                own = [tier.index for tier in host.node.tiers.each if tier.writes is None]
                there = {key for index in own for of in index._by_namespace.values() for key in of}
                told = host.node.announcer.in_tiers
                assert told._told <= there
                assert told._known.keys() <= there


def test_what_lies_in_a_tier_is_told_of_too_but_not_what_nodes_share():
    demoted = dict.fromkeys(("tiers", "both", "store"), 0)
    for profile in demoted:
        for seed in range(4):
            world = WatchedTiers(seed, replace(PROFILES[profile], has_routers=True), 2)
            world.run(500, 5)
            demoted[profile] += sum(host.router.demoted for host in world.hosts)
    assert demoted["tiers"] > 0
    assert demoted["both"] > 0
    assert demoted["store"] == 0


def test_a_block_of_which_nobody_was_told_is_a_violation():
    world = World(1, replace(PROFILES["calm"], has_routers=True), 2)
    world.run(300, 250)
    host = next(host for host in world.hosts if host.router.blocks)
    host.router.blocks.popitem()
    with pytest.raises(Violated, match=r"there and not known"):
        host.router.agree(host.node)
