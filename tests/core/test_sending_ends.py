"""How a send ends: what the engine hears, and what is left of it."""

from __future__ import annotations

import pytest

from kvd.core.lease import ENGINE
from kvd.errors import Code
from kvd.wire import client, events
from tests.core.world import World, tokens

PROMPT = tokens((1, 100))


def opened(world: World, room: int = 7) -> tuple[client.Leased, client.Sending]:
    """The prefill engine has leased and opened the room."""
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    send = world.p.call(client.Send, PROMPT, room=room, lease=lease.lease)
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
    assert prefiller.by_send == prefiller.by_room == {}
    assert world.p.node.leases.leases[leased.lease].holders == {ENGINE}
    (ended,) = [one for one in world.p.events if isinstance(one, events.HandoffEnded)]
    assert (ended.side, ended.part, ended.outcome, ended.code) == (
        "prefill",
        send.send,
        "timed-out",
        "deadline",
    )
    assert prefiller.last_word.failed == 1
    assert list(prefiller.failed) == [send.send]


@pytest.mark.parametrize("kind", [client.Finish, client.AbortSend])
@pytest.mark.parametrize("is_offered", [True, False])
def test_the_engine_ends_a_failed_send_once(kind, is_offered):
    world = World()
    _, send = opened(world)
    if is_offered:
        world.d.call(client.Receive, PROMPT, room=7, source=("p",), deadline_s=1.0)
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
    monkeypatch.setattr("kvd.core.prefill.MAX_FAILED_SENDS", 2)
    world = World()
    sends = [opened(world, room)[1].send for room in (1, 2, 3)]
    world.pass_time(31)
    assert list(world.p.node.prefiller.failed) == sends[1:]
