"""A received prompt that is in the device buffer before its engine hears of it (scenario E6)."""

from __future__ import annotations

import pytest

from kvd.core import effects
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import pack_ids, page_ids
from kvd.wire import client
from kvd.wire.peer import Integrity
from tests.core.engines import Sender, cached
from tests.core.sentences import sentence_of
from tests.core.test_fetch import HISPARSE, SLOTS, buffers
from tests.core.world import PAGE, Side, World, content, tokens

SHORT = tokens((1, 52))
"""Three whole pages, and one of 4 tokens."""


@pytest.fixture
def world() -> World:
    return World(spec=HISPARSE)


def send(world: World, toks: bytes = SHORT, room: int = 7) -> None:
    Sender(world, toks, room=room).finish()


def receive(world: World, toks: bytes = SHORT, room: int = 7, **fields: object) -> client.Reply:
    reply = world.d.call(client.ReceiveRequest, toks, room=room, source=("p",), **fields)
    assert reply is not None
    return reply


def received(side: Side) -> list[client.Received]:
    return [one for one in side.answers if isinstance(one, client.Received)]


def failures(side: Side) -> list[Code]:
    return [one.refusal.code for one in side.answers if isinstance(one, client.ReceiveFailed)]


def copies(side: Side) -> list[effects.Copy]:
    return [one for one in side.effects if isinstance(one, effects.Copy)]


def check(side: Side, got: client.Received, toks: bytes = SHORT) -> None:
    """Page n of the prompt is in page n of the buffer row."""
    there, end = side.memory_of("buffer"), len(toks) // 4
    wanted = [content(toks, "", min(at + PAGE, end)) for at in range(0, end, PAGE)]
    row = page_ids(got.beside[0])[: len(wanted)]
    assert [there.get(page) for page in row] == wanted


def test_a_short_prompt_is_in_the_buffer_before_received_is_said(world: World) -> None:
    world.hold_copies = True
    receive(world, tier="device")
    send(world)

    (copy,) = copies(world.d)
    assert received(world.d) == []
    (room,) = snapshot(world.d.node).rooms
    assert (room.state, room.waiting_for) == (
        "verifying",
        "its pages to be copied to the device buffer",
    )
    world.d.finish_copy()
    world.run()

    (got,) = received(world.d)
    assert (copy.source_region, copy.source) == ("kv", got.pages)
    assert (copy.destination_region, copy.destination) == ("buffer", got.beside[0])
    check(world.d, got)


def test_what_was_preloaded_is_there_for_the_first_fetch(world: World) -> None:
    receive(world, tier="device")
    send(world)
    (got,) = received(world.d)

    reply = world.d.call(client.FetchPages, lease=got.lease, pages=pack_ids([2, 0, 1]))

    assert isinstance(reply, client.FetchReply)
    row = page_ids(got.beside[0])
    assert page_ids(reply.pages) == [row[2], row[0], row[1]]
    assert (reply.hits, reply.misses) == (3, 0)


@pytest.mark.parametrize("tier", ["host", None])
def test_nothing_is_copied_where_the_request_does_not_ask_for_it(
    world: World, tier: str | None
) -> None:
    receive(world, tier=tier)
    send(world)

    (got,) = received(world.d)
    assert copies(world.d) == []
    reply = world.d.call(client.FetchPages, lease=got.lease, pages=pack_ids([0, 3]))
    assert isinstance(reply, client.FetchReply)
    assert reply.misses == 2


def test_each_request_chooses_for_itself(world: World) -> None:
    other = tokens((500, 40))
    receive(world, tier="device", room=7)
    receive(world, other, tier="host", room=8)
    send(world, room=7)
    send(world, other, room=8)

    assert len(received(world.d)) == 2
    assert [one.source for one in copies(world.d)] == [received(world.d)[0].pages]


def test_the_cached_prefix_is_preloaded_too(world: World) -> None:
    cached(world.d, tokens((1, 32)))
    reply = receive(world, tier="device")
    send(world)

    assert isinstance(reply, client.Receiving)
    assert reply.prefix_tokens == 32
    (got,) = received(world.d)
    check(world.d, got)


def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(world: World) -> None:
    reply = receive(world, tokens((1, SLOTS * PAGE + 1)), tier="device")

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.TOO_LARGE
    assert reply.refusal.numbers == {"prompt_pages": 5, "buffer_pages": 4}
    assert reply.refusal.message == sentence_of(
        "a prompt that does not fit is refused with both numbers"
    )
    assert world.d.node.decoder.open.parts == {}


def test_a_prompt_of_any_length_is_received_into_host_memory(world: World) -> None:
    long = tokens((1, SLOTS * PAGE + 1))

    receive(world, long, tier="host")
    send(world, long)

    assert len(received(world.d)) == 1


def test_a_prompt_that_just_fits_is_preloaded(world: World) -> None:
    toks = tokens((1, SLOTS * PAGE))
    receive(world, toks, tier="device", reserve_tokens=100)
    send(world, toks)

    (got,) = received(world.d)
    check(world.d, got, toks)


def test_a_tier_that_is_none_is_refused(world: World) -> None:
    reply = receive(world, tier="gold")

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert reply.refusal.message == sentence_of("a tier that is none is refused")


def test_a_pool_with_one_place_has_no_tiers() -> None:
    reply = receive(World(), tier="device")

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.NOT_SUPPORTED
    assert reply.refusal.message == sentence_of("a pool with one place has no tiers")


def test_only_what_was_verified_is_preloaded() -> None:
    world = World(spec=HISPARSE, integrity=Integrity.FULL)
    world.hold_verify = True
    receive(world, tier="device")
    send(world)
    assert copies(world.d) == []

    while world.d.asked:
        world.d.answer_verify()
        world.run()

    (got,) = received(world.d)
    check(world.d, got)


# ---- who gives up meanwhile ----------------------------------------------------------------------


def given_up(world: World) -> None:
    """Its preload under way, the receive is no longer wanted: heard at once, kept until over."""
    assert buffers(world).pool.free_pages == SLOTS
    world.d.finish_copy()
    world.run()
    assert world.d.node.leases.leases == {}
    assert buffers(world).pool.free_pages == 2 * SLOTS
    assert received(world.d) == []
    assert world.d.node.leases.tree.probe(SHORT, "") == 48


def test_a_receive_that_is_cancelled_while_it_is_preloaded_leaves_its_prompt_cached(
    world: World,
) -> None:
    world.hold_copies = True
    receive(world, tier="device")
    send(world)

    world.d.call(client.CancelReceive, receive=1)

    assert failures(world.d) == [Code.CANCELLED]
    given_up(world)


def test_an_engine_that_dies_while_its_prompt_is_preloaded_leaves_it_cached(world: World) -> None:
    world.hold_copies = True
    receive(world, tier="device")
    send(world)

    world.d.hang_up()

    given_up(world)


def test_the_deadline_holds_while_a_prompt_is_preloaded(world: World) -> None:
    world.hold_copies = True
    receive(world, tier="device", deadline_s=1.0)
    send(world)

    world.pass_time(1.2)

    assert failures(world.d) == [Code.DEADLINE]
    (told,) = [one for one in world.d.answers if isinstance(one, client.ReceiveFailed)]
    assert told.refusal.message.endswith(
        "every byte had landed, and our transfer process is copying them to the device buffer"
    )
    given_up(world)


def test_who_gave_up_while_it_was_verified_is_not_preloaded() -> None:
    world = World(spec=HISPARSE, integrity=Integrity.FULL)
    world.hold_verify = True
    receive(world, tier="device")
    send(world)
    world.d.call(client.CancelReceive, receive=1)

    while world.d.asked:
        world.d.answer_verify()
        world.run()

    assert copies(world.d) == []
    assert world.d.node.leases.leases == {}


def test_a_preload_cut_by_the_end_of_the_transfer_process_is_done_by_the_next(
    world: World,
) -> None:
    world.hold_copies = True
    receive(world, tier="device")
    send(world)

    world.d.stop_transfer("killed")
    assert received(world.d) == failures(world.d) == []
    world.hold_copies = False
    world.d.start_transfer("killed")
    world.run()

    (got,) = received(world.d)
    check(world.d, got)


def test_a_preload_that_is_refused_fails_the_receive_and_keeps_the_prompt(world: World) -> None:
    world.hold_copies = True
    receive(world, tier="device")
    send(world)

    world.d.refuse_copy("no such region")
    world.run()

    assert failures(world.d) == [Code.INTERNAL]
    assert received(world.d) == []
    assert world.d.node.leases.leases == {}
    assert world.d.node.leases.tree.probe(SHORT, "") == 48
