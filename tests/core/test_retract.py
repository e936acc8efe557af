"""Retraction: pages go, their bytes are kept, and only what the tree lost is copied back.

scenario A34, scenario A36.
"""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import Pages, Tokens, count, pack_ids
from kvd.wire import admin, client, events
from tests.core.engines import PageTotals, Sender, cached, totals
from tests.core.sentences import sentence_of
from tests.core.side import SAVED
from tests.core.world import PAGE, Side, World, tokens

PREFIX = tokens((1, 64))
PROMPT = tokens((1, 100))
OUTPUT = tokens((5000, 29))
KNOWN = Tokens(PROMPT + OUTPUT)
"""129 tokens of KV: a prompt of 100 whose first 64 were cached, and 29 of 30 output tokens."""
POOL = 63
SAVED_BYTES = 9 * 128


@pytest.fixture
def world() -> World:
    return World()


def pool_of(side: Side):
    return snapshot(side.node).pools[0]


def running(side: Side, **fields: object) -> client.Leased:
    """A lease with KV of 129 tokens, as an engine has it in the middle of decoding."""
    cached(side, PREFIX)
    lease = side.lease(PROMPT, reserve_tokens=40, **fields)
    assert lease.prefix_tokens == 64
    side.write(lease.pages, KNOWN, start=64)
    return lease


def retract(side: Side, lease: int, new: bytes = OUTPUT, **fields: object) -> client.Reply | None:
    return side.call(client.RetractLease, new, lease=lease, **fields)


def refusal_of(reply: client.Reply | None) -> tuple[Code, str]:
    assert isinstance(reply, client.Failed), reply
    return reply.refusal.code, reply.refusal.message


def ids(*numbers: int) -> Pages:
    return Pages(pack_ids(list(numbers)))


def test_a_retraction_orders_one_copy_and_answers_when_it_is_done(world):
    world.hold_copies = True
    lease = running(world.d)
    row = lease.pages

    made = world.d.feed(inputs.FromClient(100.0, 1, client.RetractLease(900, lease.lease), OUTPUT))

    (copy,) = made
    assert copy == effects.Copy(1, "kv", Pages(row[: 9 * 4]), "kv.saved", ids(*range(4, 13)))
    assert world.d.node.leases.leases[1 + 1].state is LeaseStage.SAVING
    assert totals(world.d) == PageTotals(free=POOL - 9, held=5, cached=4)
    assert world.d.feed(inputs.Copied(100.0, 1, SAVED_BYTES)) == [
        effects.AnswerEngine(1, client.Retracted(900, 9, SAVED_BYTES))
    ]
    assert totals(world.d) == PageTotals(free=POOL - 4, cached=4, evictable=4)
    assert pool_of(world.d).saved_pages == 9


def test_a_prefix_that_is_still_cached_is_not_restored(world):
    lease = running(world.d)
    retract(world.d, lease.lease)

    reply = world.d.call(client.ResumeLease, lease=lease.lease)

    assert isinstance(reply, client.Resumed)
    assert (reply.prefix_tokens, reply.restored_tokens, reply.kv_tokens) == (64, 65, 129)
    assert reply.pages[: 4 * 4] == lease.pages[: 4 * 4]
    assert world.d.holds(reply.pages, KNOWN)
    assert count(reply.pages) == 9
    shot = snapshot(world.d.node).totals
    assert (shot.restored_bytes, shot.spared_bytes) == (5 * 128, 4 * 128)
    assert pool_of(world.d).saved_pages == 0


def test_an_evicted_prefix_is_restored_too(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.d.ask(admin.Evict(1, pages=4))
    other = world.d.lease(tokens((7000, 60 * PAGE)))
    world.d.write(other.pages, tokens((7000, 60 * PAGE)))
    world.d.call(client.ReleaseLease, lease=other.lease)

    reply = world.d.call(client.ResumeLease, lease=lease.lease)

    assert (reply.prefix_tokens, reply.restored_tokens, reply.kv_tokens) == (0, 129, 129)
    assert world.d.holds(reply.pages, KNOWN)


def test_what_others_cached_meanwhile_is_not_restored_either(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    cached(world.d, KNOWN)

    reply = world.d.call(client.ResumeLease, lease=lease.lease)

    assert (reply.prefix_tokens, reply.restored_tokens, reply.kv_tokens) == (128, 1, 129)
    assert world.d.holds(reply.pages, KNOWN)


def test_a_resumption_that_the_tree_serves_whole_copies_nothing(world):
    whole = tokens((1, 128))
    lease = world.d.lease(whole)
    world.d.write(lease.pages, whole)
    retract(world.d, lease.lease, b"")
    cached(world.d, whole)
    world.hold_copies = True

    made = world.d.feed(inputs.FromClient(100.0, 1, client.ResumeLease(900, lease.lease)))

    row = world.d.node.leases.leases[lease.lease].page_table
    assert made == [effects.AnswerEngine(1, client.Resumed(900, 128, 0, 128, row))]
    assert pool_of(world.d).saved_pages == 0
    assert snapshot(world.d.node).totals.spared_bytes == 8 * 128


def test_without_the_bytes_the_kv_ends_with_the_tree(world):
    lease = running(world.d)
    retracted = retract(world.d, lease.lease, keep="nothing")
    assert retracted == client.Retracted(retracted.call, 0, 0)
    assert totals(world.d) == PageTotals(free=POOL - 4, cached=4, evictable=4)

    reply = world.d.call(client.ResumeLease, lease=lease.lease)

    assert (reply.prefix_tokens, reply.restored_tokens, reply.kv_tokens) == (64, 0, 64)
    assert count(reply.pages) == 9
    world.d.write(reply.pages, KNOWN, start=64)
    world.d.call(client.CommitAndRelease, lease=lease.lease)
    assert world.d.node.leases.tree.probe(KNOWN, "") == 128


def test_a_lease_of_reserve_alone_needs_no_copy(world):
    lease = world.d.lease(tokens(), reserve_tokens=40)

    reply = retract(world.d, lease.lease, b"")

    assert reply == client.Retracted(reply.call, 0, 0)
    assert count(world.d.call(client.ResumeLease, lease=lease.lease).pages) == 3


def test_the_reserve_comes_back(world):
    lease = world.d.lease(PROMPT, reserve_tokens=100)
    world.d.write(lease.pages, PROMPT)
    retract(world.d, lease.lease, b"")

    reply = world.d.call(client.ResumeLease, lease=lease.lease)

    assert count(reply.pages) == count(lease.pages) == 13


def test_a_lease_that_caches_nothing_takes_nothing_that_others_cached(world):
    cached(world.d, PREFIX)
    lease = world.d.lease(PROMPT, cache=False)
    garbage = Tokens(PREFIX + tokens((9000, 36)))
    world.d.write(lease.pages, garbage, start=64)
    retract(world.d, lease.lease, b"")
    cached(world.d, PROMPT)

    reply = world.d.call(client.ResumeLease, lease=lease.lease)

    assert (reply.prefix_tokens, reply.restored_tokens) == (64, 36)
    assert world.d.holds(reply.pages, garbage)


def test_a_retracted_lease_is_committed_after_it_has_resumed(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.d.call(client.ResumeLease, lease=lease.lease)

    world.d.call(client.CommitAndRelease, tokens((5029, 1)), lease=lease.lease)

    assert world.d.node.leases.tree.probe(KNOWN, "") == 128
    assert totals(world.d) == PageTotals(free=POOL - 8, cached=8, evictable=8)


# ---- refused, and nothing changed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "toks"),
    [
        (client.ExtendLease, {"n_tokens": 16}, b""),
        (client.CommitLease, {}, b""),
        (client.CommitAndRelease, {}, b""),
        (client.SendRequest, {"room": 9}, PROMPT),
        (client.RetractLease, {}, b""),
    ],
)
@pytest.mark.parametrize("standing", ["saving", "retracted", "restoring"])
def test_a_lease_that_does_not_run_takes_no_request_but_its_release(
    world, kind, fields, toks, standing
):
    lease = running(world.d)
    world.hold_copies = standing == "saving"
    retract(world.d, lease.lease)
    world.hold_copies = standing == "restoring"
    if standing == "restoring":
        world.d.call(client.ResumeLease, lease=lease.lease)
    before = totals(world.d)

    code, message = refusal_of(world.d.call(kind, toks, lease=lease.lease, **fields))

    assert code is Code.WRONG_STATE
    assert message.startswith(f"lease {lease.lease} is {standing}: ")
    assert totals(world.d) == before


@pytest.mark.parametrize("standing", ["running", "saving", "restoring"])
def test_only_a_retracted_lease_resumes(world, standing):
    lease = running(world.d)
    world.hold_copies = standing == "saving"
    if standing != "running":
        retract(world.d, lease.lease)
    world.hold_copies = True
    if standing == "restoring":
        world.d.call(client.ResumeLease, lease=lease.lease)

    assert refusal_of(world.d.call(client.ResumeLease, lease=lease.lease)) == (
        Code.WRONG_STATE,
        f"lease {lease.lease} is {standing}: only a retracted one can resume",
    )


@pytest.mark.parametrize("kind", [client.RetractLease, client.ResumeLease])
def test_an_unknown_lease_is_neither_retracted_nor_resumed(world, kind):
    assert refusal_of(world.d.call(kind, lease=77))[0] is Code.UNKNOWN_LEASE


def test_a_receive_still_in_transfer_is_not_retracted(world):
    world.hold_posts = True
    world.d.call(client.ReceiveRequest, PROMPT, room=7, source=("p",))
    (lease,) = world.d.node.leases.leases
    before = totals(world.d)

    code, message = refusal_of(retract(world.d, lease, b""))

    assert code is Code.WRONG_STATE
    assert message.startswith(f"lease {lease} is still being received")
    assert totals(world.d) == before


def test_a_lease_that_a_send_reads_is_not_retracted(world):
    sender = Sender(world)

    code, message = refusal_of(retract(world.p, sender.lease.lease, b""))

    assert code is Code.WRONG_STATE
    assert message == sentence_of("a lease that a send reads is not retracted")


def test_more_tokens_than_the_pages_hold_are_refused(world):
    lease = world.d.lease(PROMPT)

    code, message = refusal_of(retract(world.d, lease.lease, tokens((5000, 13))))

    assert code is Code.BAD_REQUEST
    assert message.startswith("retract of 113 tokens on lease 1, which holds pages for 112")
    assert count(world.d.node.leases.leases[1].tokens) == 100


def test_keep_is_host_or_nothing(world):
    lease = world.d.lease(PROMPT)

    assert refusal_of(retract(world.d, lease.lease, b"", keep="disk"))[0] is Code.BAD_REQUEST


def test_a_full_saved_area_is_said_with_the_numbers_and_who_has_it(world):
    first = running(world.d)
    retract(world.d, first.lease)
    second = world.d.lease(tokens((8000, 80)))
    before = totals(world.d)

    reply = retract(world.d, second.lease, b"")

    code, message = refusal_of(reply)
    assert code is Code.NO_ROOM
    assert message.startswith(
        f"saving lease {second.lease} takes 5 pages of kv.saved, 3 of {SAVED} are free; most are "
        "held by lease 2 of engine (pid 1001) for lease, 0.0 s (9 saved pages)"
    )
    assert reply.refusal.numbers == {"needed_pages": 5, "free_pages": 3}
    assert totals(world.d) == before
    assert isinstance(retract(world.d, second.lease, b"", keep="nothing"), client.Retracted)


# ---- the queue -----------------------------------------------------------------------------------


def fill(side: Side, first: int = 20_000) -> client.Leased:
    """A lease on every page that can be had."""
    return side.lease(tokens((first, side.node.leases.headroom_pages * PAGE)))


@pytest.mark.parametrize("overtakers", [0, 8])
def test_a_lease_that_resumes_stands_before_every_new_request_and_none_overtakes_it(overtakers):
    world = World(overtakers=overtakers)
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.d.ask(admin.Evict(1, pages=4))
    held = [world.d.lease(tokens((20_000 + k, (POOL - 5) // 2 * PAGE))) for k in (0, 5000)]
    for first, n_tokens, priority in ((9000, 320, 5), (9500, 160, 0)):
        toks = tokens((first, n_tokens))
        assert world.d.call(client.OpenLease, toks, priority=priority) is None

    assert world.d.call(client.ResumeLease, lease=lease.lease) is None

    queue = snapshot(world.d.node).waiting
    shown = [(one.kind, one.priority) for one in queue]
    assert shown == [("resume", 0), ("lease", 5), ("lease", 0)]
    seen = len(world.d.events)
    for one in held:
        world.d.call(client.ReleaseLease, lease=one.lease)
    kinds = events.LeaseOpened | events.LeaseExtended
    got_pages = [one.lease for one in world.d.events[seen:] if isinstance(one, kinds)]
    assert got_pages == [lease.lease, 5, 6]


@pytest.mark.parametrize("overtakers", [0, 8])
def test_a_resumption_blocks_new_requests_that_would_fit(overtakers):
    world = World(overtakers=overtakers)
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.d.ask(admin.Evict(1, pages=4))
    held = world.d.lease(tokens((20_000, (POOL - 5) * PAGE)))
    assert world.d.call(client.ResumeLease, lease=lease.lease) is None

    assert world.d.call(client.OpenLease, tokens((9000, 16))) is None

    new = world.d.calls
    world.d.call(client.ReleaseLease, lease=held.lease)
    assert isinstance(world.d.answer(new), client.Leased)
    assert isinstance(world.d.answer(new - 1), client.Resumed)


def test_a_resumption_that_waited_too_long_leaves_the_lease_retracted(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    big = fill(world.d)
    world.d.call(client.ResumeLease, lease=lease.lease, deadline_s=1.0)
    call = world.d.calls

    world.pass_time(1.2)

    assert refusal_of(world.d.answer(call))[0] is Code.DEADLINE
    assert world.d.node.leases.leases[lease.lease].state is LeaseStage.RETRACTED
    assert pool_of(world.d).saved_pages == 9
    world.d.call(client.ReleaseLease, lease=big.lease)
    assert isinstance(world.d.call(client.ResumeLease, lease=lease.lease), client.Resumed)


def test_a_cancelled_resumption_leaves_the_lease_retracted(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    fill(world.d)
    world.d.call(client.ResumeLease, lease=lease.lease)
    call = world.d.calls

    world.d.call(client.CancelCall, of=call)

    assert refusal_of(world.d.answer(call))[0] is Code.CANCELLED
    assert world.d.node.leases.leases[lease.lease].state is LeaseStage.RETRACTED
    assert world.d.node.admission.queue == []


def test_a_full_queue_leaves_the_lease_retracted():
    world = World(max_queue=1)
    lease = running(world.d)
    retract(world.d, lease.lease)
    fill(world.d)
    world.d.call(client.OpenLease, tokens((9000, 32)))

    reply = world.d.call(client.ResumeLease, lease=lease.lease)

    assert refusal_of(reply)[0] is Code.NO_ROOM
    assert world.d.node.leases.leases[lease.lease].state is LeaseStage.RETRACTED


# ---- releases and deaths -------------------------------------------------------------------------


def test_the_release_of_a_retracted_lease_frees_what_was_saved(world):
    lease = running(world.d)
    retract(world.d, lease.lease)

    assert isinstance(world.d.call(client.ReleaseLease, lease=lease.lease), client.Done)

    assert pool_of(world.d).saved_pages == 0
    assert world.d.node.leases.leases == {}


def test_a_release_withdraws_the_resumption_that_waits(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    fill(world.d)
    world.d.call(client.ResumeLease, lease=lease.lease)
    call = world.d.calls

    world.d.call(client.ReleaseLease, lease=lease.lease)

    assert refusal_of(world.d.answer(call)) == (
        Code.CANCELLED,
        f"lease {lease.lease} was released meanwhile",
    )
    assert world.d.node.admission.queue == []
    assert pool_of(world.d).saved_pages == 0


@pytest.mark.parametrize("end", ["released", "dead"])
@pytest.mark.parametrize("way", ["out", "back"])
def test_pages_are_free_only_after_the_copy_when_the_engine_lets_go_meanwhile(world, end, way):
    lease = running(world.d)
    world.hold_copies = way == "out"
    retract(world.d, lease.lease)
    world.hold_copies = True
    if way == "back":
        world.d.call(client.ResumeLease, lease=lease.lease)
    call = world.d.calls

    if end == "released":
        world.d.call(client.ReleaseLease, lease=lease.lease)
        assert refusal_of(world.d.answer(call))[0] is Code.CANCELLED
    else:
        world.d.hang_up()
    assert totals(world.d) == PageTotals(free=POOL - 9, held=5, cached=4)
    assert pool_of(world.d).saved_pages == 9

    world.d.finish_copy()
    world.run()
    assert totals(world.d) == PageTotals(free=POOL - 4, cached=4, evictable=4)
    assert pool_of(world.d).saved_pages == 0
    assert world.d.node.leases.leases == {}


@pytest.mark.parametrize("waiting", [False, True])
def test_the_death_of_the_engine_frees_what_was_saved(world, waiting):
    lease = running(world.d)
    retract(world.d, lease.lease)
    if waiting:
        fill(world.d)
        world.d.call(client.ResumeLease, lease=lease.lease)

    world.d.hang_up()

    assert world.d.node.leases.leases == {}
    assert world.d.node.admission.queue == []
    assert pool_of(world.d).saved_pages == 0
    assert totals(world.d) == ((POOL, 0, 0, 0, 0) if waiting else (POOL - 4, 0, 4, 0, 4))


# ---- the transfer process ends -------------------------------------------------------------------


def test_a_cut_save_fails_and_the_lease_runs_on_as_before(world):
    world.hold_copies = True
    lease = running(world.d)
    retract(world.d, lease.lease)
    call = world.d.calls

    world.d.restart_transfer("killed")
    world.run()

    code, message = refusal_of(world.d.answer(call))
    assert code is Code.ABORTED
    assert message.endswith("it runs on as before; retract it again")
    found = world.d.node.leases.leases[lease.lease]
    assert (found.state, found.tokens, found.page_table) == (
        LeaseStage.RUNNING,
        PROMPT,
        lease.pages,
    )
    assert pool_of(world.d).saved_pages == 0
    world.hold_copies = False
    assert isinstance(retract(world.d, lease.lease), client.Retracted)


def test_a_cut_restore_is_done_again_by_the_next_generation(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.hold_copies = True
    world.d.call(client.ResumeLease, lease=lease.lease)
    call = world.d.calls

    world.d.restart_transfer("killed")
    world.run()
    assert world.d.answer(call) is None
    world.d.finish_copy()
    world.run()

    reply = world.d.answer(call)
    assert isinstance(reply, client.Resumed)
    assert world.d.holds(reply.pages, KNOWN)


def test_a_restore_waits_for_a_transfer_process(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.d.stop_transfer("killed")

    assert world.d.call(client.ResumeLease, lease=lease.lease) is None
    call = world.d.calls
    world.d.start_transfer("again")
    world.run()

    assert world.d.holds(world.d.answer(call).pages, KNOWN)


def test_without_a_transfer_process_nothing_is_saved_and_the_lease_runs_on(world):
    lease = running(world.d)
    world.d.stop_transfer("killed")
    before = totals(world.d)

    assert refusal_of(retract(world.d, lease.lease))[0] is Code.ABORTED

    assert totals(world.d) == before
    assert isinstance(retract(world.d, lease.lease, keep="nothing"), client.Retracted)


@pytest.mark.parametrize("way", ["out", "back"])
def test_a_dead_engines_pages_are_free_when_the_transfer_process_ends(world, way):
    lease = running(world.d)
    world.hold_copies = way == "out"
    retract(world.d, lease.lease)
    world.hold_copies = True
    if way == "back":
        world.d.call(client.ResumeLease, lease=lease.lease)
    world.d.hang_up()

    world.d.stop_transfer("killed")

    assert world.d.node.leases.leases == {}
    assert totals(world.d) == PageTotals(free=POOL - 4, cached=4, evictable=4)
    assert pool_of(world.d).saved_pages == 0


def test_an_engine_that_dies_before_its_restore_began_leaves_nothing(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.d.stop_transfer("killed")
    world.d.call(client.ResumeLease, lease=lease.lease)

    world.d.hang_up()

    assert world.d.node.leases.leases == {}
    world.d.start_transfer("again")
    assert totals(world.d) == PageTotals(free=POOL - 4, cached=4, evictable=4)


def test_a_refused_save_leaves_the_lease_running(world):
    world.hold_copies = True
    lease = running(world.d)
    retract(world.d, lease.lease)
    call = world.d.calls

    world.d.refuse_copy("no such page")
    world.run()

    assert refusal_of(world.d.answer(call))[0] is Code.INTERNAL
    assert world.d.node.leases.leases[lease.lease].state is LeaseStage.RUNNING


def test_a_refused_restore_leaves_the_lease_retracted_and_its_bytes_saved(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.hold_copies = True
    world.d.call(client.ResumeLease, lease=lease.lease)
    call = world.d.calls

    world.d.refuse_copy("no such page")
    world.run()

    assert refusal_of(world.d.answer(call))[0] is Code.INTERNAL
    assert pool_of(world.d).saved_pages == 9
    world.hold_copies = False
    reply = world.d.call(client.ResumeLease, lease=lease.lease)
    assert world.d.holds(reply.pages, KNOWN)


@pytest.mark.parametrize("report", [inputs.Copied(0.0, 99, 1), inputs.CopyFailed(0.0, 99, "?")])
def test_the_report_of_a_copy_that_nobody_ordered_changes_nothing(world, report):
    running(world.d)

    assert world.d.feed(report) == []


# ---- what is shown -------------------------------------------------------------------------------


def test_who_what_and_since_when_is_shown(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.pass_time(2.0)

    (state,) = snapshot(world.d.node).leases
    assert (state.state, state.owner, state.saved_pages, state.saved_bytes) == (
        "retracted",
        "engine",
        9,
        SAVED_BYTES,
    )
    assert (state.held_pages, state.locked_node, state.prompt_tokens) == (0, 0, 129)
    assert state.retracted_s == pytest.approx(2.0)
    assert state.waiting_for == sentence_of("who what and since when is shown 1")
    because = world.d.ask(admin.Why(1, "lease", lease.lease))
    assert because.facts[1] == sentence_of("who what and since when is shown 2")


def test_both_ways_are_told_as_events(world):
    lease = running(world.d)
    retract(world.d, lease.lease)
    world.pass_time(2.0)
    world.d.call(client.ResumeLease, lease=lease.lease)

    out, back = (
        one
        for one in world.d.events
        if isinstance(one, events.LeaseRetracted | events.LeaseResumed)
    )
    assert out == events.LeaseRetracted(
        out.seq,
        100.0,
        lease=2,
        session=1,
        kv_tokens=129,
        freed_pages=5,
        saved_pages=9,
        saved_bytes=SAVED_BYTES,
        took_s=0.0,
    )
    assert back == events.LeaseResumed(
        back.seq,
        102.0,
        lease=2,
        session=1,
        prefix_tokens=64,
        restored_tokens=65,
        restored_bytes=5 * 128,
        spared_bytes=4 * 128,
        took_s=0.0,
        away_s=pytest.approx(2.0),
    )
