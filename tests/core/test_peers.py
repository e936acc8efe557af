"""Links, incarnations, generations and sending agents between two nodes."""

from __future__ import annotations

from kvd.core.agents import Agent
from kvd.errors import Code
from kvd.wire import client
from kvd.wire.peer import Hello
from tests.core.world import World, tokens

PROMPT = tokens((1, 100))


def handed_over(world: World, room: int = 7) -> client.Reply:
    """One whole handoff; the last thing the decode engine heard."""
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    send = world.p.call(client.Send, PROMPT, room=room, lease=lease.lease)
    assert isinstance(send, client.Sending)
    world.d.call(client.Receive, PROMPT, room=room, source=("p",))
    world.p.call(client.Finish, send=send.send, aux=b"x")
    return world.d.take()[-1]


def test_an_agent_that_failed_to_load_is_tried_again():
    world = World()
    world.p.fails_loading = 1
    world.d.restart_transfer("crashed")
    world.run()
    peer = world.p.node.peers.by_name["d"]
    assert (peer.agent, peer.agent_why) == (Agent.FAILED, "no route")
    failed = handed_over(world)
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.POST_FAILED
    assert failed.refusal.message == "no sending agent: no route"

    world.pass_time(3)

    assert peer.agent is Agent.LOADED
    assert isinstance(handed_over(world, room=8), client.Received)


def test_an_offer_of_an_unknown_generation_asks_for_the_hello_that_was_lost():
    world = World()
    world.lost = {Hello}
    world.d.restart_transfer("crashed")
    world.run()
    world.lost = set()
    assert world.p.node.peers.by_name["d"].generation == 1

    assert isinstance(handed_over(world), client.Receiving)
    world.pass_time(0.5)

    assert world.p.node.peers.by_name["d"].generation == 2
    assert isinstance(world.d.take()[-1], client.Received)
