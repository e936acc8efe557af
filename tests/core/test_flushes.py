"""A flush holds below the pool: over the end of a storage process, of a daemon, and of its disk."""

from __future__ import annotations

import pytest

from kvd.core import effects, inputs
from kvd.core.audit.invariants import violations
from kvd.core.leases import flushes as leases_flushes
from kvd.core.leases.flushes import Flushes, last_flush
from kvd.core.leases.kept_answers import KEEP_WITHIN_S
from kvd.errors import Code
from kvd.wire import admin, client
from tests.core.storing import LIFETIME_S, keys_of, store
from tests.core.tiered import PAGE, TieredWorld, cached, disk, fill, tokens
from tests.core.world import World
from tests.support.compiled import replaces_methods

PROMPT = tokens((1, 8 * PAGE))
N_TOKENS = 8 * PAGE
OTHER = "other"


def evicted(world, side, namespace="llama#a"):
    """The prompt was cached, written to the tier, and has left the pool."""
    cached(side, PROMPT, namespace)
    fill(world, side)
    assert side.node.leases.tree.probe(PROMPT, namespace) == 0


def with_two_namespaces():
    world = TieredWorld(d_pages=33, tier=disk(objects=400, moving=8))
    evicted(world, world.d)
    evicted(world, world.d, OTHER)
    return world, world.d


def begin_again(world, side):
    """The daemon is killed, and the next one serves."""
    world.restart(side)
    side.attach()
    side.start_storage(1)


def found(side, namespace="llama#a"):
    """How much of the prompt a request gets, with what a tier has."""
    lease = side.lease(PROMPT, namespace=namespace)
    side.call(client.ReleaseLease, lease=lease.lease)
    return lease.prefix_tokens


def writes(side):
    return [effect for effect in side.effects if isinstance(effect, effects.KeepEpochs)]


NAMES = pytest.mark.parametrize("namespace", [None, "llama", "llama#a"])


# ---- of a disk -----------------------------------------------------------------------------------


@NAMES
def test_a_flush_holds_over_the_end_of_a_daemon_that_never_had_a_storage_process(namespace):
    world, d = with_two_namespaces()
    d.stop_storage()
    d.ask(admin.Flush(1, namespace=namespace))
    begin_again(world, d)

    assert found(d) == 0
    assert found(d, OTHER) == (0 if namespace is None else N_TOKENS)
    assert not [stored for stored, _ in d.stored.objects if stored.startswith("llama")]


@NAMES
def test_a_flush_holds_where_the_daemon_is_killed_before_its_process_has_obeyed(namespace):
    world, d = with_two_namespaces()
    d.hold_storage = True
    said = d.call(client.FlushNamespace, namespace=namespace) if namespace else None
    if namespace is None:
        d.ask(admin.Flush(1))
    else:
        assert isinstance(said, client.FlushReport)
    d.orders.clear()
    d.hold_storage = False
    begin_again(world, d)

    assert found(d) == 0
    assert found(d, OTHER) == (0 if namespace is None else N_TOKENS)


def test_a_flush_holds_over_any_number_of_daemons_that_serve_no_disk():
    world, d = with_two_namespaces()
    d.stop_storage()
    d.ask(admin.Flush(1, namespace="llama"))
    for _ in range(3):
        world.restart(d)
        d.attach()
    d.start_storage(1)
    assert found(d) == 0


def test_what_was_written_after_a_flush_is_found_by_every_later_daemon():
    """Also where what was there before it was never removed."""
    world, d = with_two_namespaces()
    d.stop_storage()
    d.ask(admin.Flush(1, namespace="llama"))
    d.start_storage(2)
    evicted(world, d)
    for _ in range(3):
        begin_again(world, d)
        assert found(d) == N_TOKENS
    assert not violations(d.node)


def test_a_second_flush_is_about_what_the_first_one_left():
    world, d = with_two_namespaces()
    d.ask(admin.Flush(1, namespace="llama"))
    evicted(world, d)
    d.stop_storage()
    d.ask(admin.Flush(1, namespace="llama#a"))
    begin_again(world, d)
    assert found(d) == 0
    evicted(world, d)
    begin_again(world, d)
    assert found(d) == N_TOKENS


def test_a_flush_between_what_a_process_finds_and_its_serving_takes_that_too():
    world, d = with_two_namespaces()
    world.restart(d)
    d.attach()
    orders = []
    feed = d.feed

    def feed_and_flush(happened):
        step = feed(happened)
        if type(happened).__name__ == "TierFound" and not orders:
            orders.append(happened)
            d.ask(admin.Flush(1, namespace="llama"))
        return step

    d.feed = feed_and_flush
    d.start_storage(1)
    d.feed = feed
    assert orders
    assert found(d) == 0
    assert found(d, OTHER) == N_TOKENS


def test_what_is_of_before_is_counted_as_flushed_when_it_is_met():
    world, d = with_two_namespaces()
    d.stop_storage()
    d.ask(admin.Flush(1, namespace="llama"))
    begin_again(world, d)
    (dropped,) = d.tier.index.removed.dropped
    assert (dropped.why, dropped.namespace, dropped.n_objects) == ("flush", "llama#a", 8)


def test_a_write_that_ends_after_a_flush_takes_nothing_of_what_is_written_then():
    """The void order is answered while the next one, of equal keys, is under way."""
    world = TieredWorld(d_pages=33, tier=disk(objects=400, moving=8))
    d = world.d
    cached(d, PROMPT, "llama")
    d.hold_storage = True
    fill(world, d, n_pages=20)
    assert [order.namespace for order in d.orders][:1] == ["llama"]
    d.ask(admin.Flush(1, namespace="llama"))
    cached(d, PROMPT, "llama")
    fill(world, d, first=90_000, n_pages=20)
    d.hold_storage = False
    world.run()
    fill(world, d, first=120_000)
    assert found(d, "llama") == N_TOKENS
    assert not violations(d.node)


# ---- of a store that nodes share -----------------------------------------------------------------


def written_by_another(side, namespace="llama#a"):
    """Objects of the prompt that this node has never heard of."""
    for key in keys_of(side, PROMPT, namespace):
        side.stored.objects[namespace, key] = "of another"
    side.memory.clear()


@NAMES
def test_of_a_store_nothing_is_asked_for_over_restarts_until_what_was_there_is_gone(namespace):
    world = store()
    d = world.d
    written_by_another(d)
    d.ask(admin.Flush(1, namespace=namespace))
    world.pass_time(0.5 * LIFETIME_S)
    begin_again(world, d)
    world.pass_time(0.4 * LIFETIME_S)
    begin_again(world, d)
    assert found(d) == 0
    assert not [effect for effect in d.effects if isinstance(effect, effects.ProbeTier)]

    world.pass_time(0.2 * LIFETIME_S)
    assert found(d) == N_TOKENS, "what was there then has had its time"


def test_a_new_epoch_is_asked_for_at_once():
    """It has names of its own: nothing of before can be found in it."""
    d = store().d
    d.call(client.BeginEpoch, namespace="llama")
    d.lease(PROMPT, namespace="llama#a")
    assert [effect for effect in d.effects if isinstance(effect, effects.ProbeTier)]


@replaces_methods
def test_of_a_store_alone_a_flush_whose_time_is_over_makes_room_for_others(monkeypatch):
    monkeypatch.setattr(leases_flushes, "MOST_FLUSHES", 5)
    world = store()
    d = world.d
    for k in range(5):
        d.ask(admin.Flush(1, namespace=f"n{k}"))
    world.pass_time(LIFETIME_S + 1)
    d.ask(admin.Flush(1, namespace="last"))
    assert [flush.namespace for flush in d.flushes] == ["last"]


# ---- when it is told -----------------------------------------------------------------------------


def test_a_flush_is_answered_when_it_is_on_disk():
    world, d = with_two_namespaces()
    d.hold_disk = True
    n_reports = len(d.reports)
    d.call(client.FlushNamespace, namespace="llama")
    call = d.calls
    d.feed(inputs.FromOperator(world.now_s, b"op", admin.Flush(5, namespace="llama#a")))
    world.pass_time(0.5)
    assert d.answer(call) is None
    assert len(d.reports) == n_reports
    d.let_disk_go()
    assert isinstance(d.answer(call), client.FlushReport)
    assert isinstance(d.reports[-1], admin.Report)


def test_a_flush_that_cannot_be_written_down_says_so_and_what_that_means():
    world, d = with_two_namespaces()
    d.disk_fails = "No space left on device"
    said = d.call(client.FlushNamespace, namespace="llama")
    assert said.refusal.code is Code.ABORTED
    assert "No space left on device" in said.refusal.message
    assert "what a tier still has of it may be found after that" in said.refusal.message
    assert found(d) == 0
    assert isinstance(d.ask(admin.Flush(1)), admin.AdminFailed)

    d.disk_fails = ""
    assert isinstance(d.call(client.FlushNamespace, namespace="llama"), client.FlushReport)
    begin_again(world, d)
    assert found(d) == 0


def test_whoever_waits_too_long_for_the_disk_hears_so():
    world, d = with_two_namespaces()
    d.hold_disk = True
    d.call(client.FlushNamespace, namespace="llama")
    call = d.calls
    world.pass_time(KEEP_WITHIN_S + 0.2)
    assert f"not written after {KEEP_WITHIN_S:g} s" in d.answer(call).refusal.message


def test_nothing_is_written_down_where_nothing_is_flushed_or_no_tier_is():
    _, d = with_two_namespaces()
    d.lease(PROMPT, namespace=OTHER)
    assert d.ask(admin.Flush(1, "strict")).refused
    d.ask(admin.Rehearse(1, admin.Flush(1)))
    assert not writes(d)

    side = World().d
    cached(side, PROMPT)
    assert isinstance(side.ask(admin.Flush(1)), admin.Report)
    assert not writes(side)


# ---- what is known -------------------------------------------------------------------------------


def test_the_last_flush_of_a_namespace_is_its_own_or_its_bases_or_that_of_all():
    flushes = Flushes("life", [disk()])
    assert flushes.stamp_of("m#a") == ""
    flushes.note(None, 1.0)
    of_all = flushes.stamp_of("m#a")
    flushes.note("m", 2.0)
    of_base = flushes.stamp_of("m#a")
    flushes.note("m#a", 3.0)
    stamps = [of_all, of_base, flushes.stamp_of("m#a")]
    assert len({*stamps, ""}) == 4
    assert flushes.stamp_of("m#b\x1f7") == of_base
    assert flushes.stamp_of("") == of_all
    flushes.note("", 4.0)
    assert flushes.stamp_of("") not in stamps
    assert flushes.stamp_of("other") == of_all
    flushes.note("m", 5.0)
    assert set(flushes.by_name) == {None, "", "m"}
    assert flushes.stamp_of("m#a") not in stamps
    assert last_flush(flushes.by_name, None).stamp == of_all
    flushes.note(None, 6.0)
    assert set(flushes.by_name) == {None}


def test_no_two_flushes_have_one_stamp():
    lives = [Flushes(f"life {k}", [disk()]) for k in range(3)]
    stamps = []
    for flushes in lives:
        for k in range(50):
            flushes.note("m", float(k))
            stamps.append(flushes.stamp_of("m"))
    assert len(set(stamps)) == 150


@replaces_methods
def test_more_names_than_are_known_are_a_flush_of_all_that_lies_there(monkeypatch):
    monkeypatch.setattr(leases_flushes, "MOST_FLUSHES", 3)
    world, d = with_two_namespaces()
    for k in range(3):
        d.ask(admin.Flush(1, namespace=f"n{k}"))
    assert found(d, OTHER) == N_TOKENS
    fill(world, d)
    d.ask(admin.Flush(1, namespace="one more"))
    assert found(d, OTHER) == 0
    assert [flush.namespace for flush in d.flushes] == [None]
    begin_again(world, d)
    assert found(d, OTHER) == 0
