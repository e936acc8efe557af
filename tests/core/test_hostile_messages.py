"""Every message a peer may send, in every state of both machines: refused or harmless.

A bad message may end its own room. It must not raise out of ``Node.step``, break an invariant, or
touch the room beside it: that one is delivered afterwards, byte for byte.
"""

from __future__ import annotations

import random
import typing

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.handoff.protocol import Decode, Prefill
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code, Refusal
from kvd.wire import client
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import (
    ALL,
    Abort,
    Accept,
    AskStory,
    Closed,
    Grant,
    Hello,
    Integrity,
    Message,
    Offer,
    Ping,
    Progress,
    ReceiveOutcome,
    Reject,
    Role,
    Settled,
    SourceShare,
    Story,
    Told,
    Withdrawn,
)
from tests.core.world import Side, World, tokens

PROMPT = tokens((1, 100))
ROOM = 7
INTEGERS = (0, 1, 2, 3, -1, 7, 16, 96, 100, 101, 2**31, 2**62, 2**63 - 1, 2**64 - 1, -(2**63))
NAMES = ("", "p", "d", "x", "p1".ljust(32, "0"), "d1".ljust(32, "0"), "ffff")
FLOATS = (0.0, -1.0, 1e300, float("nan"), float("inf"), float("-inf"))
BLOBS = (b"", b"\0" * 4, b"\1\0\0\0", b"abc", b"\xff" * 64)
LAYOUTS = ("", "{", "[]", "null", "[" * 2000, '"x"', "[1,2,3]", '{"a":{}}')


def prefill_in(state: Prefill, *, verifies: bool = False) -> World:
    """A world whose prefill side has room 7 in ``state``, and the decode side accordingly."""
    world = World(integrity=Integrity.FULL)
    world.hold_verify = verifies
    p, d = world.p, world.d
    world.hold_posts = True
    if state is Prefill.AWAIT_ENGINE:
        d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
        return world
    lease = p.lease(PROMPT)
    p.write(lease.pages, PROMPT)
    send = p.call(client.SendRequest, PROMPT, room=ROOM, lease=lease.lease)
    assert isinstance(send, client.Sending)
    if state is Prefill.AWAIT_OFFER:
        return world
    d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
    if state is Prefill.STREAMING:
        p.call(client.Advance, send=send.send, upto_tokens=40)
        return world
    if state is Prefill.DRAINING:
        p.call(client.Advance, send=send.send, upto_tokens=40)
        p.call(client.AbortSend, send=send.send, reason="failed")
        return world
    p.call(client.Finish, send=send.send, aux=b"x")
    if state is Prefill.SETTLED:
        world.lost = {Settled}
    if state is not Prefill.FLUSHING:
        world.land_posts()
    world.lost = set()
    return world


def decode_in(state: Decode) -> World:
    """A world whose decode side has room 7 in ``state``."""
    reached = {
        Decode.OFFERED: Prefill.AWAIT_ENGINE,
        Decode.RECEIVING: Prefill.STREAMING,
        Decode.DRAINING: Prefill.STREAMING,
        Decode.VERIFYING: Prefill.CLOSED,
        Decode.READY: Prefill.CLOSED,
        Decode.CLOSED: Prefill.CLOSED,
        Decode.QUEUED: Prefill.FORGOTTEN,
    }
    if state is Decode.QUEUED:
        world = World(d_pages=9)
        world.hold_posts = True
        world.d.lease(tokens((500, 100)))
        world.d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))
        return world
    world = prefill_in(reached[state], verifies=state is Decode.VERIFYING)
    if state is Decode.DRAINING:
        world.d.call(client.CancelReceive, receive=1)
    if state is Decode.CLOSED:
        world.d.call(client.ReleaseLease, lease=1)
    return world


UGLY: dict[object, tuple[object, ...]] = {
    int: INTEGERS,
    str: NAMES,
    bool: (True, False),
    bytes: BLOBS,
    float: FLOATS,
    int | None: (None, *INTEGERS),
}


def some(rng: random.Random, kind: object) -> object:
    """A value of this annotation, often an ugly one."""
    if kind in UGLY:
        return rng.choice(UGLY[kind])
    if kind in {ReceiveOutcome, Integrity, Role}:
        return rng.choice(list(kind))  # type: ignore[call-overload]
    if kind is SourceShare:
        ugly = (some(rng, of) for of in (int, int, int, int, Role, bool))
        return rng.choice((ALL, SourceShare(*ugly)))  # type: ignore[arg-type]
    if kind is Refusal:
        return Refusal(Code.INTERNAL, "why not")
    if kind == Refusal | None:
        return rng.choice((None, Refusal(Code.ABORTED, "because")))
    if kind == tuple[Told, ...]:
        return tuple(Told(some(rng, float), some(rng, str)) for _ in range(rng.randint(0, 3)))  # type: ignore[arg-type]
    if kind == tuple[int, ...]:
        return tuple(some(rng, int) for _ in range(rng.randint(0, 3)))
    if kind == tuple[str, ...]:
        return tuple(some(rng, str) for _ in range(rng.randint(0, 3)))
    assert kind == tuple[Grant, ...], kind
    sound = Grant("kv", 0, 100, b"".join(bytes([k, 0, 0, 0]) for k in range(1, 8)))
    grant = rng.choice((sound, msgspec.structs.replace(sound, component="other")))
    if rng.random() < 0.5:
        grant = Grant(some(rng, str), some(rng, int), some(rng, int), some(rng, bytes))  # type: ignore[arg-type]
    return tuple(grant for _ in range(rng.choice((0, 1, 1, 1, 2))))


KINDS: tuple[type[Message], ...] = (
    Hello,
    Ping,
    Offer,
    Abort,
    Closed,
    Accept,
    Progress,
    Settled,
    Reject,
    Withdrawn,
    AskStory,
    Story,
)


def hostile(rng: random.Random, kind: type[Message], source: str, target: str) -> Message:
    """A message between two known processes, with anything in its other fields."""
    hints = typing.get_type_hints(kind)
    fields = {name: some(rng, hint) for name, hint in hints.items()}
    fields["source"], fields["target"] = source, target
    if kind is Hello:
        fields["node"] = rng.choice(("p", "d", "x", ""))
        fields["layout"] = rng.choice(LAYOUTS)
        fields["protocol"] = rng.choice((1, 1, 1, 2))
        if rng.random() < 0.5:
            fields["source"] = rng.choice(NAMES)
    if rng.random() < 0.6 and "handoff" in fields:
        fields["handoff"] = 1
    if rng.random() < 0.6 and "room" in fields:
        fields["room"] = ROOM
    return kind(**fields)


def shower(world: World, victims: tuple[Side, ...], seed: int, attacker: Side | None) -> None:
    """Many hostile messages, from the other side of each victim or from ``attacker``."""
    rng = random.Random(seed)
    for kind in KINDS * 6:
        for to in victims:
            sender = attacker or (world.d if to is world.p else world.p)
            message = hostile(rng, kind, sender.incarnation, to.incarnation)
            if isinstance(message, Hello) and attacker is not None and message.node in {"p", "d"}:
                continue  # the transport authenticates names
            if kind is Hello and message.source in {world.p.incarnation, world.d.incarnation}:
                continue  # whoever knows a secret incarnation and a name is that node
            read = PEER_MESSAGES.decode(PEER_MESSAGES.encode(message))
            if isinstance(read, Refusal):
                continue  # it never comes as far as the core
            world.inject(to, read, sender)
        world.now_s += 0.01
    for side in world.sides.values():
        msgspec.json.encode(snapshot(side.node))
        msgspec.json.encode(side.events)


@pytest.mark.parametrize("state", [s for s in Prefill if s is not Prefill.FORGOTTEN])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_a_peer_says_raises_on_the_prefill_side(state, seed):
    world = prefill_in(state)
    shower(world, (world.p, world.d), seed, None)


@pytest.mark.parametrize("state", list(Decode))
@pytest.mark.parametrize("seed", range(3))
def test_nothing_a_peer_says_raises_on_the_decode_side(state, seed):
    world = decode_in(state)
    if state is Decode.VERIFYING:
        assert [part.state for part in world.d.node.decoder.open.parts.values()] == [state]
    shower(world, (world.p, world.d), seed, None)


def strangers(**more: object) -> tuple[World, Side]:
    """Two that are about to hand a prompt over, and a third that knows both."""
    world = World(names=("d", "e"), **more)
    d, e = world.d, world.sides["e"]
    (hello,) = [step for step in e.log if isinstance(step, inputs.FromPeer)][:1]
    assert isinstance(hello.message, Hello)
    introduction = msgspec.structs.replace(
        hello.message, source=e.incarnation, target=d.incarnation, node="e"
    )
    world.inject(d, introduction, e)
    return world, e


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "unnamed"])
@pytest.mark.parametrize("comes_first", ["prefill engine", "decode engine"])
@pytest.mark.parametrize("seed", range(4))
def test_a_hostile_peer_disturbs_no_room_but_its_own(seed, comes_first, is_named):
    """scenario G6: rooms of other peers go on as if nothing had happened, at every state.

    It speaks before the room is open, before there is an Offer, and between all further steps; and
    it has every chance to guess the number, but not the prompt.
    """
    world, e = strangers(integrity=Integrity.FULL)
    p, d = world.p, world.d
    world.hold_posts = True
    sends: list[int] = []
    lease = p.lease(PROMPT)
    p.write(lease.pages, PROMPT)

    def attack(at: int) -> None:
        shower(world, (p, d), 10 * seed + at, e)

    def opens() -> None:
        peer = "d" if is_named else None
        send = p.call(client.SendRequest, PROMPT, room=ROOM, lease=lease.lease, peer=peer)
        assert isinstance(send, client.Sending)
        sends.append(send.send)

    def receives() -> None:
        d.call(client.ReceiveRequest, PROMPT, room=ROOM, source=("p",))

    attack(0)
    for at, step in enumerate(
        (opens, receives) if comes_first == "prefill engine" else (receives, opens)
    ):
        step()
        attack(1 + at)
    p.call(client.Advance, send=sends[0], upto_tokens=40)
    attack(3)
    p.call(client.Finish, send=sends[0], aux=b"x")
    attack(4)
    world.hold_posts = False
    world.land_posts()
    attack(5)

    got = next(one for one in d.take() if isinstance(one, client.Received))
    assert d.holds(got.pages, PROMPT)
    assert got.aux == b"x"
    finished = next(one for one in p.take() if isinstance(one, client.Finished))
    assert finished.failure is None
