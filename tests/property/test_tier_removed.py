"""What left a tier, against a plain list: whose it was, for whom, asked for once, and bounded."""

from __future__ import annotations

import random

import pytest

from kvd.core.layout.quota import Quota
from kvd.core.tiers.index import TierIndex
from kvd.core.tiers.keys import KEY_BYTES
from kvd.core.tiers.removed import (
    MOST_REMOVALS,
    QUIET_S,
    SOON_AGAIN_S,
    THRASH_REQUESTS,
    MissedObjects,
    side_of,
)
from tests.support.seeds import repeatable, seed_range

NAMESPACES = ["a", "b#1", "b#2", "c\x1f3", ""]


class Walk:
    """Prompts of one page each are written, removed for that, and asked for."""

    def __init__(self, rng):
        self.rng = rng
        self.quotas = rng.choice([(), (Quota("b#1", 1), Quota("a", ceiling_pages=2))])
        self.index = TierIndex(rng.choice([2, 5, 20]), self.quotas)
        self.now_s = 0.0
        self.went = {}
        """By key, of what is not there: whose it was and for whom it went, and the same asked."""
        self.asked = 0
        self.n_removed = 0

    def side(self, namespace):
        return side_of(namespace, self.index.share_of(namespace))

    def key(self, namespace, number):
        digest = NAMESPACES.index(namespace) * 1000 + number
        return digest.to_bytes(KEY_BYTES, "little")

    def write(self, namespace, number):
        key, index = self.key(namespace, number), self.index
        if index.has(namespace, key):
            index.touch(namespace, key)
            return
        gone = index.reserve(1, namespace, self.now_s)
        index.release(1)
        index.add(namespace, [key])
        self.went.pop(key, None)
        for name, keys in gone.items():
            for one in keys:
                self.n_removed += 1
                self.went[one] = (self.side(name), self.side(namespace), False)
                assert index.removed.find(one) is not None, "what went last is known"

    def ask(self, namespace, number):
        key, removed = self.key(namespace, number), self.index.removed
        if self.index.has(namespace, key):
            return
        hurt, needed_by, was_asked = self.went.get(key, ("", "", True))
        removal = removed.ask(key, namespace)
        assert (removal is not None) is (not was_asked)
        if removal is None:
            return
        assert (removal.hurt, removal.needed_by) == (hurt, needed_by)
        self.went[key] = (hurt, needed_by, True)
        self.asked += 1
        removed.hurt(MissedObjects(removal, namespace, 1, 0, 1, self.now_s))
        assert removed.ask(key, namespace) is None, "it counts once"

    def check(self):
        removed, index = self.index.removed, self.index
        assert (removed.n_removed, removed.n_missed) == (self.n_removed, self.asked)
        assert removed.n_missed_soon <= removed.n_missed
        assert len(removed.removals) <= MOST_REMOVALS
        assert sum(one.n_objects for one in removed.removals.values()) == self.n_removed
        for key, (hurt, needed_by, _) in self.went.items():
            known = removed.find(key)
            assert known is not None
            assert (known.hurt, known.needed_by) == (hurt, needed_by)
        for (needed_by, hurt), pair in removed.pairs.items():
            assert (pair.needed_by, pair.hurt) == (needed_by, hurt)
            assert pair.n_removed <= index.capacity
            assert pair.removal.number in removed.removals
        for pair in removed.thrashing_at(self.now_s):
            assert pair.rounds >= THRASH_REQUESTS
            assert pair.since_s <= pair.last.at_s <= self.now_s <= pair.last.at_s + QUIET_S


@pytest.mark.parametrize("seed", range(*seed_range("0:40")))
def test_a_walk_names_both_sides_of_all_that_went_and_counts_each_once(seed):
    with repeatable(seed, __file__):
        rng = random.Random(seed)
        walk = Walk(rng)
        for _ in range(400):
            # No two keys of a walk have one place in the table: what is known is exact then.
            namespace, number = rng.choice(NAMESPACES), rng.randrange(12)
            match rng.random():
                case draw if draw < 0.6:
                    walk.write(namespace, number)
                case draw if draw < 0.9:
                    walk.ask(namespace, number)
                case _:
                    walk.now_s += rng.choice([0.1, 2.0, QUIET_S / 2, SOON_AGAIN_S])
            walk.check()


@pytest.mark.parametrize("seed", range(*seed_range("0:20")))
def test_nothing_thrashes_where_nobody_asks_again(seed):
    with repeatable(seed, __file__):
        rng = random.Random(seed)
        walk = Walk(rng)
        for number in range(400):
            walk.write(rng.choice(NAMESPACES), number)
            walk.now_s += 0.1
            walk.ask(rng.choice(NAMESPACES), 900 + number % 50)
        assert walk.n_removed > 300
        assert not walk.index.removed.thrashing_at(walk.now_s)
        walk.check()


@pytest.mark.parametrize("seed", range(*seed_range("0:20")))
def test_a_circle_that_is_larger_than_the_tier_always_thrashes(seed):
    with repeatable(seed, __file__):
        rng = random.Random(seed)
        walk = Walk(rng)
        walk.index = TierIndex(walk.index.capacity)
        n_prompts = walk.index.capacity + rng.randint(1, walk.index.capacity)
        for _ in range(8):
            for number in range(n_prompts):
                walk.ask("a", number)
                walk.write("a", number)
                walk.now_s += 1.0
                walk.check()
        (pair,) = walk.index.removed.thrashing_at(walk.now_s)
        assert (pair.needed_by, pair.hurt) == ("a", "a")
