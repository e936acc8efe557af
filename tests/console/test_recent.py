"""Where tokens came from, counted from what happened; the tokens of a prompt are counted once."""

from __future__ import annotations

import pytest

from kvd.console.history import Recent
from kvd.wire import client
from tests.core.world import PAGE, World, tokens


@pytest.fixture
def seen():
    """A world, and what its decode side's events add up to."""
    world = World()
    recent = Recent()

    def sources():
        for event in world.d.events[sources.taken :]:
            if recent.wants(type(event)):
                recent.take(event)
        sources.taken = len(world.d.events)
        return recent.sources()

    sources.taken = 0
    return world, sources


def lease(world, prompt):
    """Compute a prompt and cache it."""
    opened = world.d.call(client.OpenLease, prompt)
    world.d.call(client.CommitAndRelease, lease=opened.lease)
    return opened.lease


def test_a_prompt_is_new_then_cached_then_evicted(seen):
    world, sources = seen
    prompt = tokens((1, 3 * PAGE + 2))
    lease(world, prompt)
    assert (sources().new, sources().unaligned, sources().cached) == (3 * PAGE, 2, 0)

    lease(world, prompt)
    assert (sources().new, sources().unaligned, sources().cached) == (3 * PAGE, 4, 3 * PAGE)

    world.d.node.leases.evictor.flush()
    lease(world, prompt)
    assert (sources().new, sources().evicted) == (3 * PAGE, 3 * PAGE)
