"""A request id names one prompt of one session, asked for with one verb, and answers no other."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvd.core.audit.invariants import faults
from kvd.errors import Code, Refusal
from kvd.wire import client
from kvd.wire.peer import Closed
from tests.core.engines import PROMPT
from tests.core.world import PAGE, World, tokens

if TYPE_CHECKING:
    from tests.core.side import Side

SAME_LENGTH = tokens((70_000, len(PROMPT) // 4))
SHORTER = PROMPT[: 4 * 2 * PAGE]


def receive(side: Side, toks: bytes = PROMPT, **fields: object) -> client.Reply | None:
    asked = {"room": 7, "source": ("p",), "request_id": "r1", "deadline_s": 20.0, **fields}
    return side.call(client.ReceiveRequest, toks, **asked)


def send(side: Side, lease: int, toks: bytes = b"", **fields: object) -> client.Reply | None:
    asked = {"room": 7, "lease": lease, "request_id": "r1", "deadline_s": 20.0, **fields}
    return side.call(client.SendRequest, toks, **asked)


def hand_over(side: Side, lease: int, toks: bytes = b"", **fields: object) -> client.Reply | None:
    asked = {"room": 7, "lease": lease, "request_id": "r1", "deadline_s": 20.0, **fields}
    return side.call(client.HandOver, toks, **asked)


def written(side: Side, toks: bytes = PROMPT, **fields: object) -> int:
    leased = side.lease(toks, **fields)
    side.write(leased.pages, toks)
    return leased.lease


def refusal(reply: client.Reply | None) -> Refusal:
    assert isinstance(reply, client.Failed), reply
    return reply.refusal


OTHERS = [
    pytest.param(SAME_LENGTH, {}, "digests", id="other-tokens"),
    pytest.param(SHORTER, {}, "tokens", id="shorter"),
    pytest.param(PROMPT, {"namespace": "b"}, "namespace", id="other-namespace"),
]


@pytest.mark.parametrize(("toks", "fields", "said"), OTHERS)
def test_a_receive_of_anything_else_is_not_answered_by_the_first(toks, fields, said):
    world = World()
    first = receive(world.d)

    why = refusal(receive(world.d, toks, **fields))

    assert why.code is Code.PROMPT_MISMATCH
    assert said in why.message
    assert why.numbers["first_tokens"] == len(PROMPT) // 4
    assert why.numbers["tokens"] == len(toks) // 4
    again = receive(world.d)
    assert isinstance(again, client.Receiving)
    assert again.receive == first.receive


@pytest.mark.parametrize(("toks", "fields", "said"), OTHERS)
def test_a_receive_in_the_queue_is_not_ended_by_another_one(toks, fields, said):
    world = World(d_pages=16)
    world.d.lease(tokens((5000, 200)))
    assert receive(world.d) is None

    assert said in refusal(receive(world.d, toks, **fields)).message

    assert len(world.d.node.decoder.open.attempts) == 1
    assert world.d.answer(1 + 1) is None


@pytest.mark.parametrize(("toks", "fields", "said"), OTHERS)
def test_a_delivered_receive_is_not_named_to_who_asks_for_another(toks, fields, said):
    world = World()
    receive(world.d)
    hand_over(world.p, written(world.p))
    why = refusal(receive(world.d, toks, **fields))
    assert why.code is Code.PROMPT_MISMATCH
    assert "lease" not in why.numbers
    assert said in why.message


def test_a_receive_into_other_pages_of_an_arena_is_not_answered_by_the_first():
    world = World()
    arena = world.d.call(client.OpenArena, n_pages=32)
    n_pages = -(-len(PROMPT) // 4 // PAGE)
    first, other = arena.pages[: 4 * n_pages], arena.pages[4 * n_pages : 8 * n_pages]
    assert isinstance(receive(world.d, arena=arena.lease, pages=first), client.Receiving)

    assert refusal(receive(world.d, arena=arena.lease, pages=other)).code is Code.BAD_PAGES
    assert refusal(receive(world.d)).code is Code.BAD_PAGES
    shifted = refusal(receive(world.d, arena=arena.lease, pages=first, have_tokens=PAGE))
    assert shifted.code is Code.BAD_PAGES
    assert shifted.numbers["first_have_tokens"] == 0
    assert isinstance(receive(world.d, arena=arena.lease, pages=first), client.Receiving)


@pytest.mark.parametrize("cache", [False, True])
def test_what_is_kept_out_of_the_cache_has_no_lease_with_what_is_not(cache):
    world = World()
    assert isinstance(receive(world.d, cache=cache), client.Receiving)
    why = refusal(receive(world.d, cache=not cache))
    assert why.code is Code.DUPLICATE_ROOM
    assert f"it said cache={cache}" in why.message
    assert isinstance(receive(world.d, cache=cache), client.Receiving)


def test_another_session_is_not_answered_by_the_first():
    world = World()
    first = receive(world.d)
    world.d.attach()
    other = receive(world.d, session=2)
    assert isinstance(other, client.Receiving)
    assert other.receive != first.receive

    lease = written(world.p)
    assert isinstance(send(world.p, lease), client.Sending)
    world.p.attach()
    own = written(world.p, session=2)
    assert refusal(send(world.p, own, session=2)).code is Code.DUPLICATE_ROOM
    assert refusal(hand_over(world.p, own, session=2)).code is Code.DUPLICATE_ROOM


@pytest.mark.parametrize("verb", [send, hand_over])
@pytest.mark.parametrize(("toks", "fields", "said"), OTHERS)
def test_a_send_of_anything_else_is_not_answered_by_the_first(verb, toks, fields, said):
    world = World()
    verb(world.p, written(world.p))
    own = written(world.p, toks, **fields)

    why = refusal(verb(world.p, own, **fields))

    assert (why.code, said in why.message) == (Code.PROMPT_MISMATCH, True)
    assert own in world.p.node.leases.leases


@pytest.mark.parametrize(("first", "other"), [(send, hand_over), (hand_over, send)])
@pytest.mark.parametrize("is_settled", [False, True])
def test_the_other_verb_is_another_request(first, other, is_settled):
    world = World()
    lease = written(world.p)
    first(world.p, lease, takers=0)
    if is_settled:
        world.lost.add(Closed)
        (part,) = world.p.node.prefiller.known()
        receive(world.d, request_id="")
        if first is send:
            world.p.call(client.Finish, send=part.id)
    why = refusal(other(world.p, lease))
    assert why.code is Code.DUPLICATE_ROOM
    assert {why.numbers["verb"], why.numbers["first_verb"]} == {"send", "hand_over"}


@pytest.mark.parametrize("verb", [send, hand_over])
def test_the_lease_of_the_first_call_stands_for_the_prompt_that_it_had(verb):
    """It may know more by now."""
    world = World()
    leased = world.p.lease(PROMPT, reserve_tokens=PAGE)
    world.p.write(leased.pages, PROMPT)
    first = verb(world.p, leased.lease)
    world.p.call(client.CommitLease, tokens((900, 3)), lease=leased.lease)

    again = verb(world.p, leased.lease)

    assert again is None if verb is hand_over else again.send == first.send
    why = refusal(verb(world.p, leased.lease, namespace="b"))
    assert why.code is Code.PROMPT_MISMATCH


def test_a_send_that_is_still_written_does_not_go_on_from_another_lease():
    """What its engine writes there would be said of pages that nobody has written."""
    world = World()
    first = world.p.lease(PROMPT)
    send(world.p, first.lease)
    own = world.p.lease(PROMPT)
    why = refusal(send(world.p, own.lease))
    assert why.code is Code.DUPLICATE_ROOM
    assert why.numbers == {"first_lease": first.lease, "lease": own.lease, "send": 1}

    world.p.write(first.pages, PROMPT)
    world.p.call(client.Finish, send=1)

    # All is written: it is sent, from whatever pages.
    assert isinstance(send(world.p, own.lease), client.Sending)
    receive(world.d)
    (got,) = [one for one in world.d.take() if isinstance(one, client.Received)]
    assert world.d.holds(got.pages, PROMPT)


def test_a_send_whose_lease_is_unknown_is_not_answered():
    world = World()
    send(world.p, written(world.p))
    assert refusal(send(world.p, 99)).code is Code.UNKNOWN_LEASE


# ---- a retry that brings a lease of its own ------------------------------------------------------


@pytest.mark.parametrize("ttl_s", [0.0, 5.0])
@pytest.mark.parametrize("ends", [False, True])
def test_the_lease_of_a_retry_ends_as_it_says(ends, ttl_s):
    world = World()
    hand_over(world.p, written(world.p), ends_lease=True, ttl_s=ttl_s)
    own = written(world.p, reserve_tokens=10 * PAGE)

    hand_over(world.p, own, ends_lease=ends, ttl_s=ttl_s)

    assert (own in world.p.node.leases.leases) is not ends
    assert not faults(world.p.node)
    receive(world.d)
    (got,) = [one for one in world.d.take() if isinstance(one, client.Received)]
    assert world.d.holds(got.pages, PROMPT)


def test_the_lease_of_a_retry_that_is_refused_stays():
    world = World()
    hand_over(world.p, written(world.p), ends_lease=True, ttl_s=5.0)
    own = written(world.p, SAME_LENGTH)
    refusal(hand_over(world.p, own, ends_lease=True, ttl_s=5.0))
    assert own in world.p.node.leases.leases


def test_tokens_that_are_not_of_the_lease_of_a_retry_are_refused_and_it_stays():
    world = World()
    hand_over(world.p, written(world.p), ends_lease=True, ttl_s=5.0)
    own = written(world.p, SAME_LENGTH)
    why = refusal(hand_over(world.p, own, PROMPT, ends_lease=True, ttl_s=5.0))
    assert why.code is Code.PROMPT_MISMATCH
    assert own in world.p.node.leases.leases


def test_a_retry_with_the_lease_of_another_session_ends_nothing():
    world = World()
    hand_over(world.p, written(world.p), PROMPT, ends_lease=True, ttl_s=5.0)
    world.p.attach()
    foreign = written(world.p, session=2)
    why = refusal(hand_over(world.p, foreign, PROMPT, ends_lease=True, ttl_s=5.0))
    assert why.code is Code.UNKNOWN_LEASE
    assert foreign in world.p.node.leases.leases


def named_by_walking(side: Side) -> tuple[dict[object, int], dict[object, int]]:
    """What each request id must find: receives and settled sends, looked for one by one."""
    decoder, sends = side.node.decoder, side.node.prefiller.settled_sends
    live = [attempt for attempt in decoder.open.attempts.values() if attempt.ended is None]
    receives = {attempt.name: attempt.id for attempt in [*live, *decoder.open.ready.values()]}
    settled = {
        (part.session, part.room, part.request.id): part.id
        for part in sends.settled.values()
        if part.request is not None
    }
    receives.pop(None, None)
    return receives, settled


def named(side: Side) -> tuple[dict[object, int], dict[object, int]]:
    """What they do find."""
    decoder, sends = side.node.decoder, side.node.prefiller.settled_sends
    receives = {
        name: attempt.id
        for name, attempt in decoder.open.named.items()
        if attempt.ended is None or decoder.open.lease_of_ready(attempt) is not None
    }
    return receives, {name: part.id for name, part in sends.named.items()}


def act_at_random(world: World, rng: random.Random) -> None:
    asked = {"room": rng.randint(1, 4), "request_id": rng.choice(["r1", "r2", ""])}
    receives = list(world.d.node.decoder.open.attempts)
    ready = list(world.d.node.decoder.open.ready)
    match rng.randrange(7):
        case 0 | 1:
            receive(world.d, **asked)
        case 2:
            hand_over(world.p, written(world.p), ends_lease=True, **asked)
        case 3:
            send(world.p, written(world.p), **asked)
        case 4 if ready:
            world.d.call(client.ReleaseLease, lease=rng.choice(ready))
        case 5 if receives:
            world.d.call(client.CancelReceive, receive=rng.choice(receives))
        case 6:
            world.pass_time(rng.choice([0.1, 1.0, 8.0]), tick_s=0.5)


@pytest.mark.parametrize("seed", range(12))
def test_a_request_id_finds_what_a_walk_over_all_would_find(seed):
    rng = random.Random(seed)
    world = World(p_pages=2048, d_pages=2048)
    found = 0
    for step in range(60):
        act_at_random(world, rng)
        for side in (world.d, world.p):
            assert named(side) == named_by_walking(side), f"seed {seed}, step {step}"
            found += sum(map(len, named(side)))
    assert found
    for number in list(world.d.node.decoder.open.attempts):
        world.d.call(client.CancelReceive, receive=number)
    world.pass_time(60.0, tick_s=1.0)
    for lease in list(world.d.node.decoder.open.ready):
        world.d.call(client.ReleaseLease, lease=lease)
    assert not world.d.node.decoder.open.named
    assert not world.p.node.prefiller.settled_sends.named
