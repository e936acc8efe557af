"""What a snapshot says of pools with several components: pages, windows, buffers, holders."""

from __future__ import annotations

import pytest

from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import (
    Buffer,
    Component,
    Host,
    Mha,
    Nowhere,
    PageOrder,
    PerRequest,
    PoolSpec,
    State,
    StateTensor,
    Tail,
)
from kvd.wire import admin, client
from kvd.wire.snapshot import (
    BufferState,
    CompanionState,
    HeldState,
    LeaseState,
    PoolState,
    WindowState,
)
from tests.core.world import PAGE, Side, World, tokens

KV = Component("kv", 2, Mha(1, 1, 1, "float32"), PAGE)
"""A page of it takes 2 x 16 x 2 x 4 = 256 bytes."""
SWA = PoolSpec(
    "main",
    "swa",
    PageOrder.PAGE_FIRST,
    (KV, Component("swa", 4, Mha(1, 1, 1, "float32"), PAGE, Tail(2 * PAGE))),
    (64, 16),
)
HISPARSE = PoolSpec(
    "main",
    "hisparse",
    PageOrder.PAGE_FIRST,
    (
        Component("kv", 2, Mha(1, 1, 1, "float32"), PAGE, tier=Host()),
        Component("index", 2, Mha(1, 3, 0, "uint8"), PAGE // 4),
        Component("buffer", 2, Mha(1, 1, 1, "float32"), PAGE, Buffer(4 * PAGE)),
    ),
    (64, 256, 11),
)
RECURRENT = PoolSpec(
    "main",
    "recurrent",
    PageOrder.PAGE_FIRST,
    (
        Component("kv", 0, Mha(1, 1, 1, "float32"), PAGE, tier=Nowhere()),
        Component("state", 3, State((StateTensor("ssm", (5,), "float32"),)), 1, PerRequest()),
    ),
    (64, 9),
)


def node_of(spec: PoolSpec) -> Side:
    return World(spec=spec).d


def pools_of(side: Side) -> tuple[PoolState, ...]:
    return snapshot(side.node).pools


def lease_of(side: Side, number: int) -> LeaseState:
    return next(one for one in snapshot(side.node).leases if one.id == number)


def test_each_component_with_pages_of_its_own_has_a_row_and_companions_stand_beside_theirs() -> (
    None
):
    d = node_of(HISPARSE)

    kv, buffer = pools_of(d)

    assert kv == PoolState(
        *("main", "kv", PAGE, 256, 64, 63, 0, 0, 0, 0, 0),
        tier="host",
        companions=(CompanionState("index", 4, 24, 4, 256, "device"),),
    )
    assert buffer == PoolState(
        *("main", "buffer", PAGE, 256, 11, 10, 0, 0, 0, 0, 0),
        extent="buffer",
        buffer=BufferState(4 * PAGE, 0, 0, 0),
    )


def test_windows_say_how_many_pages_full_allocation_would_have() -> None:
    """scenario C: with steps of a page a lease of 10 pages has the window, a step and one more."""
    d = node_of(SWA)
    lease = d.lease(tokens((1, 10 * PAGE)), step_tokens=PAGE)

    kv, swa = pools_of(d)

    assert (kv.held_pages, kv.free_pages) == (10, 53)
    assert (swa.held_pages, swa.free_pages, swa.cached_pages) == (4, 11, 0)
    assert swa.window == WindowState(2 * PAGE, 1, 10, 0)
    assert (swa.extent, swa.page_bytes) == ("tail", 512)
    d.call(client.SlideLease, lease=lease.lease, upto_tokens=PAGE)
    assert pools_of(d)[1].window == WindowState(2 * PAGE, 2, 10, 1)
    assert lease_of(d, lease.lease).beside == (HeldState("swa", 4, 2),)
    assert lease_of(d, lease.lease).row_pages == 10


def test_window_pages_of_the_tree_are_cached_and_locked_by_the_lease_that_reads_them() -> None:
    d = node_of(SWA)
    first = d.lease(tokens((1, 8 * PAGE)))
    d.call(client.CommitAndRelease, lease=first.lease)
    _, swa = pools_of(d)
    assert (swa.cached_pages, swa.locked_pages, swa.evictable_pages) == (8, 0, 8)

    second = d.lease(tokens((1, 8 * PAGE), (900, PAGE)))

    kv, swa = pools_of(d)
    assert (kv.cached_pages, kv.held_pages, second.prefix_tokens) == (8, 1, 8 * PAGE)
    assert (swa.cached_pages, swa.locked_pages, swa.held_pages) == (8, 2, 1)
    assert lease_of(d, second.lease).beside == (HeldState("swa", 1, 3, needed_nodes=(2,)),)
    assert 1 + swa.free_pages + swa.held_pages + swa.cached_pages == swa.total_pages


def test_a_state_is_held_by_its_lease_and_cached_when_that_has_ended() -> None:
    d = node_of(RECURRENT)
    first = d.lease(tokens((1, 2 * PAGE)))
    assert lease_of(d, first.lease).beside == (HeldState("state", 1, 1),)
    d.call(client.CommitAndRelease, lease=first.lease)

    second = d.lease(tokens((1, 2 * PAGE), (900, 5)))

    kv, state = pools_of(d)
    assert (kv.tier, state.tier, state.extent, state.page_bytes) == (
        *("nowhere", "device", "per-request", 60),
    )
    assert (state.held_pages, state.cached_pages, state.locked_pages) == (1, 1, 1)
    assert lease_of(d, second.lease).beside == (HeldState("state", 1, 2, needed_nodes=(2,)),)


@pytest.mark.parametrize("spec", [SWA, HISPARSE, RECURRENT], ids=lambda spec: spec.family)
def test_pages_of_every_component_add_up_to_its_total(spec: PoolSpec) -> None:
    d = node_of(spec)
    for k in range(2):
        d.lease(tokens((1000 * k + 1, 3 * PAGE)))
    ended = d.lease(tokens((9000, 3 * PAGE)))
    d.call(client.CommitAndRelease, lease=ended.lease)

    for one in pools_of(d):
        found = 1 + one.free_pages + one.held_pages + one.cached_pages + one.quarantined_pages
        assert found == one.total_pages, one


def test_a_waiter_is_told_which_component_is_short_and_who_has_it() -> None:
    d = node_of(SWA)
    big = d.lease(tokens((1, 14 * PAGE)))
    small = d.lease(tokens((5000, PAGE)))

    d.call(client.OpenLease, tokens((9000, 2 * PAGE)))

    (waiting,) = snapshot(d.node).waiting
    assert (waiting.budget, waiting.needed_pages, waiting.missing_pages) == ("swa", 2, 2)
    assert [one.partition(" of engine")[0] for one in waiting.held_by] == [
        f"lease {big.lease}",
        f"lease {small.lease}",
    ]
    assert waiting.held_by[0].endswith("(14 pages of swa)")


def test_why_says_what_a_lease_has_of_each_component() -> None:
    d = node_of(SWA)
    lease = d.lease(tokens((1, 10 * PAGE)), step_tokens=PAGE)

    because = d.ask(admin.Why(1, "lease", lease.lease))

    assert isinstance(because, admin.Because)
    assert "of swa: 4 pages held, 1 in its row" in because.facts


def test_a_pool_of_one_component_has_nothing_beside_it() -> None:
    d = World(d_pages=64).d
    lease = d.lease(tokens((1, 2 * PAGE)))

    (kv,) = pools_of(d)

    assert (kv.companions, kv.window, kv.buffer, kv.extent, kv.tier) == (
        *((), None, None, "whole", "device"),
    )
    assert lease_of(d, lease.lease).beside == ()
