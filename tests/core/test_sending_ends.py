"""How a send ends: what the engine hears, and what is left of it."""

from __future__ import annotations

import pytest

from kvd.core.cache.lease import ENGINE
from kvd.core.peers.peer import Agent
from kvd.errors import Code
from kvd.wire import client, events
from kvd.wire.peer import Closed, ReceiveOutcome, Settled
from tests.core.engines import FULL, Sender, cached, offered
from tests.core.sentences import sentence_of
from tests.core.world import World, tokens

PROMPT = tokens((1, 100))


def opened(world: World, room: int = 7) -> tuple[client.Leased, client.Sending]:
    """The prefill engine has leased and opened the room."""
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    send = world.p.call(client.SendRequest, PROMPT, room=room, lease=lease.lease)
    assert isinstance(send, client.Sending)
    return lease, send


def test_a_send_that_fails_after_finish_leaves_nothing_behind():
    world = World()
    _, send = opened(world)
    world.p.call(client.Finish, send=send.send, aux=b"x", session=1)

    world.pass_time(31)

    failed, finished = world.p.take()[-2:]
    assert isinstance(failed, client.SendFailed)
    assert isinstance(finished, client.Finished)
    assert finished.failure == failed.refusal
    assert failed.refusal.code is Code.DEADLINE
    assert world.p.node.prefiller.by_send == {}


def test_a_send_that_was_never_offered_keeps_neither_tokens_nor_lease_and_is_counted():
    world = World()
    leased, send = opened(world)

    world.pass_time(31)

    prefiller = world.p.node.prefiller
    assert prefiller.by_send == prefiller.rooms.by_room == {}
    assert world.p.node.leases.leases[leased.lease].holders == {ENGINE}
    (ended,) = [one for one in world.p.events if isinstance(one, events.HandoffEnded)]
    assert (ended.side, ended.part, ended.outcome, ended.code) == (
        "prefill",
        send.send,
        "timed-out",
        "deadline",
    )
    assert prefiller.settled_sends.failed == 1
    assert list(prefiller.failed) == [send.send]


@pytest.mark.parametrize("kind", [client.Finish, client.AbortSend])
@pytest.mark.parametrize("is_offered", [True, False])
def test_the_engine_ends_a_failed_send_once(kind, is_offered):
    world = World()
    _, send = opened(world)
    if is_offered:
        world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=1.0)
    world.pass_time(40)
    failure = world.p.take()[-1]
    assert isinstance(failure, client.SendFailed)
    more = {client.Finish: {"aux": b""}, client.AbortSend: {"reason": "it failed"}}[kind]

    advance = world.p.call(client.Advance, send=send.send, upto_tokens=16)
    first = world.p.call(kind, send=send.send, **more)
    second = world.p.call(kind, send=send.send, **more)

    assert advance == client.Failed(advance.call, failure.refusal)
    if kind is client.Finish:
        assert first == client.Failed(first.call, failure.refusal)
    else:
        assert first == client.Done(first.call)
    assert isinstance(second, client.Failed)
    assert second.refusal.code is Code.UNKNOWN_HANDOFF
    assert world.p.node.prefiller.failed == {}


def test_an_engine_that_is_gone_leaves_no_failed_send():
    world = World()
    opened(world)
    world.pass_time(31)
    world.p.hang_up()
    assert world.p.node.prefiller.failed == {}
    assert world.p.node.leases.leases == {}


def test_failed_sends_that_no_engine_ends_are_bounded(monkeypatch):
    monkeypatch.setattr("kvd.core.handoff.send.MAX_FAILED_SENDS", 2)
    world = World()
    sends = [opened(world, room)[1].send for room in (1, 2, 3)]
    world.pass_time(31)
    assert list(world.p.node.prefiller.failed) == sends[1:]


def test_a_full_hit_needs_no_sending_agent():
    """Nothing is posted, so that nothing can fail: on the offer, and when the agent fails."""
    for fails_first in (True, False):
        world = World()
        cached(world.d, FULL)
        world.p.fails_loading = 1
        world.hold_shells = not fails_first
        world.d.restart_transfer("crashed")
        world.run()
        world.replace_processes()
        world.run()
        sender = Sender(world, FULL)
        world.d.call(client.ReceiveRequest, FULL, room=7, source=("p",))
        world.hold_shells = False
        world.run()
        assert world.p.node.peers.by_name["d"].agent is Agent.FAILED

        finished = sender.finish()

        assert isinstance(finished, client.Finished)
        assert (finished.failure, finished.decode_prefix_len) == (None, 96)
        assert isinstance(world.d.take()[-1], client.Received)


def test_finish_is_answered_by_its_deadline_and_the_end_is_still_learned():
    """The decode side's Closed is lost: unknown at the deadline, committed for who watches."""
    world = World(lost_s=100.0)
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    send = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, deadline_s=5.0)
    assert isinstance(send, client.Sending)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.lost = {Closed}
    assert world.p.call(client.Finish, send=send.send, aux=b"x") is None
    call = world.p.calls

    world.pass_time(4.9)
    assert world.p.answer(call) is None
    world.pass_time(0.2)

    finished = world.p.answer(call)
    assert isinstance(finished, client.Finished)
    assert finished.failure is not None
    assert finished.failure.code is Code.UNKNOWN_OUTCOME
    assert finished.failure.message == sentence_of(
        "finish is answered by its deadline and the end is still learned"
    )
    world.lost = set()
    world.pass_time(2)
    (ended,) = [one for one in world.p.events if isinstance(one, events.HandoffEnded)]
    assert (ended.outcome, ended.code) == ("committed", "")


def test_a_deadline_that_was_cut_says_by_what():
    world = World()
    lease = world.p.lease(PROMPT)
    world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, deadline_s=600.0)
    world.pass_time(31)
    failed = world.p.take()[-1]
    assert isinstance(failed, client.SendFailed)
    assert failed.refusal.message == sentence_of("a deadline that was cut says by what")


def test_an_offer_repeated_after_its_end_is_not_delivered_without_its_aux():
    world = World(linger_s=3.0, lost_s=100.0)
    sender = Sender(world)
    world.lost = {Settled}
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=20.0)
    offer = offered(world)
    sender.finish()
    world.cut = {"d"}
    world.pass_time(3.2)
    world.cut = set()
    assert world.p.node.prefiller.settled_sends.settled == {}
    world.lost = set()

    world.inject(world.p, offer)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.UNKNOWN_OUTCOME
    assert world.d.node.leases.leases == {}
    (ended,) = [one for one in world.d.events if isinstance(one, events.HandoffEnded)]
    assert ended.outcome == ReceiveOutcome.FAILED.value
