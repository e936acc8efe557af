"""Every request an engine or an operator may make, with ugly values: one answer each, never raised.

A session that makes them may lose its own handoffs and leases. The session beside it is not
disturbed, and when the hostile one is gone nothing of it is left.
"""

from __future__ import annotations

import random
import types
import typing

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.types import Tokens
from kvd.wire import admin, client
from tests.core.engines import PROMPT, Sender
from tests.core.side import ANSWERS
from tests.core.world import World, tokens

INTEGERS = (0, 1, 2, 3, -1, 7, 16, 40, 100, 101, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
FLOATS = (0.0, 0.3, -1.0, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "p",
    "d",
    "x",
    "lora",
    "\0",
    "strict",
    "unlocked",
    "page",
    "room",
    "lease",
    "node",
    "host",
)
TOKENS = (Tokens(b""), tokens((1, 10)), PROMPT, tokens((1, 5000)), tokens((-5, 40)))
OTHERS = tuple(toks for toks in TOKENS if toks != PROMPT)
"""An engine is believed what it has written of a prompt, and all engines of a node share it: one
that lies about the very prompt of the others does not leave them alone."""
WITHIN = {
    *typing.get_args(typing.get_type_hints(admin.Rehearse)["verb"]),
    *typing.get_args(client.ABOUT_PROMPTS),
}
"""Requests within another one."""
OWNED_ONLY_BY_THE_SHELL = (client.Subscribe, client.Unsubscribe, admin.ListEvents, admin.Look)


def some(rng: random.Random, kind: object) -> object:
    if kind is int:
        return rng.choice(INTEGERS)
    if kind is float:
        return rng.choice(FLOATS)
    if kind is bool:
        return rng.random() < 0.5
    if kind is bytes:
        return rng.choice((b"", b"aux", bytes(70_000)))
    if kind is str:
        return rng.choice(TEXTS)
    if kind in WITHIN:
        return ugly(rng, kind, 1)
    if kind is types.NoneType:
        return None
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return some(rng, rng.choice(typing.get_args(kind)))
    if kind == tuple[int, ...]:
        return tuple(rng.choice(INTEGERS) for _ in range(rng.randrange(4)))
    assert kind == tuple[str, ...], kind
    return rng.choice(((), ("p",), ("d",), ("x",), ("p", "p")))


def ugly(rng: random.Random, kind: typing.Any, call: int) -> object:
    """A request with anything in its fields; read back as the socket would read it."""
    hints = typing.get_type_hints(kind)
    fields = {name: some(rng, hint) for name, hint in hints.items() if name != "call"}
    if kind is client.AboutPrompt and rng.random() < 0.7:
        # Mostly sound as far as it is looked at first, or nothing behind that is reached.
        fields["request"] = msgspec.structs.replace(fields["request"], call=call)
        fields |= {"prompt": 1, "known_tokens": rng.choice((0, 10, 11, -1))}
    return kind(call=call, **fields)


@pytest.mark.parametrize("seed", range(10))
def test_every_request_of_an_engine_is_answered_once_and_disturbs_nobody_else(seed):
    rng = random.Random(seed)
    world = World()
    p, d = world.p, world.d
    sender = Sender(world)
    d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(40)
    hostile = {side.name: side.attach("hostile") for side in (p, d)}
    asked: dict[str, set[int]] = {"p": set(), "d": set()}
    kinds = [one for one in typing.get_args(client.Request) if one not in OWNED_ONLY_BY_THE_SHELL]

    for kind in kinds * 12:
        for side in (p, d):
            side.calls += 1
            message = ugly(rng, kind, side.calls)
            if message_is_for_room_seven(message):
                continue
            asked[side.name].add(side.calls)
            happened = inputs.FromClient(
                world.now_s, hostile[side.name], message, rng.choice(TOKENS)
            )
            side.feed(happened)
            world.run()
        world.now_s += 0.01
    world.pass_time(35, tick_s=0.5)

    for side in (p, d):
        heard = {one.call for one in side.answers if isinstance(one, ANSWERS)}
        assert asked[side.name] <= heard
        msgspec.json.encode(snapshot(side.node))
        side.hang_up(hostile[side.name])


def message_is_for_room_seven(message: object) -> bool:
    """The hostile sessions have rooms of their own; sharing one is ``test_bad_requests``."""
    if isinstance(message, client.AboutPrompt):
        message = message.request
    return isinstance(message, client.SendRequest | client.ReceiveRequest) and message.room == 7


@pytest.mark.parametrize("seed", range(6))
def test_a_hostile_session_leaves_the_room_beside_it_alone(seed):
    rng = random.Random(seed)
    world = World()
    p, d = world.p, world.d
    sender = Sender(world)
    d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(40)
    hostile = {side.name: side.attach("hostile") for side in (p, d)}
    kinds = [one for one in typing.get_args(client.Request) if one not in OWNED_ONLY_BY_THE_SHELL]

    for kind in kinds * 10:
        for side in (p, d):
            side.calls += 1
            message = ugly(rng, kind, side.calls)
            if not message_is_for_room_seven(message):
                side.feed(
                    inputs.FromClient(world.now_s, hostile[side.name], message, rng.choice(OTHERS))
                )
                world.run()
    for side in (p, d):
        side.hang_up(hostile[side.name])

    sender.finish()
    (got,) = [one for one in d.answers if isinstance(one, client.Received) and one.receive == 1]
    assert d.holds(got.pages, PROMPT)
    world.pass_time(1)
    assert {lease.session for lease in d.node.leases.leases.values()} == {1}
    assert {lease.session for lease in p.node.leases.leases.values()} == {1}


@pytest.mark.parametrize("seed", range(6))
def test_every_request_of_an_operator_is_answered_once(seed):
    rng = random.Random(seed)
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(40)
    kinds = [
        one for one in typing.get_args(admin.AdminRequest) if one not in OWNED_ONLY_BY_THE_SHELL
    ]
    for k, kind in enumerate(kinds * 6):
        side = rng.choice((world.p, world.d))
        before = len(side.reports)
        side.ask(ugly(rng, kind, k))
        assert [one.call for one in side.reports[before:]] == [k]
        msgspec.json.encode(side.reports[-1])
