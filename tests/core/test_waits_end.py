"""Whatever makes room for a request that waits is noticed in the step in which it happens."""

from __future__ import annotations

import pytest

from kvd.wire import client
from tests.core.engines import PROMPT, Sender
from tests.core.world import World, tokens


def test_the_end_of_a_send_lets_in_who_waited_for_its_pages():
    """Its engine released the lease before: the send was the last that held the pages."""
    world = World(p_pages=9)
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)
    assert world.p.call(client.OpenLease, tokens((5000, 100))) is None
    call = world.p.calls
    world.p.take()

    world.land_posts()

    assert [one.call for one in world.p.take() if isinstance(one, client.Leased)] == [call]


def test_the_second_receive_of_a_prompt_is_let_in_when_the_first_has_cached_it():
    world = World(d_pages=9)
    sender = Sender(world)
    Sender(world, room=8)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    assert world.d.call(client.ReceiveRequest, PROMPT, room=8, source=("p",)) is None
    call = world.d.calls
    world.d.take()

    sender.finish()

    begun = [one for one in world.d.take() if isinstance(one, client.Receiving)]
    assert [(one.call, one.prefix_tokens) for one in begun] == [(call, 96)]


def peer_lost(world):
    world.cut.add("p")
    world.pass_time(3.0)


def transfer_stopped(world):
    world.d.stop_transfer("killed")


@pytest.mark.parametrize("happens", [peer_lost, transfer_stopped])
def test_a_receive_that_waits_for_no_memory_blocks_nobody_behind_it(happens):
    world = World(d_pages=9)
    world.d.lease(tokens((5000, 48)))
    assert world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",)) is None
    assert world.d.call(client.OpenLease, tokens((6000, 1))) is None
    call = world.d.calls
    world.d.take()

    happens(world)

    assert [one.call for one in world.d.take() if isinstance(one, client.Leased)] == [call]
