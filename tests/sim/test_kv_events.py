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


def test_a_block_that_is_told_twice_is_a_violation():
    world = World(1, replace(PROFILES["calm"], has_routers=True), 2)
    world.run(300, 250)
    host = next(host for host in world.hosts if host.router.blocks)
    node = next(iter(host.node.announcer.told))
    del host.node.announcer.told[node]
    with pytest.raises(Violated, match=r"told otherwise"):
        host.router.agree(host.node)
