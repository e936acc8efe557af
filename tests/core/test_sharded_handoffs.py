"""Handoffs between nodes whose pools have other shards of one model: posts, sums, what lands."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core import effects
from kvd.core.handoff.payload import Payload
from kvd.core.handoff.payload_route import routes_of
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.shards import PageWindow, Pieced, Shard, Straight, tp_shards
from kvd.errors import Code
from kvd.types import NO_TOKENS, Tokens, count, page_ids
from kvd.wire import admin, client, events
from kvd.wire.peer import Integrity
from tests.core.engines import offered
from tests.core.side import PAGE
from tests.core.world import tokens
from tests.property.cells import CellSide, CellWorld, check, fill, sharded

LAYERS, HEADS = 4, 8
WHOLE = (Shard(0, LAYERS, 0, HEADS),)
PROMPT = tokens((1, 100))
N_PAGES = 7
CELL_BYTES = PAGE * 2 * 4
"""Of one head of one layer of a page: slots of K and V, one float each."""


def ranks(size: int, stage: tuple[int, int] = (0, LAYERS)) -> tuple[Shard, ...]:
    return tp_shards(HEADS, size, (0, size), stage)


def world_of(
    p: tuple[Shard, ...], d: tuple[Shard, ...], integrity: Integrity = Integrity.FULL
) -> CellWorld:
    world = CellWorld(spec=sharded(LAYERS, HEADS, d), integrity=integrity)
    world.p.config = msgspec.structs.replace(world.p.config, spec=sharded(LAYERS, HEADS, p))
    world.restart(world.p)
    world.p.attach()
    world.pass_time(1)
    return world


def send(world: CellWorld, toks: Tokens = PROMPT, room: int = 7) -> int:
    lease = world.p.lease(toks)
    fill(world.p, lease.pages, toks)
    reply = world.p.call(client.SendRequest, toks, room=room, lease=lease.lease)
    assert isinstance(reply, client.Sending)
    return reply.send


def receive(world: CellWorld, toks: Tokens = PROMPT, room: int = 7) -> client.Reply | None:
    return world.d.call(client.ReceiveRequest, toks, room=room, source=("p",))


def arrived(world: CellWorld) -> client.Received:
    got = world.d.take()[-1]
    assert isinstance(got, client.Received), got
    return got


def posts(side: CellSide) -> list[effects.Post]:
    return [one for one in side.effects if isinstance(one, effects.Post)]


LAYOUTS = {
    "1 to 2": (WHOLE, ranks(2)),
    "2 to 1": (ranks(2), WHOLE),
    "2 to 4": (ranks(2), ranks(4)),
    "4 to 2": (ranks(4), ranks(2)),
    "2 to 2": (ranks(2), ranks(2)),
    "8 to 16": (ranks(8), ranks(16)),
    "16 to 8": (ranks(16), ranks(8)),
    "16 to 1": (ranks(16), WHOLE),
    "copies to 2": (ranks(1) * 3, ranks(2)),
    "2 to copies": (ranks(2), ranks(1) * 2),
    "all layers to a stage": (ranks(2), ranks(4, (1, 3))),
    "all ranks to some": (WHOLE, tp_shards(HEADS, 4, (1, 3), (0, LAYERS))),
}


@pytest.mark.parametrize("integrity", [Integrity.FULL, Integrity.SAMPLED, Integrity.OFF])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_every_head_of_every_layer_lands_where_it_belongs(
    layouts: str, integrity: Integrity
) -> None:
    ours, theirs = LAYOUTS[layouts]
    world = world_of(ours, theirs, integrity)
    sent = send(world)
    receive(world)

    world.p.call(client.Advance, send=sent, upto_tokens=40)
    (part,) = world.d.node.decoder.open.parts.values()
    landing_bytes = part.total_bytes
    finished = world.p.call(client.Finish, send=sent, aux=b"first")

    kept_bytes = N_PAGES * CELL_BYTES * sum(shard.cells for shard in theirs)
    assert landing_bytes == kept_bytes
    assert finished == client.Finished(world.p.calls, None, 0, N_PAGES, kept_bytes)
    got = arrived(world)
    check(world.d, got.pages, PROMPT)
    assert snapshot(world.d.node).pools[0].page_bytes * N_PAGES == kept_bytes
    (ended,) = [one for one in world.d.events if isinstance(one, events.HandoffEnded)]
    assert ended.moved_bytes == kept_bytes


def test_each_shard_of_the_decode_side_has_posts_of_its_own() -> None:
    world = world_of(WHOLE, ranks(2))
    receive(world)
    sent = send(world)

    world.p.call(client.Finish, send=sent)

    first, second = posts(world.p)
    for post, shard in ((first, 0), (second, 1)):
        assert (post.component, post.peer_shard) == ("kv", shard)
        assert isinstance(post.making, Pieced)
        assert post.making.window == PageWindow(0, LAYERS, 0, 4)
        assert count(post.source) == N_PAGES
    assert first.destination == second.destination
    assert first.seal.key != second.seal.key, "pages of two shards have other sums"


def test_a_part_settles_when_the_posts_of_all_shards_are_done() -> None:
    world = world_of(ranks(2), ranks(2))
    world.hold_posts = True
    sent = send(world)
    receive(world)
    world.p.call(client.Finish, send=sent)
    one, other = list(world.p.flights.values())

    world.p.land(other)
    world.run()
    assert world.d.take()[-1] == client.Receiving(1, 1, 0)
    world.p.land(one)
    world.run()

    check(world.d, arrived(world).pages, PROMPT)


def test_copies_cut_the_pages_of_each_push_among_them() -> None:
    world = world_of(ranks(1) * 4, ranks(2))
    sent = send(world)
    receive(world)

    world.p.call(client.Advance, send=sent, upto_tokens=3 * PAGE)
    world.p.call(client.Finish, send=sent)

    found = [
        (post.peer_shard, post.making.pieces[0].shard, post.first_page, count(post.source))
        for post in posts(world.p)
        if isinstance(post.making, Pieced)
    ]
    shares = [(0, 0, 1), (1, 1, 1), (2, 2, 1)]  # copy, first page, pages: the last one has none
    rest = [(0, 3, 1), (1, 4, 1), (2, 5, 1), (3, 6, 1)]
    assert found == [
        (shard, *share) for push in (shares, rest) for shard in (0, 1) for share in push
    ]
    check(world.d, arrived(world).pages, PROMPT)


def test_sums_are_in_the_order_of_the_pages_whichever_post_is_done_first() -> None:
    world = world_of(ranks(1) * 2, ranks(2))
    world.hold_posts = True
    sent = send(world)
    receive(world)
    world.p.call(client.Advance, send=sent, upto_tokens=4 * PAGE)
    world.p.call(client.Finish, send=sent)

    for flight in reversed(list(world.p.flights.values())):
        world.p.land(flight)
        world.run()

    check(world.d, arrived(world).pages, PROMPT)


def test_what_is_wrong_in_one_shard_is_found_and_named() -> None:
    world = world_of(WHOLE, ranks(2))
    world.hold_verify = True
    sent = send(world)
    receive(world)
    world.p.call(client.Finish, send=sent)
    verified = [(one.shard, one.window, count(one.pages)) for one in world.d.asked]
    page = page_ids(world.d.asked[1].pages)[2]
    world.d.memory_of("kv#1")[page] = "torn"

    world.d.answer_verify()
    world.d.answer_verify()
    world.run()

    assert verified == [(0, None, N_PAGES), (1, None, N_PAGES)]
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.CORRUPT
    assert "1 of 7 verified pages of shard 1 (full, 7 were sent)" in failed.refusal.message
    assert f"page {page} (page 2 of the prompt, tokens [32, 48))" in failed.refusal.message
    assert snapshot(world.d.node).pools[0].cached_pages == 0


def test_a_post_that_fails_in_one_shard_fails_the_handoff() -> None:
    world = world_of(ranks(2), ranks(2))
    world.hold_posts = True
    sent = send(world)
    receive(world)
    world.p.call(client.Finish, send=sent)
    one, other = list(world.p.flights.values())

    world.p.land(one)
    world.p.fail(other, "out of luck")
    world.run()

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.POST_FAILED
    pools = snapshot(world.d.node).pools[0]
    assert pools.free_pages == pools.total_pages - 1


def test_a_whole_hit_is_handed_over_without_a_post() -> None:
    world = world_of(WHOLE, ranks(2))
    whole = tokens((1, 96))
    for room in (7, 8):
        sent = send(world, whole, room)
        receive(world, whole, room)
        world.p.call(client.Finish, send=sent, aux=b"x")
        got = arrived(world)
        world.d.call(client.CommitAndRelease, NO_TOKENS, lease=got.lease)

    assert len(posts(world.p)) == 2
    check(world.d, got.pages, whole)


def test_the_first_shard_of_two_has_the_seal_of_an_unsharded_pool() -> None:
    """An unsharded node sums as it always did; other shards have other keys."""
    keys = []
    for d in (WHOLE, ranks(2)):
        world = world_of(WHOLE, d)
        receive(world)
        offer, node = offered(world), world.p.node
        shard_routes = node.peers.by_name["d"].outgoing
        routes = routes_of(offer, shard_routes)
        payload = Payload(node.settings.spec, node.leases)
        keys.append([seal.key for seal in payload.seals(offer, routes)])

    (alone,), (first, second) = keys
    assert alone == first != second


# ---- peers that alone have not all of it -------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "d", "has", "missing"),
    [
        (ranks(1, (0, 2)), WHOLE, "layers 0-1 of heads 0-7", "layers 2-3 of heads 0-7"),
        (
            tp_shards(HEADS, 4, (1, 3), (0, LAYERS)),
            ranks(2),
            "layers 0-3 of heads 2-5",
            "layers 0-3 of heads 0-1, layers 0-3 of heads 6-7",
        ),
        (ranks(1, (0, 2)), ranks(1, (2, 4)), "layers 0-1 of heads 0-7", "layers 2-3 of heads 0-7"),
    ],
)
def test_a_receive_from_a_peer_that_has_not_all_of_it_is_refused_with_what_is_missing(
    p: tuple[Shard, ...], d: tuple[Shard, ...], has: str, missing: str
) -> None:
    world = world_of(p, d)

    reply = receive(world)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.LAYOUT_MISMATCH
    assert reply.refusal.message == (
        f"p has {has}, which is not all that is kept here: {missing} must come from elsewhere too; "
        "name every source"
    )
    assert [one.layout for one in snapshot(world.d.node).peers] == ["same"]


def test_what_a_peer_lacks_may_be_known_only_after_its_hello() -> None:
    world = CellWorld(spec=sharded(LAYERS, HEADS, WHOLE))
    world.p.config = msgspec.structs.replace(
        world.p.config, spec=sharded(LAYERS, HEADS, ranks(1, (0, 2)))
    )
    world.cut.add("p")
    world.restart(world.d)
    world.d.attach()
    receive(world)
    (before,) = snapshot(world.d.node).waiting
    world.cut.clear()

    world.restart(world.p)
    world.pass_time(1)

    (after,) = snapshot(world.d.node).waiting
    assert before.why.startswith("p has not said Hello yet")
    assert "layers 2-3 of heads 0-7 must come from elsewhere too" in after.why


def test_why_of_a_peer_says_which_shards_go_where() -> None:
    world = world_of(ranks(2), ranks(8, (1, 3)))

    said = world.p.ask(admin.Why(1, "peer", 0, name="d"))

    assert isinstance(said, admin.Because)
    assert (
        "shards: 8 there, of layers 1-2 of heads 0-7, and 2 here, of layers 0-3 of heads 0-7; ours "
        "fill 8 of theirs, theirs 2 of ours"
    ) in said.facts


# ---- retraction --------------------------------------------------------------------------------


def test_retracted_pages_are_copied_shard_by_shard_and_back() -> None:
    world = world_of(WHOLE, ranks(4))
    lease = world.d.lease(PROMPT, reserve_tokens=28)
    fill(world.d, lease.pages, PROMPT)

    world.d.call(client.RetractLease, NO_TOKENS, lease=lease.lease)
    out = [one for one in world.d.effects if isinstance(one, effects.Copy)]
    taken = world.d.lease(tokens((5000, 500)))
    fill(world.d, taken.pages, tokens((5000, 500)))
    world.d.call(client.ReleaseLease, lease=taken.lease)
    resumed = world.d.call(client.ResumeLease, lease=lease.lease)

    assert isinstance(resumed, client.Resumed)
    check(world.d, resumed.pages, PROMPT)
    assert [(one.source_region, one.destination_region) for one in out] == [
        ("kv", "kv.saved"),
        ("kv#1", "kv.saved#1"),
        ("kv#2", "kv.saved#2"),
        ("kv#3", "kv.saved#3"),
    ]


def test_a_copy_that_fails_in_one_shard_leaves_the_lease_as_it_was() -> None:
    world = world_of(WHOLE, ranks(2))
    world.hold_copies = True
    lease = world.d.lease(PROMPT)
    fill(world.d, lease.pages, PROMPT)
    world.d.call(client.RetractLease, NO_TOKENS, lease=lease.lease)

    world.d.finish_copy()
    world.run()
    assert not isinstance(world.d.answers[-1], client.Retracted | client.Failed)
    world.d.refuse_copy("no memory")
    world.run()

    assert isinstance(world.d.answers[-1], client.Failed)
    check(world.d, lease.pages, PROMPT)


def test_lanes_are_kept_with_the_peer_from_its_hello_on() -> None:
    world = world_of(WHOLE, ranks(2))
    peer = world.d.node.peers.by_name["p"]
    assert peer.shards == WHOLE
    assert len(peer.incoming) == 2
    assert isinstance(world.p.node.peers.by_name["d"].outgoing[0].copies[0], Pieced)
    equal = world_of(ranks(2), ranks(2)).p.node.peers.by_name["d"].outgoing
    assert [shard_route.copies for shard_route in equal] == [(Straight(0),), (Straight(1),)]
