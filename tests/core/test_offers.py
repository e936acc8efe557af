"""Offers that do not agree with the pool, or with the prompt of the prefill engine."""

from __future__ import annotations

import struct

import msgspec
import pytest

from kvd.core.handoff.protocol import Prefill
from kvd.errors import Code
from kvd.wire import client
from kvd.wire.peer import Closed, Hello, Offer, ReceiveOutcome, Settled
from tests.core.engines import PROMPT, PageTotals, Sender, totals
from tests.core.sentences import sentence_of
from tests.core.world import World, tokens


def tampered(world: World, **changes: object) -> Settled:
    """The answer to the decode side's Offer with these fields changed."""
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    (letter,) = world.held(Offer)
    assert isinstance(letter.message, Offer)
    grant = letter.message.grants[0]
    in_grant = {k: v for k, v in changes.items() if k in {"component", "pages", "start_tokens"}}
    in_offer = {k: v for k, v in changes.items() if k not in in_grant}
    offer = msgspec.structs.replace(
        letter.message, grants=(msgspec.structs.replace(grant, **in_grant),), **in_offer
    )
    world.wire.clear()
    world.deliver(letter._replace(message=offer))
    (settled,) = [one.message for one in world.held(Settled)]
    assert isinstance(settled, Settled)
    return settled


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (
            {"decode_prefix_len": 112},  # scenario B12
            Code.BAD_PREFIX,
            "decode_prefix_len=112 of a prompt of 100 tokens",
        ),
        (
            {"decode_prefix_len": -16},
            Code.BAD_PREFIX,
            "decode_prefix_len=-16 of a prompt of 100 tokens",
        ),
        (
            {"decode_prefix_len": 50},
            Code.BAD_PREFIX,
            "decode_prefix_len=50 is not a multiple of page_size=16; nearest valid is 48",
        ),
        (
            {"decode_prefix_len": 16},  # scenario B13
            Code.BAD_PAGES,
            "pages of kv for tokens [0, 100), what is sent of it is [16, 100)",
        ),
        (
            {"pages": b"\1\0\0\0" * 6},  # scenario B6
            Code.BAD_PAGES,
            "6 destination pages of kv for 100 tokens of page_size=16: 7 are needed",
        ),
        (
            {"pages": b"\1\0\0\0" * 7},
            Code.BAD_PAGES,
            "destination pages of kv must be distinct and above the null page",
        ),
        (
            {"pages": bytes(28)},
            Code.BAD_PAGES,
            "destination pages of kv must be distinct and above the null page",
        ),
        (
            {"pages": struct.pack("<7i", 3, 1, 4, 2, 5, 9, 3)},
            Code.BAD_PAGES,
            "destination pages of kv must be distinct and above the null page",
        ),
        (  # of a pool so large that they are sorted
            {"pages": struct.pack("<7i", 1, 2**31 - 1, 3, 4, 5, 6, 2**31 - 1)},
            Code.BAD_PAGES,
            "destination pages of kv must be distinct and above the null page",
        ),
        (
            {"pages": struct.pack("<7i", 1, 2, 3, 4, 5, 6, -(2**31))},
            Code.BAD_PAGES,
            "destination pages of kv must be distinct and above the null page",
        ),
        (
            {"pages": b"abc"},
            Code.BAD_PAGES,
            "0 destination pages of kv for 100 tokens of page_size=16: 7 are needed",
        ),
        (
            {"component": "swa"},
            Code.BAD_PAGES,
            "pages of 'swa', this pool sends 'kv'",
        ),
        ({"grants": ()}, Code.BAD_PAGES, "pages of nothing, this pool sends 'kv'"),
        (
            {"room": 0},
            Code.BAD_ROOM,
            "room 0 is not in 1..9223372036854775807",
        ),
    ],
)
def test_an_offer_that_is_misaligned_is_refused_with_the_numbers(changes, code, message):
    """scenario B6, scenario B12, scenario B13: refused loudly before a byte, never truncated."""
    world = World()

    settled = (
        tampered(world, **{k: v for k, v in changes.items() if k != "grants"})
        if ("grants" not in changes)
        else without_grants(world)
    )

    assert settled.outcome is ReceiveOutcome.REFUSED
    assert settled.reason is not None
    assert (settled.reason.code, settled.reason.message, settled.reason.side) == (
        code,
        message,
        "p",
    )
    assert world.p.node.prefiller.rooms.by_room == {}
    world.hold_wire = False
    world.run()
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal == settled.reason
    assert totals(world.d) == PageTotals(free=63)


def without_grants(world: World) -> Settled:
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    (letter,) = world.held(Offer)
    world.wire.clear()
    world.deliver(letter._replace(message=msgspec.structs.replace(letter.message, grants=())))
    (settled,) = [one.message for one in world.held(Settled)]
    assert isinstance(settled, Settled)
    return settled


@pytest.mark.parametrize("first", ["engine", "offer"])
def test_prompts_that_differ_are_refused_in_words(first):
    world = World()
    other = tokens((1, 99), (7, 1))
    if first == "engine":
        Sender(world, other)
        world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
        failed = world.d.take()[-1]
        assert isinstance(failed, client.ReceiveFailed)
        refusal = failed.refusal
        assert world.p.node.prefiller.rooms.by_room[7].state is Prefill.AWAIT_OFFER
    else:
        world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
        lease = world.p.lease(other)
        reply = world.p.call(client.SendRequest, other, room=7, lease=lease.lease, peer="d")
        assert isinstance(reply, client.Failed)
        refusal = reply.refusal
        assert world.p.node.prefiller.rooms.by_room == {}
    assert refusal.code is Code.PROMPT_MISMATCH
    assert refusal.message.startswith("both prompts have 100 tokens, but the digests differ (")
    assert totals(world.d) == PageTotals(free=63)


def test_namespaces_that_differ_are_refused():
    """scenario A9: the digest covers the namespace."""
    world = World()
    Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), namespace="lora")
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.PROMPT_MISMATCH


def test_prompts_of_other_lengths_are_refused_with_both():
    world = World()
    Sender(world, tokens((1, 99)))
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.message == sentence_of("prompts of other lengths are refused with both")


def test_a_closed_that_says_corrupt_fails_the_finish():
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.lost = {Closed}
    sender.finish()

    world.inject(
        world.p, Closed(world.d.incarnation, world.p.incarnation, 1, ReceiveOutcome.CORRUPT)
    )

    finished = world.p.answer(sender.finish_call)
    assert isinstance(finished, client.Finished)
    assert finished.failure is not None
    assert finished.failure.message == "corrupt"
    assert not world.held(Hello)
