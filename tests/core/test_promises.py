"""Promised pages: nobody else gets them, cached KV lies in them, and who was promised has them."""

from __future__ import annotations

import pytest

from kvd.core.audit.containment import Containment
from kvd.core.audit.invariants import faults
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import ID_BYTES, Tokens, count
from kvd.wire import admin, client
from tests.core.keeping import check, claim, opened, table_of, windows
from tests.core.world import PAGE, Side, World, tokens

PROMPT = tokens((1, 4 * PAGE))
OTHER = tokens((5_000, 4 * PAGE))


def side_of(pages: int) -> Side:
    """A node with so many pages, none of them null."""
    return World(p_pages=pages + 1).p


def cached(side: Side, *prompts: Tokens) -> None:
    """Nobody locks them."""
    for prompt in filter(None, prompts):
        lease = side.lease(prompt)
        side.write(lease.pages, prompt)
        side.call(client.CommitAndRelease, lease=lease.lease)


def refused(reply: client.Reply) -> Code:
    assert isinstance(reply, client.Failed), reply
    return reply.refusal.code


def test_a_promise_takes_no_page_and_what_is_cached_stays():
    side = side_of(10)
    cached(side, PROMPT)

    lease = side.lease(tokens((900, PAGE)), promise_tokens=9 * PAGE)

    assert count(lease.pages) == 1
    table = side.node.leases
    assert (table.pool.free_pages, table.tree.evictable_pages) == (5, 4)
    assert (table.promises.n_pages, table.headroom_pages) == (9, 0)
    assert side.call(client.MatchPrefix, PROMPT).tokens == 4 * PAGE


def test_what_is_promised_is_had_when_it_is_needed_and_cached_pages_give_way():
    side = side_of(10)
    cached(side, PROMPT)
    lease = side.lease(tokens((900, PAGE)), promise_tokens=9 * PAGE)

    for n_pages in range(2, 11):
        reply = side.call(client.ExtendLease, lease=lease.lease, n_tokens=PAGE)
        assert isinstance(reply, client.PageTable), reply
        assert side.node.leases.promises.n_pages == 10 - n_pages

    assert side.node.leases.tree.cached_pages == 0
    assert refused(side.call(client.ExtendLease, lease=lease.lease, n_tokens=PAGE)) is Code.NO_ROOM


def test_a_commit_brings_the_pages_of_promised_tokens():
    side = side_of(10)
    cached(side, PROMPT)
    prompt = tokens((900, PAGE))
    lease = side.lease(prompt, promise_tokens=9 * PAGE)
    side.write(lease.pages, prompt)

    reply = side.call(
        client.CommitAndExtend, lease=lease.lease, extend_tokens=9 * PAGE, upto_tokens=None
    )

    assert reply.first + count(reply.pages) == 10


def test_nobody_else_is_given_what_is_promised():
    side = side_of(10)
    mine = side.lease(tokens((900, PAGE)), promise_tokens=6 * PAGE)

    refusal = side.call(client.OpenLease, PROMPT, deadline_s=0.0)

    assert refused(refusal) is Code.DEADLINE
    assert "1 missing; 6 are promised to leases" in refusal.refusal.message
    other = side.lease(tokens((7_000, 3 * PAGE)))
    failed = side.call(client.ExtendLease, lease=other.lease, n_tokens=1)
    assert refused(failed) is Code.NO_ROOM
    assert "0 are obtainable (6 free, 0 evictable, 6 of them promised to leases)" in (
        failed.refusal.message
    )
    assert f"lease {mine.lease} of engine" in failed.refusal.message
    assert "6 promised" in failed.refusal.message
    assert refused(side.call(client.OpenArena, n_pages=1)) is Code.NO_ROOM


def test_a_hit_is_not_locked_where_its_pages_are_all_that_is_left_for_a_promise():
    """scenario A11: what can be had is read after the lock."""
    side = side_of(9)
    cached(side, PROMPT)  # 4 evictable, 5 free
    mine = side.lease(tokens((900, PAGE)), promise_tokens=6 * PAGE)  # 4 and 4, of which 6

    for kind in (client.OpenLease, client.HoldPrefix):
        fields = {"deadline_s": 0.0} if kind is client.OpenLease else {}
        reply = side.call(kind, PROMPT, **fields)
        assert isinstance(reply, client.Failed), reply
        assert "-" not in str(reply.refusal.numbers.get("headroom_pages")), reply.refusal
    assert side.node.leases.tree.evictable_pages == 4

    side.call(client.ExtendLease, lease=mine.lease, n_tokens=2 * PAGE)
    hit = side.call(client.HoldPrefix, PROMPT[: len(PROMPT) // 2])
    assert isinstance(hit, client.Leased)
    assert hit.prefix_tokens == 2 * PAGE


def test_who_waits_for_promised_pages_has_them_when_the_promise_ends():
    side = side_of(10)
    mine = side.lease(tokens((900, PAGE)), promise_tokens=8 * PAGE)
    call = side.calls + 1
    assert side.call(client.OpenLease, PROMPT, deadline_s=5.0) is None

    side.call(client.ReleaseLease, lease=mine.lease)

    assert isinstance(side.answer(call), client.Leased)


def test_a_promise_that_no_pool_of_this_size_could_keep_is_refused_at_once():
    reply = side_of(10).call(client.OpenLease, PROMPT, promise_tokens=7 * PAGE)

    assert refused(reply) is Code.TOO_LARGE


@pytest.mark.parametrize("end", ["release", "hang-up", "retract"])
def test_a_promise_ends_with_its_lease(end):
    side = side_of(10)
    lease = side.lease(PROMPT, promise_tokens=6 * PAGE)

    if end == "release":
        side.call(client.ReleaseLease, lease=lease.lease)
    elif end == "hang-up":
        side.hang_up()
    else:
        side.call(client.RetractLease, lease=lease.lease, keep="nothing")

    assert side.node.leases.promises.n_pages == 0
    assert side.node.leases.headroom_pages == 10


def test_a_lease_that_resumes_is_promised_what_it_was():
    side = side_of(10)
    lease = side.lease(PROMPT, promise_tokens=6 * PAGE)
    side.call(client.ExtendLease, lease=lease.lease, n_tokens=PAGE)
    side.call(client.RetractLease, lease=lease.lease, keep="nothing")
    other = side.lease(OTHER)

    call = side.calls + 1
    assert side.call(client.ResumeLease, lease=lease.lease, deadline_s=5.0) is None
    side.call(client.ReleaseLease, lease=other.lease)

    assert isinstance(side.answer(call), client.Resumed)
    assert side.node.leases.promises.n_pages == 5
    reply = side.call(client.ExtendLease, lease=lease.lease, n_tokens=5 * PAGE)
    assert isinstance(reply, client.PageTable)


def test_a_lease_that_only_a_send_holds_is_promised_nothing():
    world = World(p_pages=12)
    lease = world.p.lease(PROMPT, promise_tokens=5 * PAGE)
    world.p.call(client.SendRequest, PROMPT, room=3, lease=lease.lease)

    world.p.call(client.ReleaseLease, lease=lease.lease)

    assert lease.lease in world.p.node.leases.leases
    assert world.p.node.leases.promises.n_pages == 0


def test_a_commit_of_pages_that_its_engine_goes_on_with_locks_none_that_are_promised():
    side = side_of(12)
    cached(side, PROMPT)
    twin = side.call(client.OpenLease, PROMPT, promise_tokens=0, cache=True, deadline_s=0.0)
    side.call(client.ReleaseLease, lease=twin.lease)
    # Computed beside the tree: what is cached of it came meanwhile.
    table = side.node.leases
    table.evictor.flush()
    twin = side.lease(PROMPT)
    side.write(twin.pages, PROMPT)
    cached(side, PROMPT)
    mine = side.lease(tokens((900, PAGE)), promise_tokens=7 * PAGE)
    assert table.headroom_pages == 0

    side.call(client.CommitUpTo, lease=twin.lease, upto_tokens=4 * PAGE, swaps=False)

    assert table.leases[twin.lease].owned == 0
    reply = side.call(client.ExtendLease, lease=mine.lease, n_tokens=7 * PAGE)
    assert isinstance(reply, client.PageTable)


def test_pages_that_are_found_broken_end_the_youngest_promises_first():
    side = side_of(12)
    old = side.lease(tokens((900, PAGE)), promise_tokens=5 * PAGE)
    young = side.lease(tokens((950, PAGE)), promise_tokens=5 * PAGE)
    table = side.node.leases
    table.pool.condemn(table.pool.free_slice(0, 1))

    said = table.promises.cut()

    assert said == [f"lease {young.lease} is promised 5 pages less"]
    assert table.leases[old.lease].promised_pages == 5
    reply = side.call(client.ExtendLease, lease=young.lease, n_tokens=5 * PAGE)
    assert refused(reply) is Code.NO_ROOM
    reply = side.call(client.ExtendLease, lease=old.lease, n_tokens=5 * PAGE)
    assert isinstance(reply, client.PageTable)


def test_a_broken_count_of_promises_is_found_and_counted_again():
    side = side_of(12)
    side.lease(PROMPT, promise_tokens=5 * PAGE)
    side.node.leases.promises.n_pages = 1

    (fault,) = faults(side.node)
    assert fault.rule == "I10"
    assert Containment(side.node).contain(fault) == "counted again"
    assert side.node.leases.promises.n_pages == 5


def test_a_receive_is_promised_room_for_what_it_generates():
    world = World(d_pages=11)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), promise_tokens=6 * PAGE)
    assert world.d.node.leases.promises.n_pages == 6
    assert refused(world.d.call(client.OpenLease, OTHER, deadline_s=0.0)) is Code.DEADLINE

    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    world.p.call(client.HandOver, room=7, lease=lease.lease)
    (received,) = [one for one in world.d.take() if isinstance(one, client.Received)]

    reply = world.d.call(client.ExtendLease, lease=received.lease, n_tokens=6 * PAGE)
    assert isinstance(reply, client.PageTable)


def test_a_receive_that_is_asked_again_has_the_promise_of_the_first_call():
    d = World(d_pages=20).d
    asked = {"room": 7, "source": ("p",), "request_id": "a", "promise_tokens": 2 * PAGE}
    first = d.call(client.ReceiveRequest, PROMPT, **asked)

    again = d.call(client.ReceiveRequest, PROMPT, **asked)
    more = d.call(client.ReceiveRequest, PROMPT, **{**asked, "promise_tokens": 3 * PAGE})

    assert (again.receive, again.promised_tokens) == (first.receive, 2 * PAGE)
    assert refused(more) is Code.BAD_REQUEST
    assert d.node.leases.promises.n_pages == 2


@pytest.mark.parametrize("n_cached", [0, 2, 4])
def test_a_pull_is_promised_pages_behind_the_whole_prompt(n_cached):
    """Of what the source has, of a part, and where nothing has to come."""
    world = World(d_pages=20)
    cached(world.p, Tokens(PROMPT[: n_cached * PAGE * ID_BYTES]))

    world.d.call(client.ReceiveRequest, PROMPT, room=0, source=("p",), promise_tokens=3 * PAGE)

    (received,) = [one for one in world.d.take() if isinstance(one, client.Received)]
    assert count(received.pages) == 4
    assert world.d.node.leases.leases[received.lease].promised_pages == 3
    reply = world.d.call(client.ExtendLease, lease=received.lease, n_tokens=3 * PAGE)
    assert isinstance(reply, client.PageTable)


def test_a_draining_node_keeps_what_it_has_promised():
    side = side_of(10)
    lease = side.lease(PROMPT, promise_tokens=6 * PAGE)
    side.ask(admin.Drain(1, "upgrade"))
    assert refused(side.call(client.OpenLease, OTHER)) is Code.DRAINING

    reply = side.call(client.ExtendLease, lease=lease.lease, n_tokens=6 * PAGE)

    assert isinstance(reply, client.PageTable)


def test_pages_in_quarantine_are_promised_no_more():
    world = World(d_pages=14)
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",), promise_tokens=6 * PAGE)
    lease = world.p.lease(PROMPT)
    world.p.write(lease.pages, PROMPT)
    world.p.call(client.HandOver, room=7, lease=lease.lease)
    (receiving,) = [one for one in world.d.take() if isinstance(one, client.Receiving)]
    assert receiving.promised_tokens == 6 * PAGE

    world.d.call(client.CancelReceive, receive=receiving.receive)

    (held,) = world.d.node.leases.leases.values()
    assert held.quarantine is not None
    assert (held.promised_pages, world.d.node.leases.promises.n_pages) == (0, 0)


def test_windows_are_promised_too_and_what_a_slide_gives_back_is_counted_again():
    table = table_of(4, 40, window=8, swa=12)
    lease = opened(table, claim(tokens((1, 8)), step=4, promise=24))
    held = windows(table)
    assert held.promised_pages == held.growth(lease, 32)

    for upto in range(4, 32, 4):
        if upto >= 8:
            assert table.grants.extend(lease, 4) is None, upto
        assert table.grants.slide(lease, upto) is None
        assert held.promised_pages == held.growth(lease, 32)
        assert held.headroom_pages >= 0
        check(table)


def test_operators_see_what_is_promised_and_to_whom():
    side = side_of(10)
    lease = side.lease(PROMPT, promise_tokens=6 * PAGE)

    report = snapshot(side.node)
    (row,), (pool,) = report.leases, report.pools
    assert (row.promised_pages, row.promised_tokens, pool.promised_pages) == (6, 6 * PAGE, 6)
    why = side.ask(admin.Why(1, "lease", lease.lease))
    assert "promised pages for its first 160 tokens: 6 of kv to come" in why.facts
    side.call(client.ExtendLease, lease=lease.lease, n_tokens=6 * PAGE)
    (row,) = snapshot(side.node).leases
    assert (row.promised_pages, row.promised_tokens) == (0, 0)
