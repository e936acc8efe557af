"""What an engine says to be written is shared, and nothing beyond it, whatever ends the lease."""

from __future__ import annotations

import pytest

from kvd.core.audit.invariants import violations
from kvd.core.inspect.schema import LEASE
from kvd.core.leases.written import MAX_RANKS
from kvd.errors import Code
from kvd.types import Tokens, count, page_ids
from kvd.wire import admin, client, events
from tests.core.families import SPECS
from tests.core.world import PAGE, Side, World, tokens

PROMPT = tokens((1, 320))


def matched(side: Side, toks: Tokens = PROMPT, namespace: str = "") -> int:
    reply = side.call(client.MatchPrefix, toks, namespace=namespace)
    assert isinstance(reply, client.MatchReply)
    return reply.tokens


def say(side: Side, lease: client.Leased, upto: int, rank: int = 0, ranks: int = 1):
    return side.call(client.SayWritten, lease=lease.lease, upto_tokens=upto, rank=rank, ranks=ranks)


def refused(reply: client.Reply | None) -> dict[str, object]:
    assert isinstance(reply, client.Failed), reply
    assert reply.refusal.code is Code.BAD_REQUEST
    return dict(reply.refusal.numbers)


# ---- commits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [client.CommitLease, client.CommitAndRelease])
def test_a_commit_shares_no_more_than_was_said_to_be_written(kind):
    side = World().p
    lease = side.lease(PROMPT)
    say(side, lease, 100)

    side.call(kind, lease=lease.lease)

    assert matched(side) == 96


def test_a_commit_is_the_word_about_all_tokens_where_nothing_was_said():
    side = World().p
    lease = side.lease(PROMPT)

    side.call(client.CommitLease, lease=lease.lease)

    assert matched(side) == 320


@pytest.mark.parametrize("said", [False, True])
def test_a_lease_with_nothing_written_shares_nothing_when_it_says_so(said):
    side = World().p
    lease = side.lease(PROMPT)
    if said:
        say(side, lease, 0)

    side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=None if said else 0)

    assert matched(side) == 0
    assert side.node.leases.leases[lease.lease].held_pages == 20


def test_a_running_prefill_shares_its_chunks_with_others():
    side = World().p
    lease = side.lease(PROMPT)
    found = []

    for upto in (50, 64, 64, 200, 320):
        side.write(lease.pages, PROMPT, end=upto)
        reply = side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=upto)
        assert isinstance(reply, client.PageTable)
        found.append(matched(side))

    assert found == [48, 64, 64, 192, 320]
    other = side.lease(PROMPT)
    assert other.prefix_tokens == 320
    assert side.holds(other.pages, PROMPT)


def test_a_commit_that_extends_does_both_and_its_new_tokens_may_lie_in_the_new_pages():
    side = World().p
    lease, more = side.lease(PROMPT), tokens((900, 20))

    reply = side.call(
        client.CommitAndExtend, more, lease=lease.lease, extend_tokens=32, upto_tokens=320
    )

    assert isinstance(reply, client.PageTable)
    record = side.node.leases.leases[lease.lease]
    assert (count(record.page_table), record.room_tokens) == (22, 352)
    assert reply.first <= 20
    assert count(reply.pages) == 22 - reply.first
    assert matched(side) == 320
    assert matched(side, Tokens(PROMPT + more)) == 320
    side.call(client.CommitLease, lease=lease.lease)
    assert matched(side) == 320
    assert violations(side.node) == []


def as_it_is(side: Side, lease: client.Leased) -> tuple[object, ...]:
    record = side.node.leases.leases[lease.lease]
    return (
        record.page_table, record.room_tokens, record.tokens, record.said, record.written_tokens,
        matched(side), side.node.leases.headroom_pages,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("more", "extend", "upto", "code"),
    [
        (b"", 16 * 10_000, 320, Code.NO_ROOM),
        (tokens((900, 40)), 16, 320, Code.BAD_REQUEST),
        (tokens((900, 20)), 32, 341, Code.BAD_REQUEST),
        (b"", -1, None, Code.BAD_REQUEST),
    ],
)
@pytest.mark.parametrize("said", [None, 64])
def test_a_commit_that_cannot_do_both_does_neither(more, extend, upto, code, said):
    side = World().p
    lease = side.lease(PROMPT)
    if said is not None:
        say(side, lease, said)
    before = as_it_is(side, lease)

    reply = side.call(
        client.CommitAndExtend,
        Tokens(more),
        lease=lease.lease,
        extend_tokens=extend,
        upto_tokens=upto,
    )

    assert isinstance(reply, client.Failed), reply
    assert reply.refusal.code is code
    assert as_it_is(side, lease) == before
    assert violations(side.node) == []


def test_a_number_in_a_commit_is_a_word_for_those_after_it():
    side = World().p
    lease = side.lease(PROMPT)
    side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=100)

    side.call(client.CommitAndRelease, tokens((900, 5)), lease=lease.lease)

    assert matched(side) == 96


def test_tokens_that_a_commit_names_are_known_and_are_shared_once_written():
    side = World().p
    first, more = tokens((1, 40)), tokens((41, 24))
    lease = side.lease(first, reserve_tokens=24)
    say(side, lease, 40)

    side.call(client.CommitLease, more, lease=lease.lease)
    assert matched(side) == 32
    say(side, lease, 64)
    side.call(client.CommitLease, lease=lease.lease)

    assert matched(side) == 64


@pytest.mark.parametrize("upto", [-1, 321])
@pytest.mark.parametrize("kind", [client.CommitUpTo, client.ReleaseUpTo])
def test_a_commit_beyond_the_tokens_of_the_lease_is_refused_with_both_numbers(kind, upto):
    side = World().p
    lease = side.lease(PROMPT, reserve_tokens=64)

    numbers = refused(side.call(kind, lease=lease.lease, upto_tokens=upto))

    assert numbers == {"upto_tokens": upto, "tokens": 320}
    assert matched(side) == 0
    assert not side.node.leases.leases[lease.lease].said


def test_a_release_up_to_a_token_shares_whole_pages_below_it():
    side = World().p
    lease = side.lease(PROMPT)

    reply = side.call(client.ReleaseUpTo, lease=lease.lease, upto_tokens=70)

    assert isinstance(reply, client.Done)
    assert matched(side) == 64
    assert not side.node.leases.leases


def test_a_lease_that_is_not_cached_shares_nothing_that_it_says():
    side = World().p
    lease = side.lease(PROMPT, cache=False)
    say(side, lease, 320)
    side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=320)

    side.call(client.ReleaseLease, lease=lease.lease)

    assert matched(side) == 0


# ---- saying it -----------------------------------------------------------------------------------


def test_what_is_written_stays_written():
    side = World().p
    lease = side.lease(PROMPT)
    say(side, lease, 100)

    numbers = refused(say(side, lease, 99))

    assert numbers == {"upto_tokens": 99, "written_tokens": 100}
    assert isinstance(say(side, lease, 100), client.Done)


@pytest.mark.parametrize("upto", [-1, 337])
def test_more_than_the_pages_hold_cannot_be_written(upto):
    side = World().p
    lease = side.lease(PROMPT, reserve_tokens=10)

    numbers = refused(say(side, lease, upto))

    assert numbers == {"upto_tokens": upto, "room_tokens": 336}


def test_the_least_of_the_ranks_counts():
    side = World().p
    lease = side.lease(PROMPT)
    for rank, upto in enumerate((320, 64, 128)):
        say(side, lease, upto, rank, 4)
    side.call(client.CommitLease, lease=lease.lease)
    assert matched(side) == 0

    say(side, lease, 200, 3, 4)
    side.call(client.CommitLease, lease=lease.lease)

    assert matched(side) == 64
    numbers = refused(side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=65))
    assert numbers == {"upto_tokens": 65, "written_tokens": 64}


def test_what_one_process_said_for_all_holds_for_each_rank():
    side = World().p
    lease = side.lease(PROMPT)
    say(side, lease, 64)
    say(side, lease, 128, 1, 2)

    side.call(client.CommitLease, lease=lease.lease)

    assert matched(side) == 64
    assert refused(say(side, lease, 256)) == {"ranks": 1, "said_ranks": 2}


@pytest.mark.parametrize(("rank", "ranks"), [(1, 1), (-1, 2), (0, 0), (0, MAX_RANKS + 1)])
def test_a_rank_that_cannot_be_is_refused(rank, ranks):
    side = World().p
    lease = side.lease(PROMPT)

    assert refused(say(side, lease, 16, rank, ranks)) == {"rank": rank, "ranks": ranks}


def test_it_is_told_when_the_last_rank_has_come_further():
    side = World().p
    lease = side.lease(PROMPT)
    seen = len(side.events)
    for rank, upto in ((0, 320), (1, 64), (0, 320), (1, 100)):
        say(side, lease, upto, rank, 2)

    told = [(type(event), event.written_tokens) for event in side.events[seen:]]

    assert told == [(events.LeaseWritten, 64), (events.LeaseWritten, 100)]
    assert LEASE.state(side.node, side.node.leases.leases[lease.lease]).written_tokens == 100
    because = side.ask(admin.Why(1, "lease", lease.lease))
    assert "KV of 100 tokens is said to be written, by rank 320, 100" in because.facts


# ---- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["release", "death"])
def test_what_was_said_stays_however_the_lease_ends(end):
    side = World().p
    lease = side.lease(PROMPT)
    side.write(lease.pages, PROMPT, end=200)
    say(side, lease, 200)

    if end == "death":
        side.hang_up()
        side.attach()
    else:
        side.call(client.ReleaseLease, lease=lease.lease)

    session = side.sessions
    reply = side.call(client.OpenLease, PROMPT, session=session)
    assert isinstance(reply, client.Leased)
    assert reply.prefix_tokens == 192
    assert side.holds(reply.pages[: 12 * 4], tokens((1, 192)))


@pytest.mark.parametrize("end", [client.ReleaseLease, client.CommitAndRelease])
def test_a_release_without_a_word_means_what_it_always_did(end):
    side = World().p
    lease = side.lease(PROMPT)

    side.call(end, lease=lease.lease)

    assert matched(side) == (320 if end is client.CommitAndRelease else 0)


def test_an_engine_that_releases_while_its_send_reads_leaves_what_it_said():
    world = World()
    world.hold_posts = True
    side = world.p
    lease = side.lease(PROMPT)
    side.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    side.write(lease.pages, PROMPT, end=100)
    say(side, lease, 100)

    side.call(client.ReleaseLease, lease=lease.lease)

    assert matched(side) == 96
    assert side.node.leases.leases[lease.lease].holders == {"send 1"}


def test_a_retracted_lease_has_said_nothing_of_pages_that_it_gave_back():
    side = World().p
    lease = side.lease(PROMPT)
    say(side, lease, 160)
    retracted = side.call(client.RetractLease, lease=lease.lease, keep="nothing")
    assert isinstance(retracted, client.Retracted), retracted
    side.call(client.ResumeLease, lease=lease.lease)

    side.call(client.CommitAndRelease, lease=lease.lease)

    assert matched(side) == 0


def test_a_retraction_saves_nothing_that_is_not_said_to_be_written():
    side = World().p
    lease = side.lease(tokens((1, 100)))
    say(side, lease, 64)

    refused(side.call(client.RetractLease, lease=lease.lease, keep="host"))

    say(side, lease, 100)
    reply = side.call(client.RetractLease, lease=lease.lease, keep="host")
    assert isinstance(reply, client.Retracted), reply


# ---- sends ---------------------------------------------------------------------------------------

EVENT = bytes(range(64))


def sending(world: World) -> tuple[client.Leased, int]:
    """A prompt that a send is open for."""
    lease = world.p.lease(PROMPT)
    reply = world.p.call(client.SendRequest, PROMPT, room=7, lease=lease.lease)
    assert isinstance(reply, client.Sending)
    return lease, reply.send


@pytest.mark.parametrize("kind", [client.CommitLease, client.CommitAndRelease])
def test_what_a_send_has_been_told_is_a_word_about_its_lease(kind):
    world = World()
    lease, send = sending(world)
    world.p.call(client.Advance, send=send, upto_tokens=100)

    world.p.call(kind, lease=lease.lease)

    assert matched(world.p) == 96


def test_a_send_that_is_finished_has_said_all_of_its_prompt():
    world = World()
    lease, send = sending(world)
    world.p.call(client.Advance, send=send, upto_tokens=100)
    world.p.call(client.Finish, send=send, aux=b"")

    world.p.call(client.ReleaseLease, lease=lease.lease)

    assert matched(world.p) == 320


def test_a_send_that_is_finished_after_it_failed_has_said_all_of_its_prompt():
    world = World()
    lease, send = sending(world)
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    world.run()
    world.p.call(client.Advance, send=send, upto_tokens=100)
    world.d.hang_up()
    world.run()

    failed = world.p.call(client.Finish, send=send, aux=b"")

    assert isinstance(failed, client.Failed)
    world.p.call(client.ReleaseLease, lease=lease.lease)
    assert matched(world.p) == 320


@pytest.mark.parametrize("end", ["abort", "death"])
def test_what_an_aborted_send_was_told_stays(end):
    world = World()
    lease, send = sending(world)
    world.p.call(client.Advance, send=send, upto_tokens=100)

    if end == "death":
        world.p.hang_up()
        world.p.attach()
    else:
        world.p.call(client.AbortSend, send=send, reason="failed")
        world.p.call(client.ReleaseLease, lease=lease.lease)

    assert world.p.node.leases.tree.cached_pages == 6


def test_a_send_that_is_told_less_than_the_lease_takes_nothing_back():
    world = World()
    lease, send = sending(world)
    say(world.p, lease, 200)

    world.p.call(client.Advance, send=send, upto_tokens=100)

    world.p.call(client.CommitLease, lease=lease.lease)
    assert matched(world.p) == 192


def test_a_word_of_the_lease_is_refused_below_what_a_send_was_told():
    world = World()
    lease, send = sending(world)
    world.p.call(client.Advance, send=send, upto_tokens=100)

    numbers = refused(say(world.p, lease, 99))

    assert numbers == {"upto_tokens": 99, "written_tokens": 100}


def test_kv_behind_an_event_is_shared_by_a_commit_and_by_nothing_else():
    world = World()
    lease, send = sending(world)
    world.p.call(client.Advance, send=send, upto_tokens=64)
    world.p.call(client.Advance, send=send, upto_tokens=200, after=EVENT)
    assert world.p.node.leases.leases[lease.lease].written_tokens == 64

    world.p.call(client.CommitLease, lease=lease.lease)  # by then the engine has seen the event

    assert matched(world.p) == 192


def test_an_engine_that_dies_before_its_event_leaves_what_was_written_before():
    world = World()
    _, send = sending(world)
    world.p.call(client.Advance, send=send, upto_tokens=64)
    world.p.call(client.Finish, send=send, aux=b"", after=EVENT)

    world.p.hang_up()

    assert world.p.node.leases.tree.cached_pages == 4


# ---- swaps ---------------------------------------------------------------------------------------


def test_an_engine_keeps_its_pages_until_it_wants_the_cached_ones():
    side = World().p
    first, second = side.lease(PROMPT), side.lease(PROMPT)
    side.call(client.CommitLease, lease=first.lease)

    kept = side.call(client.CommitUpTo, lease=second.lease, upto_tokens=160, swaps=False)

    assert kept == client.PageTable(kept.call, 20, b"")
    table = side.node.leases
    lease = table.leases[second.lease]
    assert lease.held_pages == 20
    assert [node.lock_ref for node in table.tree.nodes()] == [2, 1]
    kept = side.call(client.CommitUpTo, lease=second.lease, upto_tokens=200, swaps=False)
    assert kept == client.PageTable(kept.call, 20, b"")
    swapped = side.call(client.CommitUpTo, lease=second.lease, upto_tokens=320)
    assert swapped == client.PageTable(swapped.call, 0, first.pages)
    assert (lease.held_pages, lease.deferred) == (0, b"")
    assert table.pool.free_pages == 63 - 20


@pytest.mark.parametrize("keep", ["nothing", "host"])
def test_pages_that_an_engine_kept_are_free_once_it_has_retracted(keep):
    prompt = tokens((1, 100))
    side = World().p
    first, second = side.lease(prompt), side.lease(prompt)
    side.call(client.CommitLease, lease=first.lease)
    side.call(client.CommitUpTo, lease=second.lease, upto_tokens=100, swaps=False)

    side.call(client.RetractLease, lease=second.lease, keep=keep)

    assert side.node.leases.pool.free_pages == 63 - 7
    side.call(client.ResumeLease, lease=second.lease)
    side.call(client.ReleaseLease, lease=second.lease)
    assert side.node.leases.pool.free_pages == 63 - 7


def test_pages_that_an_engine_kept_go_with_its_lease():
    side = World().p
    first, second = side.lease(PROMPT), side.lease(PROMPT)
    side.call(client.CommitLease, lease=first.lease)
    side.call(client.CommitUpTo, lease=second.lease, upto_tokens=320, swaps=False)

    side.call(client.ReleaseLease, lease=second.lease)

    assert side.node.leases.pool.free_pages == 63 - 20


def test_pages_that_an_engine_kept_are_its_own_after_a_restart():
    side = World(is_journaled=True).p
    first, second = side.lease(PROMPT), side.lease(PROMPT)
    side.call(client.CommitLease, lease=first.lease)

    side.call(client.CommitUpTo, lease=second.lease, upto_tokens=320, swaps=False)

    noted = {page for page, lease in side.noted.holder.items() if lease == second.lease}
    assert noted == set(page_ids(second.pages))


# ---- what lies beside ----------------------------------------------------------------------------


def family(name: str) -> Side:
    return World(spec=SPECS[name]).p


def test_a_state_is_kept_only_where_all_that_was_computed_is_committed():
    side = family("recurrent")
    prompt = tokens((1, 64))
    for upto, reserve, new in ((48, 0, b""), (64, 16, b"")):
        lease = side.lease(prompt, reserve_tokens=reserve)
        if reserve:  # one more is computed, and the state has seen it
            say(side, lease, 65)
        side.call(client.ReleaseUpTo, new, lease=lease.lease, upto_tokens=upto)
        assert not side.node.leases.components.each[0].at
    lease = side.lease(prompt)
    say(side, lease, 64)

    side.call(client.CommitAndRelease, lease=lease.lease)

    (at,) = side.node.leases.components.each[0].at
    assert at.end_tokens == 64
    assert side.lease(tokens((1, 80))).prefix_tokens == 64


def test_a_state_of_an_engine_that_died_is_nobodys():
    side = family("recurrent")
    lease = side.lease(tokens((1, 64)))
    say(side, lease, 64)

    side.hang_up()

    assert not side.node.leases.components.each[0].at
    assert [count(node.edge) for node in side.node.leases.tree.nodes()] == [64]


def test_nobody_goes_on_from_a_chunk_of_a_running_prefill_whose_state_is_not_there():
    side = family("recurrent")
    lease = side.lease(tokens((1, 128)))
    side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=64)

    other = side.lease(tokens((1, 100)))

    assert matched(side, tokens((1, 100))) == 64
    assert other.prefix_tokens == 0


def test_windows_of_a_partial_commit_join_at_the_end_and_only_below_it():
    side = family("swa")
    lease = side.lease(tokens((1, 160)))
    side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=96)
    windows = side.node.leases.components.each[0]
    assert side.lease(tokens((1, 120)), cache=False).prefix_tokens == 0

    side.call(client.ReleaseLease, lease=lease.lease)

    assert [node.end_tokens for node in windows.nodes] == [96]
    assert count(windows.pages_at(next(iter(windows.nodes)))) == 6
    assert side.lease(tokens((1, 120))).prefix_tokens == 96


def test_windows_that_a_dead_engine_had_slid_past_are_not_shared():
    side = family("swa")
    lease = side.lease(tokens((1, 160)), step_tokens=16)
    for upto in range(16, 161, 16):
        say(side, lease, min(upto, 64))
        side.call(client.SlideLease, lease=lease.lease, upto_tokens=upto)

    side.hang_up()

    windows = side.node.leases.components.each[0]
    assert [node.end_tokens for node in side.node.leases.tree.nodes()] == [64]
    assert not list(windows.nodes)


def test_a_page_that_is_written_can_be_fetched_before_it_is_committed():
    side = family("hisparse")
    lease = side.lease(tokens((1, 64)))
    fetch = {"lease": lease.lease, "pages": (1).to_bytes(4, "little")}
    assert isinstance(side.call(client.FetchPages, **fetch), client.Failed)

    say(side, lease, 32)

    reply = side.call(client.FetchPages, **fetch)
    assert isinstance(reply, client.FetchReply), reply


def test_all_components_are_whole_after_partial_commits():
    side = family("everything")
    lease = side.lease(tokens((1, 120)), step_tokens=32)
    for upto in (10, 33, 64, 100):
        side.call(client.SlideLease, lease=lease.lease, upto_tokens=upto)
        reply = side.call(client.CommitUpTo, lease=lease.lease, upto_tokens=upto)
        assert isinstance(reply, client.PageTable)
        assert not violations(side.node)

    side.hang_up()

    assert not violations(side.node)
    assert side.node.leases.tree.cached_pages == 100 // PAGE
