"""Leases of what is cached and nothing else, and calls that do not wait."""

from __future__ import annotations

import pytest

from kvd.core import inputs
from kvd.core.audit.invariants import violations
from kvd.core.inspect.snapshot import snapshot
from kvd.errors import Code
from kvd.types import count
from kvd.wire import client
from tests.core.engines import PageTotals, totals
from tests.core.families import SPECS, worked
from tests.core.test_admission import cached
from tests.core.test_drain import drain
from tests.core.world import PAGE, World, tokens


def test_a_full_pool_with_others_waiting_serves_hits():
    world = World(d_pages=10)
    d = world.d
    cached(d, tokens((1, 4 * PAGE)))
    holder = d.lease(tokens((5000, 5 * PAGE)))
    assert d.call(client.OpenLease, tokens((7000, 6 * PAGE)), deadline_s=9.0) is None
    before = totals(d)

    hit = d.call(client.HoldPrefix, tokens((1, 8 * PAGE)))

    assert isinstance(hit, client.Leased)
    assert (hit.prefix_tokens, len(hit.pages)) == (4 * PAGE, 4 * 4)
    assert totals(d) == PageTotals(free=before.free, held=before.held, cached=4, evictable=0)
    assert len(snapshot(d.node).waiting) == 1
    more = d.call(client.ExtendLease, lease=hit.lease, n_tokens=PAGE)
    assert isinstance(more, client.Failed)
    d.call(client.ReleaseLease, lease=holder.lease)
    d.call(client.ReleaseLease, lease=hit.lease)
    world.run()
    assert not snapshot(d.node).waiting


def test_it_grows_and_is_committed_like_any_other():
    world = World()
    d = world.d
    prompt = tokens((1, 6 * PAGE))
    cached(d, prompt[: 3 * PAGE * 4])
    hit = d.call(client.HoldPrefix, prompt)
    grown = d.call(client.ExtendLease, lease=hit.lease, n_tokens=3 * PAGE)
    assert isinstance(grown, client.PageTable)

    d.call(client.CommitAndRelease, prompt[3 * PAGE * 4 :], lease=hit.lease)

    found = d.call(client.MatchPrefix, prompt)
    assert found.tokens == 6 * PAGE


@pytest.mark.parametrize("prompt", [tokens((1, 3 * PAGE)), b""])
def test_of_what_is_not_cached_it_is_a_lease_of_nothing(prompt):
    world = World()
    d = world.d
    before = totals(d)
    empty = d.call(client.HoldPrefix, prompt)
    assert (empty.prefix_tokens, empty.pages) == (0, b"")
    assert totals(d) == before
    assert isinstance(
        d.call(client.ExtendLease, lease=empty.lease, n_tokens=PAGE), client.PageTable
    )
    assert isinstance(d.call(client.ReleaseLease, lease=empty.lease), client.Done)
    assert totals(d) == before


def test_a_draining_node_holds_nothing_new():
    world = World()
    drain(world.d)
    refused = world.d.call(client.HoldPrefix, tokens((1, PAGE)))
    assert refused.refusal.code is Code.DRAINING


@pytest.mark.parametrize("family", SPECS)
def test_every_family_holds_what_it_can_go_on_from(family):
    """All that it is said to have is cached, also of what lies beside the first component."""
    engine = worked(family, seed=20261123, steps=120)
    engine.now_s += 1.0
    engine.feed(inputs.Tick(engine.now_s))  # nobody waits any more
    for number in list(engine.leases):
        engine.call(client.ReleaseLease, number)
    first = engine.call(client.OpenLease, toks=tokens((77_000, 4 * PAGE)))
    engine.call(client.SlideLease, first.lease, 4 * PAGE)
    engine.call(client.CommitAndRelease, first.lease)
    for prompt, least in (
        (tokens((77_000, 4 * PAGE), (78_000, 3 * PAGE)), 4 * PAGE),
        *((tokens((1000 * number, 160)), 0) for number in (1, 2, 3)),
    ):
        hit = engine.call(client.HoldPrefix, toks=prompt)

        lease = engine.node.leases.leases[hit.lease]
        assert hit.prefix_tokens == count(lease.tokens) == lease.room_tokens
        assert hit.prefix_tokens >= least
        assert hit.prefix_tokens <= engine.call(client.MatchPrefix, toks=prompt).tokens
        assert violations(engine.node) == []
        engine.call(client.ReleaseLease, hit.lease)
        assert violations(engine.node) == []


def test_who_does_not_wait_is_answered_in_the_same_step():
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((1, 8 * PAGE)))

    refused = d.call(client.OpenLease, tokens((5000, 4 * PAGE)), deadline_s=0.0)

    assert isinstance(refused, client.Failed)
    assert refused.refusal.code is Code.DEADLINE
    assert refused.refusal.numbers["needed_pages"] == 4
    assert not snapshot(d.node).waiting
    assert isinstance(d.call(client.OpenLease, tokens((7000, PAGE)), deadline_s=0.0), client.Leased)


def test_who_does_not_wait_behind_others_hears_of_them():
    world = World(d_pages=10)
    d = world.d
    d.lease(tokens((1, 8 * PAGE)))
    assert d.call(client.OpenLease, tokens((5000, 4 * PAGE)), deadline_s=9.0) is None

    refused = d.call(client.OpenLease, tokens((7000, PAGE)), deadline_s=0.0)

    assert refused.refusal.code is Code.DEADLINE
    assert "1 requests wait in front of it" in refused.refusal.message
    assert len(snapshot(d.node).waiting) == 1
