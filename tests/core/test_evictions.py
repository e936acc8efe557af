"""What left the pool: for whom, who missed it since, and who thrashes."""

from __future__ import annotations

import pytest

from kvd.core.cache.eviction import Policy, eviction_order
from kvd.core.cache.evictions import MOST_LEFT, SOON_S, Evictions
from kvd.core.cache.radix import RadixTree
from kvd.core.inputs import Tick
from kvd.core.inspect import snapshot as inspected
from kvd.core.inspect.why import because
from kvd.core.replay.freeze import freeze
from kvd.core.replay.thaw import thaw
from kvd.wire import admin, client, events
from kvd.wire.cache_events import CacheThrashing
from tests.core.engines import cached
from tests.core.world import Side, World, tokens

OTHER = 2
PAGES = 16
"""Of the pool, the null page not counted."""


@pytest.fixture
def world() -> World:
    return World(d_pages=PAGES + 1)


@pytest.fixture
def side(world: World) -> Side:
    """With two engines: ``engine`` is session 1, ``other`` is session 2."""
    assert world.d.attach("other") == OTHER
    return world.d


def prompt(first: int, n_pages: int = 8) -> bytes:
    return tokens((first, 16 * n_pages))


def state_of(side: Side):
    record(side)
    return inspected.snapshot(side.node).evictions


def put(side: Side, toks: bytes, session: int = 1, namespace: str = "") -> None:
    """A request of that session: leased, committed and let go."""
    lease = side.lease(toks, session=session, namespace=namespace)
    side.call(client.CommitLease, lease=lease.lease, session=session)
    side.call(client.ReleaseLease, lease=lease.lease, session=session)


def record(side: Side):
    side.feed(Tick(side.world.now_s))
    return side.node.leases.evictor.evictions


def facts(side: Side, kind: str = "evicted", number: int = 0) -> tuple[str, ...]:
    side.feed(Tick(side.world.now_s))
    said = because(side.node, admin.Why(1, kind, number))
    assert isinstance(said, admin.Because), said
    return (said.sentence, *said.facts)


def test_a_row_says_what_left_who_had_written_it_and_who_needed_its_pages(world, side):
    put(side, prompt(1000))
    put(side, prompt(2000))
    world.pass_time(3)
    put(side, prompt(3000), session=OTHER)

    (left,) = state_of(side).evicted

    assert (left.start_tokens, left.end_tokens, left.pages) == (0, 128, 8)
    assert (left.wrote, left.needed_by, left.need) == ("engine", "other", "lease")
    assert (left.tier, left.hits) == ("", 1)
    assert left.ago_s == 0
    assert left.unused_s == pytest.approx(3)


def test_a_request_that_misses_exactly_what_left_is_hurt_and_both_sides_are_named(world, side):
    put(side, prompt(1000))
    put(side, prompt(2000))
    put(side, prompt(3000), session=OTHER)
    world.pass_time(2)

    put(side, prompt(1000))

    state = state_of(side)
    (missed,) = state.missed
    assert (state.prefixes, state.hurt, state.hurt_soon) == (2, 1, 1)
    assert (missed.missed_by, missed.evicted.needed_by) == ("engine", "other")
    assert missed.after_s == pytest.approx(2)
    assert any("engine missed tokens 0 to 128" in fact for fact in facts(side))
    assert any("a lease of other" in fact for fact in facts(side))


def test_what_never_was_there_or_is_behind_other_tokens_hurts_nobody(world, side):
    put(side, tokens((1000, 64), (5000, 64)))
    put(side, tokens((1000, 64), (6000, 64)))
    side.ask(admin.Evict(1, 99))

    put(side, tokens((2000, 64), (5000, 64)))  # the second half left, but behind another first one
    put(side, prompt(4000))

    assert record(side).n_hurt == 0


def test_what_left_below_a_node_that_is_still_there_is_found(world, side):
    put(side, tokens((1000, 64), (5000, 32)))
    put(side, tokens((1000, 64), (6000, 32)))
    side.ask(admin.Evict(1, 2))

    put(side, tokens((1000, 64), (5000, 32)))

    (missed,) = record(side).missed
    assert (missed.left.start_tokens, missed.left.need) == (64, "operator")


def test_the_same_prefix_evicted_and_asked_for_twice_is_thrash_and_told_once(world, side):
    for _ in range(4):
        for first, session in ((1000, 1), (2000, OTHER), (3000, OTHER)):
            put(side, prompt(first), session=session)
            world.pass_time(1)

    state = state_of(side)
    told = [event for event in side.events if isinstance(event, CacheThrashing)]

    assert {(one.session, one.hurt) for one in told} == {(2, 1), (1, 2), (2, 2)}
    assert len(told) == 3
    assert {(pair.needed_by, pair.hurt) for pair in state.thrashing} == {
        ("other", "engine"),
        ("engine", "other"),
        ("other", "other"),
    }
    assert any(fact.startswith("thrashing for") and "engine" in fact for fact in facts(side))


def test_one_eviction_counts_once_however_many_ask(world, side):
    put(side, prompt(1000, PAGES))
    put(side, prompt(2000, PAGES))
    for _ in range(3):
        lease = side.lease(prompt(1000, PAGES))
        side.call(client.ReleaseLease, lease=lease.lease)  # nothing was written

    assert record(side).n_hurt == 3
    assert not record(side).thrashing


def test_what_is_asked_for_much_later_is_no_thrash(world, side):
    for _ in range(3):
        put(side, prompt(1000))
        side.ask(admin.Evict(1, 99))
        world.pass_time(SOON_S + 10, tick_s=10)

    put(side, prompt(1000))

    assert (record(side).n_hurt, record(side).n_soon) == (3, 0)
    assert not record(side).thrashing


def test_thrash_is_over_when_nobody_was_hurt_for_a_while(world, side):
    for _ in range(3):
        put(side, prompt(1000, PAGES))
        put(side, prompt(2000, PAGES))
    assert state_of(side).thrashing

    world.pass_time(SOON_S + 10, tick_s=10)

    assert not state_of(side).thrashing


@pytest.mark.parametrize(
    ("verb", "said"), [(admin.Flush(1), "for a flush"), (admin.Evict(1, 99), "for an operator")]
)
def test_what_an_operator_does_is_in_the_record_and_never_thrash(world, side, verb, said):
    for _ in range(3):
        put(side, prompt(1000))
        side.ask(verb)

    put(side, prompt(1000))

    assert record(side).n_hurt == 3
    assert not record(side).thrashing
    assert any(said in fact for fact in facts(side))


@pytest.mark.parametrize("namespace", [None, "chat", "chat#a"])
def test_what_was_flushed_since_is_nobodys_loss(world, side, namespace):
    """Evicted or not, it would not be there."""
    for turn in range(4):
        put(side, prompt(1000), namespace="chat#a")
        put(side, prompt(5000 + 1000 * turn, PAGES), session=OTHER)
        side.ask(admin.Flush(1, namespace=namespace))
        world.pass_time(0.1)
    put(side, prompt(1000), namespace="chat#a")
    assert record(side).n_hurt == 0
    assert not record(side).thrashing

    for turn in range(3):
        put(side, prompt(9000 + 1000 * turn, PAGES), session=OTHER)
        world.pass_time(0.1)
        put(side, prompt(1000), namespace="chat#a")
    assert record(side).n_hurt == 3
    assert state_of(side).thrashing


def test_a_flush_of_another_namespace_excuses_nothing(world, side):
    for _ in range(3):
        put(side, prompt(1000))
        put(side, prompt(5000, PAGES), session=OTHER)
        side.ask(admin.Flush(1, namespace="chat"))
    put(side, prompt(1000))
    assert record(side).n_hurt


def test_a_page_says_who_wrote_it_and_a_free_one_what_it_held(world, side):
    put(side, prompt(1000), session=OTHER)
    (edge,) = side.node.leases.tree.nodes()
    page = int.from_bytes(edge.pages[:4], "little")

    assert "written by other" in facts(side, "page", page)
    side.ask(admin.Evict(1, 99))

    sentence, *rest = facts(side, "page", page)
    assert sentence == f"page {page} is free"
    assert rest[0].startswith("it was cached: 0.0 s ago tokens 0 to 128")
    assert "written by other, for an operator" in rest[0]


def test_who_is_gone_keeps_its_name_for_a_while(world, side):
    put(side, prompt(1000), session=OTHER)
    side.hang_up(OTHER)
    side.ask(admin.Evict(1, 99))

    assert state_of(side).evicted[0].wrote == "other (gone)"


def test_the_record_is_bounded():
    tree, kept = RadixTree(16, eviction_order(Policy.LRU)), Evictions(is_single=True)
    for number in range(MOST_LEFT + 20):
        root, page = tree.match(b"", ""), number.to_bytes(4, "little")
        node = tree.extend(root, tokens((1000 + 300 * number, 16)), page).node
        kept.left([node], page, 1, "lease", 1.0)
        kept.settle()

    assert MOST_LEFT // 2 < len(kept.last_left()) <= MOST_LEFT
    assert kept.last_left()[0].number == MOST_LEFT + 20
    assert kept.n_left == MOST_LEFT + 20


def test_a_split_node_keeps_who_wrote_it(world, side):
    put(side, prompt(1000))
    put(side, tokens((1000, 64), (9000, 64)), session=OTHER)

    assert sorted(node.writer for node in side.node.leases.tree.nodes()) == [1, 1, OTHER]


def test_a_thawed_node_has_the_record(world, side):
    put(side, prompt(1000))
    side.ask(admin.Evict(1, 99))

    record(side)
    again = thaw(freeze(side.node))

    assert again.leases.evictor.evictions.last_left() == record(side).last_left()


def test_a_miss_of_what_was_evicted_is_still_told_with_the_lease(world, side):
    cached(side, prompt(1000))
    side.ask(admin.Evict(1, 99))
    side.lease(prompt(1000))

    opened = [event for event in side.events if isinstance(event, events.LeaseOpened)]
    assert opened[-1].why_missed == "evicted"
