"""What is left of an engine when its last process is gone: what it committed, and nothing else."""

from __future__ import annotations

from kvd.types import count
from kvd.wire import client
from tests.core.world import World, tokens


def test_waiting_requests_of_a_dead_session_are_not_admitted_while_it_is_cleaned_up():
    world = World(p_pages=9)
    world.p.lease(tokens((1, 100)), session=1)
    other = world.p.attach("other")
    dead = world.p.attach("dying")
    world.p.call(client.OpenLease, tokens((1, 120)), session=dead)
    world.p.call(client.OpenLease, tokens((1, 10)), session=dead)
    world.p.call(client.OpenLease, tokens((5000, 10)), session=other)
    world.p.take()

    world.p.hang_up(dead)

    table = world.p.node.leases
    assert {lease.session for lease in table.leases.values()} == {1, other}
    assert [type(reply) for reply in world.p.take()] == [client.Leased]
    assert world.p.node.admission.queue == []


def test_waiting_receives_of_a_dead_session_never_reach_the_peer():
    world = World(d_pages=9)
    world.d.lease(tokens((1, 100)), session=1)
    dead = world.d.attach("dying")
    world.d.call(
        client.ReceiveRequest, tokens((1, 120)), session=dead, room=1, source=("p",), deadline_s=9.0
    )
    world.d.call(client.ReceiveRequest, tokens((1, 10)), session=dead, room=2, source=("p",))

    world.d.hang_up(dead)

    assert world.d.node.decoder.open.parts == {}
    assert world.d.grants == {}, "an Offer was sent"
    assert list(world.d.node.leases.leases) == [1]


def test_a_dead_session_leaves_what_it_committed():
    world = World()
    prompt = tokens((1, 100))
    lease = world.p.lease(prompt)
    world.p.call(client.CommitLease, lease=lease.lease)
    world.p.lease(tokens((9000, 50)))

    world.p.hang_up(1)

    table = world.p.node.leases
    assert table.leases == {}
    assert table.tree.probe(prompt, "") == 96
    assert (table.tree.evictable_pages, table.pool.free_pages) == (6, 57)
    assert count(lease.pages) == 7
