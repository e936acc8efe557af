"""How a send ends: what the engine hears, and what is left of it."""

from __future__ import annotations

from kvd.errors import Code
from kvd.wire import client
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
