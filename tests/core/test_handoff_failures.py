"""How handoffs fail: who hears it, when the pages come back, and what goes on beside them."""

from __future__ import annotations

from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.inspect.snapshot import snapshot
from kvd.core.peers.peer import Agent
from kvd.errors import Code
from kvd.wire import admin, client
from kvd.wire.peer import ReceiveOutcome, Settled
from tests.core.engines import PROMPT, PageTotals, Sender, cached, totals
from tests.core.sentences import sentence_of
from tests.core.world import World, tokens


def test_a_transfer_that_fails_frees_the_delta_and_keeps_the_prefix():
    """scenario A20: exactly 3 pages come back, 64 tokens stay cached, the retry has them."""
    world = World()
    cached(world.d, tokens((1, 64)))
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    assert totals(world.d) == PageTotals(free=56, held=3, cached=4)

    world.p.call(client.AbortSend, send=sender.send, reason="out of memory")

    assert totals(world.d) == PageTotals(free=59, cached=4, evictable=4)
    assert [one.lock_ref for one in world.d.node.leases.tree.nodes()] == [0]
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.ABORTED
    assert failed.refusal.message == sentence_of(
        "a transfer that fails frees the delta and keeps the prefix"
    )
    again = world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    assert again == client.Receiving(4, 2, 64)


def test_a_handshake_that_fails_leaves_both_trees_as_they_were():
    """scenario A19: the peer never says Hello; at the deadline nothing was held."""
    world = World()
    cached(world.d, tokens((1, 64)))
    world.cut = {"p"}
    world.restart(world.d)
    world.d.attach()
    cached(world.d, tokens((1, 64)))
    nodes = [(one.id, one.hits, one.lock_ref) for one in world.d.node.leases.tree.nodes()]
    reply = world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=0.5)
    assert reply is None

    world.pass_time(0.6)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.Failed)
    assert failed.refusal.code is Code.DEADLINE
    assert failed.refusal.message.startswith("waited 0.5 s for room: p has not said Hello yet")
    assert [(o.id, o.hits, o.lock_ref) for o in world.d.node.leases.tree.nodes()] == nodes
    assert totals(world.d) == PageTotals(free=59, cached=4, evictable=4)


def test_an_abort_before_anything_is_held_is_told_once():
    """scenario A25: queued for room, then aborted by an operator."""
    world = World(d_pages=9)
    world.d.lease(tokens((5000, 100)))
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.d.take()

    report = world.d.ask(admin.AbortRoom(1, 7, "too slow"))

    assert report == admin.Report(
        1,
        {"receives": 1, "sends": 0, "freed_pages": 0, "quarantined_pages": 0},
        (),
        notes=("receive 1 leaves the queue: it holds nothing",),
    )
    (failed,) = world.d.take()
    assert isinstance(failed, client.Failed)
    assert failed.refusal.message == sentence_of("an abort before anything is held is told once")
    assert world.d.grants == {}
    assert totals(world.d) == PageTotals(free=1, held=7)


def test_an_abort_during_the_transfer_quarantines_the_pages_until_the_writer_settles():
    """scenario A26: the prefix lock is dropped at once; the delta is nobody's until Settled."""
    world = World()
    cached(world.d, tokens((1, 64)))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)

    world.d.call(client.CancelReceive, receive=1)

    assert totals(world.d) == PageTotals(free=56, cached=4, quarantined=3, evictable=4)
    (lease,) = snapshot(world.d.node).leases
    assert lease.state == "quarantined"
    assert lease.waiting_for == sentence_of(
        "an abort during the transfer quarantines the pages until the writer settles 1"
    )
    assert world.p.node.prefiller.rooms.by_room[7].state is Prefill.DRAINING
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.CANCELLED

    world.land_posts()

    assert totals(world.d) == PageTotals(free=59, cached=4, evictable=4)
    failed = world.p.take()[-1]
    assert isinstance(failed, client.SendFailed)
    assert failed.refusal.message == sentence_of(
        "an abort during the transfer quarantines the pages until the writer settles 2"
    )
    settled = Settled(world.p.incarnation, world.d.incarnation, 1, ReceiveOutcome.ABORTED)
    world.inject(world.d, settled)
    assert totals(world.d) == PageTotals(free=59, cached=4, evictable=4), (
        "a repeated Settled frees nothing"
    )


def test_the_aux_of_another_handoff_does_not_end_this_one():
    """scenarios A29, A30: it rides in Settled, and that names its handoff: nothing is taken for it.

    What came stays nobody's KV until the word about this handoff, which has the aux of this one.
    """
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    before = totals(world.d)

    for handoff in (0, 2, 2**31):
        foreign = Settled(
            world.p.incarnation,
            world.d.incarnation,
            handoff,
            ReceiveOutcome.DELIVERED,
            aux=b"of another room",
        )
        world.inject(world.d, foreign)

    assert world.d.node.decoder.open.parts[1].state is Decode.RECEIVING
    assert totals(world.d) == before == PageTotals(free=56, held=7)
    world.hold_posts = False
    sender.finish(b"of this room")
    world.land_posts()
    received = world.d.take()[-1]
    assert isinstance(received, client.Received)
    assert received.aux == b"of this room"
    assert totals(world.d) == PageTotals(free=56, held=1, cached=6)


def test_a_failed_post_settles_only_after_its_agent_is_destroyed():
    """scenario A28: bytes in doubt stay in quarantine until no byte can land."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    (flight,) = world.p.flights.values()
    world.p.land(flight, 1)

    world.hold_shells = True
    world.p.fail(flight, "transport error")
    world.p.report_next()
    assert world.p.node.peers.by_name["d"].agent is Agent.DROPPING
    assert world.p.node.prefiller.rooms.by_room[7].state is Prefill.DRAINING
    assert world.d.node.decoder.open.parts[1].state is Decode.RECEIVING
    world.hold_shells = False
    world.run()

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert (failed.refusal.code, failed.refusal.message) == (Code.POST_FAILED, "transport error")
    assert totals(world.d) == PageTotals(free=63)
    assert world.p.node.peers.by_name["d"].agent is Agent.LOADED


def test_bytes_in_doubt_keep_their_pages_until_the_receiving_host_is_quiet():
    """scenario A28: what a destroyed agent had sent may still be in the receiver's sockets."""
    world = World()
    world.hold_posts = world.hold_quiet = world.doubts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    (flight,) = world.p.flights.values()
    world.p.fail(flight, "transport error")
    world.run()
    assert world.d.node.decoder.open.parts == {}
    assert totals(world.d) == PageTotals(free=56, quarantined=7)

    world.hold_quiet = False
    world.d.land_late()
    world.pass_time(1.2)  # the new agent's connection was there too, until it is claimed

    assert totals(world.d) == PageTotals(free=63)


def test_other_rooms_through_a_destroyed_agent_fail_too():
    world = World()
    world.hold_posts = True
    senders = [Sender(world, tokens((1000 * room, 50)), room) for room in (1, 2)]
    for room in (1, 2):
        world.d.call(client.ReceiveRequest, tokens((1000 * room, 50)), room=room, source=("p",))
    for sender in senders:
        sender.advance(32)
    first, _ = world.p.flights.values()

    world.p.fail(first, "transport error")
    world.run()

    failed = [one.refusal for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert [(one.code, one.message) for one in failed] == [
        (Code.POST_FAILED, "transport error"),
        (Code.POST_FAILED, "agent destroyed"),
    ]


def test_a_writer_that_aborts_in_mid_chunk_is_heard_at_once():
    """scenario B11: the decode engine knows it without a clock."""
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(40)
    now_s = world.now_s

    world.p.call(client.AbortSend, send=sender.send, reason="engine died")

    assert isinstance(world.d.take()[-1], client.ReceiveFailed)
    assert world.now_s == now_s
    assert totals(world.d) == PageTotals(free=63)


def test_a_restarted_writer_frees_the_quarantine_by_its_hello():
    """scenario G5: a new incarnation is proof that the old one writes no more."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)
    world.d.call(client.CancelReceive, receive=1)
    assert totals(world.d) == PageTotals(free=56, quarantined=7)

    world.restart(world.p)
    world.pass_time(1)

    assert totals(world.d) == PageTotals(free=63)
    assert world.d.node.peers.by_name["p"].incarnation == world.p.incarnation
    world.hold_posts = False
    world.p.attach()
    Sender(world).finish()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    assert isinstance(world.d.take()[-1], client.Received)


def test_a_writer_that_restarts_under_a_wanted_room_fails_it_with_what_to_do():
    """scenario G5."""
    world = World()
    Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    world.restart(world.p)
    world.pass_time(1)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.PEER_LOST
    assert failed.refusal.message == sentence_of(
        "a writer that restarts under a wanted room fails it with what to do"
    )
    assert totals(world.d) == PageTotals(free=63)


def test_a_restarted_decode_side_ends_its_rooms_and_no_other():
    """scenario G6: posts to it fail, the rooms of another decode node go on."""
    world = World(names=("d", "e"))
    d, e = world.d, world.sides["e"]
    world.hold_posts = True
    mine, other = Sender(world, room=7), Sender(world, room=8)
    d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    e.call(client.ReceiveRequest, PROMPT, room=8, source=("p",))
    for sender in (mine, other):
        sender.advance(64)

    world.restart(d)
    world.land_posts()

    failed = [one for one in world.p.take() if isinstance(one, client.SendFailed)]
    assert [(one.send, one.refusal.code) for one in failed] == [(mine.send, Code.PEER_LOST)]
    other.finish()
    world.land_posts()
    assert isinstance(e.take()[-1], client.Received)
    assert world.p.node.prefiller.rooms.by_room == {}
    world.pass_time(1)
    assert world.p.node.prefiller.settled_sends.records == {}


def test_a_fence_frees_what_drains_and_fails_what_was_posted():
    """The decode side's transfer process is replaced: nothing writes through the old one."""
    world = World()
    world.hold_posts = True
    drains, wanted = Sender(world, room=1), Sender(world, room=2)
    for room in (1, 2):
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
    for sender in (drains, wanted):
        sender.advance(64)
    world.d.call(client.CancelReceive, receive=1)
    assert totals(world.d) == PageTotals(free=49, held=7, quarantined=7)

    report = world.d.ask(admin.Fence(1))
    world.land_posts()

    figures = {"quarantined_leases": 1, "quarantined_pages": 7, "receives_cut": 1, "sends_cut": 0}
    note = "room 2: receive 2 from p is cut, 0 B of 896 B had arrived"
    assert report == admin.Report(1, figures, (), notes=(note,))
    assert totals(world.d) == PageTotals(free=63)
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.POST_FAILED
    assert failed.refusal.message == sentence_of(
        "a fence frees what drains and fails what was posted"
    )
    assert world.p.node.peers.by_name["d"].generation == 2


def test_a_dead_client_leaves_no_lease_and_its_writer_is_told():
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(64)

    world.d.hang_up(1)

    assert totals(world.d) == PageTotals(free=63)
    failed = world.p.take()[-1]
    assert isinstance(failed, client.SendFailed)
    assert failed.refusal.message == sentence_of(
        "a dead client leaves no lease and its writer is told"
    )
