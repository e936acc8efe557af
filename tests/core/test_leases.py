"""Leases of one session, and what no other may do with them."""

from __future__ import annotations

import pytest

from kvd.errors import Code
from kvd.types import count, page_ids
from kvd.wire import client
from tests.core.sentences import sentence_of
from tests.core.world import PAGE, World, tokens

PROMPT = tokens((1, 100))


of_a_lease = pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (client.ReleaseLease, {}),
        (client.CommitLease, {}),
        (client.CommitAndRelease, {}),
        (client.CommitUpTo, {"upto_tokens": 16}),
        (client.ReleaseUpTo, {"upto_tokens": 16}),
        (client.SayWritten, {"upto_tokens": 16}),
        (client.ExtendLease, {"n_tokens": 16}),
        (client.SendRequest, {"room": 9}),
    ],
)


@of_a_lease
def test_the_lease_of_a_prompt_that_is_still_arriving_belongs_to_no_engine(kind, fields):
    world = World()
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    (lease,) = world.d.node.leases.leases

    toks = PROMPT if kind is client.SendRequest else b""
    reply = world.d.call(kind, toks, lease=lease, **fields)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.UNKNOWN_LEASE
    assert list(world.d.node.leases.leases) == [lease]


@of_a_lease
def test_a_lease_of_another_session_is_unknown(kind, fields):
    world = World()
    other = world.p.attach("other")
    lease = world.p.lease(PROMPT)

    toks = PROMPT if kind is client.SendRequest else b""
    reply = world.p.call(kind, toks, session=other, lease=lease.lease, **fields)

    assert reply == client.Failed(reply.call, reply.refusal)
    assert reply.refusal.code is Code.UNKNOWN_LEASE
    assert reply.refusal.message == (
        f"session {other} holds no lease 1: it was released, or never its own"
    )


def test_a_lease_of_a_cold_prompt_holds_the_pages_of_all_its_tokens():
    """scenario A1: 100 tokens are 7 pages, the last with 4 tokens."""
    world = World()

    lease = world.p.lease(PROMPT)

    assert lease == client.Leased(1, 1, 0, lease.pages)
    assert page_ids(lease.pages) == [57, 58, 59, 60, 61, 62, 63]
    assert world.p.node.leases.pool.free_pages == 56


def test_commit_caches_whole_pages_and_leaves_the_tail_to_the_lease():
    """scenario R1: 40 tokens are 32 in the tree and 8 with their owner."""
    world = World()
    prompt = tokens((1, 40))
    lease = world.p.lease(prompt)

    reply = world.p.call(client.CommitLease, lease=lease.lease)

    assert reply == client.PageTable(2, 0, lease.pages)
    table = world.p.node.leases
    assert (table.tree.cached_pages, table.leases[1].held_pages) == (2, 1)
    assert world.p.call(client.ReleaseLease, lease=lease.lease) == client.Done(3)
    assert (table.tree.evictable_pages, table.pool.free_pages) == (2, 61)


def test_commit_swaps_pages_that_the_tree_has_already():
    """scenario A22: the second commit of a prompt gives its six duplicates back."""
    world = World()
    first, second = world.p.lease(PROMPT), world.p.lease(PROMPT)
    world.p.call(client.CommitLease, lease=first.lease)

    reply = world.p.call(client.CommitLease, lease=second.lease)

    assert isinstance(reply, client.PageTable)
    assert reply.first == 0
    assert page_ids(reply.pages)[:6] == page_ids(first.pages)[:6]
    assert page_ids(reply.pages)[6:] == page_ids(second.pages)[6:]
    table = world.p.node.leases
    assert [node.lock_ref for node in table.tree.nodes()] == [2]
    assert table.pool.free_pages == 63 - 6 - 1 - 1


def test_commit_beyond_the_pages_of_the_lease_is_refused_with_both_numbers():
    world = World()
    lease = world.p.lease(tokens((1, 10)))

    reply = world.p.call(client.CommitLease, tokens((500, 7)), lease=lease.lease)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert reply.refusal.numbers == {"tokens": 17, "pages": 1}
    assert count(world.p.node.leases.leases[1].tokens) == 10


def test_extend_holds_a_page_only_when_the_tokens_need_one():
    world = World()
    lease = world.p.lease(tokens((1, 10)))

    within = world.p.call(client.ExtendLease, lease=lease.lease, n_tokens=6)
    beyond = world.p.call(client.ExtendLease, lease=lease.lease, n_tokens=1)

    assert within == client.PageTable(2, 1, b"")
    assert isinstance(beyond, client.PageTable)
    assert (beyond.first, count(beyond.pages)) == (1, 1)


def test_extend_by_a_negative_number_is_refused():
    world = World()
    lease = world.p.lease(tokens((1, 10)))

    reply = world.p.call(client.ExtendLease, lease=lease.lease, n_tokens=-1)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.BAD_REQUEST
    assert reply.refusal.message == sentence_of("extend by a negative number is refused")


def test_extend_without_room_names_the_numbers_and_the_holders():
    world = World(p_pages=9)
    lease = world.p.lease(PROMPT)

    reply = world.p.call(client.ExtendLease, lease=lease.lease, n_tokens=100)

    assert isinstance(reply, client.Failed)
    assert reply.refusal.code is Code.NO_ROOM
    assert reply.refusal.message == sentence_of(
        "extend without room names the numbers and the holders"
    )
    assert reply.refusal.numbers == {"needed_pages": 6, "headroom_pages": 1}


def test_a_warm_up_request_caches_nothing():
    """scenario A37: ``cache=False`` leaves the tree empty, and a flush finds nothing."""
    world = World()
    lease = world.p.lease(PROMPT, cache=False)

    world.p.call(client.CommitAndRelease, lease=lease.lease)

    table = world.p.node.leases
    assert list(table.tree.nodes()) == []
    assert table.pool.free_pages == table.capacity_pages


def test_equal_tokens_of_another_namespace_are_not_matched():
    """scenario A9: the namespace holds what isolates equal tokens (LoRA, cache salt)."""
    world = World()
    lease = world.p.lease(PROMPT, namespace="lora-1")
    world.p.call(client.CommitAndRelease, lease=lease.lease)

    assert world.p.lease(PROMPT, namespace="lora-2").prefix_tokens == 0
    assert world.p.lease(PROMPT, namespace="lora-1").prefix_tokens == 96


def test_text_shared_up_to_the_middle_of_a_page_is_matched_in_whole_pages():
    """scenario A3: 70 common tokens match 64."""
    world = World()
    lease = world.p.lease(tokens((1, 70), (900, 26)))
    world.p.call(client.CommitAndRelease, lease=lease.lease)

    assert world.p.lease(PROMPT).prefix_tokens == 64


def test_a_prompt_shorter_than_a_page_caches_nothing_until_its_page_is_whole():
    """scenario A10: 10 tokens cache nothing; with 6 more they are a page."""
    world = World()
    short = tokens((1, 10))
    first = world.p.lease(short)
    world.p.call(client.CommitAndRelease, lease=first.lease)
    assert world.p.node.leases.tree.cached_pages == 0

    second = world.p.lease(short)
    world.p.call(client.CommitAndRelease, tokens((11, 6)), lease=second.lease)

    assert world.p.node.leases.tree.cached_pages == 1
    assert count(first.pages) * PAGE == 16


def test_five_turns_of_a_conversation_leave_nothing_protected():
    """scenario A39: each turn is the last one, its output and 40 more tokens."""
    world = World(p_pages=128)
    table = world.p.node.leases
    history = tokens((1, 40))
    for turn in range(5):
        lease = world.p.lease(history, reserve_tokens=30)
        assert lease.prefix_tokens == (count(history) - 40) // PAGE * PAGE
        output = tokens((10_000 * (turn + 1), 30))
        world.p.call(client.CommitAndRelease, output, lease=lease.lease)
        assert table.tree.protected_pages == 0
        assert table.pool.free_pages + table.tree.evictable_pages == table.capacity_pages
        history = history + output + tokens((10_000 * (turn + 1) + 500, 40))
