"""Quotas in a store that nodes share: what this node writes of a namespace within a lifetime."""

from __future__ import annotations

from kvd.core import inputs
from kvd.core.audit.invariants import violations
from kvd.core.layout.quota import Quota
from kvd.core.settings import Demotion
from kvd.wire import admin
from tests.core.storing import LIFETIME_S, store
from tests.core.test_store_pins import pinned
from tests.core.tiered import PAGE, cached, tokens

BATCH = Quota("batch", 0, 10)


def bounded(**more):
    return store(**{"demotion": Demotion.ALWAYS, "quotas": (BATCH,), **more})


def there(side, namespace):
    side.remove_old()
    return sum(name == namespace for name, _ in side.stored.objects)


def busy(side, namespace, n_prompts=10, first=10_000, n_pages=4):
    """So many prompts that push each other out of the pool."""
    for n in range(n_prompts):
        cached(side, tokens((first + n * 1000, n_pages * PAGE)), namespace)
        side.world.pass_time(0.5)


def quota_of(side, namespace="batch"):
    states = side.ask(admin.ShowStatus(1)).snapshot.quotas
    (found,) = [state for state in states if (state.namespace, state.place) == (namespace, "disk")]
    return found


def test_at_its_ceiling_nothing_more_of_a_namespace_is_written_and_others_go_on():
    world = bounded()
    busy(world.d, "batch", 20)
    assert there(world.d, "batch") == 10
    busy(world.d, "llama", 20)

    assert there(world.d, "batch") == 10
    assert there(world.d, "llama") > 20
    counts = world.d.tier.counts
    state = quota_of(world.d)
    assert (state.pages, state.ceiling_pages) == (10, 10)
    assert counts.over_ceiling == state.went_over_pages > 20
    assert state.why.startswith("at its ceiling: nothing of it is written until")
    assert not violations(world.d.node)


def test_a_lifetime_later_it_goes_on():
    world = bounded()
    busy(world.d, "batch", 20)
    assert world.d.n_written == 10
    world.pass_time(LIFETIME_S)
    busy(world.d, "batch", 20, first=100_000)

    assert there(world.d, "batch") == 10
    assert world.d.n_written == 20


def test_all_that_is_written_of_it_is_found():
    """Of a long prompt the last pages go first, and would be found by nobody."""
    world = bounded()
    long = tokens((1, 6 * PAGE), (9_000, 6 * PAGE))
    cached(world.d, tokens((1, 6 * PAGE)), "batch")
    cached(world.d, long, "batch")
    busy(world.d, "llama", 20)

    assert world.d.there(long, "batch") == there(world.d, "batch") == 10


def test_a_base_means_its_members_and_what_fails_is_not_counted():
    world = bounded()
    world.d.fails_writing = "no answer"
    busy(world.d, "batch#1", 10)
    assert quota_of(world.d).pages == 0
    world.d.fails_writing = ""
    world.pass_time(70.0)
    busy(world.d, "batch#1", 20)
    busy(world.d, "batch#2", 20)

    assert there(world.d, "batch#1") + there(world.d, "batch#2") == 10
    assert not violations(world.d.node)


def test_what_a_dead_process_may_have_written_counts():
    world = bounded(least_bytes=2**20)
    world.d.hold_storage = True
    busy(world.d, "batch", 7)
    n_moving = world.d.tier.writes.share_of("batch").moving
    assert n_moving > 0
    world.d.stop_storage()
    world.d.hold_storage = False
    world.d.start_storage(2)

    assert quota_of(world.d).pages == n_moving
    assert not violations(world.d.node)


def test_a_pin_is_written_again_at_its_ceiling_and_takes_no_room_for_that():
    world = bounded()
    pinned(world.d, tokens((1, 5 * PAGE)), "batch")
    for n in range(8):
        busy(world.d, "batch", 20, first=100_000 * (n + 1))
        assert world.d.there(tokens((1, 5 * PAGE)), "batch") == 5
        assert there(world.d, "batch") <= 10
    assert not violations(world.d.node)


def test_pins_have_half_of_a_ceiling():
    world = bounded()
    pinned(world.d, tokens((1, 6 * PAGE)), "batch")
    world.pass_time(5.0)

    assert there(world.d, "batch") == 0


def test_a_pin_at_its_ceiling_is_in_nobodys_way():
    world = bounded(moving=2)
    busy(world.d, "batch", 12)
    pinned(world.d, tokens((1, 5 * PAGE)), "batch")
    other = tokens((900, 5 * PAGE))
    pinned(world.d, other)
    world.pass_time(2.0)

    assert world.d.there(other) == 5


def test_a_new_quota_counts_from_then_on_and_one_that_is_gone_bounds_nothing():
    world = bounded()
    busy(world.d, "batch", 12)

    def reload(*quotas):
        world.d.feed(inputs.Reconfigured(world.now_s, (), 64, 0, (), (), (), (), tuple(quotas)))

    reload(Quota("batch", 0, 14), Quota("llama", 0, 3))
    assert quota_of(world.d).pages == 10
    busy(world.d, "batch", 12, first=200_000)
    busy(world.d, "llama", 12)
    assert (there(world.d, "batch"), there(world.d, "llama")) == (14, 3)
    reload()
    busy(world.d, "batch", 12, first=300_000)
    assert there(world.d, "batch") > 20
    assert not violations(world.d.node)
