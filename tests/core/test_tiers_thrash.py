"""What was removed from a tier: for whose writes, who asked for it again, and what thrashes."""

from __future__ import annotations

import pytest

from kvd.core import inputs
from kvd.core.inspect import snapshot as inspected
from kvd.core.inspect.why import because
from kvd.core.layout.quota import Quota
from kvd.core.replay.freeze import freeze
from kvd.core.replay.thaw import thaw
from kvd.core.settings import Demotion
from kvd.core.tiers import removed
from kvd.core.tiers.removed import QUIET_S, MissedObjects, RemovedObjects
from kvd.wire import admin, client
from kvd.wire.cache_events import CacheThrashing
from tests.core.tiered import DISK, PAGE, TieredWorld, cached, disk, tokens

OBJECTS = 24
POOL = 16
CHAT = [tokens((1 + 1000 * k, 4 * PAGE)) for k in range(2)]


def world_of(**more):
    world = TieredWorld(d_pages=POOL + 1, tier=disk(objects=OBJECTS, moving=8, **more))
    return world, world.d


class Batch:
    """Prompts of a page each, of which none comes twice."""

    def __init__(self, world, namespace="batch"):
        self.world, self.namespace, self.n = world, namespace, 0

    def write(self, n_prompts, pages_each=1):
        for _ in range(n_prompts):
            self.n += 1
            prompt = tokens((100_000 + 1000 * self.n, pages_each * PAGE))
            cached(self.world.d, prompt, self.namespace)
            self.world.pass_time(0.1)


def ask_for(side, prompts=CHAT, namespace="chat"):
    for prompt in prompts:
        cached(side, prompt, namespace)


def pushed_out_and_asked_for(world, side, rounds, batch=None):
    """Chat asks for its prompts, and between batch writes as much as the disk holds."""
    batch = batch or Batch(world)
    ask_for(side)
    for _ in range(rounds):
        batch.write(POOL + OBJECTS + 8)
        assert not side.tier.index.objects_of("chat")
        ask_for(side)


def told(side):
    return [event for event in side.events if isinstance(event, CacheThrashing)]


def thrashing(side):
    return [
        pair for pair in inspected.snapshot(side.node).evictions.thrashing if pair.place == DISK
    ]


def facts(side, kind="evicted", number=0):
    side.feed(inputs.Tick(side.world.now_s))
    said = because(side.node, admin.Why(1, kind, number))
    assert isinstance(said, admin.Because), said
    return (said.sentence, *said.facts)


def test_writes_of_one_that_push_out_what_another_asks_for_again_name_both():
    world, d = world_of()
    pushed_out_and_asked_for(world, d, rounds=2)

    (pair,) = thrashing(d)
    assert (pair.needed_by, pair.hurt, pair.rounds) == ("batch", "chat", 4)
    n_pages = 4 * len(CHAT[0]) // 4 // PAGE
    assert pair.tokens == n_pages * PAGE
    assert (pair.last.missed_by, pair.last.evicted.namespace) == ("engine", "chat")
    assert "writes of batch push out what chat asks for again: 4 requests" in pair.why
    assert "a larger tiers.disk.size" in pair.why
    assert f"a larger tiers.disk.size than {OBJECTS} B: {2 * OBJECTS} B would have" in pair.why
    assert "in quotas.disk a floor for chat or a ceiling for batch" in pair.why
    assert 'tiers.disk.demote = "second-use"' in pair.why
    (event,) = told(d)
    assert (event.tier, event.need, event.namespace) == (DISK, "writes of batch", "chat")
    (state,) = inspected.snapshot(d.node).tiers
    assert (state.missed, state.missed_soon) == (n_pages, n_pages)


def test_a_disk_that_is_full_of_what_nobody_asks_for_again_thrashes_not():
    world, d = world_of()
    ask_for(d)
    Batch(world).write(10 * OBJECTS)

    assert d.tier.counts.dropped > 8 * OBJECTS
    assert not thrashing(d)
    assert not told(d)
    assert inspected.snapshot(d.node).tiers[0].missed == 0


def test_a_few_that_ask_again_of_much_that_went_are_no_thrash():
    world, d = world_of()
    old = Batch(world, "chat")
    for _ in range(8):
        old.write(OBJECTS)
        # One page of many, each time another one.
        cached(d, tokens((100_000 + 1000 * (old.n - POOL - OBJECTS), PAGE)), "chat")

    assert inspected.snapshot(d.node).tiers[0].missed >= 4
    assert not thrashing(d)


def test_one_that_pushes_out_its_own_is_told_so():
    world, d = world_of(demotion=Demotion.ALWAYS)
    prompts = [tokens((1 + 1000 * k, 4 * PAGE)) for k in range(14)]
    for _ in range(3):
        for prompt in prompts:
            cached(d, prompt, "chat")
            world.pass_time(0.5)

    (pair,) = thrashing(d)
    assert (pair.needed_by, pair.hurt) == ("chat", "chat")
    assert "writes of chat push out what chat asks for again" in pair.why
    assert "what helps: a larger tiers.disk.size" in pair.why
    assert "quotas.disk" not in pair.why


def test_who_is_over_its_ceiling_is_told_that():
    world, d = world_of()
    batch = Batch(world)
    for _ in range(4):
        ask_for(d)
        d.node.tiers.set_quotas((), ())
        batch.write(POOL)
        d.node.tiers.set_quotas((Quota("chat", ceiling_pages=2),), ())
        batch.write(OBJECTS // 4, pages_each=4)
    ask_for(d)

    assert any("'chat' was over its ceiling of 2 pages by 6" in fact for fact in facts(d))
    (pair,) = thrashing(d)
    assert "what helps: a higher ceiling of chat in quotas.disk than 2 pages, 2 B;" in pair.why


def test_what_is_so_already_is_no_remedy():
    """A floor that is there is advised as a higher one, with what it is and what lies there."""
    world, d = world_of()
    batch = Batch(world)
    pushed_out_and_asked_for(world, d, rounds=2, batch=batch)
    n_chat = d.tier.index.objects_of("chat")
    quotas = (Quota("chat", floor_pages=12), Quota("batch", ceiling_pages=3))
    d.node.tiers.set_quotas(quotas, ())
    world.pass_time(2.0)
    (pair,) = thrashing(d)
    assert "floor for chat" not in pair.why
    has = f"chat has {n_chat}, and what it writes up to there stays"
    assert f"a higher floor of chat than 12 pages, 12 B ({has})" in pair.why
    assert "or a lower ceiling of batch than 3 pages, 3 B (batch has" in pair.why
    assert pair.why.endswith("quotas changed 2.0 s ago, and no request has missed anything since")

    d.node.tiers.set_quotas((), ())
    pushed_out_and_asked_for(world, d, rounds=1, batch=batch)
    d.node.tiers.set_quotas((), ())  # as they were
    (pair,) = thrashing(d)
    assert "quotas changed" not in pair.why


def test_members_of_a_base_are_one_side_and_one_with_a_quota_is_another():
    world, d = world_of(quotas=(Quota("llama#a", 1),))
    batch = Batch(world, "llama#b")
    cached(d, CHAT[0], "llama#a")
    batch.write(POOL + OBJECTS + 8)
    sides = set(d.tier.index.removed.pairs)
    assert sides == {("llama", "llama"), ("llama", "llama#a")}


def test_what_is_asked_for_again_counts_once():
    world, d = world_of()
    ask_for(d)
    Batch(world).write(POOL + OBJECTS + 8)
    for _ in range(3):
        lease = d.lease(CHAT[0], namespace="chat")
        d.call(client.ReleaseLease, lease=lease.lease)
        d.ask(admin.Evict(1, 4))

    assert inspected.snapshot(d.node).tiers[0].missed == 4


def test_thrash_is_over_when_nobody_was_hurt_for_a_while():
    world, d = world_of()
    pushed_out_and_asked_for(world, d, rounds=2)
    assert thrashing(d)
    world.pass_time(QUIET_S + 60, tick_s=30)
    assert not thrashing(d)


def test_what_was_flushed_since_is_nobodys_loss():
    world, d = world_of()
    pushed_out_and_asked_for(world, d, rounds=1)
    batch = Batch(world, "more")
    batch.write(POOL + OBJECTS + 8)
    cached(d, tokens((9, PAGE)), "chat")
    batch.write(POOL)
    d.ask(admin.Flush(1, namespace="chat"))
    before = inspected.snapshot(d.node).tiers[0].missed
    ask_for(d)

    assert inspected.snapshot(d.node).tiers[0].missed == before
    assert any("pages of chat went from tier disk, by a flush" in fact for fact in facts(d))


@pytest.mark.parametrize("namespace", [None, "chat"])
def test_what_was_flushed_is_nobodys_loss_where_all_of_it_had_gone(namespace):
    world, d = world_of()
    batch = Batch(world)
    for _ in range(4):
        ask_for(d)
        batch.write(POOL + OBJECTS + 8)
        assert not d.tier.index.objects_of("chat")
        d.ask(admin.Flush(1, namespace=namespace))
    ask_for(d)
    assert inspected.snapshot(d.node).tiers[0].missed == 0

    pushed_out_and_asked_for(world, d, rounds=2, batch=batch)
    assert len(thrashing(d)) == 1


def test_what_a_process_found_that_is_none_is_no_flush_of_the_namespace_without_a_name():
    world, d = world_of()
    ask_for(d, namespace="")
    Batch(world).write(POOL + OBJECTS + 8)
    d.feed(inputs.TierReady(world.now_s, DISK, 2, n_removed=3, removed_why="3f9c is of another"))
    assert not [fact for fact in facts(d) if "all of its namespace went" in fact]
    ask_for(d, namespace="")
    assert inspected.snapshot(d.node).tiers[0].missed == 8


def test_what_went_long_before_is_not_soon_on_a_disk_that_turns_over_within_a_moment():
    record, keys = RemovedObjects(8), [n.to_bytes(20, "little") for n in range(100)]
    for key in keys:
        record.pushed_out(key, "chat", "chat", None, 1.0)
    for number, is_soon in ((80, False), (97, True)):
        removal = record.ask(keys[number], "chat")
        record.hurt(MissedObjects(removal, "chat", 1, 0, 1, 1.1))
        assert record.n_missed_soon == is_soon


def test_a_new_epoch_and_damage_and_what_was_found_are_reasons():
    world, d = world_of()
    ask_for(d)
    batch = Batch(world)
    batch.write(POOL)
    world.pass_time(1)
    for place in range(len(d.stored.objects)):
        d.stored.damage(place)
    ask_for(d, CHAT[:1])
    world.pass_time(1)
    assert any("as the first of them was damaged or not there" in fact for fact in facts(d))
    d.ask(admin.RaiseEpoch(1, "batch"))
    assert any("as their epoch is over" in fact for fact in facts(d))

    d.feed(inputs.TierReady(world.now_s, DISK, 2, n_removed=3, removed_why="3f9c is of another"))
    assert any("3 things that lay in tier disk went when it began" in fact for fact in facts(d))


def test_what_became_of_it_in_the_tier_is_told_of_what_has_left_the_pool():
    world, d = world_of()
    batch = Batch(world)
    ask_for(d, CHAT[:1])
    batch.write(POOL // 4, pages_each=4)
    (said,) = [fact for fact in facts(d) if "of chat" in fact]
    assert said.endswith("; tier disk has it")

    batch.write(OBJECTS // 4, pages_each=4)
    (said, gone) = [fact for fact in facts(d) if "of chat" in fact]
    assert said.endswith("when its end was removed as the oldest, for writes of batch")
    assert gone.endswith("4 pages of chat went from tier disk, as the oldest, for writes of batch")


def test_a_record_is_bounded_and_is_in_a_recording(monkeypatch):
    monkeypatch.setattr(removed, "MOST_REMOVALS", 8)
    record = RemovedObjects(4)
    for n in range(1000):
        record.pushed_out(n.to_bytes(20, "little"), f"n{n}", f"by{n}", None, float(n))
    assert len(record.removals) == 8
    assert len(record.pairs) == 64
    assert record.find((999).to_bytes(20, "little")) is not None
    assert record.find((1).to_bytes(20, "little")) is None

    world, d = world_of()
    pushed_out_and_asked_for(world, d, rounds=2)
    again = thaw(freeze(d.node))
    assert inspected.snapshot(again).evictions.thrashing == (
        inspected.snapshot(d.node).evictions.thrashing
    )


def test_a_shared_tier_removes_nothing_and_says_nothing():
    world, d = world_of(is_shared=True)
    ask_for(d)
    Batch(world).write(POOL + OBJECTS + 8)
    ask_for(d)
    assert not d.tier.index.removed.n_removed


@pytest.mark.parametrize("word", ["now", "wait"])
def test_whoever_waits_for_no_tier_is_hurt_as_well(word):
    world, d = world_of()
    ask_for(d)
    Batch(world).write(POOL + OBJECTS + 8)
    d.call(client.OpenLease, CHAT[0], namespace="chat", tiers=word)
    assert inspected.snapshot(d.node).tiers[0].missed == 4
