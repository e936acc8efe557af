"""One handoff between two nodes: what is asked for, sent, cached and kept."""

from __future__ import annotations

import pytest

from kvd.core.inspect.snapshot import snapshot
from kvd.types import count, page_ids
from kvd.wire import client, events
from kvd.wire.client import SentShare
from kvd.wire.peer import Accept, Settled
from tests.core.engines import FULL, PROMPT, PageTotals, Sender, cached, offered, totals
from tests.core.world import World, tokens

WHOLE = SentShare(0, 1, 0, 100, is_dummy=False, is_authoritative=True)

# ---- what is asked for ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("in_tree", "prompt", "prefix", "pages"),
    [
        (0, 100, 0, 7),  # scenario A1
        (64, 100, 64, 3),  # scenario A2
        (70, 100, 64, 3),  # scenario A3: 70 common tokens are 64 in the tree
        (96, 96, 96, 0),  # scenario A4
        (96, 97, 96, 1),  # scenario A5
        (0, 10, 0, 1),  # scenario A10
        (1008, 100, 96, 1),
    ],
)
def test_an_offer_names_the_prefix_and_the_pages_of_the_rest(in_tree, prompt, prefix, pages):
    """scenario A1 to A6, A10: a whole hit is offered too, with a range and no pages."""
    world = World()
    if in_tree:
        cached(world.d, tokens((1, in_tree)))
    toks = tokens((1, prompt))

    reply = world.d.call(client.ReceiveRequest, toks, room=7, source=("p",))

    assert reply == client.Receiving(world.d.calls, 1, prefix)
    offer = offered(world)
    (grant,) = offer.grants
    assert (offer.prompt_tokens, offer.decode_prefix_len) == (prompt, prefix)
    assert (grant.component, grant.start_tokens, grant.end_tokens) == ("kv", prefix, prompt)
    assert count(grant.pages) == pages
    assert world.d.node.leases.leases[offer_lease(world)].held_pages == pages


def offer_lease(world: World) -> int:
    (part,) = world.d.node.decoder.open.parts.values()
    assert part.lease is not None
    return part.lease.id


# ---- what is sent --------------------------------------------------------------------------------


def test_a_cold_prompt_streams_in_whole_pages_and_ends_with_the_partial_one():
    """scenario B1: chunks of 40 are posts of 2, 3 and 2 pages; cumulative 7, only one is last."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    part = world.p.node.prefiller.by_send[sender.send]
    posted = []
    for upto in (40, 80, 100):
        before = set(world.p.flights)
        sender.advance(upto) if upto < 100 else sender.finish()
        posted += [world.p.flights[k].pages for k in sorted(set(world.p.flights) - before)]
        posted.append(part.posted_tokens)

    assert posted == [2, 32, 3, 80, 2, 100]
    world.land_posts()
    assert world.p.answer(sender.finish_call) == client.Finished(5, None, 0, 7, 7 * 128)


def test_a_delivered_prompt_reads_back_as_it_was_written():
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(40)

    finished = sender.finish(b"first token")

    assert finished == client.Finished(4, None, 0, 7, 896)
    got = world.d.take()[-1]
    assert got == client.Received(1, 1, got.pages, b"first token")
    assert world.d.holds(got.pages, PROMPT)


@pytest.mark.parametrize("order", ["engine first", "offer first", "finished first"])
def test_the_two_halves_meet_in_any_order(order):
    world = World()
    if order == "offer first":
        world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender = Sender(world)
    if order == "finished first":
        assert sender.finish() is None
    if order != "offer first":
        world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    if order != "finished first":
        sender.finish()

    assert world.p.answer(sender.finish_call) == client.Finished(3, None, 0, 7, 896)
    pushes = [one for one in world.p.answers if isinstance(one, client.Accepted)]
    assert pushes == [client.Accepted(1, 0, WHOLE)]
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert world.d.holds(got.pages, PROMPT)


def test_a_full_hit_sends_no_page_and_still_delivers_the_aux():
    """scenario A4, scenario B3: nothing is posted, nothing is evicted, the first token arrives."""
    world = World(d_pages=8)
    cached(world.d, FULL)
    world.d.lease(tokens((9000, 1)))
    assert totals(world.d) == PageTotals(free=0, held=1, cached=6, evictable=6)
    sender = Sender(world, FULL)
    world.d.call(client.ReceiveRequest, FULL, room=7, source=("p",))
    for upto in (40, 80):
        sender.advance(upto)

    finished = sender.finish(b"token")

    assert finished == client.Finished(5, None, 96, 0, 0)
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert got.aux == b"token"
    assert world.d.holds(got.pages, FULL)
    assert world.p.node.prefiller.posts.sent_bytes == 0
    assert not [one for one in world.d.events if isinstance(one, events.Evicted)]


def test_no_accept_is_said_when_settled_leaves_in_the_same_step():
    """It says all that Accept does; one that is lost is repeated alone."""
    world = World(resend_s=0.25)
    cached(world.d, FULL)
    sender = Sender(world, FULL)
    sender.finish(b"token")
    world.hold_wire = True
    world.d.call(client.ReceiveRequest, FULL, room=7, source=("p",))

    world.deliver(world.wire.pop())

    assert [letter.message.handoff for letter in world.held(Settled)] == [1]
    assert world.held(Accept) == []
    world.wire.clear()
    world.hold_wire = False
    world.pass_time(0.3)
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert got.aux == b"token"
    assert world.p.answer(sender.finish_call) == client.Finished(3, None, 96, 0, 0)


def test_accept_is_said_when_a_page_is_posted_in_the_same_step():
    world = World()
    sender = Sender(world)
    sender.finish()
    world.hold_wire = True

    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.deliver(world.wire.pop())

    assert len(world.held(Accept)) == 1


def test_a_chunk_that_ends_where_the_prefix_does_sends_nothing():
    """scenario B4: prefix 80, chunk end 80: no post, the cursor is at 80."""
    world = World()
    cached(world.d, tokens((1, 80)))
    sender = Sender(world)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    sender.advance(80)

    part = world.p.node.prefiller.by_send[sender.send]
    assert (part.cursor_tokens, part.posted_tokens, part.posted_pages) == (80, 80, 0)
    assert world.p.flights == {}
    sender.finish()
    world.land_posts()
    assert world.p.answer(sender.finish_call) == client.Finished(4, None, 80, 2, 256)


def test_only_what_the_decode_side_lacks_is_sent():
    """scenario A2: bytes sent are the pages beyond the prefix, to the byte."""
    world = World()
    cached(world.d, tokens((1, 64)))
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))

    finished = sender.finish()

    assert finished == client.Finished(3, None, 64, 3, 3 * 128)
    ended = [one for one in world.d.events if isinstance(one, events.HandoffEnded)]
    assert [(one.moved_bytes, one.saved_bytes) for one in ended] == [(3 * 128, 4 * 128)]


def test_several_rooms_at_once_do_not_mix():
    world = World(p_pages=128, d_pages=128)
    prompts = {room: tokens((1000 * room, 50 + room)) for room in range(1, 6)}
    for room, toks in prompts.items():
        world.d.call(client.ReceiveRequest, toks, room=room, source=("p",))
    senders = [Sender(world, toks, room) for room, toks in prompts.items()]
    for upto in (16, 33):
        for sender in reversed(senders):
            sender.advance(upto)
    for sender in senders:
        sender.finish(str(sender.room).encode())

    got = {one.aux: one for one in world.d.answers if isinstance(one, client.Received)}

    assert {int(aux) for aux in got} == set(prompts)
    for aux, one in got.items():
        assert world.d.holds(one.pages, prompts[int(aux)])


# ---- what is cached and kept ---------------------------------------------------------------------


def test_a_delivered_prompt_is_cached_in_whole_pages_and_locked_once():
    """scenario A21: the lock moves from the 64-token node to the end; the tail stays with the
    lease."""
    world = World()
    cached(world.d, tokens((1, 64)))
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()

    nodes = [(one.end_tokens, one.lock_ref) for one in world.d.node.leases.tree.nodes()]

    assert nodes == [(64, 1), (96, 1)]
    lease = world.d.node.leases.leases[2]
    assert (lease.held_pages, lease.holders, lease.reason) == (1, {"engine"}, "received from p")
    world.d.call(client.ReleaseLease, lease=2)
    assert totals(world.d) == PageTotals(free=57, cached=6, evictable=6)


def test_the_second_of_two_equal_cold_prompts_gives_its_duplicates_back():
    """scenario A22: both transfer 7 pages; the tree keeps the first six, nothing is freed twice."""
    world = World()
    for room in (1, 2):
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
    senders = [Sender(world, room=room) for room in (1, 2)]
    assert totals(world.d) == PageTotals(free=49, held=14)

    for sender in senders:
        sender.finish()

    first, second = [one for one in world.d.answers if isinstance(one, client.Received)]
    assert page_ids(first.pages)[:6] == page_ids(second.pages)[:6]
    assert page_ids(first.pages)[6] != page_ids(second.pages)[6]
    assert world.d.holds(second.pages, PROMPT)
    assert totals(world.d) == PageTotals(free=55, held=2, cached=6)
    assert [one.lock_ref for one in world.d.node.leases.tree.nodes()] == [2]


def test_the_second_of_two_equal_prompts_is_cached_when_the_first_fails():
    """scenario A23."""
    world = World()
    for room in (1, 2):
        world.d.call(client.ReceiveRequest, PROMPT, room=room, source=("p",))
    first, second = (Sender(world, room=room) for room in (1, 2))
    world.p.call(client.AbortSend, send=first.send, reason="failed")
    assert totals(world.d) == PageTotals(free=56, held=7)

    second.finish()

    assert totals(world.d) == PageTotals(free=56, held=1, cached=6)


def test_a_warm_up_handoff_caches_nothing():
    """scenario A37."""
    world = World()
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), cache=False)
    sender.finish()
    assert totals(world.d) == PageTotals(free=56, held=7)

    world.d.call(client.CommitAndRelease, tokens((500, 3)), lease=1)

    assert totals(world.d) == PageTotals(free=63)


def test_a_first_token_that_ends_the_request_leaves_its_prompt_cached():
    """scenario A33: one output token without KV; 96 tokens stay."""
    world = World()
    sender = Sender(world, FULL)
    world.d.call(client.ReceiveRequest, FULL, room=7, source=("p",))
    sender.finish(b"eos")

    world.d.call(client.CommitAndRelease, lease=1)

    assert totals(world.d) == PageTotals(free=57, cached=6, evictable=6)


def test_five_turns_send_only_what_is_new():
    """scenario A39: turn k is the last prompt, its output and 40 more tokens."""
    world = World(p_pages=128, d_pages=128)
    history = tokens((1, 40))
    for turn in range(5):
        sender = Sender(world, history, room=turn + 1)
        world.d.call(
            client.ReceiveRequest, history, room=turn + 1, source=("p",), reserve_tokens=30
        )
        finished = sender.finish()
        assert isinstance(finished, client.Finished)
        prefix = max(0, count(history) - 40) // 16 * 16
        assert (finished.failure, finished.decode_prefix_len) == (None, prefix)
        assert finished.sent_pages == -(-count(history) // 16) - prefix // 16
        world.p.call(client.CommitAndRelease, lease=sender.lease.lease)
        got = world.d.take()[-1]
        assert isinstance(got, client.Received)
        assert world.d.holds(got.pages, history)
        output = tokens((10_000 * (turn + 1), 30))
        history = history + output
        world.d.write(got.pages, history)
        world.d.call(client.CommitAndRelease, output, lease=got.lease)
        free, held, in_tree, quarantined, evictable = totals(world.d)
        assert (held, quarantined, free + evictable, in_tree) == (0, 0, 127, evictable)
        history = history + tokens((10_000 * (turn + 1) + 500, 40))


def test_the_source_lease_lives_until_the_last_byte_is_sent():
    """The engine lets go after finish; its pages are freed when the send lets go too."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.finish()
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)
    (lease,) = snapshot(world.p.node).leases
    assert (lease.state, lease.holders) == ("lingering", ("send 1",))
    assert lease.waiting_for == "send 1 to be over"
    assert totals(world.p) == PageTotals(free=56, held=1, cached=6)

    world.land_posts()

    assert totals(world.p) == PageTotals(free=57, cached=6, evictable=6)
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert world.d.holds(got.pages, PROMPT)


def test_duplicates_under_a_post_are_freed_after_it():
    """A commit swaps pages that a post still reads: they are given back when it is over."""
    world = World()
    cached_lease = world.p.lease(PROMPT)
    sender = Sender(world)
    world.p.write(cached_lease.pages, PROMPT)
    world.p.call(client.CommitAndRelease, lease=cached_lease.lease)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    sender.advance(96)
    world.p.call(client.CommitLease, lease=sender.lease.lease)
    assert world.p.node.leases.leases[2].held_pages == 7
    free = totals(world.p).free

    world.land_posts()

    assert totals(world.p).free == free + 6
    sender.finish()
    world.land_posts()
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert world.d.holds(got.pages, PROMPT)
