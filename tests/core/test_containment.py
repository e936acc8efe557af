"""What is found broken costs what it touched: its owner hears of it, and no page has two owners."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from kvd.core import effects, inputs
from kvd.core.audit.audit import EVERY_S
from kvd.core.audit.invariants import violations
from kvd.core.audit.rules import Fault
from kvd.core.inspect.snapshot import snapshot
from kvd.core.inspect.why import because
from kvd.errors import Code, Refusal
from kvd.types import ID_BYTES, NO_TOKENS, Pages, page_ids
from kvd.wire import admin, client, events
from tests.core.breakage import BREAKAGES, busy, engine_lease, page_in_two_leases, source_lease
from tests.core.breakage_beside import BESIDE_BREAKAGES, busy_beside
from tests.core.world import World, tokens

if TYPE_CHECKING:
    from kvd.core.node import NodeState
    from tests.core.side import Side

WHOLE = 1_000_000

LOST = "is lost"
DONE = {
    "lost_unlock": "",
    "lost_page": "",
    "page_in_two_leases": LOST,
    "cached_page_in_free_list": "1 pages no longer free",
    "stray_page": LOST,
    "leaked_quarantine": "",
    "nameless_quarantine": "",
    "lease_of_the_dead": "",
    "lease_without_holder": "",
    "lease_of_a_lost_send": "",
    "post_without_part": "is given up, its bytes are in doubt",
    "part_without_post": "",
    "reads_off": "",
    "order_lost_a_leaf": "in the order of eviction again",
    "wrong_child_key": "1 nodes dropped",
    "evictable_off": "counted again",
    "edge_cut": "1 nodes dropped",
    "row_off": LOST,
    "lease_unlocked": "2 locks added",
    "receive_without_lease": "has failed for its engine",
    "verification_forgotten": "has failed for its engine",
    "unfindable_receive": "has failed for its engine",
    "unfindable_send": "is given up, its bytes are in doubt",
    "records_off": "",
    "waiter_of_the_dead": "1 requests left the queue",
    "settling_for_nothing": "",
    "window_page_lost": "",
    "window_page_in_two_places": LOST,
    "window_page_free_and_held": "1 pages no longer free",
    "window_lock_too_many": LOST,
    "window_lock_too_few": LOST,
    "needed_window_dropped": LOST,
    "window_too_short": "is found by no prompt any more",
    "window_of_a_dropped_node": "",
    "window_order_lost_a_node": "",
    "window_sum_off": "",
    "null_page_mapped": LOST,
    "stretch_too_long": LOST,
    "window_of_another_path": LOST,
    "stretch_forgotten": LOST,
    "snapshot_lock_too_many": LOST,
    "snapshot_of_another_path": LOST,
    "state_lost": LOST,
    "buffer_of_a_gone_lease": "",
    "buffer_too_large": LOST,
    "slot_in_two_pages": LOST,
    "slot_lost": LOST,
    "page_without_slot_copied": LOST,
    "copy_that_never_ends": LOST,
    "saved_window_lost": "",
    "saved_window_in_two_leases": LOST,
    "saved_state_of_a_running_lease": LOST,
    "companion_out_of_step": "",
}
"""What is done about each, beside telling; empty: see ``containment`` for why nothing is."""


def sweep(node: NodeState, now_s: float) -> tuple[list[events.Violation], list[client.Reply]]:
    """Two of them, to see what the first one's deeds leave: who was told what."""
    told, heard = [], []
    for k in range(1, 3):
        before = node.audit.sweeps
        while node.audit.sweeps == before:
            step = node.step(inputs.AuditTurn(now_s + k * EVERY_S, WHOLE))
            told += [one for one in step.events if isinstance(one, events.Violation)]
            heard += [one.message for one in step.effects if isinstance(one, effects.AnswerEngine)]
    return told, heard


def test_every_way_to_break_a_node_is_decided_upon():
    assert DONE.keys() == BREAKAGES.keys() | BESIDE_BREAKAGES.keys()


@pytest.mark.parametrize("name", BREAKAGES)
def test_what_is_broken_costs_no_page_twice(name):
    world = busy()
    node = getattr(world, BREAKAGES[name].side).node
    rows = {one.id: own(node, one.id) for one in node.leases.leases.values()}

    BREAKAGES[name].apply(node)
    told, heard = sweep(node, world.now_s)

    assert any(DONE[name] in one.done if DONE[name] else not one.done for one in told), told
    check_losers_heard(node, heard)
    work(node, rows, world.now_s + 1)


@pytest.mark.parametrize("name", BESIDE_BREAKAGES)
def test_what_is_broken_beside_the_first_component_costs_no_page_twice(name):
    engine = busy_beside()
    node = engine.node
    rows = {one.id: own(node, one.id) for one in node.leases.leases.values()}

    BESIDE_BREAKAGES[name].apply(node)
    told, heard = sweep(node, engine.now_s)

    assert any(DONE[name] in one.done if DONE[name] else not one.done for one in told), told
    check_losers_heard(node, heard)
    if node.leases.leases and any(one.lost for one in node.leases.leases.values()):
        work(node, rows, engine.now_s + 1)


def own(node: NodeState, lease: int) -> dict[str, set[int]]:
    """Its own pages of each component, as its engine was told."""
    found = {"": set(page_ids(node.leases.leases[lease].held))}
    for keeper in node.leases.components.each:
        pages = keeper.own_pages(node.leases.leases[lease])
        found[keeper.component.name] = set(page_ids(pages))
    return found


def check_losers_heard(node: NodeState, heard: list[client.Reply]) -> None:
    """Each engine that has a lost lease was told so, once, and hears it again from every call."""
    lost = [one for one in node.leases.leases.values() if one.lost is not None]
    mine = sorted(one.id for one in lost if "engine" in one.holders)
    assert sorted(one.lease for one in heard if isinstance(one, client.LeaseLost)) == mine
    for lease in mine:
        session = node.leases.leases[lease].session
        request = client.ExtendLease(5000 + lease, lease, 16)
        (answer,) = node.step(inputs.FromClient(node.out.at_s, session, request)).effects
        assert answer.message.refusal.code is Code.CONDEMNED


def work(node: NodeState, rows: dict[int, dict[str, set[int]]], now_s: float) -> None:
    """An engine takes all it can get and gives it back; nobody else has any page of it."""
    rng = random.Random(7)
    session = max(node.sessions.by_id) + 1
    node.step(inputs.ClientJoined(now_s, session, "worker", 4321))
    call = 10_000
    has: list[int] = []

    def ask(message: client.Request, toks: bytes = NO_TOKENS) -> client.Reply | None:
        step = node.step(inputs.FromClient(now_s, session, message, toks))
        answers = [one.message for one in step.effects if isinstance(one, effects.AnswerEngine)]
        return next((one for one in answers if getattr(one, "call", 0) == message.call), None)

    for k in range(150):
        call += 1
        if has and rng.random() < 0.4:
            lease = has.pop(rng.randrange(len(has)))
            assert isinstance(ask(client.CommitAndRelease(call, lease)), client.Done)
            del rows[lease]
            continue
        toks = tokens((1, 64), (50_000 + 100 * (k % 9), 48)) if k % 3 else tokens((k * 1000, 32))
        got = ask(client.OpenLease(call, deadline_s=0.0), toks)
        if isinstance(got, client.Leased):
            mine = own(node, got.lease)
            for lease, theirs in rows.items():
                for component, pages in mine.items():
                    both = pages & theirs[component] - {0}
                    assert not both, f"lease {got.lease} has pages {both} of lease {lease}"
            rows[got.lease] = mine
            has.append(got.lease)
        node.step(inputs.Tick(now_s := now_s + 0.01))


def test_both_owners_of_a_page_hear_of_it_and_nobody_gets_it_again():
    world = busy()
    node = world.p.node
    mine, theirs = engine_lease(node), source_lease(node)
    other = node.sessions.by_id[mine.session]

    words = page_in_two_leases(node)
    page = page_ids(theirs.held)[-1]
    told, heard = sweep(node, world.now_s)

    lost = {one.lease for one in heard if isinstance(one, client.LeaseLost)}
    failed = [one for one in heard if isinstance(one, client.SendFailed)]
    assert lost == {mine.id, theirs.id}
    assert [one.refusal.code for one in failed] == [Code.CONDEMNED], "room 7 reads it"
    assert [one.what for one in told] == [f"I1: {words}"]
    assert told[0].owner == other.name
    said = because(node, admin.Why(1, "page", page))
    assert not isinstance(said, Refusal)
    assert said.sentence.startswith(f"page {page} is condemned: nobody gets it before")
    assert said.facts == (f"because I1: {words}",)
    (pool,) = snapshot(node).pools
    parts = pool.free_pages + pool.held_pages + pool.cached_pages + pool.quarantined_pages
    assert pool.condemned_pages == node.leases.pool.condemned_pages > 1
    assert 1 + parts + pool.condemned_pages == pool.total_pages
    assert node.audit.state().findings == 0, "healed: it is in no two places any more"


def test_pages_given_back_twice_are_found_at_that_step_and_named():
    """Before: nothing was said, and two takes had the same page."""
    world = World(d_pages=20)
    node = world.d.node
    lease = world.d.lease(tokens((1, 64)), cache=False)
    record = node.leases.leases[lease.lease]
    page = record.page_table[:ID_BYTES]
    node.leases.pool.return_pages(page)

    step = node.step(inputs.FromClient(world.now_s, 1, client.ReleaseLease(99, lease.lease)))

    (told,) = [one for one in step.events if isinstance(one, events.Violation)]
    number = page_ids(Pages(page))[0]
    assert told.what == f"I1: lease {lease.lease} gave back page {number}, which is free already"
    assert (told.owner, told.lease, told.done) == ("engine", lease.lease, "4 pages condemned")
    answers = [one.message for one in step.effects if isinstance(one, effects.AnswerEngine)]
    assert [type(one) for one in answers] == [client.Done]
    free = page_ids(node.leases.pool.free_ids())
    assert not set(free) & set(page_ids(record.page_table))
    assert len(free) == len(set(free)) == 15
    assert not sweep(node, world.now_s)[0], "all of it is accounted for"


def test_admission_knows_that_condemned_pages_are_not_to_be_had():
    world = World(d_pages=11)
    world.d.node.leases.pool.condemn(Pages(np.arange(1, 4, dtype="<i4").tobytes()))

    reply = world.d.call(client.OpenLease, tokens((1, 128)))

    assert isinstance(reply, client.Failed)
    assert reply.refusal.numbers == {"needed_pages": 8, "pool_pages": 7}


@pytest.mark.parametrize("standing", ["saving", "restoring", "resuming", "receiving", "sending"])
def test_a_lease_that_is_lost_in_the_middle_of_something_ends_all_the_same(standing):
    """What was under way comes to its end, nothing of it is cached, and all is released."""
    world = World(p_pages=30, d_pages=30)
    side = world.p if standing == "sending" else world.d
    lease = in_the_middle(world, standing)
    node = side.node
    fault = Fault("I4", "row", "found wrong by hand", lease=lease)

    node.audit.findings.saw(fault, 1)
    side.feed(inputs.AuditTurn(world.now_s, 1))
    world.run()
    world.hold_copies = world.hold_posts = False
    while any(one.copies for one in world.sides.values()):
        next(one for one in world.sides.values() if one.copies).finish_copy()
        world.run()
    world.land_posts()
    world.pass_time(3)
    for one in world.sides.values():
        one.hang_up()
        world.pass_time(7)
        assert one.node.leases.leases == {}
        assert not violations(one.node)
    pool = node.leases.pool
    assert pool.condemned_pages > 0 or standing == "resuming"
    assert 1 + pool.free_pages + pool.condemned_pages + node.leases.tree.cached_pages == 30


def test_a_lease_that_is_lost_while_it_waits_to_be_restored_gives_all_back_as_it_ends():
    """No process copies, so none will say that it is over: a pool of kv alone has nothing to copy
    back any more, and its lock and its saved pages would stay for good."""
    world = World(p_pages=30, d_pages=30)
    d = world.d
    lease = in_the_middle(world, "restoring")
    d.stop_transfer("killed")
    assert list(d.node.retractor.uncopied) == [lease]
    d.node.audit.findings.saw(Fault("I4", "row", "found wrong by hand", lease=lease), 1)
    d.feed(inputs.AuditTurn(world.now_s, 1))

    d.start_transfer("again")
    world.run()
    assert not d.copies, "nothing is copied over pages that are condemned"
    assert is_told_that_it_is_lost(d, d.calls)
    d.call(client.ReleaseLease, lease=lease)

    assert d.node.leases.leases == {}
    assert not violations(d.node)
    saved = d.node.leases.saved.pools["kv"]
    assert saved.free_pages == saved.total_pages - 1
    assert not d.node.leases.tree.protected_pages


def test_a_lease_that_is_lost_while_it_is_restored_is_not_said_to_run():
    world = World(p_pages=30, d_pages=30)
    d = world.d
    lease = in_the_middle(world, "restoring")
    d.node.audit.findings.saw(Fault("I4", "row", "found wrong by hand", lease=lease), 1)
    d.feed(inputs.AuditTurn(world.now_s, 1))

    d.finish_copy()
    world.run()

    assert is_told_that_it_is_lost(d, d.calls)
    assert not [one for one in d.answers if isinstance(one, client.Resumed)]


def is_told_that_it_is_lost(side: Side, call: int) -> bool:
    answer = side.answer(call)
    return isinstance(answer, client.Failed) and answer.refusal.code is Code.CONDEMNED


def in_the_middle(world: World, standing: str) -> int:
    """A lease of which this is going on."""
    d, p, prompt = world.d, world.p, tokens((1, 100))
    if standing in {"receiving", "sending"}:
        world.hold_posts = True
        d.call(client.ReceiveRequest, prompt, room=7, source=("p",))
        source = p.lease(prompt)
        send = p.call(client.SendRequest, prompt, room=7, lease=source.lease)
        p.call(client.Advance, send=send.send, upto_tokens=96)
        return source.lease if standing == "sending" else max(d.node.leases.leases)
    leased = d.lease(prompt)
    d.call(client.CommitLease, lease=leased.lease)
    world.hold_copies = True
    d.call(client.RetractLease, lease=leased.lease)
    if standing == "saving":
        return leased.lease
    d.finish_copy()
    world.run()
    d.ask(admin.Evict(1, pages=6))
    filler = d.lease(tokens((9000, 29 * 16)), cache=False) if standing == "resuming" else None
    d.call(client.ResumeLease, lease=leased.lease)
    assert filler is None or len(d.node.admission) == 1
    return leased.lease
