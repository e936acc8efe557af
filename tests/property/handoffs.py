"""Handoffs of a storm: a prompt is sent while it is computed, and received meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.wire import client
from tests.property.slots import Asked

if TYPE_CHECKING:
    from tests.property.slots import Sequence
    from tests.property.storms import Storm


def hand_off(storm: Storm) -> None:
    """A prompt goes from one node to the other; whoever is first waits."""
    storm.rooms += 1
    asked, room = storm.asked(), storm.rooms
    sides = [_send, _receive]
    storm.rng.shuffle(sides)
    for one in sides:
        one(storm, asked, room)


def _receive(storm: Storm, asked: Asked, room: int) -> None:
    rng, d = storm.rng, storm.world.d
    tier = rng.choice((None, None, "host", "device")) if storm.family == "hisparse" else None
    step = rng.choice((0, 0, 1, storm.page))
    asked = Asked(asked.text, asked.namespace, step, asked.reserve, asked.promise)

    def then(reply: client.Reply) -> None:
        if isinstance(reply, client.Receiving):
            storm.receives[d.name, d.life, reply.receive] = asked

    storm.call(
        d,
        client.ReceiveRequest,
        asked.tokens,
        then,
        room=room,
        source=("p",),
        namespace=asked.namespace,
        reserve_tokens=asked.reserve,
        promise_tokens=asked.promise,
        cache=rng.random() < 0.85,
        step_tokens=asked.step,
        deadline_s=rng.choice((1, 30)),
        tier=tier,
    )


def _send(storm: Storm, asked: Asked, room: int) -> None:
    p = storm.world.p
    asked = Asked(asked.text, asked.namespace, asked.step, 0)
    one = storm.open(p, asked, deadline_s=1, cache=storm.rng.random() < 0.85)
    if one is None:
        return
    if storm.rng.random() < 0.2:
        storm.go_on(one, storm.rng.randint(0, len(asked.text)))

    def then(reply: client.Reply) -> None:
        if isinstance(reply, client.Sending):
            one.sends[reply.send] = 0

    fields = {"room": room, "lease": one.lease, "namespace": asked.namespace}
    storm.call(p, client.SendRequest, asked.tokens, then, **fields)


def advance(storm: Storm, one: Sequence) -> None:
    """More of a prompt is written and sent, all of it, or nothing after all."""
    open_ones = [send for send, upto in one.sends.items() if upto >= 0]
    if not open_ones:
        return
    send, rng = storm.rng.choice(open_ones), storm.rng
    if rng.random() < 0.5 and one.written < one.prompt:
        storm.go_on(one, rng.randint(one.written, one.prompt))
    if rng.random() < 0.05:
        storm.call(one.side, client.AbortSend, send=send, reason="not wanted")
        one.sends.pop(send, None)
    elif rng.random() < 0.5:
        if one.written > one.sends.get(send, one.written):
            one.sends[send] = one.written
            storm.call(one.side, client.Advance, send=send, upto_tokens=one.written)
    else:
        _finish(storm, one, send)


def _finish(storm: Storm, one: Sequence, send: int) -> None:
    storm.go_on(one, one.prompt)
    if one.written < one.prompt or send not in one.sends:
        return
    one.sends[send] = -1
    storm.call(
        one.side,
        client.Finish,
        then=lambda reply: one.sends.pop(send, None) and None,
        send=send,
        aux=b"first",
    )
    if storm.rng.random() < 0.3:
        storm.release(one, keep=storm.rng.random() < 0.5)
