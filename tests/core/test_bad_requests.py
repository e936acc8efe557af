"""Bad requests of engines and operators: a typed answer with the numbers, and nothing changed."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code, Refusal
from kvd.types import MAX_ROOM
from kvd.wire import admin, client
from tests.core.sentences import sentence_of
from tests.core.world import World, tokens

PROMPT = tokens((1, 100))


def refused(reply: client.Reply | None) -> tuple[Code, str]:
    assert isinstance(reply, client.Failed)
    assert reply.call > 0
    assert reply.refusal.side in {"p", "d", ""}
    return reply.refusal.code, reply.refusal.message


@pytest.mark.parametrize("room", [0, -1, MAX_ROOM + 1, 2**64 - 1])
def test_a_room_outside_its_range_is_refused_on_both_sides(room):
    world = World()
    lease = world.p.lease(PROMPT)
    expected = (
        Code.BAD_ROOM,
        f"room {room} is not in 1..{MAX_ROOM} (0 means no room to every router)",
    )

    if room:  # without one it is a pull
        received = world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
        assert refused(received) == expected
    assert (
        refused(world.p.call(client.SendRequest, PROMPT, room=room, lease=lease.lease)) == expected
    )
    assert world.d.node.leases.leases == {}


def test_the_largest_room_works():
    world = World()
    reply = world.d.call(client.ReceiveRequest, PROMPT, room=MAX_ROOM, source=("p",))
    assert reply == client.Receiving(1, 1, 0)
    assert list(world.p.node.prefiller.rooms.by_room) == [MAX_ROOM]


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        (
            {"source": ("x",)},
            Code.PEER_UNKNOWN,
            "no peer is called 'x' (known: p): add it to peers.connect, or "
            "give its address as tcp://HOST:PORT",
        ),
        (
            {"source": ("d",)},
            Code.PEER_UNKNOWN,
            "no peer is called 'd' (known: p): add it to peers.connect, or "
            "give its address as tcp://HOST:PORT",
        ),
        ({"source": ()}, Code.BAD_REQUEST, "receive from 0 sources, of 1 to 64"),
        ({"source": ("p",) * 65}, Code.BAD_REQUEST, "receive from 65 sources, of 1 to 64"),
        (
            {"source": ("p", "p")},
            Code.BAD_REQUEST,
            "receive from p, p: p is named 2 times, and each source sends its part once",
        ),
        (
            {"source": ("p", "x")},
            Code.PEER_UNKNOWN,
            "no peer is called 'x' (known: p): add it to peers.connect, or "
            "give its address as tcp://HOST:PORT",
        ),
        (
            {"source": ("p",), "tier": "host"},
            Code.NOT_SUPPORTED,
            "tier='host' needs the hisparse family, this pool is mha",
        ),
        (
            {"source": ("p",), "reserve_tokens": -1},
            Code.BAD_REQUEST,
            "receive of 100 tokens, -1 in reserve and 0 promised, 0 at a time",
        ),
        (
            {"source": ("p",), "reserve_tokens": 2**63},
            Code.TOO_LARGE,
            f"{2**63 + 100} tokens need {2**59 + 7} pages of kv, the pool has 63: "
            "it can never fit; enlarge pool.pages",
        ),
    ],
)
def test_a_bad_receive_is_refused_before_anything_is_held(fields, code, message):
    """No lock, no split, no page, and no word to the peer.

    Covers scenario A14, scenario A16, scenario A19.
    """
    world = World()
    cached = world.d.lease(PROMPT)
    world.d.call(client.CommitAndRelease, lease=cached.lease)
    nodes = [(node.id, node.lock_ref, node.hits) for node in world.d.node.leases.tree.nodes()]

    reply = world.d.call(client.ReceiveRequest, PROMPT, room=7, **fields)

    assert refused(reply) == (code, message)
    table = world.d.node.leases
    assert [(node.id, node.lock_ref, node.hits) for node in table.tree.nodes()] == nodes
    assert (table.leases, table.pool.free_pages, table.tree.evictable_pages) == ({}, 57, 6)
    assert world.d.grants == {}
    assert world.d.node.decoder.open.parts == {}


def test_a_prompt_larger_than_the_pool_is_refused_without_a_word_to_the_peer():
    """scenario A16: 1008 tokens fill the pool, 1009 can never fit."""
    world = World()

    fits = world.d.call(client.ReceiveRequest, tokens((1, 1008)), room=7, source=("p",))
    reply = world.d.call(client.ReceiveRequest, tokens((1, 1009)), room=8, source=("p",))

    assert fits == client.Receiving(1, 1, 0)
    assert refused(reply) == (
        Code.TOO_LARGE,
        "1009 tokens need 64 pages of kv, the pool has 63: it can never fit; enlarge pool.pages",
    )
    assert list(world.d.grants) == [1]


def test_an_empty_lease_and_an_empty_receive_are_refused():
    world = World()
    assert refused(world.d.call(client.OpenLease)) == (
        Code.BAD_REQUEST,
        "a lease of 0 tokens, 0 in reserve and 0 promised, 0 at a time",
    )
    assert refused(world.d.call(client.ReceiveRequest, room=7, source=("p",))) == (
        Code.BAD_REQUEST,
        "receive of 0 tokens, 0 in reserve and 0 promised, 0 at a time",
    )


@pytest.mark.parametrize("deadline_s", [float("nan"), -1.0, float("-inf"), float("inf"), 1e300])
def test_no_deadline_of_a_caller_makes_a_request_wait_for_ever(deadline_s):
    world = World(p_pages=9)
    world.p.lease(PROMPT)
    world.p.call(client.OpenLease, PROMPT, deadline_s=deadline_s)

    world.pass_time(30.5)

    assert refused(world.p.answer(2))[0] is Code.DEADLINE


@pytest.mark.parametrize("deadline_s", [float("nan"), float("inf")])
def test_no_deadline_of_a_caller_makes_a_handoff_wait_for_ever(deadline_s):
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), deadline_s=deadline_s)
    lease = world.p.lease(PROMPT)
    world.p.call(client.SendRequest, PROMPT, room=8, lease=lease.lease, deadline_s=deadline_s)

    world.pass_time(31)

    assert isinstance(world.d.take()[-1], client.ReceiveFailed)
    assert isinstance(world.p.take()[-1], client.SendFailed)
    assert world.p.node.prefiller.rooms.by_room == {}
    assert world.d.node.decoder.open.parts == {}


def test_a_send_of_other_tokens_than_the_lease_holds_is_refused():
    world = World()
    lease = world.p.lease(PROMPT, namespace="lora")

    other = world.p.call(
        client.SendRequest, tokens((2, 100)), room=7, lease=lease.lease, namespace="lora"
    )
    elsewhere = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)

    assert refused(other) == (
        Code.PROMPT_MISMATCH,
        "send of 100 tokens in namespace 'lora' on lease 1, which holds other tokens "
        "(100 in namespace 'lora')",
    )
    assert refused(elsewhere) == (
        Code.PROMPT_MISMATCH,
        "send of 100 tokens in namespace '' on lease 1, which holds other tokens "
        "(100 in namespace 'lora')",
    )
    assert world.p.node.prefiller.rooms.by_room == {}


def test_advance_backwards_is_no_news_and_beyond_the_prompt_is_refused():
    world = World()
    lease = world.p.lease(PROMPT)
    send = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    assert isinstance(send, client.Sending)

    for upto in (40, 16, 0):
        reply = world.p.call(client.Advance, send=send.send, upto_tokens=upto)
        assert isinstance(reply, client.Done)
        assert world.p.node.prefiller.by_send[1].cursor_tokens == 40
    for upto in (101, -1):
        reply = world.p.call(client.Advance, send=send.send, upto_tokens=upto)
        assert refused(reply) == (
            Code.BAD_REQUEST,
            f"advance to {upto} of a prompt of 100 tokens",
        )


def test_finish_twice_is_refused_and_the_first_is_answered():
    world = World()
    lease = world.p.lease(PROMPT)
    send = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    assert isinstance(send, client.Sending)
    assert world.p.call(client.Finish, send=send.send, aux=b"1") is None

    reply = world.p.call(client.Finish, send=send.send, aux=b"2")
    late = world.p.call(client.Advance, send=send.send, upto_tokens=100)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    gone = world.p.call(client.Finish, send=send.send, aux=b"3")

    assert refused(reply) == (Code.WRONG_STATE, "send 1 is finished already")
    assert late == client.Done(5)
    assert refused(gone) == (
        Code.UNKNOWN_HANDOFF,
        "this session has no open send 1: it ended, or never was its own",
    )
    assert world.p.answer(3) == client.Finished(3, None, 0, 7, 7 * 128)
    received = world.d.take()[-1]
    assert isinstance(received, client.Received)
    assert received.aux == b"1"


def test_an_aux_above_the_limit_is_refused_and_a_smaller_one_may_follow():
    world = World(max_aux_bytes=8)
    lease = world.p.lease(PROMPT)
    send = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    assert isinstance(send, client.Sending)

    reply = world.p.call(client.Finish, send=send.send, aux=b"123456789")

    assert refused(reply) == (
        Code.TOO_LARGE,
        "aux of 9 B, 1 B above the limit here (limits.max_aux_bytes)",
    )
    assert world.p.call(client.Finish, send=send.send, aux=b"12345678") is None


def test_an_aux_above_the_limit_of_the_peer_is_refused_before_it_travels():
    world = World()
    world.p.node.peers.by_name["d"].max_aux_bytes = 4
    lease = world.p.lease(PROMPT)
    send = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    assert isinstance(send, client.Sending)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    reply = world.p.call(client.Finish, send=send.send, aux=b"12345")

    assert refused(reply) == (
        Code.TOO_LARGE,
        "aux of 5 B, 1 B above the limit of d (limits.max_aux_bytes)",
    )
    done = world.p.call(client.Finish, send=send.send, aux=b"1234")
    assert isinstance(done, client.Finished)
    assert done.failure is None


def test_cancel_twice_is_refused_and_fails_the_receive_once():
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    first = world.d.call(client.CancelReceive, receive=1)
    second = world.d.call(client.CancelReceive, receive=1)

    assert first == client.Done(2)
    assert refused(second) == (
        Code.UNKNOWN_HANDOFF,
        "this session has no open receive 1: it ended, or never was its own",
    )
    failures = [one for one in world.d.answers if isinstance(one, client.ReceiveFailed)]
    assert [one.refusal.code for one in failures] == [Code.CANCELLED]


def test_handoffs_of_another_session_are_unknown():
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    lease = world.p.lease(PROMPT)
    world.p.call(client.SendRequest, PROMPT, room=8, lease=lease.lease)
    p_other, d_other = world.p.attach("other"), world.d.attach("other")

    assert refused(world.d.call(client.CancelReceive, session=d_other, receive=1))[0] is (
        Code.UNKNOWN_HANDOFF
    )
    for kind, fields in (
        (client.Advance, {"upto_tokens": 10}),
        (client.Finish, {"aux": b""}),
        (client.AbortSend, {"reason": "mine"}),
    ):
        reply = world.p.call(kind, session=p_other, send=1, **fields)
        assert refused(reply)[0] is Code.UNKNOWN_HANDOFF
    assert list(world.p.node.prefiller.rooms.by_room) == [7, 8]


def test_a_session_that_is_over_is_told_so():
    world = World()
    world.p.hang_up(1)
    request = inputs.FromClient(world.now_s, 1, client.OpenLease(5), PROMPT)
    assert world.p.node.step(request).effects == [
        effects.AnswerEngine(
            1,
            client.Failed(
                5,
                Refusal(Code.UNKNOWN_SESSION, "this session is over: attach again", side="p"),
            ),
        )
    ]


def test_a_second_send_for_a_room_is_refused_and_the_first_goes_on():
    """scenario A44: sampling n=2 with one room fails once, loudly."""
    world = World()
    lease = world.p.lease(PROMPT)
    first = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    second = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)

    assert first == client.Sending(2, 1)
    assert refused(second) == (
        Code.DUPLICATE_ROOM,
        "room 7 is already open here (await-offer, send 1)",
    )
    assert world.p.node.leases.leases[1].holders == {"engine", "send 1"}


def test_a_second_receive_for_a_room_is_refused_by_the_writer_and_the_first_goes_on():
    """scenario A44, on the decode side: the pages of the second are free again."""
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.d.take()

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    receiving, failed = world.d.take()
    assert receiving == client.Receiving(2, 2, 0)
    assert isinstance(failed, client.ReceiveFailed)
    assert (failed.receive, failed.refusal.code) == (2, Code.DUPLICATE_ROOM)
    assert failed.refusal.message == sentence_of(
        "a second receive for a room is refused by the writer and the first goes on"
    )
    assert list(world.d.node.leases.leases) == [1]
    assert world.d.node.leases.pool.free_pages == 56


# ---- operators -----------------------------------------------------------------------------------


def test_an_unknown_flush_mode_changes_nothing():
    world = World()
    lease = world.p.lease(PROMPT)
    world.p.call(client.CommitAndRelease, lease=lease.lease)

    reply = world.p.ask(admin.Flush(1, mode="stric"))

    assert isinstance(reply, admin.AdminFailed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert reply.refusal.message == sentence_of("an unknown flush mode changes nothing")
    assert world.p.node.leases.tree.cached_pages == 6


@pytest.mark.parametrize(
    ("kind", "number", "message"),
    [
        (
            "pages",
            1,
            "'pages' is none of page, node, room, lease, receive, send, client, peer, evicted",
        ),
        ("receive", 7, "there is no receive 7: over, or never was; see its events"),
        ("send", 7, "there is no send 7: over, or never was; see its events"),
        ("client", 7, "there is no client 7: gone, or never was"),
        ("peer", 7, "there is no peer '': this node knows d"),
        ("page", 64, "page 64: this pool has pages 0..63"),
        ("page", -1, "page -1: this pool has pages 0..63"),
        ("node", 99, "the tree has no node 99: evicted, or never was"),
        ("room", 7, "no open handoff in room 7 on this node"),
        ("lease", 7, "there is no lease 7: released, or never was"),
    ],
)
def test_why_of_what_is_not_there_says_so(kind, number, message):
    world = World()
    reply = world.p.ask(admin.Why(1, kind, number))
    assert isinstance(reply, admin.AdminFailed)
    assert reply.refusal.message == message


@pytest.mark.parametrize("kind", ["page", "node", "pages", ""])
@pytest.mark.parametrize("number", [-(2**63), -1, 0, 64, 2**31, 2**32 + 1, 2**63 - 1])
def test_a_pin_of_what_is_not_there_says_so(kind, number):
    world = World()
    lease = world.p.lease(PROMPT)
    world.p.call(client.CommitAndRelease, lease=lease.lease)

    reply = world.p.ask(admin.Pin(1, kind, number, 60.0, "alice"))

    assert isinstance(reply, admin.AdminFailed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert reply.refusal.message == f"there is no cached {kind} {number}: kvd tree"
    assert not world.p.node.pins.by_id


def test_abort_of_a_room_that_is_not_open_is_refused():
    world = World()
    reply = world.p.ask(admin.AbortRoom(1, room=7, reason="test"))
    assert isinstance(reply, admin.AdminFailed)
    assert reply.refusal.message == sentence_of("abort of a room that is not open is refused")
    assert snapshot(world.p.node).rooms == ()
