"""Connections that break and come back while both daemons live."""

from __future__ import annotations

from kvd.core import effects, inputs
from kvd.core.peers.peer import Agent, Life
from kvd.wire import client
from kvd.wire.peer import Closed, Ping
from tests.core.engines import PROMPT, Sender
from tests.core.world import World


def test_a_ping_on_a_new_link_is_answered_on_it():
    world = World()
    d, p = world.d.incarnation, world.p.incarnation
    world.d.connection = "2"

    out = world.p.feed(inputs.FromPeer(world.now_s, "in2:d", Ping(d, p, 5, 0, 0, 0)))

    assert out == [effects.SendToPeer("in2:d", Ping(p, d, 0, 5, 0, 0, streams=("p:1>d",)))]
    assert world.p.node.peers.by_name["d"].link == "in2:d"


def test_a_room_goes_on_after_the_connection_was_reset():
    """The prefill side sees a new identity; nobody becomes suspect, and Settled arrives."""
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.d.connection = "2"
    world.pass_time(1)

    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)
    assert isinstance(world.p.answer(sender.finish_call), client.Finished)
    world.pass_time(5)
    lives = [world.p.node.peers.by_name["d"].life, world.d.node.peers.by_name["p"].life]
    assert lives == [Life.UP, Life.UP]


def test_a_silent_peer_is_suspect_and_lost_when_its_times_are_over():
    world = World(suspect_s=1.0, lost_s=3.0, heartbeat_s=0.1)
    peer = world.p.node.peers.by_name["d"]
    world.cut = {"d"}
    seen = []
    for _ in range(40):
        world.pass_time(0.1)
        seen.append((round(world.now_s - peer.heard_s, 1), peer.life))

    assert min(silent_s for silent_s, life in seen if life is Life.SUSPECT) == 1.0
    assert min(silent_s for silent_s, life in seen if life is Life.LOST) == 3.0


def test_a_lost_peer_that_came_to_us_is_not_pinged_and_forgotten_in_the_end():
    world = World()
    world.cut = {"d"}
    world.pass_time(5)
    p, d = world.p.node.peers, world.d.node.peers
    assert (p.by_name["d"].life, d.by_name["p"].life) == (Life.LOST, Life.LOST)
    world.p.effects.clear()

    world.pass_time(24)
    assert list(p.by_name) == ["d"]
    world.pass_time(2)

    assert world.p.effects == [effects.DropAgent(world.d.incarnation, 1)]
    assert (p.by_name, p.by_incarnation) == ({}, {})
    assert list(d.by_name) == ["p"], "who is dialed is known for ever"
    world.cut = set()
    world.pass_time(1)
    assert p.by_name["d"].agent is Agent.LOADED
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()
    assert isinstance(world.d.take()[-1], client.Received)


def test_a_lost_peer_is_known_while_it_may_ask_how_something_ended():
    world = World(linger_s=1000.0)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.lost = {Closed}
    sender.finish()
    world.cut = {"d"}
    world.pass_time(100, 0.5)
    assert list(world.p.node.peers.by_name) == ["d"]
    world.cut = world.lost = set()
    world.pass_time(3)
    assert world.p.node.prefiller.settled_sends.records == {}
