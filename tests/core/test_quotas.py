"""Quotas of namespaces: who goes first, what stays, and what is said of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvd.core import inputs
from kvd.core.audit.invariants import faults
from kvd.core.audit.rules import quota_faults
from kvd.core.inspect.snapshot import snapshot
from kvd.core.inspect.why import because
from kvd.core.layout.quota import Quota
from kvd.core.replay.freeze import freeze, state_hash
from kvd.core.replay.thaw import thaw
from kvd.core.tiers.index import TierIndex
from kvd.wire import admin, client
from kvd.wire.cache_events import FloorBroken
from tests.core.tiered import PAGE, TieredWorld, cached, disk
from tests.core.world import Side, World, tokens

PAGES = 16
"""Of the pool, the null page not counted."""

FLOORED = (Quota("a", 6),)
CAPPED = (Quota("b", 0, 4),)


def world_of(*quotas: Quota, **more: object) -> World:
    return World(d_pages=PAGES + 1, quotas=quotas, **more)


def prompt(number: int, n_pages: int = 2) -> bytes:
    return tokens((1000 * number, n_pages * PAGE))


def flood(world: World, side: Side, namespace: str, n: int = 20, first: int = 50) -> None:
    """So many prompts of two pages."""
    for k in range(n):
        cached(side, prompt(first + k), namespace)
        world.pass_time(0.01)


def pages_of(side: Side, namespace: str) -> int:
    tree = side.node.leases.tree
    return sum(node.n_pages for node in tree.nodes() if node.namespace == namespace)


def broken(side: Side) -> list[FloorBroken]:
    return [event for event in side.events if isinstance(event, FloorBroken)]


def check(side: Side) -> None:
    assert not list(faults(side.node))


def test_who_floods_leaves_a_floor_where_it_is():
    world = world_of(*FLOORED)
    d = world.d
    for number in range(5):
        cached(d, prompt(number), "a")
    flood(world, d, "b")

    assert pages_of(d, "a") == 6
    assert pages_of(d, "b") == PAGES - 6
    assert [pages_of(d, "a"), broken(d)] == [6, []]
    # The last ones of it, as without a quota.
    assert [d.node.leases.tree.probe(prompt(number), "a") for number in range(5)] == [
        *(0, 0),
        *(2 * PAGE,) * 3,
    ]
    check(d)


def test_without_quotas_the_same_flood_takes_everything():
    world = world_of()
    cached(world.d, prompt(1), "a")
    flood(world, world.d, "b")

    assert pages_of(world.d, "a") == 0
    assert world.d.node.leases.evictor.quotas is None
    assert snapshot(world.d.node).quotas == ()


def test_what_is_above_a_ceiling_stays_until_somebody_needs_the_room_and_goes_first():
    world = world_of(*CAPPED)
    d = world.d
    for number in range(6):
        cached(d, prompt(number), "a")
    flood(world, d, "b", 2)
    assert pages_of(d, "b") == 4

    flood(world, d, "b", 5, first=80)
    # A request of b takes pages as any other; from then on it has two more than its ceiling, and
    # takes the places of its own, although a's are older.
    assert (pages_of(d, "b"), pages_of(d, "a")) == (6, 10)

    world = world_of(*CAPPED)
    d = world.d
    flood(world, d, "b", 6)
    assert pages_of(d, "b") == 12, "nobody needs the room"
    for number in range(6):
        cached(d, prompt(number), "a")
    assert (pages_of(d, "b"), pages_of(d, "a")) == (4, 12)
    (row, rest) = snapshot(d.node).quotas
    assert (row.namespace, row.place, row.pages, row.ceiling_pages) == ("b", "pool", 4, 4)
    assert (row.over_pages, row.went_over_pages) == (0, 8)
    assert rest.pages == 12
    check(d)


def test_a_request_that_can_be_given_pages_only_of_a_floor_is_given_them_and_it_is_said():
    world = world_of(*FLOORED)
    d = world.d
    for number in range(3):
        cached(d, prompt(number), "a")
    lease = d.lease(tokens((90_000, 12 * PAGE)), namespace="b")

    assert isinstance(lease, client.Leased)
    assert pages_of(d, "a") == 4
    (event,) = broken(d)
    assert (event.namespace, event.taken_pages, event.left_pages, event.floor_pages) == (
        *("a", 2, 4),
        6,
    )
    assert event.session == d.node.leases.leases[lease.lease].session
    assert event.need
    row = snapshot(d.node).quotas[0]
    assert (row.taken_pages, row.taken_ago_s) == (2, 0.0)
    assert "pages of its floor went" in row.why
    check(d)


def test_locks_are_no_quotas_business():
    world = world_of(Quota("b", 0, 2))
    d = world.d
    lease = d.lease(prompt(1, 12), namespace="b")
    d.call(client.CommitLease, lease=lease.lease)
    assert pages_of(d, "b") == 12
    row = snapshot(d.node).quotas[0]
    assert row.over_pages == 10
    assert "over its ceiling by 10 pages" in row.why

    cached(d, prompt(2), "a")
    flood(world, d, "c", 4)
    assert pages_of(d, "b") == 12, "it is locked"
    d.call(client.ReleaseLease, lease=lease.lease)
    cached(d, prompt(70, 4), "c")
    assert pages_of(d, "b") == 0, "one leaf, and it was the first to go"
    check(d)


def test_the_answer_why_it_was_evicted_names_the_ceiling():
    world = world_of(*CAPPED)
    d = world.d
    flood(world, d, "b", 8)
    cached(d, prompt(1), "a")
    world.pass_time(0.5)

    said = "\n".join(because(d.node, admin.Why(1, "evicted", 0)).facts)

    assert "'b' was over its ceiling of 4 pages by 12; dropped" in said
    (row, *_) = snapshot(d.node).evictions.evicted
    assert row.because == "'b' was over its ceiling of 4 pages by 12"


def test_the_answer_why_it_was_evicted_names_the_floor():
    world = world_of(*FLOORED)
    d = world.d
    for number in range(3):
        cached(d, prompt(number), "a")
    d.lease(tokens((90_000, 12 * PAGE)), namespace="b")
    world.pass_time(0.5)

    (row, *_) = snapshot(d.node).evictions.evicted

    assert row.because == ("2 pages were of the floor of 'a', 6: nothing else could be evicted")


def test_the_name_of_a_base_means_its_members_and_epochs_and_a_member_has_its_own():
    world = world_of(Quota("a", 4), Quota("a#1", 2))
    d = world.d
    cached(d, prompt(1), "a")
    cached(d, prompt(2), "a#2")
    cached(d, prompt(3), "a#1")
    flood(world, d, "b")

    assert [pages_of(d, name) for name in ("a", "a#2", "a#1")] == [2, 2, 2]
    assert [row.pages for row in snapshot(d.node).quotas] == [4, 2, 10]


def test_a_floor_that_is_broken_is_told_once_in_a_minute():
    world = world_of(*FLOORED)
    d = world.d
    for _ in range(2):
        for number in range(3):
            cached(d, prompt(number), "a")
        lease = d.lease(tokens((90_000, 14 * PAGE)), namespace="b", cache=False)
        d.call(client.ReleaseLease, lease=lease.lease)
        world.pass_time(1.0)
    assert len(broken(d)) == 1
    world.pass_time(61.0)
    for number in range(3):
        cached(d, prompt(number), "a")
    d.lease(tokens((90_000, 14 * PAGE)), namespace="b", cache=False)
    assert len(broken(d)) == 2


# ---- new figures, and the audit ------------------------------------------------------------------


def reconfigure(side: Side, *quotas: Quota, disk_quotas: tuple[Quota, ...] = ()) -> None:
    side.feed(
        inputs.Reconfigured(
            at_s=side.world.now_s,
            allow=(),
            max_queue=100,
            overtakers=0,
            changed=(),
            needs_restart=(),
            quotas=quotas,
            disk_quotas=disk_quotas,
        )
    )


@pytest.mark.parametrize("before", [(), CAPPED])
def test_quotas_change_while_the_node_runs(before):
    world = world_of(*before)
    d = world.d
    for number in range(3):
        cached(d, prompt(number), "a")
    reconfigure(d, *FLOORED)
    flood(world, d, "b")
    assert pages_of(d, "a") == 6
    check(d)

    reconfigure(d)
    flood(world, d, "b", first=90)
    assert pages_of(d, "a") == 0
    assert snapshot(d.node).quotas == ()
    check(d)


def test_a_node_with_quotas_is_the_same_after_it_was_bytes():
    world = world_of(*FLOORED, *CAPPED)
    d = world.d
    cached(d, prompt(1), "a")
    flood(world, d, "b")

    again = thaw(freeze(d.node))

    assert state_hash(again) == state_hash(d.node)
    assert not quota_faults(again.leases)
    assert snapshot(again).quotas == snapshot(d.node).quotas


def test_a_count_that_is_wrong_is_found_and_counted_again():
    world = world_of(*FLOORED)
    d = world.d
    cached(d, prompt(1), "a")
    quotas = d.node.leases.evictor.quotas
    assert quotas is not None
    quotas.share_named("a").n_pages += 3

    (fault,) = quota_faults(d.node.leases)
    assert fault.what == "5 pages are counted of 'a', 2 are in the tree"
    quotas.count_again()

    check(d)


# ---- tiers ---------------------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(20, "big")


def test_an_index_keeps_a_floor_to_the_object_and_what_is_over_goes_first():
    index = TierIndex(10, (Quota("a", 3), Quota("b", 0, 2)))
    for number in range(5):
        index.add("a", [key(number)])
    for number in range(10, 15):
        index.add("b", [key(number)])
    index.reserve(0)

    gone = index.reserve(3)
    assert gone == {"b": [key(10), key(11), key(12)]}
    index.release(3)
    index.add("c", [key(20), key(21), key(22)])
    assert index.reserve(2) == {"a": [key(0), key(1)]}
    index.release(2)
    index.add("c", [key(23), key(24)])
    assert index.reserve(5) == {"b": [key(13), key(14)], "c": [key(22), key(21), key(20)]}
    assert index.objects_of("a") == 3
    assert index.counted()


def test_who_floods_leaves_a_floor_on_the_disk_after_a_restart_too():
    tier = disk(objects=20, moving=8, quotas=(Quota("a", 6),))
    world = TieredWorld(d_pages=PAGES + 1, tier=tier)
    d = world.d
    for number in range(3):
        cached(d, prompt(number), "a")
    for k in range(60):
        cached(d, prompt(100 + k), "b")
        world.pass_time(0.1)
    index = d.tier.index
    assert (index.objects_of("a"), index.n_objects) == (6, 20)

    d.stop_storage()
    d.start_storage(2)
    assert index.objects_of("a") == 6
    for k in range(60):
        cached(d, prompt(200 + k), "b")
        world.pass_time(0.1)

    assert (index.objects_of("a"), index.n_objects) == (6, 20)
    assert [row.pages for row in snapshot(d.node).quotas] == [6, 14]
    check(d)


def test_what_is_written_for_a_ceiling_does_not_push_out_itself_for_ever():
    tier = disk(objects=24, moving=8, quotas=(Quota("b", 0, 4), Quota("a", 18)))
    world = TieredWorld(d_pages=PAGES + 1, tier=tier)
    d = world.d
    for number in range(9):
        cached(d, prompt(number), "a")
        world.pass_time(0.2)
    for k in range(8):
        cached(d, prompt(100 + k), "b")
        world.pass_time(0.2)
    world.pass_time(2.0)
    written = d.tier.counts.written
    for _ in range(20):
        d.node.leases.releases += 1  # something has moved: the tier is looked at again
        world.pass_time(0.2)

    assert d.tier.counts.written == written
    check(d)


def test_a_store_has_no_quotas():
    tier = replace(disk(objects=20), is_shared=True)
    world = TieredWorld(d_pages=PAGES + 1, tier=tier)
    reconfigure(world.d, disk_quotas=(Quota("a", 3),))

    assert not world.d.tier.index.has_quotas
