"""What a handoff needs fits into one frame each way, or is refused before anything begins."""

from __future__ import annotations

import time

import msgspec
import pytest

from kvd.core import effects, inputs
from kvd.core.handoff.message_sizes import MESSAGE_BYTES, offer_bytes, settled_bytes
from kvd.core.layout.seal import SUM_BYTES, Seal, chosen, most_chosen
from kvd.core.layout.shards import tp_shards
from kvd.core.node import NodeState
from kvd.errors import Code, Refusal
from kvd.types import Tokens, count
from kvd.wire import client
from kvd.wire.bounds import MAX_PEER_BYTES, OLD_PEER_BYTES
from kvd.wire.codec import PEER_MESSAGES
from kvd.wire.peer import Hello, Integrity, Offer, Settled
from tests.core.engines import PageTotals, Sender, totals
from tests.core.sentences import sentence_of
from tests.core.side import settings
from tests.core.world import World, tokens
from tests.property.cells import sharded
from tests.support.compiled import replaces_methods

LONG = tokens((1, 3200))
"""200 pages: its Offer has at most 4096 + 640 + 800 bytes, the sums of it 1600."""

P_BYTES, D_BYTES = 5536, 5696


def small(limit: int, **more: object) -> World:
    return World(p_pages=256, d_pages=256, max_frame_bytes=limit, max_aux_bytes=0, **more)


def refused(world: World) -> Refusal:
    reply = world.d.call(client.ReceiveRequest, LONG, room=7, source=("p",))
    assert isinstance(reply, client.Failed), reply
    assert totals(world.d) == PageTotals(free=255)
    assert not [one for one in world.d.effects if _is_offer(one)]
    return reply.refusal


def _is_offer(effect: effects.Effect) -> bool:
    return isinstance(effect, effects.SendToPeer) and isinstance(effect.message, Offer)


def test_sums_that_do_not_fit_are_refused_with_the_numbers_before_anything_begins():
    refusal = refused(small(D_BYTES - 1, integrity=Integrity.FULL))
    assert refusal.code is Code.TOO_LARGE
    assert refusal.message == sentence_of(
        "sums that do not fit are refused with the numbers before anything begins"
    )
    assert refusal.numbers == {"bytes": 5696, "limit": 5695, "pages": 200, "shards": 1}


@pytest.mark.parametrize(
    ("limit", "integrity"),
    [(D_BYTES, Integrity.FULL), (P_BYTES, Integrity.SAMPLED), (P_BYTES, Integrity.OFF)],
)
def test_what_just_fits_is_delivered(limit, integrity):
    world = small(limit, integrity=integrity)
    sender = Sender(world, LONG)
    world.d.call(client.ReceiveRequest, LONG, room=7, source=("p",))
    sender.finish(b"")
    assert isinstance(world.d.take()[-1], client.Received)
    sizes = [
        len(PEER_MESSAGES.encode(one.message))
        for side in (world.p, world.d)
        for one in side.effects
        if isinstance(one, effects.SendToPeer)
    ]
    assert max(sizes) <= limit


def test_an_offer_that_the_peer_cannot_read_is_refused_at_home():
    """Its limit is what its Hello says."""
    refusal = refused(small(P_BYTES - 1))
    assert refusal.message == sentence_of("an offer that the peer cannot read is refused at home")


def test_a_refused_receive_tells_the_engine_that_waits_for_it():
    world = small(P_BYTES - 1)
    Sender(world, LONG)
    refused(world)
    (failed,) = [one for one in world.p.take() if isinstance(one, client.SendFailed)]
    assert failed.refusal.message == sentence_of(
        "a refused receive tells the engine that waits for it"
    )


def test_a_cached_prefix_makes_room():
    """What counts is what is asked for, not the prompt."""
    world = small(P_BYTES - 1)
    half = Tokens(LONG[: len(LONG) // 2])
    lease = world.d.lease(half)
    world.d.write(lease.pages, half)
    world.d.call(client.CommitAndRelease, lease=lease.lease)
    sender = Sender(world, LONG)
    world.d.call(client.ReceiveRequest, LONG, room=7, source=("p",))
    sender.finish(b"")
    assert isinstance(world.d.take()[-1], client.Received)


@replaces_methods
def test_the_prefill_side_refuses_what_a_decode_side_could_not_read():
    """For one that does not look itself."""
    world = small(D_BYTES - 1, integrity=Integrity.FULL)
    world.d.node.decoder.offers.unsendable = lambda _: None  # type: ignore[method-assign]
    Sender(world, LONG)
    world.d.call(client.ReceiveRequest, LONG, room=7, source=("p",))
    (failed,) = [one for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert (failed.refusal.code, failed.refusal.side) == (Code.TOO_LARGE, "p")
    assert failed.refusal.numbers["bytes"] == D_BYTES
    assert totals(world.d) == PageTotals(free=255)


def test_a_peer_that_does_not_say_reads_what_older_versions_read():
    frame = PEER_MESSAGES.encode(Hello("s", "t", "n", "l", 1, b"", 2, 3))
    old = msgspec.msgpack.encode(msgspec.msgpack.decode(frame)[:-1])
    hello = PEER_MESSAGES.decode(old)
    assert isinstance(hello, Hello)
    assert hello.max_frame_bytes == OLD_PEER_BYTES < MAX_PEER_BYTES


@pytest.mark.parametrize("n_pages", [0, 1, 2, 3, 17, 1000, 100_000])
def test_no_more_pages_are_drawn_than_the_bound_says(n_pages):
    for seed in range(20):
        for integrity in Integrity:
            seal = _seal(integrity, seed, n_pages)
            assert chosen(seal, 0, n_pages).size <= most_chosen(integrity, n_pages)


def _seal(integrity: Integrity, seed: int, n_pages: int) -> Seal:
    return Seal(integrity, seed.to_bytes(16, "little"), 0, n_pages)


# ---- a million pages, eight shards ---------------------------------------------------------------

MILLION = 2**20


def between(
    sender: NodeState, to: NodeState, link: str, sent: list[effects.Effect]
) -> list[effects.Effect]:
    """What ``to`` does about the messages that ``sender`` sends, each through the real codec."""
    found: list[effects.Effect] = []
    for effect in sent:
        if isinstance(effect, effects.SendToPeer):
            frame = PEER_MESSAGES.encode(effect.message)
            assert len(frame) <= MAX_PEER_BYTES
            message = PEER_MESSAGES.decode(frame)
            assert message == effect.message
            found += to.step(inputs.FromPeer(1.0, link, message)).effects
    return found


class Pair:
    """A whole pool, and one in eight shards, of pages of one token."""

    def __init__(self, integrity: Integrity) -> None:
        self.p = NodeState(self.settings("p", 1, integrity), 0.0)
        self.d = NodeState(self.settings("d", 8, integrity), 0.0)
        for node in (self.p, self.d):
            node.step(inputs.ClientJoined(0.0, 1, "engine", 1))
            node.step(inputs.TransferReady(0.0, 1, b"meta", "simulated", "start"))
        said = self.d.step(inputs.LinkDialed(0.0, "out", "p", "tcp://p")).effects
        said = self.to_p(self.to_d(self.to_p(list(said))))
        peer = self.p.peers.by_name["d"]
        self.p.step(inputs.AgentLoaded(0.0, peer.incarnation, 1))

    def settings(self, name, size, integrity):
        spec = sharded(2, 8, tp_shards(8, size, (0, size), (0, 2)), pages=MILLION + 1)
        spec = msgspec.structs.replace(
            spec, components=(msgspec.structs.replace(spec.components[0], page_size=1),)
        )
        return settings(name, 2, spec=spec, integrity=integrity)

    def to_p(self, sent):
        return between(self.d, self.p, "in", sent)

    def to_d(self, sent):
        return between(self.p, self.d, "out", sent)


@pytest.mark.parametrize("integrity", [Integrity.SAMPLED, Integrity.OFF])
def test_a_million_pages_in_eight_shards_are_handed_over_within_the_frames(integrity):
    began_s = time.process_time()
    pair, prompt = Pair(integrity), Tokens(b"\5\0\0\0" * MILLION)
    p, d = pair.p, pair.d
    p.step(inputs.FromClient(1.0, 1, client.OpenLease(1), prompt))
    p.step(inputs.FromClient(1.0, 1, client.SendRequest(2, 7, 1, peer="d"), prompt))
    offered = d.step(inputs.FromClient(1.0, 1, client.ReceiveRequest(1, 7, ("p",)), prompt)).effects
    accepted = pair.to_p(list(offered))
    pair.to_d(accepted)

    posted = p.step(inputs.FromClient(1.0, 1, client.Finish(3, 1, b"x" * 65_536))).effects
    settled: list[effects.Effect] = []
    for post in [one for one in posted if isinstance(one, effects.Post)]:
        n_pages = count(post.destination)
        n_sums = chosen(post.seal, post.first_page, post.first_page + n_pages).size
        done = inputs.PostDone(1.0, post.post, n_pages, bytes(SUM_BYTES * n_sums))
        settled += p.step(done).effects
    (message,) = [
        one.message
        for one in settled
        if isinstance(one, effects.SendToPeer) and isinstance(one.message, Settled)
    ]
    asked = pair.to_d(settled)
    for verify in [one for one in asked if isinstance(one, effects.Verify)]:
        asked += d.step(inputs.Verified(1.0, verify.ticket, ())).effects

    got = next(
        one.message
        for one in asked
        if isinstance(one, effects.AnswerEngine) and isinstance(one.message, client.Received)
    )
    assert count(got.pages) == MILLION
    assert time.process_time() - began_s < 5.0
    if integrity is Integrity.SAMPLED:
        assert len(PEER_MESSAGES.encode(message)) > OLD_PEER_BYTES


def test_a_million_pages_in_eight_shards_cannot_all_be_summed_and_that_is_said_first():
    pair, prompt = Pair(Integrity.FULL), Tokens(b"\5\0\0\0" * MILLION)

    told = pair.d.step(
        inputs.FromClient(1.0, 1, client.ReceiveRequest(1, 7, ("p",)), prompt)
    ).effects

    (failed,) = [one.message for one in told if isinstance(one, effects.AnswerEngine)]
    assert isinstance(failed, client.Failed)
    needed = MESSAGE_BYTES + SUM_BYTES * 8 * MILLION + 65_536
    assert failed.refusal.numbers == {
        "bytes": needed,
        "limit": MAX_PEER_BYTES,
        "pages": MILLION,
        "shards": 8,
    }
    assert failed.refusal.message.endswith("or make pool.page_size larger")
    assert pair.d.leases.pool.free_pages == MILLION


def test_the_bounds_are_never_below_what_is_sent():
    world = World(integrity=Integrity.FULL)
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, sender.toks, room=7, source=("p",))
    sender.finish(b"aux")
    messages = [
        one.message for side in (world.p, world.d) for one in side.effects
        if isinstance(one, effects.SendToPeer)
    ]  # fmt: skip
    (offer,) = [one for one in messages if isinstance(one, Offer)]
    (settled,) = [one for one in messages if isinstance(one, Settled)]
    assert len(PEER_MESSAGES.encode(offer)) <= offer_bytes(offer)
    assert len(PEER_MESSAGES.encode(settled)) <= settled_bytes(offer, 1, len(settled.aux))
