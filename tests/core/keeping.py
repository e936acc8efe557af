"""A lease table of several components without a node, and everything that must hold in it.

``check`` recomputes from scratch what the table and its keepers count: the pages of every pool, the
locks of windows and snapshots, and the rows that engines see.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvd.core.audit.rules import promise_faults, tree_faults
from kvd.core.cache.eviction import Policy
from kvd.core.cache.lease import ARRIVAL, Claim
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.components.state import StatePages
from kvd.core.components.windows import WindowPages
from kvd.core.layout.spec import Buffer, Component, PageOrder, PerRequest, PoolSpec, Raw, Tail
from kvd.core.leases.lease_table import LeaseTable
from kvd.core.outbox import Outbox
from kvd.types import NO_TOKENS, Pages, Tokens, count, page_ids

if TYPE_CHECKING:
    from kvd.core.cache.pages import PagePool
    from kvd.core.cache.radix_node import RadixNode

AWAY = {LeaseStage.RETRACTED, LeaseStage.RESUMING}


def pool_spec(
    page: int,
    kv: int,
    *,
    window: int = 0,
    swa: int = 0,
    states: int = 0,
    buffer_tokens: int = 0,
    buffers: int = 0,
    saved: tuple[int, ...] = (),
) -> PoolSpec:
    """``kv`` pages and, where they are named, window, state and buffer pages; none is null."""
    components = [Component("kv", 1, Raw(16), page)]
    pages = [kv + 1]
    if window:
        components.append(Component("swa", 1, Raw(16), page, Tail(window)))
        pages.append(swa + 1)
    if states:
        components.append(Component("state", 1, Raw(16), 1, PerRequest()))
        pages.append(states + 1)
    if buffer_tokens:
        components.append(Component("buffer", 1, Raw(16), page, Buffer(buffer_tokens)))
        pages.append(buffers + 1)
    return PoolSpec(
        "main", "many", PageOrder.PAGE_FIRST, tuple(components), tuple(pages), tuple(saved)
    )


def table_of(page: int, kv: int, policy: Policy = Policy.LRU, **more: int) -> LeaseTable:
    """An empty table; the numbers are those of ``pool_spec``."""
    return LeaseTable(pool_spec(page, kv, **more), policy, Outbox())


def claim(
    toks: Tokens, *, reserve: int = 0, cache: bool = True, step: int = 0, promise: int = 0
) -> Claim:
    """An engine that computes."""
    return Claim(
        1, 1, "lease", 0, "", toks, reserve, 0, cache, step_tokens=step, promise_tokens=promise
    )


def arrival(
    table: LeaseTable,
    toks: Tokens,
    *,
    reserve: int = 0,
    cache: bool = True,
    step: int = 0,
    promise: int = 0,
) -> Claim:
    """A receive: what lies beside the first component is sent."""
    fresh = table.components.fresh_tokens(count(toks), cached=cache)
    return Claim(
        1, 1, "receive", 9, "", toks, reserve, 0, cache, ARRIVAL, fresh_tokens=fresh,
        step_tokens=step, promise_tokens=promise,
    )  # fmt: skip


def opened(table: LeaseTable, asked: Claim) -> LeaseRecord:
    """The lease, for which there is room."""
    lease = table.grants.open_lease(asked)
    assert isinstance(lease, LeaseRecord), lease
    check(table)
    return lease


def finish(table: LeaseTable, lease: LeaseRecord, new: Tokens = NO_TOKENS) -> None:
    """Commit and release, as an engine does that computed nothing further."""
    assert isinstance(table.commits.commit(lease, new), int)
    lease.is_whole = True
    table.holders.release(lease, next(iter(lease.holders)), "normal")
    check(table)


def cached(table: LeaseTable, toks: Tokens) -> None:
    """These tokens are in the tree, with what lies beside them."""
    finish(table, opened(table, claim(toks)))


def row(table: LeaseTable, lease: LeaseRecord, component: str = "swa") -> list[int]:
    """What the engine sees of a component."""
    keeper = table.components.named(component)
    assert keeper is not None
    return page_ids(keeper.page_table(lease))


def windows(table: LeaseTable) -> WindowPages:
    """The keeper of window pages."""
    keeper = table.components.named("swa")
    assert isinstance(keeper, WindowPages)
    return keeper


def states(table: LeaseTable) -> StatePages:
    keeper = table.components.named("state")
    assert isinstance(keeper, StatePages)
    return keeper


def pages_left(table: LeaseTable) -> dict[str, tuple[int, int]]:
    """By component: free and evictable pages."""
    left = {"kv": (table.pool.free_pages, table.tree.evictable_pages)}
    for keeper in table.components.each:
        left[keeper.component.name] = (keeper.pool.free_pages, keeper.evictable_pages)
    return left


# ---- what must hold ------------------------------------------------------------------------------


def check(table: LeaseTable) -> None:
    assert not tree_faults(table.tree)
    assert not promise_faults(table)
    leases = list(table.leases.values())
    nodes = list(table.tree.nodes())
    _tiles(table.pool, [n.pages for n in nodes] + [one.held for one in leases])
    for keeper in table.components.each:
        beside: list[Pages] = []
        if isinstance(keeper, WindowPages):
            _check_windows(keeper, leases, set(nodes))
            beside = [window.pages for window in keeper.at.values()]
        elif isinstance(keeper, StatePages):
            _check_states(keeper, leases, set(nodes))
            beside = [snapshot.pages for snapshot in keeper.at.values()]
        _tiles(keeper.pool, beside + [keeper.own_pages(one) for one in leases])
        assert keeper.cached_pages == sum(map(count, beside))
        assert set(keeper.leases) == {one.id for one in leases if one.state not in AWAY}
    parts = [part for one in leases if one.saved is not None for part in one.saved.parts]
    for component, pool in table.saved.pools.items():
        _tiles(pool, [part.slots for part in parts if part.component == component])


def _tiles(pool: PagePool, pieces: list[Pages]) -> None:
    """Every page but the null page is in exactly one place."""
    ids = np.frombuffer(b"".join([pool.free_ids(), *pieces]), "<i4")
    assert np.array_equal(np.sort(ids), np.arange(1, pool.total_pages)), pool.name


def _check_windows(keeper: WindowPages, leases: list[LeaseRecord], nodes: set[RadixNode]) -> None:
    needed: Counter[RadixNode] = Counter()
    for lease in leases:
        held = keeper.held.get(lease.id)
        if held is None:
            continue
        assert held.fence <= held.start
        assert held.floor <= held.top
        assert len(held.pages) // 4 == held.top - held.floor
        if lease.quarantine is None:
            seen = page_ids(keeper.page_table(lease))
            assert len(seen) == held.room == count(lease.page_table)
            mapped = [held.floor <= k < held.top for k in range(held.room)]
            assert [page > 0 for page in seen] == mapped
        step = lease.anchor
        page = keeper.component.page_size
        while step is not None and step.parent is not None:
            if held.fence * page < step.end_tokens <= held.start * page:
                needed[step] += 1
            step = step.parent
    for node, window in keeper.at.items():
        assert node in nodes
        assert len(window.pages) == len(node.pages)
        assert window.locks == needed.pop(node, 0) <= node.lock_ref
        assert (node in keeper.unlocked) == (not window.locks)
    assert not needed, "a lease needs the window of a tombstone"
    assert set(keeper.unlocked) <= set(keeper.nodes)
    unlocked = [len(one.pages) for one in keeper.at.values() if not one.locks]
    assert keeper.evictable_pages == sum(unlocked) // 4


def _check_states(keeper: StatePages, leases: list[LeaseRecord], nodes: set[RadixNode]) -> None:
    held = [keeper.held[lease.id] for lease in leases if lease.id in keeper.held]
    needed = Counter(one.source for one in held if one.source is not None)
    for node, snapshot in keeper.at.items():
        assert node in nodes
        assert snapshot.locks == needed.pop(node, 0) <= node.lock_ref
        assert (node in keeper.unlocked) == (not snapshot.locks)
    assert not needed, "a lease goes on from a snapshot that is gone"
    assert set(keeper.unlocked) <= set(keeper.at)
