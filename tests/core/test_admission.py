"""The one queue in front of the pool: who is admitted, in which order, and who waits for what."""

from __future__ import annotations

from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import page_ids
from kvd.wire import admin, client, events
from tests.core.engines import PageTotals, totals
from tests.core.sentences import sentence_of
from tests.core.world import Side, World, tokens


def cached(side: Side, toks: bytes) -> None:
    """These tokens were leased, committed and released before."""
    lease = side.lease(toks)
    side.call(client.CommitAndRelease, lease=lease.lease)


def test_headroom_is_read_after_the_prefix_is_locked():
    """scenario A11: with 32 tokens in reserve the number from before the lock would admit."""
    world = World(d_pages=12)
    d = world.d
    d.lease(tokens((9000, 32)))
    cached(d, tokens((1, 64)))
    cached(d, tokens((7000, 16)))
    assert totals(d) == PageTotals(free=4, held=2, cached=5, evictable=5)
    prompt = tokens((1, 128))

    too_much = d.call(client.OpenLease, prompt, reserve_tokens=32, deadline_s=1.0)

    assert too_much is None
    (waiting,) = snapshot(d.node).waiting
    assert (waiting.needed_pages, waiting.missing_pages, waiting.budget) == (6, 1, "kv")
    assert waiting.why == sentence_of("headroom is read after the prefix is locked")
    assert totals(d) == PageTotals(free=4, held=2, cached=5, evictable=5)
    assert [node.lock_ref for node in d.node.leases.tree.nodes()] == [0, 0]
    world.pass_time(1.1)

    fits = d.call(client.OpenLease, prompt)
    assert isinstance(fits, client.Leased)
    assert fits.prefix_tokens == 64
    assert totals(d) == PageTotals(free=0, held=6, cached=5, evictable=1)


def test_a_request_that_can_never_fit_is_refused_at_once():
    """scenario A16."""
    world = World(d_pages=10)
    reply = world.d.call(client.OpenLease, tokens((1, 145)))
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.TOO_LARGE
    assert reply.refusal.numbers == {"needed_pages": 10, "pool_pages": 9}


def test_the_first_that_does_not_fit_blocks_a_small_one_behind_it():
    """scenario A13: a small late request never overtakes, so a large one cannot starve."""
    world = World(d_pages=10)
    d = world.d
    holder = d.lease(tokens((1, 100)))

    large = d.call(client.OpenLease, tokens((5000, 48)))
    small = d.call(client.OpenLease, tokens((6000, 1)))

    assert (large, small) == (None, None)
    assert [one.why for one in snapshot(d.node).waiting] == [
        "needs 3 pages of kv beyond what is cached of it, 2 obtainable: 1 missing",
        "its turn: 1 before it",
    ]
    d.take()
    d.call(client.ReleaseLease, lease=holder.lease)
    assert [(type(one), one.call) for one in d.take()] == [
        (client.Done, 4),
        (client.Leased, 2),
        (client.Leased, 3),
    ]


def test_higher_priority_goes_first_and_equals_in_order():
    """scenario A13: sorted before anything is matched."""
    world = World(d_pages=10)
    d = world.d
    holder = d.lease(tokens((1, 144)))
    for first, priority in ((2000, 0), (3000, 1), (4000, 1), (5000, -1)):
        d.call(client.OpenLease, tokens((first, 16)), priority=priority)
    d.take()

    d.call(client.ReleaseLease, lease=holder.lease)

    assert [one.call for one in d.take()] == [6, 3, 4, 2, 5]


def looks(side: Side, toks: bytes) -> int:
    """How often the node of these cached tokens was ever locked, in vain or not."""
    (node,) = [node for node in side.node.leases.tree.nodes() if toks.startswith(bytes(node.edge))]
    return node.hits


def test_a_blocked_head_is_not_matched_again_until_enough_pages_came_back():
    world = World(d_pages=10)
    d = world.d
    prompt = tokens((5000, 80))
    cached(d, prompt[: 16 * 4])
    small = d.lease(tokens((1, 16)))
    holder = d.lease(tokens((1000, 100)))
    assert d.call(client.OpenLease, prompt) is None
    before = looks(d, prompt)

    for first in range(6000, 6010):
        assert d.call(client.OpenLease, tokens((first, 16))) is None
    d.call(client.MatchPrefix, prompt)
    world.pass_time(1)
    assert looks(d, prompt) == before
    d.call(client.ReleaseLease, lease=small.lease)
    assert looks(d, prompt) == before, "one page came back, two are missing"
    d.call(client.ReleaseLease, lease=holder.lease)
    assert looks(d, prompt) == before + 1, "once, to be admitted"


def test_a_blocked_head_is_matched_again_when_more_may_be_cached_of_it():
    world = World(d_pages=10)
    d = world.d
    prompt = tokens((5000, 80))
    twin = d.lease(prompt[: 4 * 64])
    d.lease(tokens((1, 64)))
    assert d.call(client.OpenLease, prompt) is None

    d.call(client.CommitAndRelease, lease=twin.lease)

    (leased,) = [one for one in d.take() if isinstance(one, client.Leased)][-1:]
    assert (leased.prefix_tokens, len(page_ids(leased.pages))) == (64, 5)


def test_what_one_step_admits_is_given_room_by_one_eviction():
    world = World(d_pages=13)
    d = world.d
    engine = d.attach("doomed")
    d.lease(tokens((7000, 64)))
    for first in (1, 2000):
        cached(d, tokens((first, 64)))
        d.call(client.OpenLease, tokens((first, 64)), session=engine)
    for first in (3000, 4000, 5000):
        assert d.call(client.OpenLease, tokens((first, 48))) is None
    before = len(d.events)

    d.hang_up(engine)

    new = d.events[before:]
    evictions = [one for one in new if isinstance(one, events.Evicted)]
    assert [(one.pages, one.nodes) for one in evictions] == [(8, 2)]
    assert [one.held_pages for one in new if isinstance(one, events.LeaseOpened)] == [3, 3]


def overtaking(n: int) -> World:
    """A node with two free pages, in front of whose pool a request for three waits."""
    world = World(d_pages=10, overtakers=n)
    world.d.lease(tokens((1, 100)))
    assert world.d.call(client.OpenLease, tokens((5000, 48))) is None
    return world


def test_small_requests_overtake_a_large_one_as_often_as_configured():
    """scenario A13, the other policy: bounded, so that the large one cannot starve."""
    world = overtaking(2)
    d = world.d

    one = d.lease(tokens((6000, 16)))
    d.call(client.ReleaseLease, lease=one.lease)
    two = d.lease(tokens((6100, 16)))
    d.call(client.ReleaseLease, lease=two.lease)
    three = d.call(client.OpenLease, tokens((6200, 16)))

    assert three is None
    large, small = snapshot(d.node).waiting
    assert (large.overtaken, large.ahead) == (2, 0)
    assert (small.why, small.ahead) == ("its turn: 1 before it", 1)


def test_a_request_as_large_as_the_blocked_one_overtakes_nobody():
    world = overtaking(2)
    assert world.d.call(client.OpenLease, tokens((6000, 48))) is None
    assert [one.overtaken for one in snapshot(world.d.node).waiting] == [0, 0]


def test_a_waiting_request_names_who_holds_what_it_lacks():
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((1, 100)))
    d.call(client.OpenLease, tokens((5000, 64)))
    world.pass_time(1)

    (waiting,) = snapshot(d.node).waiting

    assert waiting.held_by == ("lease 1 of engine (pid 1001) for lease, 1.0 s (7 pages)",)


def test_who_locks_most_of_what_is_cached_is_named_before_who_holds_little():
    """After a receive its pages are the tree's, and only the lock keeps others from them."""
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((5000, 16)))
    cached(d, tokens((1, 96)))
    d.lease(tokens((1, 97)))
    d.call(client.OpenLease, tokens((6000, 64)))

    (waiting,) = snapshot(d.node).waiting

    assert waiting.held_by == (
        "lease 3 of engine (pid 1001) for lease, 0.0 s (1 pages, locks 6 cached)",
        "lease 1 of engine (pid 1001) for lease, 0.0 s (1 pages)",
    )


def test_why_a_queued_room_waits_is_said_with_the_holders():
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((1, 100)))
    d.call(client.ReceiveRequest, tokens((5000, 64)), room=7, source=("p",))

    answer = d.ask(admin.Why(1, "room", 7))

    assert isinstance(answer, admin.Because)
    assert answer.facts[-2:] == (
        "in the queue: needs 4 pages of kv beyond what is cached of it, 2 obtainable: 2 missing",
        "held by lease 1 of engine (pid 1001) for lease, 0.0 s (7 pages)",
    )


def test_eviction_for_one_request_does_not_make_the_next_look_again():
    """Evicting turns one kind of headroom into another: nobody may hope because of it."""
    world = World(d_pages=10)
    d = world.d
    prompt = tokens((5000, 144))
    cached(d, tokens((1, 96)))
    cached(d, prompt[: 16 * 4])
    holder = d.lease(tokens((1000, 32)))
    assert d.call(client.OpenLease, prompt) is None
    before = looks(d, prompt)

    evicted = d.ask(admin.Evict(1, pages=3))

    assert isinstance(evicted, admin.Report)
    assert evicted.changed == {"evicted_pages": 6}
    assert looks(d, prompt) == before
    assert holder.lease == 3


def test_a_receive_that_waits_for_its_peer_is_passed_over():
    world = World(d_pages=10)
    d = world.d
    world.cut = {"p"}
    world.pass_time(4)

    waits = d.call(client.ReceiveRequest, tokens((1, 100)), room=7, source=("p",))
    lease = d.call(client.OpenLease, tokens((5000, 16)))

    assert waits is None
    assert isinstance(lease, client.Leased)
    assert snapshot(d.node).waiting[0].why == sentence_of(
        "a receive that waits for its peer is passed over"
    )


def test_a_full_queue_refuses_the_next_with_both_numbers():
    """scenario G18: what is exhausted delays up to a limit, and then says so."""
    world = World(d_pages=10, max_queue=2)
    d = world.d
    d.lease(tokens((1, 144)))
    for first in (2000, 3000):
        assert d.call(client.OpenLease, tokens((first, 16))) is None

    reply = d.call(client.OpenLease, tokens((4000, 16)))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.NO_ROOM
    assert reply.refusal.message == sentence_of("a full queue refuses the next with both numbers")


def test_who_waits_until_the_deadline_is_told_what_for():
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((1, 100)))
    d.call(client.OpenLease, tokens((5000, 64)), deadline_s=0.5)

    world.pass_time(0.6)

    reply = d.answer(2)
    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.DEADLINE
    assert reply.refusal.message == sentence_of("who waits until the deadline is told what for")


def test_the_end_of_a_wait_lets_the_next_one_in():
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((1, 100)))
    d.call(client.OpenLease, tokens((5000, 64)), deadline_s=0.5)
    assert d.call(client.OpenLease, tokens((6000, 32))) is None

    world.pass_time(0.6)

    assert isinstance(d.answer(3), client.Leased)


def test_quarantined_pages_are_no_headroom():
    """scenario A26: a request waits for them until the writer has settled."""
    world = World(d_pages=10)
    d = world.d
    d.call(client.ReceiveRequest, tokens((1, 100)), room=7, source=("p",))
    world.cut = {"p"}
    d.call(client.CancelReceive, receive=1)
    waits = d.call(client.OpenLease, tokens((5000, 64)))
    assert waits is None
    assert snapshot(d.node).pools[0].quarantined_pages == 7

    world.cut = set()
    world.pass_time(1.5)

    assert isinstance(d.answer(3), client.Leased)


def test_a_waiting_request_is_an_event_with_the_numbers():
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((1, 100)))
    d.call(client.OpenLease, tokens((5000, 64)))

    (waiting,) = [one for one in d.events if isinstance(one, events.Waiting)]

    assert waiting == events.Waiting(
        waiting.seq, 100.0, session=1, room=0, needed_pages=4, headroom_pages=2
    )


def test_extend_takes_evictable_pages_and_never_those_under_a_lock():
    world = World(d_pages=10)
    d = world.d
    cached(d, tokens((1, 64)))
    lease = d.lease(tokens((1, 64)))
    other = d.lease(tokens((7000, 64)))
    assert totals(d) == PageTotals(free=1, held=4, cached=4)

    one = d.call(client.ExtendLease, lease=lease.lease, n_tokens=16)
    two = d.call(client.ExtendLease, lease=lease.lease, n_tokens=16)

    assert isinstance(one, client.PageTable)
    assert isinstance(two, client.Failed)
    assert two.refusal.code is Code.NO_ROOM
    assert len(page_ids(other.pages)) == 4


# ---- flush and evict -----------------------------------------------------------------------------


def test_flush_drops_what_nobody_locks_and_names_the_holders_of_the_rest():
    """scenario A40."""
    world = World()
    d = world.d
    cached(d, tokens((1, 64)))
    cached(d, tokens((7000, 32)))
    d.lease(tokens((1, 64)))
    kept = ("node 2 kept, 4 pages: lease 3 of engine (pid 1001) for lease, 0.0 s",)

    strict = d.ask(admin.Flush(1, mode="strict"))
    assert strict == admin.Report(1, {"freed_pages": 0}, kept)
    assert totals(d) == PageTotals(free=57, cached=6, evictable=2)

    flushed = d.ask(admin.Flush(1))
    assert flushed == admin.Report(1, {"freed_pages": 2, "locked_pages": 4}, kept)
    assert totals(d) == PageTotals(free=59, cached=4)


def test_a_strict_flush_of_an_unlocked_tree_frees_all():
    """scenario A37."""
    world = World()
    cached(world.d, tokens((1, 64)))
    reply = world.d.ask(admin.Flush(1, mode="strict"))
    assert reply == admin.Report(1, {"freed_pages": 4, "locked_pages": 0}, ())
    assert totals(world.d) == PageTotals(free=63)


def test_evict_says_how_much_a_lock_kept_from_it():
    world = World()
    d = world.d
    cached(d, tokens((1, 64)))
    cached(d, tokens((7000, 32)))
    d.lease(tokens((1, 64)))

    assert d.ask(admin.Evict(1, pages=3)) == admin.Report(
        1,
        {"evicted_pages": 2},
        ("1 of 3 pages: the rest of the cache is locked (4 pages)",),
        notes=("node 3 goes, 2 pages, tokens to 32, last used 0.0 s ago",),
    )


def test_a_caller_that_goes_away_leaves_the_queue():
    """scenario A25: nothing was held for it, and who waited behind it goes ahead."""
    world = World(d_pages=10)
    d = world.d
    full = d.lease(tokens((1, 9 * 16)))
    assert d.call(client.OpenLease, tokens((5000, 9 * 16))) is None
    waiting = d.calls
    assert d.call(client.OpenLease, tokens((7000, 16))) is None
    behind = d.calls

    done = d.call(client.CancelCall, of=waiting)

    assert isinstance(done, client.Done)
    (failed,) = [one for one in d.answers if getattr(one, "call", None) == waiting]
    assert failed.refusal.code is Code.CANCELLED
    d.call(client.ReleaseLease, lease=full.lease)
    assert [type(one) for one in d.answers if getattr(one, "call", None) == behind] == [
        client.Leased
    ]
    assert isinstance(d.call(client.CancelCall, of=waiting), client.Done)
