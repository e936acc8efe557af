"""The index of a tier against plain sets: it is bounded, exact, and a prompt goes from its end."""

from __future__ import annotations

import random
from hashlib import blake2b

import pytest

from kvd.core.tiers.index import TierIndex
from kvd.core.tiers.keys import KEY_BYTES, each_key, keys_along, root_key
from tests.support.seeds import repeatable, seed_range

LAYOUT = blake2b(b"layout", digest_size=KEY_BYTES).digest()
PAGE_BYTES = 8


def path_of(rng, namespace):
    """The keys of a prompt that begins as others do."""
    tokens = b"".join([bytes([rng.randint(0, 2)] * PAGE_BYTES) for _ in range(rng.randint(1, 9))])
    return keys_along(root_key(LAYOUT, namespace), tokens, PAGE_BYTES)


class Oracle:
    """What is there, by plain sets, and what was before what."""

    def __init__(self):
        self.there = {}
        self.before = {}
        self.pins = []

    def kept(self):
        """What is pinned, and what is before it."""
        found = set()
        for _, key in self.pins:
            step = key
            while step is not None:
                found.add(step)
                step = self.before.get(step)
        return found

    def drop(self, gone):
        """These go for room."""
        for name, dropped in gone.items():
            for key in dropped:
                self.there[name].remove(key)
                followers = [k for k in self.there[name] if self.before[k] == key]
                assert not followers, "what follows it is of no use any more"
        if {key for _, key in self.pins} & set().union(*gone.values()):
            left = set().union(*self.there.values())
            assert left <= self.kept(), "what is pinned goes last"

    def add(self, namespace, keys):
        there = self.there.setdefault(namespace, set())
        for at, key in enumerate(keys):
            there.add(key)
            self.before[key] = keys[at - 1] if at else None

    @property
    def n_objects(self):
        return sum(map(len, self.there.values()))


@pytest.mark.parametrize("seed", range(*seed_range("0:40")))
def test_a_walk_keeps_the_bound_and_never_a_page_without_those_before_it(seed):
    with repeatable(seed, __file__):
        rng = random.Random(seed)
        capacity = rng.choice([1, 5, 20, 60])
        index, oracle = TierIndex(capacity), Oracle()
        reserved = 0
        for _ in range(300):
            namespace = rng.choice(["a", "b", "c"])
            keys = path_of(rng, namespace)
            there = oracle.there.get(namespace, set())
            match rng.random():
                case draw if draw < 0.6:
                    n_known = index.leading(namespace, keys)
                    wanted = keys[n_known : n_known + capacity - reserved]
                    gone = index.reserve(len(wanted))
                    oracle.drop(gone)
                    assert index.n_objects + index.reserved <= capacity
                    index.release(len(wanted))
                    # What was there when it was ordered may have gone for the room.
                    n_left = index.leading(namespace, keys)
                    if n_left >= n_known:
                        index.add(namespace, keys[: n_known + len(wanted)])
                        oracle.add(namespace, keys[: n_known + len(wanted)])
                case draw if draw < 0.65:
                    oracle.pins.append((namespace, keys[-1]))
                    index.pin(namespace, keys[-1])
                case draw if draw < 0.7 and oracle.pins:
                    index.unpin(*oracle.pins.pop(rng.randrange(len(oracle.pins))))
                case draw if draw < 0.9:
                    index.touch(namespace, rng.choice(keys))
                case draw if draw < 0.93:
                    index.forget_namespace(namespace)
                    oracle.there.pop(namespace, None)
                case _:
                    assert index.leading(namespace, keys) == next(
                        (at for at, key in enumerate(keys) if key not in there), len(keys)
                    )
            assert index.n_objects == oracle.n_objects
            assert {n for n in oracle.there if oracle.there[n]} == set(index.namespaces())
            for name, known in oracle.there.items():
                assert all(index.has(name, key) for key in known)


def test_the_least_recently_used_prompt_goes_first_and_from_its_end():
    index = TierIndex(6)
    old, new = [[bytes([n, k]) * 10 for k in range(3)] for n in range(2)]
    index.add("", old)
    index.add("", new)
    index.touch("", old[2])
    assert index.reserve(2) == {"": [new[2], new[1]]}
    assert index.leading("", old) == 3


def test_what_was_found_goes_by_its_age_until_it_is_used():
    index = TierIndex(4)
    keys = [bytes([k]) * KEY_BYTES for k in range(4)]
    index.found("", keys)
    index.add("", keys[:2])  # used again: now it is known what follows what
    assert index.reserve(2) == {"": [keys[2], keys[3]]}
    index.release(2)
    assert index.reserve(3) == {"": [keys[1]]}


def test_a_page_that_is_forgotten_leaves_what_followed_it_to_its_age():
    index = TierIndex(3)
    keys = [bytes([k]) * KEY_BYTES for k in range(3)]
    index.add("", keys)
    assert index.forget("", [keys[1], b"unknown"]) == [keys[1]]
    index.add("", [keys[1]], keys[0])
    assert index.n_objects == 3
    assert sum(map(len, index.reserve(3).values())) == 3
    assert index.n_objects == 0


def test_room_is_always_found():
    """Also where each is followed by another, as no hash would have it."""
    index = TierIndex(2)
    one, other = b"1" * KEY_BYTES, b"2" * KEY_BYTES
    index.add("", [one, other])
    index.add("", [one], other)
    assert sum(map(len, index.reserve(2).values())) == 2


def test_keys_name_all_that_is_before_them():
    tokens = bytes(range(32))
    keys = keys_along(root_key(LAYOUT, "a"), tokens, PAGE_BYTES)
    assert len(keys) == len(set(keys)) == 4
    assert each_key(b"".join(keys)) == keys
    assert keys_along(keys[1], tokens[16:], PAGE_BYTES) == keys[2:], "a chain goes on anywhere"
    others = keys_along(root_key(LAYOUT, "a\x1f1"), tokens, PAGE_BYTES)
    assert not set(keys) & set(others), "an epoch is another namespace"
    assert keys_along(root_key(LAYOUT, "a"), tokens[:12], PAGE_BYTES) == keys[:1]
