"""Daemons that are killed and come back over one pool, while engines hold on to their leases.

Engines lease, compute, commit, extend, retract, release and die; operators evict and flush; at any
moment the daemon is gone, some engines with it, and the next one adopts all that was noted or only
what could be proven. The same with a real journal, of which the next one has the bytes alone. After
every step all invariants hold, the notes say what the node says, and no page that an engine still
reads has been given to anybody. A failure names its seed. ``KVD_SEEDS=first:last`` runs others:

    KVD_SEEDS=100:1000 python -m pytest -q tests/property/test_restarts.py
"""

from __future__ import annotations

from collections import Counter

import pytest

from kvd.core.cache.eviction import Policy
from kvd.core.replay.freeze import state_hash
from tests.property.journaled import JournaledPool
from tests.property.restarts import Pool, calm, step
from tests.support.seeds import repeatable, seed_range

FIRST, LAST = seed_range("0:8")
STEPS = 250
A_TEST = 4

done: Counter[str] = Counter()


def lived(seed: int, kind: type[Pool] = Pool) -> Pool:
    """The whole of one seed; a failure says how to repeat it."""
    with repeatable(seed, __file__):
        pool = kind(seed, list(Policy)[seed % len(Policy)])
        for _ in range(STEPS):
            step(pool)
        calm(pool)
    return pool


@pytest.mark.parametrize("kind", [Pool, JournaledPool])
@pytest.mark.parametrize("first", range(FIRST, LAST, A_TEST))
def test_nothing_that_was_noted_is_lost_and_nothing_that_is_read_is_given_away(first, kind):
    for seed in range(first, min(first + A_TEST, LAST)):
        done.update(lived(seed, kind).done)


def test_the_same_seed_is_the_same_life():
    assert state_hash(lived(FIRST).node) == state_hash(lived(FIRST).node)


def test_all_of_it_happened():
    """What no seed does is not tested by them."""
    if (FIRST, LAST) != (0, 8) or not done:
        pytest.skip("only the whole default run covers everything")
    wanted = {
        "OpenLease: done", "ExtendLease: done", "CommitLease: done", "CommitAndRelease: done",
        "ReleaseLease: done", "RetractLease: done", "ExtendLease: before-restart",
        "CommitLease: before-restart", "RetractLease: before-restart",
        "SendRequest: before-restart", "ResumeLease: before-restart",
        "SlideLease: before-restart", "restarts", "not proven",
        "former leases", "came back", "came back for leases", "died", "pages adopted",
        "cached pages found",
    }  # fmt: skip
    assert wanted - {what for what, times in done.items() if times} == set()
