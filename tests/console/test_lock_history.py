"""The lock changes of a node: told from events, they add up to its locks."""

from __future__ import annotations

import pytest

from kvd.console.history import MARKS, lock_changes, with_lock_history
from kvd.core.inputs import FromClient, FromOperator
from kvd.types import NO_TOKENS
from kvd.wire import admin, client
from kvd.wire.admin import Because, Mark
from tests.core.families import SPECS, worked
from tests.core.world import PAGE, World, tokens

PROMPT = (100, 4 * PAGE)
SAID = Because(1, "node", ("a fact",))


def anchor_of(world, lease):
    return world.p.node.leases.leases[lease].anchor


def told(world, node):
    return [one.what for one in lock_changes(world.p.node, node, world.p.events)]


def opened(world, *more):
    lease = world.p.lease(tokens(PROMPT, *more))
    world.p.call(client.CommitLease, lease=lease.lease)
    return lease.lease


def test_who_locked_a_node_and_who_let_go_is_told_in_order():
    world = World()
    first = opened(world)
    node = anchor_of(world, first)
    second = opened(world, (7, PAGE))
    world.p.call(client.ReleaseLease, lease=first)

    assert told(world, node) == [
        f"+1 lease {first} of engine (lease), committed",
        f"+1 lease {second} of engine (lease)",
        f"-1 lease {first} released",
    ]
    assert told(world, anchor_of(world, second)) == [
        f"+1 lease {second} of engine (lease), committed"
    ]


def test_a_lease_that_moves_down_locks_its_nodes_once():
    world = World()
    opened(world)
    second = world.p.lease(tokens(PROMPT, (7, PAGE)), reserve_tokens=PAGE).lease
    node = anchor_of(world, second)
    for new in (NO_TOKENS, tokens((8, PAGE))):
        world.p.call(client.CommitLease, new, lease=second)

    assert anchor_of(world, second) is not node
    assert told(world, node).count(f"+1 lease {second} of engine (lease)") == 1
    assert len(told(world, node)) == node.lock_ref == 2


def test_why_it_was_released_is_said_unless_it_is_what_is_normal():
    world = World()
    lease = opened(world)
    node = anchor_of(world, lease)
    world.p.hang_up()

    assert told(world, node)[-1] == f"-1 lease {lease} released: client-gone"


def test_a_retracted_lease_lets_go_and_locks_again():
    world = World()
    lease = opened(world)
    node = anchor_of(world, lease)
    world.p.call(client.RetractLease, lease=lease)
    assert told(world, node)[-1] == f"-1 lease {lease} retracted"
    world.p.call(client.ResumeLease, lease=lease)

    assert told(world, node)[-1] == f"+1 lease {lease} of engine (lease), resumed"
    assert node.lock_ref == 1


def test_what_began_before_anything_that_is_remembered_is_not_counted_twice():
    world = World()
    lease = opened(world)
    node = anchor_of(world, lease)
    last = len(world.p.events)
    world.p.call(client.ReleaseLease, lease=lease)

    for first in (last - 1, last):  # with its commit, and without
        late = lock_changes(world.p.node, node, world.p.events[first:])
        assert [one.what for one in late] == [f"-1 lease {lease} released"]


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("seed", range(4))
def test_the_changes_add_up_to_the_locks(family, seed):
    engine = worked(family, seed, 40)
    node = engine.node
    n_locked = 0
    for _ in range(8):
        engine.work(25)
        lease = max(node.leases.leases, default=0)
        message = client.RetractLease(9000 + lease, lease, "nothing")
        engine.leases.pop(lease, None)
        engine.feed(FromClient(engine.now_s, 1, message, NO_TOKENS))
        happened = [event for step in engine.steps for event in step.events]
        for edge in node.leases.tree.nodes():
            changes = lock_changes(node, edge, happened)
            assert sum(one.by for one in changes) == edge.lock_ref, (family, seed, edge.describe())
            n_locked += edge.lock_ref > 0
    assert n_locked


def test_of_many_changes_the_newest_are_marks_with_their_age():
    world = World()
    first = opened(world)
    node = anchor_of(world, first)
    for _ in range(MARKS):
        world.now_s += 1.0
        world.p.call(client.ReleaseLease, lease=opened(world))
    because = with_lock_history(SAID, world.p.node, node.id, world.p.events, world.now_s + 5)

    assert len(because.marks) == MARKS
    assert because.marks[-1] == Mark(5.0, f"-1 lease {MARKS + 1} released")
    assert because.marks[0].ago_s == 5.0 + MARKS / 2 - 1
    assert because.facts == (
        "a fact",
        f"lock changes: {MARKS} of {2 * MARKS + 1} since event 1, of it and of what is below it "
        "now; nodes evicted since are not in it",
    )


def test_a_gain_and_its_loss_vanish_with_the_evicted_node():
    world = World()
    first = opened(world)
    node = anchor_of(world, first)
    leaf = opened(world, (7, PAGE))
    deeper = world.p.lease(tokens(PROMPT, (7, PAGE), (9, 3))).lease
    world.p.call(client.ReleaseLease, lease=leaf)
    world.p.call(client.ReleaseLease, lease=deeper)
    assert f"+1 lease {deeper} of engine (lease)" in told(world, node)
    world.p.node.step(FromOperator(world.now_s, b"op", admin.Flush(1)))

    assert [one for one in told(world, node) if f"lease {deeper} " in one] == []
    assert sum(one.by for one in lock_changes(world.p.node, node, world.p.events)) == node.lock_ref


def test_a_node_that_is_gone_has_no_history():
    world = World()

    assert with_lock_history(SAID, world.p.node, 999, world.p.events, 0.0) is SAID
