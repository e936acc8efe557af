"""Why: who, why and since when in one sentence, what to ask about next, and what happened."""

from __future__ import annotations

import pytest

from kvd.core.cache.radix import RadixTree
from kvd.core.inspect import why
from kvd.core.inspect.why import has_page
from kvd.types import pack_ids, page_ids
from kvd.wire import admin, client
from tests.core.engines import PROMPT, Sender, cached
from tests.core.sentences import sentence_of
from tests.core.world import World, tokens


def ask(side, kind, number=0, name=""):
    said = side.ask(admin.Why(1, kind, number, name=name))
    assert isinstance(said, admin.Because), said
    return said


@pytest.fixture
def world():
    """A cached prompt that one lease locks; a handoff with posts under way."""
    world = World()
    world.hold_posts = True
    cached(world.p, tokens((1, 64)))
    sender = Sender(world)
    world.pass_time(1)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    return world


def test_a_held_page_leads_to_its_lease_and_its_client(world):
    page = page_ids(world.p.node.leases.leases[2].held)[0]
    said = ask(world.p, "page", page)

    assert said.sentence == (
        f"page {page} is held by lease 2 of engine (pid 1001) for lease, 1.0 s"
    )
    assert said.links == ("lease:2", "client:1")


def test_a_cached_page_leads_to_its_node_and_those_who_lock_it(world):
    node = next(world.p.node.leases.tree.nodes())
    page = page_ids(node.pages)[-1]
    said = ask(world.p, "page", page)

    assert said.sentence == (
        f"page {page} is cached in node 2 (tokens 0 to 64, 4 pages), lock_ref 1: lease 2 of engine "
        "(pid 1001) for lease, 1.0 s"
    )
    assert said.links == ("node:2", "lease:2")


def test_a_node_leads_to_its_parent_its_children_and_those_who_lock_it(world):
    cached(world.p, tokens((1, 64), (500, 32)))
    cached(world.p, tokens((1, 64), (600, 32)))
    top, left, right = (ask(world.p, "node", number) for number in (2, 3, 4))

    assert top.links == ("lease:2", "node:3", "node:4")
    assert left.links == right.links == ("node:2",)
    assert left.sentence == sentence_of(
        "a node leads to its parent its children and those who lock it"
    )
    assert left.facts == ("hits: 1, last used 0.0 s ago", "written by engine")


def test_a_lease_leads_to_its_node_its_handoff_and_the_peer(world):
    said = ask(world.p, "lease", 2)
    assert said.links == ("client:1", "node:2", "send:1", "peer:d")
    assert said.marks[0].what == sentence_of("a lease leads to its node its handoff and the peer")
    theirs = ask(world.d, "lease", 1)

    assert theirs.links == ("client:1", "receive:1", "room:7", "peer:p")
    assert theirs.marks[0] == admin.Mark(0.0, "asked for by session 1")


def test_a_room_leads_to_its_parts_leases_client_and_peer(world):
    said = ask(world.p, "room", 7)

    assert said.sentence == sentence_of("a room leads to its parts leases client and peer")
    assert said.facts[:2] == (
        "prompt 100 tokens, decode_prefix_len 0, 0 B of 896 B moved",
        "96 tokens computed, 6 of 7 pages posted, 1 posts under way",
    )
    assert said.links == ("send:1", "lease:2", "client:1", "peer:d")
    assert [mark.what.split(" (")[0] for mark in said.marks] == [
        *("opened by session 1", "await-offer -> streaming"),
    ]
    assert [mark.ago_s for mark in said.marks] == [1.0, 0.0]


@pytest.mark.parametrize(("side", "kind"), [("d", "receive"), ("p", "send")])
def test_a_part_is_found_by_its_own_number(world, side, kind):
    said, room = (
        ask(world.sides[side], kind, 1),
        ask(world.sides[side], "room", 7),
    )

    assert (said.sentence, said.facts) == (room.sentence, room.facts)
    assert said.links == ("room:7", *room.links[1:])
    assert room.links[0] == f"{kind}:1"


def test_two_attempts_of_one_room_are_told_together(world):
    world.d.call(client.CancelReceive, receive=1)
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    said = ask(world.d, "room", 7)

    assert said.links[:4] == ("receive:1", "receive:2", "lease:1", "lease:2")
    assert ask(world.d, "receive", 2).links[:2] == ("room:7", "lease:2")
    assert [mark.ago_s for mark in said.marks] == sorted(
        (mark.ago_s for mark in said.marks), reverse=True
    )


def test_a_delivered_receive_is_there_while_its_lease_lives(world):
    world.hold_posts = False
    world.land_posts()
    world.p.call(client.Finish, send=1, aux=b"")

    assert "ready on the decode side by engine, from p" in ask(world.d, "receive", 1).sentence


def test_a_client_leads_to_its_largest_leases_and_its_handoffs(world):
    for k in range(25):
        world.p.lease(tokens((10_000 + 100 * k, 16 if k else 80)))
    said = ask(world.p, "client", 1)

    assert said.sentence == sentence_of("a client leads to its largest leases and its handoffs 1")
    assert said.facts[0] == sentence_of("a client leads to its largest leases and its handoffs 2")
    assert said.facts[-1] == sentence_of("a client leads to its largest leases and its handoffs 3")
    assert said.links[0] == "lease:3"
    assert len(said.links) == 21
    assert said.links[-1] == "send:1"


def test_a_client_that_is_gone_is_told_by_what_it_left(world):
    world.d.hang_up(1)
    said = ask(world.d, "client", 1)

    assert said.sentence == sentence_of("a client that is gone is told by what it left")
    assert said.links == ("lease:1", "receive:1")


def test_a_client_that_waits_says_so():
    world = World(d_pages=10)
    world.d.lease(tokens((1, 100)))
    world.d.call(client.OpenLease, tokens((5000, 64)))
    world.pass_time(1)

    assert ask(world.d, "client", 1).facts[-1] == sentence_of("a client that waits says so")


def test_a_peer_leads_to_what_is_open_with_it(world):
    world.d.call(client.CancelReceive, receive=1)
    said = ask(world.d, "peer", name="p")
    heard_s = world.now_s - world.d.node.peers.by_name["p"].heard_s

    assert said.sentence == (
        f"peer p (70000000) is up, heard {heard_s:.1f} s ago, 1 receives and 0 sends under way"
    )
    assert said.facts[0] == sentence_of("a peer leads to what is open with it 1")
    assert said.facts[1].startswith("generation 1 of its transfer process; our agent: loaded for ")
    assert said.facts[-1] == sentence_of("a peer leads to what is open with it 2")
    assert said.links == ("receive:1", "lease:1")
    assert ask(world.p, "peer", name="d").links == ("send:1",)


def test_a_peer_that_never_answered_is_told_with_why():
    world = World()
    world.cut = {"p"}
    world.restart(world.d)
    world.pass_time(2)

    assert ask(world.d, "peer", name="p").sentence == sentence_of(
        "a peer that never answered is told with why"
    )


def test_a_peer_that_nobody_knows_is_refused_with_those_we_know(world):
    reply = world.d.ask(admin.Why(1, "peer", 0, name="q"))

    assert isinstance(reply, admin.AdminFailed)
    assert reply.refusal.message == sentence_of(
        "a peer that nobody knows is refused with those we know"
    )


def test_bytes_that_only_look_like_a_page_are_not_found():
    """Ids lie side by side: those of page 65536 are also there across pages 1 and 1."""
    far = pack_ids([65_536])
    row = pack_ids([1, 1, 2])

    assert far in row
    assert not has_page(row, far)
    assert has_page(row + far, far)
    assert has_page(row, pack_ids([2]))
    assert not has_page(row, pack_ids([1]), first=2)


def test_a_page_is_found_in_one_walk_over_the_tree(monkeypatch):
    world = World(d_pages=256)
    for first in range(0, 20_000, 100):
        cached(world.d, tokens((first, 16)))
    walks = []
    walk = RadixTree.nodes
    monkeypatch.setattr(RadixTree, "nodes", lambda tree: walks.append(1) or walk(tree))
    page = page_ids(list(walk(world.d.node.leases.tree))[-1].pages)[0]

    assert (
        f"page {page} is cached in node "
        in why.because(world.d.node, admin.Why(1, "page", page)).sentence
    )
    assert walks == [1]


def test_a_root_says_who_locks_it_and_what_begins_there():
    world = World(d_pages=400)
    cached(world.d, tokens((1, 64)))
    root = world.d.node.leases.tree.roots[""]
    [child] = root.children.values()
    bare = ask(world.d, "node", root.id)
    for number in range(25):
        world.d.lease(tokens((1, 64), (5000 * number, 40)))
    said = ask(world.d, "node", root.id)

    what = f"node {root.id} (the root of no namespace, 1 children), locked by"
    assert (bare.sentence, bare.facts) == (f"{what} nobody", ())
    assert said.sentence == f"{what} 25 leases"
    assert len(said.facts) == 21
    assert said.facts[-1] == sentence_of("a root says who locks it and what begins there")
    assert said.links[-1] == f"node:{child.id}"


def test_a_node_that_very_many_lock_names_the_first_twenty():
    world = World(d_pages=400)
    cached(world.d, tokens((1, 64)))
    for number in range(25):
        world.d.lease(tokens((1, 64), (5000 * number, 40)))
    [child] = world.d.node.leases.tree.roots[""].children.values()
    said = ask(world.d, "node", child.id)

    assert ", lock_ref 25: lease " in said.sentence
    assert said.sentence.endswith(" and 24 more")
    assert "and 5 more leases" in said.facts
