"""Connections that break and come back while both daemons live."""

from __future__ import annotations

from kvd.core import effects, inputs
from kvd.core.life import Life
from kvd.wire import client
from kvd.wire.peer import Ping
from tests.core.engines import PROMPT, Sender
from tests.core.world import World


def test_a_ping_on_a_new_link_is_answered_on_it():
    world = World()
    d, p = world.d.incarnation, world.p.incarnation
    world.d.connection = "2"

    out = world.p.feed(inputs.FromPeer(world.now_s, "in2:d", Ping(d, p, 5, 0, 0, 0)))

    assert out == [effects.Send("in2:d", Ping(p, d, 0, 5, 0, 0))]
    assert world.p.node.peers.by_name["d"].link == "in2:d"


def test_a_room_goes_on_after_the_connection_was_reset():
    """The prefill side sees a new identity; nobody becomes suspect, and Settled arrives."""
    world = World()
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    world.d.connection = "2"
    world.pass_time(1)

    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)
    assert isinstance(world.p.answer(sender.finish_call), client.Finished)
    world.pass_time(5)
    lives = [world.p.node.peers.by_name["d"].life, world.d.node.peers.by_name["p"].life]
    assert lives == [Life.UP, Life.UP]
