"""One handoff between two nodes: what is asked for, sent, cached, kept and said."""

from __future__ import annotations

import msgspec
import pytest

from kvd.core.agents import Agent
from kvd.core.report import snapshot
from kvd.core.tables import Decode, Prefill
from kvd.errors import Code
from kvd.types import count, page_ids
from kvd.wire import admin, client, events
from kvd.wire.peer import Closed, Hello, Offer, Outcome, Settled
from tests.core.world import Side, World, tokens

PROMPT = tokens((1, 100))
FULL = tokens((1, 96))


class Sender:
    """The prefill engine with one prompt: leased, opened, and written step by step."""

    def __init__(self, world: World, toks: bytes = PROMPT, room: int = 7, **fields: object) -> None:
        self.world, self.toks = world, toks
        self.lease = world.p.lease(toks)
        self.room = room
        reply = world.p.call(client.Send, toks, room=room, lease=self.lease.lease, **fields)
        assert isinstance(reply, client.Sending), reply
        self.send = reply.send
        self.finish_call = 0

    def advance(self, upto: int) -> None:
        self.world.p.write(self.lease.pages, self.toks, end=upto)
        assert isinstance(
            self.world.p.call(client.Advance, send=self.send, upto_tokens=upto), client.Done
        )

    def finish(self, aux: bytes = b"aux") -> client.Reply | None:
        self.world.p.write(self.lease.pages, self.toks)
        reply = self.world.p.call(client.Finish, send=self.send, aux=aux)
        self.finish_call = self.world.p.calls
        return reply


def cached(side: Side, toks: bytes) -> None:
    """These tokens are in the tree, with their content."""
    lease = side.lease(toks)
    side.write(lease.pages, toks)
    side.call(client.CommitAndRelease, lease=lease.lease)


def totals(side: Side) -> tuple[int, int, int, int, int]:
    """Free, held, cached, quarantined and evictable pages."""
    pool = snapshot(side.node).pools[0]
    return (
        pool.free_pages,
        pool.held_pages,
        pool.cached_pages,
        pool.quarantined_pages,
        pool.evictable_pages,
    )


def offered(world: World) -> Offer:
    """The last Offer that the decode side sent."""
    (part,) = [one for one in world.d.node.decoder.parts.values() if one.unanswered is not None]
    assert isinstance(part.unanswered, Offer)
    return part.unanswered


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
    """Scenarios A1 to A6, A10: a whole hit is offered too, with a range and no pages."""
    world = World()
    if in_tree:
        cached(world.d, tokens((1, in_tree)))
    toks = tokens((1, prompt))

    reply = world.d.call(client.Receive, toks, room=7, source=("p",))

    assert reply == client.Receiving(world.d.calls, 1, prefix)
    offer = offered(world)
    (grant,) = offer.grants
    assert (offer.prompt_tokens, offer.decode_prefix_len) == (prompt, prefix)
    assert (grant.component, grant.start_tokens, grant.end_tokens) == ("kv", prefix, prompt)
    assert count(grant.pages) == pages
    assert world.d.node.leases.leases[offer_lease(world)].held_pages == pages


def offer_lease(world: World) -> int:
    (part,) = world.d.node.decoder.parts.values()
    assert part.lease is not None
    return part.lease.id


# ---- what is sent --------------------------------------------------------------------------------


def test_a_cold_prompt_streams_in_whole_pages_and_ends_with_the_partial_one():
    """Scenario B1: chunks of 40 are posts of 2, 3 and 2 pages; cumulative 7, only one is last."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
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
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
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
        world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender = Sender(world)
    if order == "finished first":
        assert sender.finish() is None
    if order != "offer first":
        world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    if order != "finished first":
        sender.finish()

    assert world.p.answer(sender.finish_call) == client.Finished(3, None, 0, 7, 896)
    pushes = [one for one in world.p.answers if isinstance(one, client.Accepted)]
    assert pushes == [client.Accepted(1, 0)]
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert world.d.holds(got.pages, PROMPT)


def test_a_full_hit_sends_no_page_and_still_delivers_the_aux():
    """Scenarios A4, B3: nothing is posted, nothing is evicted, the first token arrives."""
    world = World(d_pages=8)
    cached(world.d, FULL)
    world.d.lease(tokens((9000, 1)))
    assert totals(world.d) == (0, 1, 6, 0, 6)
    sender = Sender(world, FULL)
    world.d.call(client.Receive, FULL, room=7, source=("p",))
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


def test_a_chunk_that_ends_where_the_prefix_does_sends_nothing():
    """Scenario B4: prefix 80, chunk end 80: no post, the cursor is at 80."""
    world = World()
    cached(world.d, tokens((1, 80)))
    sender = Sender(world)
    world.hold_posts = True
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))

    sender.advance(80)

    part = world.p.node.prefiller.by_send[sender.send]
    assert (part.cursor_tokens, part.posted_tokens, part.posted_pages) == (80, 80, 0)
    assert world.p.flights == {}
    sender.finish()
    world.land_posts()
    assert world.p.answer(sender.finish_call) == client.Finished(4, None, 80, 2, 256)


def test_only_what_the_decode_side_lacks_is_sent():
    """Scenario A2: bytes sent are the pages beyond the prefix, to the byte."""
    world = World()
    cached(world.d, tokens((1, 64)))
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))

    finished = sender.finish()

    assert finished == client.Finished(3, None, 64, 3, 3 * 128)
    ended = [one for one in world.d.events if isinstance(one, events.HandoffEnded)]
    assert [(one.moved_bytes, one.saved_bytes) for one in ended] == [(3 * 128, 4 * 128)]


def test_several_rooms_at_once_do_not_mix():
    world = World(p_pages=128, d_pages=128)
    prompts = {room: tokens((1000 * room, 50 + room)) for room in range(1, 6)}
    for room, toks in prompts.items():
        world.d.call(client.Receive, toks, room=room, source=("p",))
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
    """Scenario A21: the lock moves from the 64-token node to the end; the tail stays with the
    lease."""
    world = World()
    cached(world.d, tokens((1, 64)))
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.finish()

    nodes = [(one.end_tokens, one.lock_ref) for one in world.d.node.leases.tree.nodes()]

    assert nodes == [(64, 1), (96, 1)]
    lease = world.d.node.leases.leases[2]
    assert (lease.held_pages, lease.holders, lease.reason) == (1, {"engine"}, "received from p")
    world.d.call(client.ReleaseLease, lease=2)
    assert totals(world.d) == (57, 0, 6, 0, 6)


def test_the_second_of_two_equal_cold_prompts_gives_its_duplicates_back():
    """Scenario A22: both transfer 7 pages; the tree keeps the first six, nothing is freed twice."""
    world = World()
    for room in (1, 2):
        world.d.call(client.Receive, PROMPT, room=room, source=("p",))
    senders = [Sender(world, room=room) for room in (1, 2)]
    assert totals(world.d) == (49, 14, 0, 0, 0)

    for sender in senders:
        sender.finish()

    first, second = [one for one in world.d.answers if isinstance(one, client.Received)]
    assert page_ids(first.pages)[:6] == page_ids(second.pages)[:6]
    assert page_ids(first.pages)[6] != page_ids(second.pages)[6]
    assert world.d.holds(second.pages, PROMPT)
    assert totals(world.d) == (55, 2, 6, 0, 0)
    assert [one.lock_ref for one in world.d.node.leases.tree.nodes()] == [2]


def test_the_second_of_two_equal_prompts_is_cached_when_the_first_fails():
    """Scenario A23."""
    world = World()
    for room in (1, 2):
        world.d.call(client.Receive, PROMPT, room=room, source=("p",))
    first, second = (Sender(world, room=room) for room in (1, 2))
    world.p.call(client.AbortSend, send=first.send, reason="failed")
    assert totals(world.d) == (56, 7, 0, 0, 0)

    second.finish()

    assert totals(world.d) == (56, 1, 6, 0, 0)


def test_a_warm_up_handoff_caches_nothing():
    """Scenario A37."""
    world = World()
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",), cache=False)
    sender.finish()
    assert totals(world.d) == (56, 7, 0, 0, 0)

    world.d.call(client.CommitAndRelease, tokens((500, 3)), lease=1)

    assert totals(world.d) == (63, 0, 0, 0, 0)


def test_a_first_token_that_ends_the_request_leaves_its_prompt_cached():
    """Scenario A33: one output token without KV; 96 tokens stay."""
    world = World()
    sender = Sender(world, FULL)
    world.d.call(client.Receive, FULL, room=7, source=("p",))
    sender.finish(b"eos")

    world.d.call(client.CommitAndRelease, lease=1)

    assert totals(world.d) == (57, 0, 6, 0, 6)


def test_five_turns_send_only_what_is_new():
    """Scenario A39: turn k is the last prompt, its output and 40 more tokens."""
    world = World(p_pages=128, d_pages=128)
    history = tokens((1, 40))
    for turn in range(5):
        sender = Sender(world, history, room=turn + 1)
        world.d.call(client.Receive, history, room=turn + 1, source=("p",), reserve_tokens=30)
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
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.finish()
    world.p.call(client.ReleaseLease, lease=sender.lease.lease)
    (lease,) = snapshot(world.p.node).leases
    assert (lease.state, lease.holders) == ("lingering", ("send 1",))
    assert totals(world.p) == (56, 7, 0, 0, 0)

    world.land_posts()

    assert totals(world.p) == (63, 0, 0, 0, 0)
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
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.advance(96)
    world.p.call(client.CommitLease, lease=sender.lease.lease)
    assert world.p.node.leases.leases[2].held_pages == 7
    free = totals(world.p)[0]

    world.land_posts()

    assert totals(world.p)[0] == free + 6
    sender.finish()
    world.land_posts()
    got = world.d.take()[-1]
    assert isinstance(got, client.Received)
    assert world.d.holds(got.pages, PROMPT)


# ---- failures ------------------------------------------------------------------------------------


def test_a_transfer_that_fails_frees_the_delta_and_keeps_the_prefix():
    """Scenario A20: exactly 3 pages come back, 64 tokens stay cached, the retry has them."""
    world = World()
    cached(world.d, tokens((1, 64)))
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    assert totals(world.d) == (56, 3, 4, 0, 0)

    world.p.call(client.AbortSend, send=sender.send, reason="out of memory")

    assert totals(world.d) == (59, 0, 4, 0, 4)
    assert [one.lock_ref for one in world.d.node.leases.tree.nodes()] == [0]
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.ABORTED
    assert failed.refusal.message == "the prefill engine gave up: out of memory"
    again = world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    assert again == client.Receiving(4, 2, 64)


def test_a_handshake_that_fails_leaves_both_trees_as_they_were():
    """Scenario A19: the peer never says Hello; at the deadline nothing was held."""
    world = World()
    cached(world.d, tokens((1, 64)))
    world.cut = {"p"}
    world.restart(world.d)
    world.d.attach()
    cached(world.d, tokens((1, 64)))
    nodes = [(one.id, one.hits, one.lock_ref) for one in world.d.node.leases.tree.nodes()]
    reply = world.d.call(client.Receive, PROMPT, room=7, source=("p",), deadline_s=0.5)
    assert reply is None

    world.pass_time(0.6)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.Failed)
    assert failed.refusal.code is Code.DEADLINE
    assert failed.refusal.message.startswith("waited 0.5 s for room: p has not said Hello yet")
    assert [(o.id, o.hits, o.lock_ref) for o in world.d.node.leases.tree.nodes()] == nodes
    assert totals(world.d) == (59, 0, 4, 0, 4)


def test_an_abort_before_anything_is_held_is_told_once():
    """Scenario A25: queued for room, then aborted by an operator."""
    world = World(d_pages=9)
    world.d.lease(tokens((5000, 100)))
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    world.d.take()

    report = world.d.ask(admin.AbortRoom(1, 7, "too slow"))

    assert report == admin.Report(1, {"receives": 1, "sends": 0}, ())
    (failed,) = world.d.take()
    assert isinstance(failed, client.Failed)
    assert failed.refusal.message == "an operator aborted it: too slow"
    assert world.d.grants == {}
    assert totals(world.d) == (1, 7, 0, 0, 0)


def test_an_abort_during_the_transfer_quarantines_the_pages_until_the_writer_settles():
    """Scenario A26: the prefix lock is dropped at once; the delta is nobody's until Settled."""
    world = World()
    cached(world.d, tokens((1, 64)))
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.advance(96)

    world.d.call(client.CancelReceive, receive=1)

    assert totals(world.d) == (56, 0, 4, 3, 4)
    (lease,) = snapshot(world.d.node).leases
    assert lease.state == "quarantined"
    assert lease.waiting_for == "p (p0000000) to settle, to restart, or a fence"
    assert world.p.node.prefiller.by_room[7].state is Prefill.DRAINING
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.CANCELLED

    world.land_posts()

    assert totals(world.d) == (59, 0, 4, 0, 4)
    failed = world.p.take()[-1]
    assert isinstance(failed, client.SendFailed)
    assert failed.refusal.message == "d gave up: cancelled"
    settled = Settled(world.p.incarnation, world.d.incarnation, 1, Outcome.ABORTED)
    world.inject(world.d, settled)
    assert totals(world.d) == (59, 0, 4, 0, 4), "a repeated Settled frees nothing"


def test_a_failed_post_settles_only_after_its_agent_is_destroyed():
    """Scenario A28: bytes in doubt stay in quarantine until no byte can land."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.advance(64)
    (flight,) = world.p.flights.values()
    world.p.land(flight, 1)

    world.hold_shells = True
    world.p.fail(flight, "transport error")
    world.p.report_next()
    assert world.p.node.peers.by_name["d"].agent is Agent.DROPPING
    assert world.p.node.prefiller.by_room[7].state is Prefill.DRAINING
    assert world.d.node.decoder.parts[1].state is Decode.RECEIVING
    world.hold_shells = False
    world.run()

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert (failed.refusal.code, failed.refusal.message) == (Code.POST_FAILED, "transport error")
    assert totals(world.d) == (63, 0, 0, 0, 0)
    assert world.p.node.peers.by_name["d"].agent is Agent.LOADED


def test_bytes_in_doubt_keep_their_pages_until_the_receiving_host_is_quiet():
    """Scenario A28: what a destroyed agent had sent may still be in the receiver's sockets."""
    world = World()
    world.hold_posts = world.hold_quiet = world.doubts = True
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.advance(64)
    (flight,) = world.p.flights.values()
    world.p.fail(flight, "transport error")
    world.run()
    assert world.d.node.decoder.parts == {}
    assert totals(world.d) == (56, 0, 0, 7, 0)

    world.d.land_late()
    world.d.be_quiet()
    world.run()

    assert totals(world.d) == (63, 0, 0, 0, 0)


def test_other_rooms_through_a_destroyed_agent_fail_too():
    world = World()
    world.hold_posts = True
    senders = [Sender(world, tokens((1000 * room, 50)), room) for room in (1, 2)]
    for room in (1, 2):
        world.d.call(client.Receive, tokens((1000 * room, 50)), room=room, source=("p",))
    for sender in senders:
        sender.advance(32)
    first, _ = world.p.flights.values()

    world.p.fail(first, "transport error")
    world.run()

    failed = [one.refusal for one in world.d.take() if isinstance(one, client.ReceiveFailed)]
    assert [(one.code, one.message) for one in failed] == [
        (Code.POST_FAILED, "transport error"),
        (Code.POST_FAILED, "agent destroyed"),
    ]


def test_a_writer_that_aborts_in_mid_chunk_is_heard_at_once():
    """Scenario B11: the decode engine knows it without a clock."""
    world = World()
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.advance(40)
    now_s = world.now_s

    world.p.call(client.AbortSend, send=sender.send, reason="engine died")

    assert isinstance(world.d.take()[-1], client.ReceiveFailed)
    assert world.now_s == now_s
    assert totals(world.d) == (63, 0, 0, 0, 0)


def test_a_restarted_writer_frees_the_quarantine_by_its_hello():
    """Scenario G5: a new incarnation is proof that the old one writes no more."""
    world = World()
    world.hold_posts = True
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.advance(64)
    world.d.call(client.CancelReceive, receive=1)
    assert totals(world.d) == (56, 0, 0, 7, 0)

    world.restart(world.p)
    world.pass_time(1)

    assert totals(world.d) == (63, 0, 0, 0, 0)
    assert world.d.node.peers.by_name["p"].incarnation == world.p.incarnation
    world.hold_posts = False
    world.p.attach()
    Sender(world).finish()
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    assert isinstance(world.d.take()[-1], client.Received)


def test_a_writer_that_restarts_under_a_wanted_room_fails_it_with_what_to_do():
    """Scenario G5."""
    world = World()
    Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))

    world.restart(world.p)
    world.pass_time(1)

    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.PEER_LOST
    assert failed.refusal.message == (
        "the prefill daemon restarted (p0000000 is gone): send it again"
    )
    assert totals(world.d) == (63, 0, 0, 0, 0)


def test_a_restarted_decode_side_ends_its_rooms_and_no_other():
    """Scenario G6: posts to it fail, the rooms of another decode node go on."""
    world = World(names=("d", "e"))
    d, e = world.d, world.sides["e"]
    world.hold_posts = True
    mine, other = Sender(world, room=7), Sender(world, room=8)
    d.call(client.Receive, PROMPT, room=7, source=("p",))
    e.call(client.Receive, PROMPT, room=8, source=("p",))
    for sender in (mine, other):
        sender.advance(64)

    world.restart(d)
    world.land_posts()

    failed = [one for one in world.p.take() if isinstance(one, client.SendFailed)]
    assert [(one.send, one.refusal.code) for one in failed] == [(mine.send, Code.PEER_LOST)]
    other.finish()
    world.land_posts()
    assert isinstance(e.take()[-1], client.Received)
    assert world.p.node.prefiller.by_room == {}
    world.pass_time(1)
    assert world.p.node.prefiller.last_word.by_handoff == {}


def test_a_fence_frees_what_drains_and_fails_what_was_posted():
    """The decode side's transfer process is replaced: nothing writes through the old one."""
    world = World()
    world.hold_posts = True
    drains, wanted = Sender(world, room=1), Sender(world, room=2)
    for room in (1, 2):
        world.d.call(client.Receive, PROMPT, room=room, source=("p",))
    for sender in (drains, wanted):
        sender.advance(64)
    world.d.call(client.CancelReceive, receive=1)
    assert totals(world.d) == (49, 7, 0, 7, 0)

    report = world.d.ask(admin.Fence(1))
    world.land_posts()

    assert report == admin.Report(1, {"quarantined_leases": 1, "quarantined_pages": 7}, ())
    assert totals(world.d) == (63, 0, 0, 0, 0)
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.POST_FAILED
    assert failed.refusal.message == (
        "d restarted its transfer process: generation 1 is over, 2 serves"
    )
    assert world.p.node.peers.by_name["d"].generation == 2


def test_a_dead_client_leaves_no_lease_and_its_writer_is_told():
    world = World()
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    sender.advance(64)

    world.d.hang_up(1)

    assert totals(world.d) == (63, 0, 0, 0, 0)
    failed = world.p.take()[-1]
    assert isinstance(failed, client.SendFailed)
    assert failed.refusal.message == "d gave up: client-gone"


# ---- what does not agree -------------------------------------------------------------------------


def tampered(world: World, **changes: object) -> Settled:
    """The answer to the decode side's Offer with these fields changed."""
    world.hold_wire = True
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
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
            "pages for tokens [0, 100), the delta is [16, 100)",
        ),
        (
            {"pages": b"\1\0\0\0" * 6},  # scenario B6
            Code.BAD_PAGES,
            "6 destination pages for 100 tokens of page_size=16: 7 are needed",
        ),
        (
            {"pages": b"\1\0\0\0" * 7},
            Code.BAD_PAGES,
            "destination pages must be distinct and above the null page",
        ),
        (
            {"pages": bytes(28)},
            Code.BAD_PAGES,
            "destination pages must be distinct and above the null page",
        ),
        (
            {"pages": b"abc"},
            Code.BAD_PAGES,
            "0 destination pages for 100 tokens of page_size=16: 7 are needed",
        ),
        (
            {"component": "swa"},
            Code.BAD_PAGES,
            "pages of component 'swa', this pool has 'kv'",
        ),
        ({"grants": ()}, Code.BAD_PAGES, "0 grants for a pool of one component"),
        (
            {"room": 0},
            Code.BAD_ROOM,
            "room 0 is not in 1..9223372036854775807",
        ),
    ],
)
def test_an_offer_that_is_misaligned_is_refused_with_the_numbers(changes, code, message):
    """Scenarios B6, B12, B13: refused loudly before a byte, never truncated."""
    world = World()

    settled = (
        tampered(world, **{k: v for k, v in changes.items() if k != "grants"})
        if ("grants" not in changes)
        else without_grants(world)
    )

    assert settled.outcome is Outcome.REFUSED
    assert settled.reason is not None
    assert (settled.reason.code, settled.reason.message, settled.reason.side) == (
        code,
        message,
        "p",
    )
    assert world.p.node.prefiller.by_room == {}
    world.hold_wire = False
    world.run()
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal == settled.reason
    assert totals(world.d) == (63, 0, 0, 0, 0)


def without_grants(world: World) -> Settled:
    world.hold_wire = True
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
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
        world.d.call(client.Receive, PROMPT, room=7, source=("p",))
        failed = world.d.take()[-1]
        assert isinstance(failed, client.ReceiveFailed)
        refusal = failed.refusal
        assert world.p.node.prefiller.by_room[7].state is Prefill.AWAIT_OFFER
    else:
        world.d.call(client.Receive, PROMPT, room=7, source=("p",))
        lease = world.p.lease(other)
        reply = world.p.call(client.Send, other, room=7, lease=lease.lease)
        assert isinstance(reply, client.Failed)
        refusal = reply.refusal
        assert world.p.node.prefiller.by_room == {}
    assert refusal.code is Code.PROMPT_MISMATCH
    assert refusal.message.startswith("both prompts have 100 tokens, but the digests differ (")
    assert totals(world.d) == (63, 0, 0, 0, 0)


def test_namespaces_that_differ_are_refused():
    """Scenario A9: the digest covers the namespace."""
    world = World()
    Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",), namespace="lora")
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.code is Code.PROMPT_MISMATCH


def test_prompts_of_other_lengths_are_refused_with_both():
    world = World()
    Sender(world, tokens((1, 99)))
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    failed = world.d.take()[-1]
    assert isinstance(failed, client.ReceiveFailed)
    assert failed.refusal.message == (
        "the decode side has a prompt of 100 tokens, the prefill engine one of 99"
    )


def test_a_closed_that_says_corrupt_fails_the_finish():
    world = World()
    sender = Sender(world)
    world.d.call(client.Receive, PROMPT, room=7, source=("p",))
    world.lost = {Closed}
    sender.finish()

    world.inject(world.p, Closed(world.d.incarnation, world.p.incarnation, 1, Outcome.CORRUPT))

    finished = world.p.answer(sender.finish_call)
    assert isinstance(finished, client.Finished)
    assert finished.failure is not None
    assert finished.failure.message == "corrupt"
    assert not world.held(Hello)
