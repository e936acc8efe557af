"""Sending agents whose loading ends our own transfer process, and peers that went silent."""

from __future__ import annotations

from kvd.core import effects
from kvd.core.peers.peer import Agent
from tests.core.world import World


def loads(world: World) -> int:
    """How often the prefill side has begun to load an agent."""
    return sum(isinstance(one, effects.LoadAgent) for one in world.p.effects)


def crashing(world: World) -> None:
    """The prefill side's transfer process dies while it loads the decode side's agent."""
    world.hold_shells = True
    world.p.stop_transfer("crashed")
    world.p.start_transfer("crashed")
    world.p.inbox.clear()


def test_an_agent_that_was_loading_when_the_transfer_process_died_rests_longer_each_time():
    world = World()
    peer = world.p.node.peers.by_name["d"]
    crashing(world)
    assert peer.agent is Agent.LOADING
    waits = []
    for _ in range(7):
        before = loads(world)
        crashing(world)
        assert (peer.agent, loads(world)) == (Agent.FAILED, before)
        since_s = world.now_s
        while peer.agent is Agent.FAILED:
            world.pass_time(0.5, 0.5)
        waits.append(world.now_s - since_s)
    assert waits == [4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_an_agent_that_loads_after_a_crash_has_a_clean_record():
    world = World()
    peer = world.p.node.peers.by_name["d"]
    crashing(world)
    crashing(world)
    world.hold_shells = False
    world.pass_time(5)
    assert (peer.agent, peer.agent_rest_s) == (Agent.LOADED, 2.0)


def test_nothing_is_loaded_for_a_lost_peer_until_it_is_heard_again():
    world = World()
    peer = world.p.node.peers.by_name["d"]
    world.cut = {"d"}
    world.pass_time(5)
    before = loads(world)

    world.p.stop_transfer("crashed")
    world.p.start_transfer("crashed")
    world.pass_time(5)

    assert (peer.agent, loads(world)) == (Agent.NONE, before)
    world.cut = set()
    world.pass_time(1)
    assert (peer.agent, loads(world)) == (Agent.LOADED, before + 1)


def test_an_agent_that_is_never_made_has_failed_after_a_while_and_is_tried_again():
    world = World(load_limit_s=3.0)
    world.hold_shells = True
    world.p.stop_transfer("crashed")
    world.p.start_transfer("crashed")
    peer = world.p.node.peers.by_name["d"]
    world.pass_time(2)
    assert peer.agent is Agent.LOADING

    world.pass_time(2)

    assert (peer.agent, peer.agent_why) == (Agent.FAILED, "it was not made within 3.1 s")
    world.hold_shells = False
    world.pass_time(4)
    assert peer.agent is Agent.LOADED
