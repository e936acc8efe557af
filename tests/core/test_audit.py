"""The standing audit finds what is broken while the node goes on living, and nothing else."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.audit import EVERY_S
from kvd.core.audit.invariants import faults
from kvd.core.node import NodeState
from kvd.wire import admin, client, events
from tests.core.breakage import (
    BREAKAGES,
    busy,
    engine_lease,
    lost_page,
    lost_unlock,
    quarantined,
)
from tests.core.breakage_beside import BESIDE_BREAKAGES, busy_beside, window_page_in_two_places
from tests.core.families import SPECS, Engine, settings_of
from tests.core.side import settings
from tests.core.world import World, tokens

WHOLE = 1_000_000
"""More work than any sweep here takes."""

ONLY_WHOLE = {"order-size"}
"""Checks that need the tree in one piece; what they find is found by others too."""


def sweep(world: World | Engine, node: NodeState, work: int = WHOLE) -> list[events.Event]:
    """One sweep of ``node`` from its beginning to its end, in turns of ``work``; its events."""
    world.now_s += EVERY_S
    before, told = node.audit.sweeps, []
    while node.audit.sweeps == before:
        told += node.step(inputs.AuditTurn(world.now_s, work)).events
    return told


def only_tell(node: NodeState) -> None:
    """What is broken stays so: see ``test_containment`` for what is done about it."""
    node.audit.findings.containment.contain = lambda fault: ""


@pytest.mark.parametrize("work", [1, 7, 100, WHOLE])
def test_a_busy_world_has_no_findings(work):
    world = busy()

    for side in (world.p, world.d):
        assert sweep(world, side.node, work) == []
        assert side.node.audit.state().findings == 0
        assert side.node.audit.refuted == 0


def test_a_quarantine_that_breaks_is_found_by_the_sweep_after_the_next_pause():
    """The next sweep begins a pause after the last one began, whatever that has found."""
    world = busy()
    node = world.d.node
    sweep(world, node)
    lease = quarantined(node)
    lease.quarantine = None
    broken_s = world.now_s

    while not node.audit.state().findings:
        world.now_s += EVERY_S / 8
        node.step(inputs.AuditTurn(world.now_s, WHOLE))

    assert world.now_s - broken_s <= EVERY_S


@pytest.mark.parametrize("name", BREAKAGES)
def test_sweep_finds_and_names_what_is_broken(name):
    breakage = BREAKAGES[name]
    world = busy()
    node = getattr(world, breakage.side).node
    only_tell(node)
    sweep(world, node)

    words = breakage.apply(node)
    told = sweep(world, node, 5)

    said = {one.check: one for one in node.audit.state().found if one.state == "broken"}
    assert words in said[breakage.check].what
    expected = {fault.key for fault in faults(node) if fault.check not in ONLY_WHOLE}
    assert node.audit.findings.by_key.keys() == expected, "the slices see what the whole sees"
    assert [type(one) for one in told] == [events.Violation] * len(expected)


@pytest.mark.parametrize("work", [1, 7, 100, WHOLE])
def test_a_busy_node_with_every_kind_of_component_has_no_findings(work):
    engine = busy_beside()

    assert sweep(engine, engine.node, work) == []
    assert engine.node.audit.refuted == 0


@pytest.mark.parametrize("name", BESIDE_BREAKAGES)
def test_sweep_finds_and_names_what_is_broken_beside_the_first_component(name):
    breakage = BESIDE_BREAKAGES[name]
    engine = busy_beside()
    node = engine.node
    only_tell(node)
    sweep(engine, node)

    words = breakage.apply(node)
    told = sweep(engine, node, 5)

    said = [one.what for one in node.audit.state().found if one.check == breakage.check]
    assert any(words in what for what in said), said
    assert node.audit.findings.by_key.keys() == {fault.key for fault in faults(node)}
    assert [type(one) for one in told] == [events.Violation] * len(faults(node))


def test_finding_about_a_window_page_names_component_and_owner():
    engine = busy_beside()

    words = window_page_in_two_places(engine.node)
    sweep(engine, engine.node)

    (found,) = engine.node.audit.state().found
    assert (found.what, found.component, found.owner, found.pid) == (words, "swa", "engine", 7)
    assert found.transitions == ("lease 4 of engine (pid 7) for lease, 1.2 s",)


@pytest.mark.parametrize("family", SPECS)
def test_a_sweep_that_is_cut_everywhere_finds_nothing_while_an_engine_works(family):
    """Slides, tombstones, snapshots and evictions between any two turns."""
    for seed in range(3):
        engine = Engine(NodeState(settings_of(family), 1.0), seed)
        for _ in range(400):
            engine.work(1)
            engine.node.step(inputs.AuditTurn(engine.now_s, 5))

        audit = engine.node.audit
        assert audit.sweeps > 1
        assert (audit.state().found, audit.refuted) == ((), 0), f"seed {seed}"
        assert faults(engine.node) == [], f"seed {seed}"


def test_finding_names_owner_room_and_the_story_of_its_handoff():
    world = busy()
    node = world.p.node
    lease = next(one for one in node.leases.leases.values() if one.reads)
    lease.reads += 1

    (told,) = sweep(world, node)

    send = node.prefiller.rooms.by_room[7]
    assert told == events.Violation(
        node.out.seq,
        world.now_s,
        what=f"I6: lease {lease.id} counts 3 posts and copies that read it, 2 are under way",
        rule="I6",
        lease=lease.id,
        tree_node=lease.anchor.id,
        owner="engine",
        pid=1001,
        room=7,
        transitions=(
            f"lease {lease.id} of engine (pid 1001) for lease, {world.now_s - 100:.1f} s",
            *send.history.lines(world.now_s),
        ),
    )


def test_finding_is_told_once_and_healed_when_it_is_gone():
    world = busy()
    node = world.p.node
    lease = engine_lease(node)
    session, lease.session = lease.session, 77

    told = [len(sweep(world, node)) for _ in range(3)]
    lease.session = session
    healed = sweep(world, node)

    assert told == [1, 0, 0]
    what = f"I9: lease {lease.id} is held for session 77, which is gone"
    assert healed == [
        events.ViolationHealed(node.out.seq, world.now_s, what=what, lasted_s=3 * EVERY_S)
    ]
    state = node.audit.state()
    assert (state.findings, [one.state for one in state.found]) == (0, ["healed"])


def test_finding_recalls_the_last_events_about_it():
    world = busy()
    node = world.p.node
    lease = engine_lease(node)
    lease.session = 77
    world.now_s += EVERY_S

    step = node.step(inputs.AuditTurn(world.now_s, WHOLE))
    node.step(inputs.Recalled(world.now_s, 1, ("lease-opened ...",)))

    assert step.effects == [effects.Recall(1, lease.id, lease.anchor.id, 0)]
    (found,) = node.audit.state().found
    assert found.transitions[-1] == "lease-opened ..."


def test_full_check_tells_the_same_findings_as_the_sweeps():
    world = busy()
    side = world.p
    lost_unlock(side.node)
    sweep(world, side.node)
    told = len(side.node.audit.findings.by_key)

    step = side.node.step(inputs.FromOperator(world.now_s, b"op", admin.Audit(1)))

    (report,) = step.effects
    assert report.message.changed["violations"] == told
    assert step.events == []


def test_page_that_is_lost_during_a_sweep_is_found_by_the_next():
    world = busy()
    node = world.p.node
    world.now_s += EVERY_S
    node.step(inputs.AuditTurn(world.now_s, 1))

    words = lost_page(node)
    while node.audit.sweeps == 0:
        node.step(inputs.AuditTurn(world.now_s, 1))
    sweep(world, node, 3)

    assert [one.what for one in node.audit.state().found] == [words]


def test_pages_that_move_between_two_slices_are_no_finding():
    """A commit, an eviction and a split while the sweep stands in the middle of the tree."""
    world = World(p_pages=32)
    p = world.p
    for first in (1, 1000, 2000):
        lease = p.lease(tokens((first, 96)))
        p.call(client.CommitAndRelease, lease=lease.lease)
    turns = 0
    for after in range(12):
        world.now_s += EVERY_S
        for _ in range(after):
            p.node.step(inputs.AuditTurn(world.now_s, 1))
            turns += 1
        lease = p.lease(tokens((1000, 32), (7000 + after, 64)))
        p.call(client.CommitAndRelease, lease=lease.lease)
        p.ask(admin.Evict(1, pages=4))
        sweep(world, p.node, 1)

    assert p.node.audit.state().findings == 0
    assert p.node.audit.refuted == 0


def test_findings_are_bounded_and_all_of_them_count():
    world = World(p_pages=2048)
    for first in range(80):
        lease = world.p.lease(tokens((100 * first + 1, 32)))
        assert isinstance(lease, client.Leased)
    for one in world.p.node.leases.leases.values():
        one.session = 77

    sweep(world, world.p.node)

    state = world.p.node.audit.state()
    assert (state.findings, len(state.found)) == (80, 64)


def test_nothing_is_noted_while_no_sweep_runs():
    node = NodeState(settings("p", 64), 0.0)
    node.step(inputs.AuditTurn(0.0, 1))
    node.leases.pool.return_pages(node.leases.pool.take_pages(3))
    noted = len(node.leases.moved.log)
    node.step(inputs.AuditTurn(0.1, WHOLE))
    node.leases.pool.return_pages(node.leases.pool.take_pages(3))

    assert (noted, len(node.leases.moved.log)) == (2, 0)
