"""A session that the daemon hung up on is served no more, and keeps what it may write.

Every step checks the invariants (``Side.feed``).
"""

from __future__ import annotations

import random

import pytest

from kvd.core import inputs
from kvd.errors import Code, Refusal
from kvd.types import page_ids
from kvd.wire import admin, client, events
from kvd.wire.events import ClientGone
from tests.core.world import World, tokens

WHY = Refusal(Code.CLIENT_GONE, "session 1 has left 4096 messages unread", side="p")


def hang_up_on(side, session=1, *pids, why=WHY):
    side.feed(inputs.HungUpOn(side.world.now_s, session, why, pids or (101,)))


def told(side, kind):
    return [one for one in side.events if isinstance(one, kind)]


def because(side, kind, number):
    return side.ask(admin.Why(1, kind, number))


def test_pages_of_a_living_engine_are_in_no_other_lease_until_its_processes_are_dead():
    world = World(p_pages=17)
    mine = world.p.lease(tokens((1, 100)))
    other = world.p.attach("other")

    hang_up_on(world.p)
    theirs = world.p.lease(tokens((5000, 16 * 9)), session=other)

    assert not set(page_ids(mine.pages)) & set(page_ids(theirs.pages))
    assert world.p.node.leases.headroom_pages == 0
    world.p.hang_up(1)
    assert world.p.node.leases.headroom_pages == 7
    assert [one.leases for one in told(world.p, ClientGone)] == [1]


def test_no_request_of_it_is_served_and_the_answer_says_why():
    world = World()
    lease = world.p.lease(tokens((1, 40)))
    hang_up_on(world.p)

    for kind, fields in ((client.ReleaseLease, {"lease": lease.lease}), (client.GetSnapshot, {})):
        reply = world.p.call(kind, **fields)
        assert isinstance(reply, client.Failed)
        assert reply.refusal is WHY
    assert list(world.p.node.leases.leases) == [lease.lease]


def test_it_is_told_in_one_event_however_often_it_is_said():
    world = World()
    world.p.lease(tokens((1, 40)))

    hang_up_on(world.p, 1, 101, 102)
    hang_up_on(world.p, 1, 102)

    [event] = told(world.p, events.ClientHungUpOn)
    assert (event.session, event.pids, event.code, event.leases, event.held_pages) == (
        *(1, (101, 102), "client-gone"),
        *(1, 3),
    )
    assert world.p.node.sessions.by_id[1].pids == [102]


def test_a_session_that_holds_nothing_is_over_at_once():
    world = World()

    hang_up_on(world.p)

    assert 1 not in world.p.node.sessions.by_id
    assert len(told(world.p, ClientGone)) == 1


def test_what_it_had_committed_stays_cached():
    world = World()
    prompt = tokens((1, 100))
    lease = world.p.lease(prompt)
    world.p.call(client.CommitLease, lease=lease.lease)

    hang_up_on(world.p)
    assert world.p.node.leases.tree.probe(prompt, "") == 96
    world.p.hang_up(1)

    assert world.p.node.leases.tree.probe(prompt, "") == 96


def test_its_waiting_requests_are_withdrawn():
    world = World(p_pages=9)
    world.p.lease(tokens((1, 100)))
    world.p.call(client.OpenLease, tokens((900, 120)))
    assert len(world.p.node.admission.queue) == 1

    hang_up_on(world.p)

    assert world.p.node.admission.queue == []


def test_a_receive_that_a_peer_may_write_ends_in_quarantine_and_is_free_when_it_settles():
    world = World()
    prompt = tokens((1, 100))
    source = world.p.lease(prompt)
    world.d.call(client.ReceiveRequest, prompt, room=7, source=("p",), deadline_s=60.0)
    world.p.call(client.SendRequest, prompt, room=7, lease=source.lease, deadline_s=60.0)
    [lease] = world.d.node.leases.leases.values()
    world.hold_wire = True

    hang_up_on(world.d)

    assert lease.quarantine is not None
    world.hold_wire = False
    world.run()
    assert world.d.node.leases.leases == {}


def test_a_lease_that_was_delivered_stays_and_a_send_of_it_is_given_up():
    world = World()
    lease = world.p.lease(tokens((1, 100)))
    world.p.call(client.SendRequest, tokens((1, 100)), room=7, lease=lease.lease, deadline_s=60.0)

    hang_up_on(world.p)

    assert world.p.node.prefiller.by_send == {}
    assert list(world.p.node.leases.leases) == [lease.lease]
    [event] = told(world.p, events.ClientHungUpOn)
    assert (event.leases, event.handoffs) == (1, 1)


@pytest.mark.parametrize("seed", range(6))
def test_pages_stay_apart_whatever_the_others_do(seed):
    rng = random.Random(seed)
    world = World(p_pages=33)
    sessions = [1, world.p.attach("b"), world.p.attach("c")]
    shut: dict[int, set[int]] = {}
    for number in range(200):
        living = [one for one in sessions if one not in shut]
        if number % 40 == 20 and len(living) > 1:
            one = rng.choice(living)
            table = world.p.node.leases.leases.values()
            held = {p for lease in table if lease.session == one for p in page_ids(lease.held)}
            hang_up_on(world.p, one)
            if held:
                shut[one] = held
            else:
                sessions.remove(one)
            continue
        session = rng.choice(living)
        mine = [x for x in world.p.node.leases.leases.values() if x.session == session]
        if mine and rng.random() < 0.5:
            lease = rng.choice(mine)
            kind = rng.choice((client.ReleaseLease, client.CommitLease, client.CommitAndRelease))
            world.p.call(kind, session=session, lease=lease.id)
        else:
            prompt = tokens((rng.randrange(5) * 1000, rng.randrange(1, 90)))
            world.p.call(client.OpenLease, prompt, session=session, deadline_s=0.0)
        for one, held in shut.items():
            others = {
                page
                for lease in world.p.node.leases.leases.values()
                if lease.session != one
                for page in page_ids(lease.held)
            }
            assert not held & others, f"seed {seed}"
    for one in shut:
        world.p.hang_up(one)
    assert not [x for x in world.p.node.leases.leases.values() if x.session in shut]


def test_why_says_that_it_was_hung_up_on_and_who_is_waited_for():
    world = World()
    lease = world.p.lease(tokens((1, 40)))
    hang_up_on(world.p, 1, 4711)
    world.pass_time(12.0)

    answer = because(world.p, "lease", lease.lease)
    assert "hung up on for 12.0 s" in answer.sentence
    waits = "waits for pid 4711 to end, which may still write its pages: " + WHY.message
    assert waits in answer.facts
    who = because(world.p, "client", 1)
    assert "hung up on for 12.0 s (client-gone)" in who.sentence
    assert waits in who.facts
