"""What a writer that is over had sent arrives after the news of its end: nobody gets its pages.

The network is held: nothing that was left in a connection arrives, nor its end, until a test says
so, while every message about it passes at once.
"""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.effects import Doubt
from kvd.core.handoff import settled
from kvd.core.handoff.protocol import Decode
from kvd.core.peers.peer import Agent
from kvd.sim.violation import Violated
from kvd.wire import admin, client
from kvd.wire.peer import MAX_STREAMS, Abort, Offer, Ping
from tests.core.engines import PROMPT, PageTotals, Sender, totals
from tests.core.world import World, tokens

OWN = 7
"""Pages of the prompt."""

OF_Q = ("q:2>d",)
"""The connections of the second source."""


def left_behind(**more: object) -> World:
    """The writer is killed in the middle, and comes back; nothing of it has arrived meanwhile."""
    world = World(**more)  # type: ignore[arg-type]
    world.hold_posts = world.hold_network = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    silence(world)
    world.restart(world.p)
    world.pass_time(3.0)
    assert world.d.node.decoder.open.parts == {}
    return world


def silence(world: World) -> None:
    """Whoever is named ``q`` says of no connection that it is its own."""
    if "q" in world.sides:
        world.sides["q"].node.peers.by_name["d"].streams = ()


def test_pages_of_a_dead_writer_are_nobodys_until_its_connection_has_ended():
    world = left_behind()
    kept = totals(world.d)

    world.d.call(client.OpenLease, tokens((5000, 56 * 16)))  # everything else
    world.flow()
    world.pass_time(1.2)

    assert kept == PageTotals(free=63 - OWN, quarantined=OWN)
    assert totals(world.d).quarantined == 0


def test_this_world_sees_it_when_only_what_has_arrived_is_waited_for():
    world = World()
    quarantines = world.d.node.decoder.quarantines
    await_quiet = quarantines._await_quiet
    quarantines._await_quiet = lambda lease, _: await_quiet(lease, Doubt.ARRIVED)  # type: ignore[method-assign]
    world.hold_posts = world.hold_network = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    world.restart(world.p)
    world.pass_time(1.0)

    with pytest.raises(Violated, match="written after their lease ended"):
        world.flow()


def test_a_destroyed_agent_keeps_the_pages_until_its_reset_has_arrived():
    world = World()
    world.hold_posts = world.hold_network = world.doubts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    (flight,) = world.p.flights.values()
    world.p.fail(flight, "transport error")
    world.pass_time(3.0)
    kept = totals(world.d)

    world.flow()

    assert world.p.node.peers.by_name["d"].agent is Agent.LOADED
    assert kept == PageTotals(free=63 - OWN, quarantined=OWN)
    assert totals(world.d) == PageTotals(free=63)


@pytest.mark.parametrize(("cut_s", "twice"), [(6.0, False), (45.0, False), (45.0, True)])
def test_who_forgets_a_peer_remembers_that_bytes_were_in_doubt(cut_s, twice):
    """It is asked again when the network is back, and knows of no handoff by then; nor may what its
    dead process had sent be taken for nothing: that has waited for the network too."""
    world = World(max_deadline_s=120.0)
    world.hold_posts = world.hold_network = world.doubts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=100.0)
    sender.advance(96)
    world.cut = {"p"}
    world.p.stop_transfer("killed")
    world.p.start_transfer("again")
    world.pass_time(cut_s)
    is_forgotten = not world.p.node.peers.by_name
    if twice:  # it says Hello, and no more
        world.cut, world.lost = set(), {Abort}
        world.pass_time(1.0)
        assert world.p.node.peers.by_name
        world.cut = {"p"}
        world.pass_time(cut_s)
    world.cut = world.lost = set()
    world.pass_time(3.0)
    kept = totals(world.d)

    world.flow()  # the late bytes, which nobody else's page may take
    world.pass_time(1.0)

    assert is_forgotten == (cut_s > world.p.node.settings.forget_s)
    assert world.d.node.decoder.open.parts == {}, "it was asked, and has answered"
    assert kept == PageTotals(free=63 - OWN, quarantined=OWN)
    assert totals(world.d) == PageTotals(free=63)


def forgotten_in_doubt():
    """The source has another transfer process, and has not been heard for so long."""
    world = World(max_deadline_s=120.0)
    world.hold_posts = world.doubts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=100.0)
    sender.advance(96)
    world.cut = {"p"}
    world.p.stop_transfer("killed")
    world.p.start_transfer("again")
    world.pass_time(45.0)
    return world


def test_what_a_peer_that_was_forgotten_offers_later_is_not_in_doubt():
    """Only what it offered before: an Abort that overtakes its Offer waits for nothing."""
    world = forgotten_in_doubt()
    world.cut = set()
    world.pass_time(3.0)
    settled_sends = world.p.node.prefiller.settled_sends
    assert totals(world.d) == PageTotals(free=63)
    assert settled_sends.doubted == {}, "its floor has passed what was in doubt"
    world.d.effects.clear()

    world.lost = {Offer}
    reply = world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",), deadline_s=100.0)
    world.d.call(client.CancelReceive, receive=reply.receive)
    world.pass_time(0.5)

    assert totals(world.d) == PageTotals(free=63)
    assert not any(isinstance(one, effects.Quiesce) for one in world.d.effects)


def test_more_forgotten_doubts_than_are_remembered_are_doubts_of_all(monkeypatch):
    monkeypatch.setattr(settled, "MAX_DOUBTED", 0)
    world = forgotten_in_doubt()

    settled_sends = world.p.node.prefiller.settled_sends
    assert settled_sends.doubted == {}
    assert settled_sends.is_doubtful(world.d.incarnation, 1)
    assert settled_sends.is_doubtful("anybody", 1)


def test_who_has_forgotten_a_peer_without_doubt_gives_its_pages_back_at_once():
    world = World(max_deadline_s=120.0)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=100.0)
    world.cut = {"p"}
    world.pass_time(45.0)
    assert world.p.node.peers.by_name == {}

    world.cut = set()
    world.pass_time(2.0)

    assert totals(world.d) == PageTotals(free=63)
    assert not any(isinstance(one, effects.Quiesce) for one in world.d.effects)


def test_a_writer_that_is_over_while_no_process_serves_here_can_write_nothing():
    """Nobody would ever answer that it is quiet; and nothing can land."""
    world = World()
    world.hold_posts = world.doubts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    world.d.stop_transfer("killed")

    (flight,) = world.p.flights.values()
    world.p.fail(flight, "transport error")
    world.pass_time(1.0)

    assert totals(world.d) == PageTotals(free=63)
    assert not any(isinstance(one, effects.Quiesce) for one in world.d.effects)


def test_another_look_does_not_ask_again_for_what_a_peer_has_claimed_since_the_first():
    """A ping that left after the first look is late enough, however often it is looked."""
    world = left_behind(sources=("p", "q"))
    world.flow()
    world.pass_time(1.0)
    quarantines = world.d.node.decoder.quarantines
    ((lease, awaited),) = quarantines.awaited.items()

    world.pass_time(2.0)
    more = (*awaited.streams, "b>c")
    world.d.feed(inputs.Awaiting(world.now_s, (lease,), more))

    again = quarantines.awaited[lease]
    assert again.streams == more
    assert (again.since_s, again.last_ping) == (awaited.since_s, awaited.last_ping)
    assert world.d.node.peers.pulse.last_ping > awaited.last_ping


def test_a_delivery_waits_for_no_connection():
    world = World(sources=("p", "q"))
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    sender.finish()

    assert isinstance(world.d.take()[-1], client.Received)
    assert not any(isinstance(one, effects.Quiesce | effects.Exempt) for one in world.d.effects)


def test_the_connection_of_another_peer_is_waited_for_until_that_says_it_is_its_own():
    world = left_behind(sources=("p", "q"))
    world.flow()
    world.pass_time(2.0)
    unclaimed = totals(world.d)

    world.sides["q"].node.peers.by_name["d"].streams = OF_Q
    world.pass_time(1.2)

    assert unclaimed == PageTotals(free=63 - OWN, quarantined=OWN)
    assert totals(world.d) == PageTotals(free=63)


def test_what_a_peer_said_before_it_could_know_is_no_claim():
    """Its echo answers a ping that had left when the connections were looked at."""
    world = World(sources=("p", "q"))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    world.pass_time(1.0)
    claims = {peer.name: peer.claim for peer in world.d.node.peers.by_name.values()}
    world.lost = {Ping}
    world.restart(world.p)
    world.pass_time(1.0)

    assert all(claim.streams for claim in claims.values())
    assert totals(world.d) == PageTotals(free=63 - OWN, quarantined=OWN)


def test_a_stream_that_two_living_peers_claim_is_nobodys():
    world = left_behind(sources=("p", "q"))
    world.sides["q"].node.peers.by_name["d"].streams = OF_Q
    liar = world.p.node.peers.by_name["d"]
    own, liar.streams = liar.streams, (*liar.streams, *OF_Q)
    world.flow()
    world.pass_time(3.0)
    disputed = totals(world.d)

    liar.streams = own
    world.pass_time(1.2)

    assert disputed == PageTotals(free=63 - OWN, quarantined=OWN)
    assert totals(world.d) == PageTotals(free=63)


def test_an_echo_that_was_overtaken_changes_no_claim():
    world = World()
    world.pass_time(1.0)
    peer = world.d.node.peers.by_name["p"]
    newest = peer.claim
    assert newest.number > 1

    old = Ping(world.p.incarnation, world.d.incarnation, 0, 1, 0, 0, streams=("a>b",))
    future = Ping(world.p.incarnation, world.d.incarnation, 0, 10**6, 0, 0, streams=("a>b",))
    world.inject(world.d, old)
    world.inject(world.d, future)

    assert peer.claim == newest


def test_the_claim_of_a_process_that_was_replaced_is_forgotten():
    world = World()
    world.pass_time(1.0)
    assert world.d.node.peers.by_name["p"].claim.streams
    world.lost = {Ping}

    world.restart(world.p)
    world.pass_time(4.0)  # until it is lost, and dialed again

    assert world.d.node.peers.by_name["p"].incarnation == world.p.incarnation
    assert world.d.node.peers.by_name["p"].claim.streams == ()


@pytest.mark.parametrize("end", ["drop", "die"])
def test_the_connections_of_an_agent_are_claimed_while_it_lives(end):
    world = World()
    peer = world.p.node.peers.by_name["d"]
    was = peer.streams
    world.hold_shells = True
    if end == "drop":
        world.p.node.peers.agents.drop(peer, "a test")
    else:
        world.p.stop_transfer("a test")

    assert was
    assert peer.streams == ()


def test_no_more_streams_are_told_than_a_message_may_have():
    world = World()
    peer = world.p.node.peers.by_name["d"]
    peer.streams = tuple(f"{k}>d" for k in range(MAX_STREAMS + 1))

    world.pass_time(1.0)

    assert world.d.node.peers.by_name["p"].claim.streams == peer.streams[:MAX_STREAMS]


def test_it_is_said_which_connections_are_waited_for_and_whose_they_are():
    world = left_behind(sources=("p", "q"), fence_after_s=60.0)
    (lease_id,) = world.d.node.decoder.quarantines.leases
    said = world.d.node.decoder.quarantines.waits_for(world.d.node.leases.leases[lease_id])

    assert "p:1>d (claimed by nobody)" in said
    assert "a fence, which comes by itself in" in said
    report = world.d.ask(admin.Why(1, "page", world.d.node.leases.leases[lease_id].held[0]))
    assert "p:1>d" in str(report)


def test_a_fence_waits_for_no_connection():
    world = left_behind()
    world.d.ask(admin.Fence(1))
    world.run()

    assert totals(world.d) == PageTotals(free=63)
    assert world.d.node.decoder.quarantines.awaited == {}


def test_a_silent_host_is_waited_for_until_the_policy_fences():
    world = left_behind(fence_after_s=10.0)
    before = totals(world.d)
    world.pass_time(10.0)

    assert before.quarantined == OWN
    assert totals(world.d) == PageTotals(free=63)


def test_what_is_awaited_of_an_unknown_lease_is_ignored():
    world = World()
    world.d.feed(inputs.Awaiting(world.now_s, (99,), ("a>b",)))

    assert world.d.node.decoder.quarantines.awaited == {}


def test_the_pages_of_a_draining_part_are_not_asked_about_before_it_is_over():
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    world.d.call(client.CancelReceive, receive=1)

    assert world.d.node.decoder.open.parts[1].state is Decode.DRAINING
    assert world.d.inflow.questions == []
