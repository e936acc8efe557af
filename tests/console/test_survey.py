"""Surveys: every page has its thing, in slices, whatever moves meanwhile, and only when asked."""

from __future__ import annotations

import itertools

import pytest

from kvd.console.page_owners import FIRST_NODE, FREE, UNSEEN, Is
from kvd.console.survey import FORGET_S, REST_S, Survey, Surveyor
from kvd.core.audit.invariants import faults
from kvd.core.inputs import FromOperator
from kvd.core.inspect.snapshot import pool_states
from kvd.types import page_ids
from kvd.wire import admin, client
from tests.console.looked import cells_by_level, map_of, pages_by_level, surveyed
from tests.core.families import SPECS, worked
from tests.core.world import PAGE, World, tokens

CACHED = ("cached", "locked")
HELD = ("held", "sending", "arriving", "lingering")


def sum_of(pages, names):
    return sum(pages.get(name, 0) for name in names)


def n_moved(survey, plane):
    """Pages that the survey has not seen."""
    first_kept = FIRST_NODE + len(survey.index) + len(survey.leases)
    return ((plane.thing == UNSEEN) | (plane.thing >= first_kept)).sum()


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("seed", range(6))
def test_the_map_counts_what_the_pool_states_count(family, seed):
    node = worked(family, seed, 60 + 40 * seed).node
    survey = surveyed(node)
    for pool in pool_states(node):
        shown = map_of(node, survey, component=pool.component, cells=pool.total_pages)
        pages = pages_by_level(shown)
        assert pages.get("free", 0) == pool.free_pages, (family, seed, pool.component)
        assert sum_of(pages, CACHED) == pool.cached_pages
        assert pages.get("locked", 0) == pool.locked_pages
        assert sum_of(pages, HELD) == pool.held_pages
        assert pages.get("quarantined", 0) == pool.quarantined_pages
        assert sum(pages.values()) == pool.total_pages - 1
        assert cells_by_level(shown) == pages
        for lens in ("owner", "age", "hits", "locks", "tier"):
            other = pages_by_level(map_of(node, survey, component=pool.component, lens=lens))
            assert sum(other.values()) == pool.total_pages - 1, lens
            assert other.get("free", 0) == pool.free_pages, lens


def test_each_page_has_the_thing_that_has_it():
    node = worked("everything", 3, 300).node
    survey = surveyed(node)
    for plane in survey.planes:
        assert (plane.thing[page_ids(plane.where.pool.free_ids())] == FREE).all()
        for edge in node.leases.tree.nodes() if plane.has_nodes else ():
            its = plane.thing[page_ids(plane.where.at([edge])[0])]
            assert (its == FIRST_NODE + survey.index[edge.id]).all()
        for lease in node.leases.leases.values():
            assert (plane.thing[page_ids(plane.where.of(lease))] == survey.leases[lease.id]).all()


def test_a_subtree_has_the_pages_of_its_nodes():
    node = worked("swa", 5, 400).node
    survey = surveyed(node)
    below = dict.fromkeys(node.leases.tree.roots.values(), 0)
    for edge in node.leases.tree.nodes():
        step = edge
        while step is not None:
            below[step] = below.get(step, 0) + edge.n_pages
            step = step.parent
    assert {one.id: pages for one, pages in below.items()} == {
        one.id: survey.below(one) for one in below
    }


def test_a_long_chain_of_nodes_is_looked_at_many_levels_at_once():
    world = World(p_pages=600)
    tree, pool = world.p.node.leases.tree, world.p.node.leases.pool
    node = tree.match(tokens((0, 0)), "")
    for number in range(500):
        node = tree.extend(node, tokens((1000 * number, PAGE)), pool.take_pages(1)).node
    survey = Survey(world.p.node, None, 1.0)
    steps = sum(1 for _ in survey.steps)

    root = tree.roots[""]
    assert survey.below(root) == 500
    assert survey.below(node) == 1
    assert steps < 20


def test_saved_pages_of_a_retracted_lease_are_a_component_of_their_own():
    world = World()
    lease = world.p.lease(tokens((1, 40)))
    world.p.call(client.RetractLease, lease=lease.lease)
    survey = surveyed(world.p.node)
    shown = map_of(world.p.node, survey, component="kv.saved")

    [pool] = pool_states(world.p.node)
    assert pool.saved_pages
    assert pages_by_level(shown) == {
        "free": pool.saved_capacity_pages - pool.saved_pages,
        "saved": pool.saved_pages,
    }
    assert pages_by_level(map_of(world.p.node, survey)) == {"free": 63}


def test_a_page_that_nobody_has_is_shown_so_when_the_audit_has_found_it():
    world = World()
    pool = world.p.node.leases.pool
    first = surveyed(world.p.node)
    lost = page_ids(pool.take_pages(2))
    second = surveyed(world.p.node, first)
    world.p.node.audit.looked_at_all(faults(world.p.node))
    third = surveyed(world.p.node, second)
    fourth = surveyed(world.p.node, third)

    assert pages_by_level(map_of(world.p.node, first)) == {"free": 63}
    assert pages_by_level(map_of(world.p.node, second)) == {"free": 63}
    for last in (third, fourth):
        shown = map_of(world.p.node, last)
        assert pages_by_level(shown) == {"free": 61, "nobody": 2}
        assert {shown.cells[page] for page in lost} == {Is.NOBODY}
        assert pages_by_level(map_of(world.p.node, last, lens="owner")) == {"free": 61, "nobody": 2}


def test_what_is_not_seen_by_the_first_survey_is_no_reason_to_worry():
    world = World()
    lost = world.p.node.leases.pool.take_pages(2)
    first = surveyed(world.p.node)
    world.p.node.leases.pool.return_pages(lost)

    assert pages_by_level(map_of(world.p.node, first)) == {"free": 61, "unseen": 2}
    assert pages_by_level(map_of(world.p.node, surveyed(world.p.node, first))) == {"free": 63}


@pytest.mark.parametrize("seed", range(4))
def test_what_moves_during_a_survey_is_put_right_by_the_next(seed, monkeypatch):
    monkeypatch.setattr("kvd.console.survey.NODES", 2)
    monkeypatch.setattr("kvd.console.survey.LEASES", 1)
    monkeypatch.setattr("kvd.console.survey.FREE_PAGES", 4)
    engine = worked("everything", seed, 100)
    survey, n_unseen = None, 0
    for _ in range(8):
        survey = Survey(engine.node, survey, engine.now_s)
        for _ in survey.steps:
            engine.work(1)
        for plane in survey.planes:
            assert plane.pages.sum() == plane.total_pages - 1
            n_unseen += n_moved(survey, plane)
            assert not plane.pages[plane.things.what == Is.NOBODY].sum(), (seed, plane.name)
    assert n_unseen, "nothing moved"
    before = survey
    quiet = surveyed(engine.node, before)
    for plane, pool in zip(quiet.planes, pool_states(engine.node), strict=False):
        pages = pages_by_level(map_of(engine.node, quiet, component=plane.name))
        assert pages.get("free", 0) == pool.free_pages
        assert sum_of(pages, CACHED) == pool.cached_pages
        assert sum_of(pages, HELD) == pool.held_pages


def test_a_node_that_is_evicted_before_it_is_looked_at_is_not_in_the_survey(monkeypatch):
    monkeypatch.setattr("kvd.console.survey.NODES", 1)
    world = World()
    for first in (1, 1000):
        lease = world.p.lease(tokens((first, 3 * PAGE)))
        world.p.call(client.CommitAndRelease, lease=lease.lease)
    survey = Survey(world.p.node, None, 1.0)
    for _ in survey.steps:
        if survey.index:  # the root was looked at, and its children are next
            break
    world.p.node.step(FromOperator(world.now_s, b"op", admin.Flush(1)))
    for _ in survey.steps:
        pass
    assert pages_by_level(map_of(world.p.node, survey)).get("cached", 0) == 0


# ---- when it is made -----------------------------------------------------------------------------


class Clock:
    """Processor time that only the test spends."""

    def __init__(self, step_s: float) -> None:
        self._ticks = itertools.count(0.0, step_s)

    def __call__(self) -> float:
        return next(self._ticks)


def test_nothing_is_surveyed_while_nobody_asks():
    surveyor = Surveyor(World().p.node, timer=Clock(0.001))
    for beat in range(100):
        surveyor.turn(beat * 0.05)

    assert surveyor.spent_s == 0.0
    assert surveyor._last is surveyor._running is None


def test_a_small_pool_is_there_with_the_first_question():
    surveyor = Surveyor(World().p.node, timer=Clock(0.0))

    survey = surveyor.ask(5.0)
    assert survey is not None
    assert survey.at_s == 5.0


def test_a_survey_takes_as_many_slices_as_its_share_pays_for():
    surveyor = Surveyor(World().p.node, share=0.01, timer=Clock(0.002))
    now_s, asked = 100.0, 0
    while surveyor.ask(now_s) is None:
        now_s, asked = now_s + 0.05, asked + 1
        assert asked < 1000
    assert surveyor.spent_s <= 0.02 + 0.002 + 0.01 * (now_s - 100.0)
    assert surveyor.spent_s >= 0.9 * 0.01 * (now_s - 100.0)


def test_many_questions_at_one_moment_are_one_slice():
    surveyor = Surveyor(World().p.node, timer=Clock(0.002))
    for _ in range(10):
        surveyor.ask(100.0)

    assert surveyor.spent_s == pytest.approx(0.002)


def test_slices_go_on_between_looks_and_end_with_the_interest():
    surveyor = Surveyor(World().p.node, timer=Clock(0.002))
    surveyor.ask(100.0)
    surveyor.turn(100.05)
    spent_s = surveyor.spent_s
    surveyor.turn(102.0)

    assert spent_s == pytest.approx(0.004)
    assert surveyor.spent_s == spent_s


def test_a_survey_is_good_for_a_while_and_forgotten_when_nobody_asks_any_more():
    surveyor = Surveyor(World().p.node, timer=Clock(0.0))
    first = surveyor.ask(100.0)

    assert surveyor.ask(100.0 + REST_S / 2) is first
    assert surveyor.ask(100.0 + REST_S) is not first
    surveyor.turn(100.0 + REST_S + FORGET_S + 0.1)
    assert surveyor._last is None
