"""Hostile and broken messages on the peers' socket of a real daemon.

Nothing is held for a stranger, a remote's bad input fails its own rooms and nothing else, and a
handoff that runs meanwhile is delivered as if nothing had been.
"""

from __future__ import annotations

import msgspec
import pytest

from kvd.errors import Code
from kvd.types import pack_ids
from kvd.wire import peer
from kvd.wire.codec import PEER_MESSAGES
from tests.daemon.conftest import until
from tests.daemon.intruder import SEED, TOO_LONG, Stranger, mutants
from tests.daemon.kv import digest, tokens_of, write

pytestmark = pytest.mark.usefixtures("undisturbed")


@pytest.fixture
def mallory(engines):
    raw = Stranger(engines.pair.prefill)
    yield raw
    raw.close()
    # A restarted mallory: what the daemon keeps for the old one until it is heard again may go.
    again = Stranger(engines.pair.prefill)
    again.greet()
    again.close()


def test_peer_messages_that_cannot_be_read_are_rejected(mallory):
    """scenario G1, scenario G2."""
    for frames in ([b""], [b"\xff" * 30], [b"\x94" * 5_000], [b"a", b"b"], [bytes(5 * 2**20)]):
        mallory.say(*frames)
        assert mallory.hears(peer.Reject).refusal.code is Code.BAD_REQUEST, frames[0][:20]


def test_offer_before_any_hello_is_answered_with_one_and_opens_nothing(engines, mallory):
    """scenario G3: nothing is held for a peer before its Hello."""
    mallory.offer(room=77)

    assert mallory.hears(peer.Hello).node == "p"
    assert [one.room for one in engines.pair.prefill.snapshot().rooms if one.room == 77] == []


def test_hello_of_another_protocol_is_rejected_with_both_versions(mallory):
    mallory.tell(msgspec.structs.replace(mallory.greeting, protocol=99))

    refusal = mallory.hears(peer.Reject).refusal
    assert "99" in refusal.message
    assert str(peer.PROTOCOL) in refusal.message


def test_offers_of_a_peer_with_another_layout_are_refused(engines, mallory):
    """scenario G10."""
    for number, layout in enumerate(('["mha","layer_first",[]]', "\x00garbage", "[" * 2_000), 1):
        greeting = msgspec.structs.replace(mallory.greeting, layout=layout, generation=number)
        mallory.tell(greeting)
        mallory.hears(peer.Hello)
        mallory.offer(handoff=number, room=number)

        settled = mallory.hears(peer.Settled)
        mallory.close_room(number)

        assert (settled.handoff, settled.reason.code) == (number, Code.LAYOUT_MISMATCH)
        [shown] = [one for one in engines.pair.prefill.snapshot().peers if one.name == "mallory"]
        assert "lay out their pools differently" in shown.layout


BAD_OFFERS = [
    ({"room": 0}, Code.BAD_ROOM),
    ({"room": 2**63}, Code.BAD_ROOM),
    ({"decode_prefix_len": 112}, Code.BAD_PREFIX),
    ({"decode_prefix_len": 50}, Code.BAD_PREFIX),
    ({"decode_prefix_len": -16}, Code.BAD_PREFIX),
    ({"prompt_tokens": 0}, Code.BAD_PREFIX),
    ({"grants": ()}, Code.BAD_PAGES),
    ({"grants": (peer.Grant("swa", 0, 100, pack_ids(list(range(1, 8)))),)}, Code.BAD_PAGES),
    ({"grants": (peer.Grant("kv", 0, 100, pack_ids([1, 2, 3])),)}, Code.BAD_PAGES),
    ({"grants": (peer.Grant("kv", 0, 100, pack_ids([1, 2, 3, 4, 5, 6, 6])),)}, Code.BAD_PAGES),
    ({"grants": (peer.Grant("kv", 0, 100, pack_ids([0, 1, 2, 3, 4, 5, 6])),)}, Code.BAD_PAGES),
    ({"grants": (peer.Grant("kv", 0, 100, b"\x01" * 27),)}, Code.BAD_PAGES),
    ({"grants": (peer.Grant("kv", 16, 100, pack_ids(list(range(1, 8)))),)}, Code.BAD_PAGES),
]


def test_offers_that_cannot_be_served_are_settled_as_refused(mallory):
    """scenario B12, scenario B13."""
    mallory.greet()

    found = []
    for handoff, (changes, _) in enumerate(BAD_OFFERS, 1):
        mallory.offer(**{"handoff": handoff, "room": 900_000 + handoff, **changes})
        settled = mallory.hears(peer.Settled)
        mallory.close_room(handoff)
        assert (settled.handoff, settled.outcome) == (handoff, peer.ReceiveOutcome.REFUSED)
        found.append(settled.reason.code)

    assert found == [code for _, code in BAD_OFFERS]


async def test_hostile_offers_for_an_open_room_leave_it_to_its_owner(engines, mallory):
    """A room that an engine waits in survives strangers, and is delivered to who has its prompt."""
    p, d = engines.p, engines.d
    tokens, room = tokens_of(100, seed=SEED + 2), engines.room()
    lease = await p.lease(tokens)
    write(p, lease, tokens)
    send = await p.send(room, tokens, lease=lease)
    mallory.greet()

    mallory.offer(room=room, handoff=1, decode_prefix_len=50)
    first = mallory.hears(peer.Settled).reason.code
    mallory.offer(room=room, handoff=2, grants=())
    second = mallory.hears(peer.Settled, peer.Reject)
    receive = await d.receive(room, tokens, "p")
    outcome = await send.finish(b"mine")
    await receive.done()

    assert (first, outcome.committed, receive.aux) == (Code.BAD_PREFIX, True, b"mine")
    assert second is not None
    assert digest(p, lease.pages) == digest(d, receive.lease.pages)


def test_settled_and_closed_for_handoffs_of_others_change_nothing(engines, mallory):
    """A peer speaks for its own handoffs only."""
    mallory.greet()
    [room] = [one for one in engines.pair.prefill.snapshot().rooms if one.peer == "d"]
    source, target, handoff = mallory.source, mallory.target, room.handoff

    mallory.tell(peer.Closed(source, target, handoff, peer.ReceiveOutcome.COMMITTED))
    mallory.tell(peer.Abort(source, target, handoff, room.room, "not mine"))
    mallory.tell(
        peer.Settled(source, target, handoff, peer.ReceiveOutcome.DELIVERED, aux=b"forged")
    )
    mallory.tell(peer.Progress(source, target, handoff, 2**62))
    mallory.tell(peer.Accept(source, target, 2**62))
    mallory.tell(peer.Ping(source, target, 5, 0, 2**62, 2**62))
    mallory.hears(peer.Ping)

    [still] = [one for one in engines.pair.prefill.snapshot().rooms if one.peer == "d"]
    assert (still.state, still.handoff) == (room.state, room.handoff)


def test_random_peer_frames_cost_nobody_anything(engines, mallory):
    mallory.greet()
    source, target = mallory.source, mallory.target
    valid = [
        PEER_MESSAGES.encode(message)
        for message in (
            mallory.greeting,
            peer.Ping(source, target, 1, 0, 1, 1),
            peer.Abort(source, target, 3, 7, "why"),
            peer.Closed(source, target, 3, peer.ReceiveOutcome.COMMITTED),
            peer.Settled(source, target, 3, peer.ReceiveOutcome.FAILED, None, b"aux"),
            peer.Offer(source, target, 9, 7, 1, 100, 0, b"d" * 16, (), 0.1),
        )
    ]
    before = engines.pair.prefill.snapshot().totals.messages_refused
    for frame in mutants(valid, 600):
        mallory.say(frame)

    until(lambda: engines.pair.prefill.snapshot().totals.messages_refused > before + 200)
    assert engines.pair.prefill.snapshot().totals.violations == 0


def test_oversized_peer_frame_closes_that_link_only(engines, mallory):
    mallory.say(bytes(TOO_LONG))

    other = Stranger(engines.pair.prefill, "oscar")
    other.greet()
    other.close()
