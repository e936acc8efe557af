"""A room that its engine keeps: who may receive it, how often, and what ends it."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import inputs
from kvd.core.audit.invariants import faults
from kvd.core.handoff.protocol import Prefill
from kvd.core.inspect.snapshot import snapshot
from kvd.core.inspect.why import because
from kvd.core.replay.freeze import freeze
from kvd.core.replay.thaw import thaw
from kvd.errors import Code, Refusal
from kvd.wire import admin, client, events
from kvd.wire.peer import Closed
from tests.core.engines import FULL, PROMPT, Sender, cached, totals
from tests.core.side import spec
from tests.core.world import PAGE, Side, World, tokens

OTHER = tokens((1, 99), (7, 1))


def three() -> tuple[World, Side, Side]:
    world = World(names=("d", "e"))
    return world, world.d, world.sides["e"]


def receive(side: Side, toks: bytes = PROMPT, **fields: object) -> None:
    side.call(client.ReceiveRequest, toks, **{"room": 7, "source": ("p",), **fields})


def hand_over(world: World, **fields: object) -> client.Reply | None:
    """All computed, said in one message, and the lease let go."""
    leased = world.p.lease(PROMPT)
    world.p.write(leased.pages, PROMPT)
    fields = {"room": 7, "aux": b"aux", "ends_lease": True, "ttl_s": 5.0, **fields}
    return world.p.call(client.HandOver, PROMPT, lease=leased.lease, **fields)


def received(side: Side) -> client.Received:
    (one,) = [one for one in side.take() if isinstance(one, client.Received)]
    return one


def refused(side: Side) -> client.ReceiveFailed:
    (one,) = [one for one in side.take() if isinstance(one, client.ReceiveFailed)]
    return one


def keep(world: World, ttl_s: float) -> client.Reply | None:
    return world.p.call(client.KeepRoom, room=7, ttl_s=ttl_s)


def locked(world: World) -> int:
    """Pages of the prefill side that a lease has or locks."""
    pool = snapshot(world.p.node).pools[0]
    return pool.held_pages + pool.cached_pages - pool.evictable_pages


# ---- one that nobody has received yet ------------------------------------------------------------


def test_a_kept_room_answers_at_once_and_holds_its_pages_though_the_lease_is_released():
    world = World()

    finished = hand_over(world)

    assert finished == client.Finished(world.p.calls, None, 0, 0, 0, 5.0)
    assert locked(world) == 7
    (room,) = snapshot(world.p.node).rooms
    assert room.waiting_for == "any decode side with the prompt, kept: received 0 times"
    world.pass_time(4.0)
    receive(world.d)
    assert world.d.holds(received(world.d).pages, PROMPT)


def test_a_kept_room_that_nobody_receives_ends_with_its_time():
    world = World()
    hand_over(world)

    world.pass_time(5.2)

    assert world.p.node.prefiller.rooms.by_room == {}
    assert locked(world) == 0
    reply = keep(world, 5.0)
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.UNKNOWN_HANDOFF
    world.pass_time(4.0)
    receive(world.d)
    # It was one prompt's alone: nobody opens it for a receive that comes so late.
    assert refused(world.d).refusal.code is Code.DEADLINE


def test_a_room_that_was_kept_and_is_opened_again_is_received():
    world = World()
    hand_over(world)
    world.pass_time(5.2)

    hand_over(world)
    receive(world.d)

    assert world.d.holds(received(world.d).pages, PROMPT)


def test_a_room_is_renewed_by_its_engine_and_by_no_other_session():
    world = World()
    hand_over(world)
    world.pass_time(4.0)

    kept = keep(world, 5.0)
    assert isinstance(kept, client.RoomKept)
    assert (kept.left_s, kept.takers, kept.taken) == (5.0, 0, ())
    world.p.feed(inputs.ClientJoined(world.now_s, 2, "other", 1002))
    other = world.p.call(client.KeepRoom, room=7, ttl_s=0.0, session=2)
    assert isinstance(other, client.Failed)
    world.pass_time(4.0)
    receive(world.d)
    received(world.d)


def test_a_room_for_one_is_ended_by_who_has_it_on_the_same_node():
    """An engine that decodes where the prompt was prefilled finds it in the cache."""
    world = World()
    hand_over(world, takers=1)
    assert locked(world)
    world.p.feed(inputs.ClientJoined(world.now_s, 2, "decode", 1002))
    renewed = world.p.call(client.KeepRoom, room=7, ttl_s=5.0, session=2)
    assert isinstance(renewed, client.Failed)

    ended = world.p.call(client.KeepRoom, room=7, ttl_s=0.0, session=2)

    assert isinstance(ended, client.RoomKept)
    assert ended.left_s == 0.0
    assert locked(world) == 0
    assert world.p.node.prefiller.rooms.by_room == {}
    again = world.p.call(client.KeepRoom, room=7, ttl_s=0.0, session=2)
    assert isinstance(again, client.Failed)


def test_a_room_for_one_that_its_engine_still_writes_is_ended_by_nobody_else():
    world = World()
    world.p.feed(inputs.ClientJoined(world.now_s, 2, "decode", 1002))
    lease = world.p.lease(PROMPT)
    world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, ttl_s=5.0, takers=1)
    other = world.p.call(client.KeepRoom, room=7, ttl_s=0.0, session=2)
    assert isinstance(other, client.Failed)


def test_a_room_is_kept_no_longer_than_the_longest_deadline():
    world = World()
    finished = hand_over(world, ttl_s=1e9)
    assert isinstance(finished, client.Finished)
    assert finished.kept_s == world.p.config.max_deadline_s


@pytest.mark.parametrize("fields", [{"ttl_s": -1.0}, {"ttl_s": float("nan")}, {"takers": -1}])
def test_a_room_cannot_be_kept_for_less_than_nothing(fields):
    world = World()
    reply = hand_over(world, **fields)
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert world.p.node.prefiller.rooms.by_room == {}


# ---- several receives ----------------------------------------------------------------------------


def test_several_nodes_receive_one_send_each_from_its_own_prefix():
    world, d, e = three()
    cached(e, tokens((1, 64)))
    hand_over(world)

    receive(d)
    assert d.holds(received(d).pages, PROMPT)
    receive(e)
    receive(d)
    assert d.holds(received(d).pages, PROMPT)
    assert e.holds(received(e).pages, PROMPT)
    kept = keep(world, 5.0)
    assert isinstance(kept, client.RoomKept)
    assert [(one.peer, one.decode_prefix_len) for one in kept.taken][:2] == [("d", 0), ("e", 64)]
    ended = [one for one in world.p.events if isinstance(one, events.HandoffEnded)]
    assert [(one.peer, one.outcome) for one in ended][:2] == [
        ("d", "committed"),
        ("e", "committed"),
    ]
    assert faults(world.p.node) == []


def test_receives_run_beside_each_other_while_the_engine_still_writes():
    world, d, e = three()
    sender = Sender(world, ttl_s=5.0)
    sender.advance(40)
    receive(d)
    sender.advance(64)
    receive(e)
    assert faults(world.p.node) == []
    states = [part.state for part in world.p.node.prefiller.rooms.parts_of(7)]
    assert states == [Prefill.AWAIT_OFFER, Prefill.STREAMING, Prefill.STREAMING]

    finished = sender.finish()

    assert isinstance(finished, client.Finished)
    assert finished.kept_s == 5.0
    assert d.holds(received(d).pages, PROMPT)
    assert e.holds(received(e).pages, PROMPT)
    told = [one for one in world.p.take() if isinstance(one, client.Accepted)]
    assert [one.send for one in told] == [sender.send, sender.send]


def test_offers_that_came_before_the_engine_are_all_served():
    world, d, e = three()
    receive(d)
    receive(e)
    hand_over(world)
    assert received(d).aux == received(e).aux == b"aux"


def test_a_room_for_so_many_is_over_with_the_last_of_them_and_says_who_had_it():
    world, d, e = three()
    hand_over(world, takers=2)
    receive(d)
    receive(e)
    assert world.p.node.prefiller.rooms.by_room == {}
    assert locked(world) == 0
    world.pass_time(1.0)
    d.take()

    receive(d, deadline_s=9.0, cache=False)

    refusal = refused(d).refusal
    assert refusal.code is Code.DUPLICATE_ROOM
    assert refusal.numbers["served_to"] == "e"
    assert "room 7 was served 1.0 s ago: e has received it as the last of 2" in refusal.message
    reply = keep(world, 5.0)
    assert isinstance(reply, client.Failed)
    assert reply.refusal.numbers["served_to"] == "e"
    told = because(world.p.node, admin.Why(1, "room", 7))
    assert isinstance(told, Refusal)
    assert told.message.startswith("room 7 was served 1.0 s ago: e has received it")


def test_a_receive_that_fails_leaves_its_place_to_the_next():
    world, d, e = three()
    world.hold_posts = True
    hand_over(world, takers=1)
    receive(d)
    receive(e)
    refusal = refused(e).refusal
    assert refusal.code is Code.DUPLICATE_ROOM
    assert refusal.numbers == {"taking": 1, "limit": 1}
    d.call(client.CancelReceive, receive=1)
    world.hold_posts = False
    world.land_posts()
    receive(e)

    assert e.holds(received(e).pages, PROMPT)
    assert world.p.node.prefiller.rooms.by_room == {}
    assert locked(world) == 0


def test_another_prompt_is_refused_alone():
    world, d, e = three()
    hand_over(world)
    receive(e, OTHER)
    assert refused(e).refusal.code is Code.PROMPT_MISMATCH
    receive(d)
    received(d)


def test_a_kept_room_that_names_a_node_is_no_others():
    world, d, e = three()
    hand_over(world, peer="d")
    receive(e)
    assert refused(e).refusal.code is Code.DUPLICATE_ROOM
    receive(d)
    received(d)


@pytest.mark.parametrize("takers", [1, 2, 3])
def test_no_more_are_let_in_than_are_left(takers):
    names = ("d", "e", "f", "g")
    world = World(names=names)
    world.hold_posts = True
    hand_over(world, takers=takers)
    for name in names:
        receive(world.sides[name], deadline_s=20.0)
    states = [part.state for part in world.p.node.prefiller.rooms.parts_of(7)]
    assert states == [Prefill.AWAIT_OFFER] + [Prefill.FLUSHING] * takers
    told = [refused(world.sides[name]).refusal for name in names[takers:]]
    assert [one.numbers for one in told] == [{"taking": takers, "limit": takers}] * len(told)


def test_who_has_all_of_it_has_its_place_before_it_has_said_so():
    world, d, e = three()
    hand_over(world, takers=2)
    world.lost = {Closed}
    receive(d)
    receive(d, cache=False)
    assert len(world.p.node.prefiller.settled_sends.settled) == 2

    receive(e)

    assert refused(e).refusal.numbers == {"taking": 2, "limit": 2}
    world.lost = set()
    world.pass_time(2)
    assert world.p.node.prefiller.rooms.by_room == {}
    assert locked(world) == 0


def test_one_that_was_received_lets_in_those_that_are_left():
    world, d, e = three()
    hand_over(world, takers=2)
    receive(d)
    world.hold_posts = True
    receive(d, cache=False)
    receive(e)
    assert refused(e).refusal.numbers == {"taking": 1, "limit": 1}


# ---- its pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{"ttl_s": 5.0}, {"takers": 1, "ttl_s": 0.0}, {"ttl_s": 0.0}])
def test_a_released_lease_keeps_what_is_sent_of_it_and_no_reserve(fields):
    world = World()
    leased = world.p.lease(PROMPT, reserve_tokens=256)
    world.p.write(leased.pages, PROMPT)
    free = world.p.node.leases.headroom_pages

    asked = {"room": 7, "lease": leased.lease, "ends_lease": True, **fields}
    world.p.call(client.HandOver, PROMPT, **asked)

    assert world.p.node.leases.headroom_pages == free + 16
    assert faults(world.p.node) == []
    receive(world.d)
    assert world.d.holds(received(world.d).pages, PROMPT)


def test_pages_of_its_own_that_the_tree_has_too_go_with_the_lease():
    world = World()
    leased = [world.p.lease(PROMPT) for _ in range(2)]
    for one in leased:
        world.p.write(one.pages, PROMPT)
    world.p.call(client.CommitLease, lease=leased[0].lease)
    world.p.call(client.CommitUpTo, lease=leased[1].lease, upto_tokens=100, swaps=False)
    before = totals(world.p)
    assert before.held == 1 + 6 + 1

    asked = {"room": 7, "lease": leased[1].lease, "ends_lease": True, "ttl_s": 5.0}
    world.p.call(client.HandOver, PROMPT, **asked)

    assert totals(world.p).held == 2
    assert faults(world.p.node) == []
    receive(world.d)
    assert world.d.holds(received(world.d).pages, PROMPT)


def test_the_longest_prompt_that_is_sent_of_it_stays():
    world = World()
    leased = world.p.lease(PROMPT, reserve_tokens=256)
    world.p.write(leased.pages, PROMPT)
    for room, toks in ((7, PROMPT), (8, FULL)):
        world.p.call(client.HandOver, toks, room=room, lease=leased.lease, deadline_s=20.0)
    world.p.call(client.ReleaseLease, lease=leased.lease)
    assert len(world.p.node.leases.leases[leased.lease].page_table) == 4 * 7
    receive(world.d)
    assert world.d.holds(received(world.d).pages, PROMPT)
    receive(world.d, FULL, room=8, cache=False)
    assert world.d.holds(received(world.d).pages, FULL)
    assert faults(world.p.node) == []


def test_a_dead_engine_leaves_no_reserve_behind_what_is_being_sent():
    world = World()
    leased = world.p.lease(PROMPT, reserve_tokens=256)
    world.p.write(leased.pages, PROMPT)
    world.hold_posts = True
    receive(world.d)
    world.p.call(client.HandOver, PROMPT, room=7, lease=leased.lease)
    world.p.hang_up(1)
    assert faults(world.p.node) == []
    lease = world.p.node.leases.leases[leased.lease]
    assert (len(lease.page_table), lease.held_pages) == (4 * 7, 1)  # six are cached


@pytest.mark.parametrize("takers", [1, 2])
def test_when_the_last_has_it_nothing_is_locked_and_the_prompt_stays_cached(takers):
    world = World()
    hand_over(world, takers=takers, ttl_s=20.0)
    for _ in range(takers):
        receive(world.d, cache=False)
        received(world.d)
    assert locked(world) == 0
    assert world.p.node.leases.leases == {}
    assert world.p.node.leases.tree.probe(PROMPT, "") == 96


def filling(side: Side) -> client.Reply | None:
    """An engine of the node wants every page of it."""
    pages = side.node.leases.capacity_pages
    return side.call(client.OpenLease, tokens((50_000, pages * PAGE)), deadline_s=5.0)


def test_a_room_for_any_number_gives_way_when_one_has_had_it():
    world, d, e = three()
    hand_over(world, ttl_s=20.0)
    receive(d)
    received(d)
    receive(d, cache=False)
    received(d)
    (room,) = snapshot(world.p.node).rooms
    said = "any decode side with the prompt, kept: received 2 times by d"
    assert room.waiting_for == f"{said}; its pages go when an engine needs them"

    assert isinstance(filling(world.p), client.Leased)

    assert world.p.node.prefiller.rooms.by_room == {}
    assert faults(world.p.node) == []
    receive(e)
    refusal = refused(e).refusal
    assert refusal.code is Code.NO_ROOM
    assert refusal.numbers == {"pages": 7}
    assert "needed by an engine of p" in refusal.message
    world.pass_time(2)
    receive(e)
    assert refused(e).refusal.numbers["served_to"] == "d"


def test_a_room_that_nobody_has_had_does_not_give_way():
    world = World()
    hand_over(world, ttl_s=20.0)
    assert filling(world.p) is None
    receive(world.d)
    assert world.d.holds(received(world.d).pages, PROMPT)


def test_who_waits_has_the_pages_when_the_first_has_received_them():
    world = World()
    hand_over(world, ttl_s=20.0)
    assert filling(world.p) is None
    call = world.p.calls
    receive(world.d)
    received(world.d)
    assert isinstance(world.p.answer(call), client.Leased)
    assert faults(world.p.node) == []


def test_a_room_for_so_many_keeps_its_pages_for_the_last():
    world, d, e = three()
    hand_over(world, takers=2, ttl_s=20.0)
    receive(d)
    received(d)
    assert filling(world.p) is None
    receive(e)
    assert e.holds(received(e).pages, PROMPT)


def test_who_is_receiving_is_not_disturbed_by_who_needs_the_pages():
    world, d, e = three()
    hand_over(world, ttl_s=20.0)
    receive(d)
    received(d)
    world.hold_posts = True
    receive(e)
    assert filling(world.p) is None
    assert faults(world.p.node) == []
    world.hold_posts = False
    world.land_posts()
    assert e.holds(received(e).pages, PROMPT)
    assert isinstance(world.p.answer(world.p.calls), client.Leased)


def test_a_lease_that_its_engine_still_has_does_not_give_way():
    world = World()
    leased = world.p.lease(PROMPT)
    world.p.write(leased.pages, PROMPT)
    world.p.call(client.HandOver, PROMPT, room=7, lease=leased.lease, ttl_s=20.0)
    receive(world.d)
    received(world.d)
    assert filling(world.p) is None
    call = world.p.calls
    world.p.call(client.ReleaseLease, lease=leased.lease)
    assert isinstance(world.p.answer(call), client.Leased)
    assert faults(world.p.node) == []


# ---- its ends ------------------------------------------------------------------------------------


def test_who_receives_when_the_room_ends_goes_on():
    world = World()
    world.hold_posts = True
    hand_over(world)
    receive(world.d)

    kept = keep(world, 0.0)

    assert isinstance(kept, client.RoomKept)
    assert (kept.left_s, kept.taking) == (0.0, 1)
    assert faults(world.p.node) == []
    world.land_posts()
    assert world.d.holds(received(world.d).pages, PROMPT)
    assert world.p.node.prefiller.rooms.by_room == {}
    assert locked(world) == 0


@pytest.mark.parametrize("how", ["abort", "session"])
def test_an_engine_that_fails_ends_all_receives_of_its_room(how):
    world, d, e = three()
    world.hold_posts = True
    sender = Sender(world, ttl_s=5.0)
    sender.advance(64)
    receive(d)
    receive(e)

    if how == "abort":
        world.p.call(client.AbortSend, send=sender.send, reason="out of memory")
    else:
        world.p.hang_up(1)
    world.pass_time(6.0)

    assert refused(d).refusal.code in {Code.ABORTED, Code.CLIENT_GONE}
    assert refused(e).refusal.code in {Code.ABORTED, Code.CLIENT_GONE}


def test_a_kept_room_is_frozen_and_goes_on():
    world, d, e = three()
    hand_over(world)
    receive(d)
    frozen = freeze(world.p.node)
    world.p.node = thaw(frozen)
    assert freeze(world.p.node) == frozen
    receive(e)
    assert e.holds(received(e).pages, PROMPT)


def test_a_plain_room_is_served_once_and_may_be_opened_again():
    world, d, e = three()
    receive(d)
    Sender(world).finish()
    received(d)
    world.pass_time(1.0)
    receive(e)  # asked for after its end: it waits for the next engine
    Sender(world).finish()
    received(e)


def test_a_session_that_ends_takes_along_who_receives_a_room_that_is_over():
    """Such a receive is in no register of its engine's."""
    world = World()
    world.hold_posts = True
    hand_over(world)
    receive(world.d)
    keep(world, 0.0)

    world.p.hang_up(1)

    assert faults(world.p.node) == []
    world.land_posts()
    assert refused(world.d).refusal.code is Code.CLIENT_GONE


def test_a_send_to_a_node_whose_pages_do_not_fit_is_refused_at_once():
    world = World()
    world.d.config = msgspec.structs.replace(world.d.config, spec=spec(64, page_size=24))
    world.restart(world.d)
    world.pass_time(1)
    lease = world.p.lease(PROMPT)
    reply = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease, peer="d")
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.LAYOUT_MISMATCH


# ---- the same request again ----------------------------------------------------------------------


def test_a_send_asked_again_with_its_request_id_is_the_same_send():
    world = World()
    sender = Sender(world, request_id="r1")
    again = {"room": 7, "lease": sender.lease.lease}

    same = world.p.call(client.SendRequest, PROMPT, request_id="r1", **again)
    other = world.p.call(client.SendRequest, PROMPT, request_id="r2", **again)

    assert isinstance(same, client.Sending)
    assert same.send == sender.send
    assert isinstance(other, client.Failed)
    assert other.refusal.code is Code.DUPLICATE_ROOM
    sender.finish()
    receive(world.d)
    received(world.d)
    late = world.p.call(client.SendRequest, PROMPT, request_id="r1", **again)
    assert isinstance(late, client.Failed)
    assert late.refusal.numbers == {"served_ago_s": 0.0, "served_to": "d"}


def test_a_hand_over_asked_again_is_answered_once_though_its_lease_is_gone():
    world = World()
    assert hand_over(world, ttl_s=0.0, request_id="r1") is None
    first = world.p.calls

    again = world.p.call(client.HandOver, room=7, lease=1, request_id="r1", ends_lease=True)

    assert again is None
    earlier = world.p.answer(first)
    assert isinstance(earlier, client.Failed)
    assert earlier.refusal.code is Code.CANCELLED
    receive(world.d)
    (finished,) = [one for one in world.p.take() if isinstance(one, client.Finished)]
    assert (finished.call, finished.failure) == (first + 1, None)


def test_a_kept_hand_over_asked_again_says_again_how_long_it_is_kept():
    world = World()
    hand_over(world, request_id="r1")
    world.pass_time(1.0)
    again = world.p.call(client.HandOver, room=7, lease=1, request_id="r1", ttl_s=5.0)
    assert isinstance(again, client.Finished)
    assert again.kept_s == 5.0


def test_a_receive_asked_again_with_its_request_id_is_the_same_receive():
    world = World()
    receive(world.d, request_id="r1")
    first = world.d.answer(world.d.calls)
    receive(world.d, request_id="r1")
    again = world.d.answer(world.d.calls)
    assert isinstance(first, client.Receiving)
    assert isinstance(again, client.Receiving)
    assert again.receive == first.receive

    hand_over(world, ttl_s=0.0)

    got = received(world.d)
    receive(world.d, request_id="r1")
    late = world.d.answer(world.d.calls)
    assert isinstance(late, client.Failed)
    assert late.refusal.numbers == {"lease": got.lease}


def test_a_receive_in_the_queue_that_is_asked_again_waits_by_its_later_call():
    world = World(d_pages=16)
    blocker = world.d.lease(tokens((5000, 200)))
    receive(world.d, request_id="r1", deadline_s=20.0)
    first = world.d.calls
    receive(world.d, request_id="r1", deadline_s=20.0)
    earlier = world.d.answer(first)
    assert isinstance(earlier, client.Failed)
    assert earlier.refusal.code is Code.CANCELLED
    hand_over(world, ttl_s=0.0)

    world.d.call(client.ReleaseLease, lease=blocker.lease)

    received(world.d)


@pytest.mark.parametrize("receives", [True, False])
def test_a_node_that_drains_ends_a_kept_room_but_not_who_receives_it(receives):
    world = World()
    world.hold_posts = True
    hand_over(world)
    if receives:
        receive(world.d)

    world.p.ask(admin.Drain(1, "by hand"))

    assert bool(world.p.node.prefiller.rooms.by_room) is receives
    if receives:
        world.land_posts()
        received(world.d)
