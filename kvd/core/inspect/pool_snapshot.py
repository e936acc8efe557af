"""The pages of every component as plain data: how many, and in which state. Only reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.audit.beside_rules import beside_places, needed_nodes
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.windows import WindowPages
from kvd.core.inspect.page_states import nobodys, places
from kvd.core.layout.geometry import shard_places
from kvd.core.layout.spec import (
    companion_factor,
    extent_tokens,
    has_bytes,
    is_companion,
    kind,
    node_page_bytes,
)
from kvd.types import Pages, count
from kvd.wire.snapshot import BufferState, CompanionState, HeldState, PoolState, WindowState

if TYPE_CHECKING:
    from kvd.core.cache.lease import Lease
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.node import Node


def pool_states(node: Node) -> tuple[PoolState, ...]:
    """Each component with page ids of its own, the first one first (I1)."""
    return (_first(node), *(_beside(node, keeper) for keeper in node.leases.components.each))


def held_states(node: Node, lease: Lease) -> tuple[HeldState, ...]:
    """What the lease has of each component beside the first."""
    return tuple(
        HeldState(
            keeper.component.name,
            count(keeper.own_pages(lease)),
            _mapped(keeper.page_table(lease)),
            *_use(keeper, lease),
            needed_nodes=tuple(sorted(edge.id for edge in needed_nodes(keeper, lease))),
        )
        for keeper in node.leases.components.each
    )


def _use(keeper: ComponentPages, lease: Lease) -> tuple[int, int]:
    """Hits and misses of the lease in its buffer."""
    if not isinstance(keeper, Buffers) or lease.id not in keeper.resident:
        return (0, 0)
    resident = keeper.resident[lease.id]
    return (resident.hits, resident.misses)


def _mapped(row: Pages) -> int:
    """Ids in a row that are of a page; the null page stands for none."""
    return int(np.count_nonzero(np.frombuffer(row, dtype="<i4")))


def _first(node: Node) -> PoolState:
    table, spec = node.leases, node.settings.spec
    first = spec.components[0]
    held = quarantined = 0
    for lease in table.leases.values():
        if lease.quarantine is None:
            held += lease.held_pages
        else:
            quarantined += lease.held_pages
    return PoolState(
        pool=spec.name,
        component=table.pool.name,
        page_size=table.page_size,
        page_bytes=node_page_bytes(spec, first) if has_bytes(first) else 0,
        total_pages=table.pool.total_pages,
        free_pages=table.pool.free_pages,
        held_pages=held,
        cached_pages=table.tree.cached_pages,
        quarantined_pages=quarantined,
        evictable_pages=table.tree.evictable_pages,
        locked_pages=table.tree.protected_pages,
        saved_pages=table.saved.used_pages(first.name),
        saved_capacity_pages=table.saved.capacity_pages(first.name),
        placeholder_bytes=0 if has_bytes(first) else node_page_bytes(spec, first),
        tier=kind(first.tier),
        extent=kind(first.extent),
        companions=_companions(node),
        shards=shard_places(spec),
        condemned_pages=nobodys(places(node), table.pool),
    )


def _companions(node: Node) -> tuple[CompanionState, ...]:
    spec = node.settings.spec
    return tuple(
        CompanionState(
            component=one.name,
            page_size=one.page_size,
            page_bytes=node_page_bytes(spec, one),
            pages_each=companion_factor(spec, one),
            total_pages=pages,
            tier=kind(one.tier),
        )
        for one, pages in zip(spec.components, spec.pages, strict=True)
        if is_companion(spec, one)
    )


def _beside(node: Node, keeper: ComponentPages) -> PoolState:
    held = quarantined = 0
    for lease in node.leases.leases.values():
        if lease.quarantine is None:
            held += count(keeper.own_pages(lease))
        else:
            quarantined += count(keeper.own_pages(lease))
    component, cached = keeper.component, keeper.cached_pages
    return PoolState(
        pool=node.settings.spec.name,
        component=component.name,
        page_size=component.page_size,
        page_bytes=node_page_bytes(node.settings.spec, component),
        total_pages=keeper.pool.total_pages,
        free_pages=keeper.pool.free_pages,
        held_pages=held,
        cached_pages=cached,
        quarantined_pages=quarantined,
        evictable_pages=keeper.evictable_pages,
        locked_pages=cached - keeper.evictable_pages,
        condemned_pages=nobodys(beside_places(node, keeper), keeper.pool),
        saved_pages=node.leases.saved.used_pages(component.name),
        saved_capacity_pages=node.leases.saved.capacity_pages(component.name),
        tier=kind(component.tier),
        extent=kind(component.extent),
        window=_window(node, keeper),
        buffer=_buffer(keeper),
    )


def _window(node: Node, keeper: ComponentPages) -> WindowState | None:
    if not isinstance(keeper, WindowPages):
        return None
    running = [one for one in node.leases.leases.values() if one.quarantine is None]
    return WindowState(
        window_tokens=extent_tokens(keeper.component),
        mapped_pages=sum(_mapped(keeper.page_table(lease)) for lease in running),
        full_pages=sum(count(lease.page_table) for lease in running),
        slides=keeper.slides,
    )


def _buffer(keeper: ComponentPages) -> BufferState | None:
    if not isinstance(keeper, Buffers):
        return None
    return BufferState(
        request_tokens=extent_tokens(keeper.component),
        hits=keeper.hits,
        misses=keeper.misses,
        copied_bytes=keeper.copied_bytes,
    )
