"""Where every page is: the free list, a lease, a node of the tree; and which nodes a lease needs.

The audit checks that places tile a pool; snapshots, ``why`` and the page map read them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.core.components.state import StatePages
from kvd.core.components.windows import LeaseWindow, WindowPages
from kvd.types import Pages

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvd.core.cache.lease import LeaseRecord
    from kvd.core.cache.pages import PagePool
    from kvd.core.cache.radix_node import RadixNode as TreeNode
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.leases.lease_table import LeaseTable


class Place(msgspec.Struct, frozen=True):
    """Something that has pages; at most one of ``lease`` and ``node`` is not 0."""

    name: str
    pages: Pages
    lease: int = 0
    node: int = 0


def places(table: LeaseTable) -> Iterator[Place]:
    """All of them: what they have tiles the pool."""
    yield Place("the free list", table.pool.free_ids())
    for edge in table.tree.nodes():
        yield Place(f"node {edge.id}", edge.pages, node=edge.id)
    for lease in table.leases.values():
        yield Place(f"lease {lease.id}", lease.held, lease=lease.id)


def nobodys(everything: Iterable[Place], pool: PagePool) -> int:
    """How many condemned pages nobody names any more."""
    if not pool.condemned_pages:
        return 0
    named = np.frombuffer(b"".join([place.pages for place in everything]), "<i4")
    return int(np.setdiff1d(np.frombuffer(pool.condemned_ids(), "<i4"), named).size)


def has_any(pages: bytes, ids: np.ndarray) -> bool:
    """Whether one of ``ids`` is among the pages."""
    return bool(np.isin(np.frombuffer(pages, "<u4"), ids).any())


def component_places(table: LeaseTable, keeper: ComponentPages) -> Iterator[Place]:
    """All places of one keeper's pages."""
    yield Place("the free list", keeper.pool.free_ids())
    for edge in keeper.nodes:
        yield Place(f"node {edge.id}", keeper.pages_at(edge), node=edge.id)
    for lease in table.leases.values():
        yield Place(f"lease {lease.id}", keeper.own_pages(lease), lease=lease.id)


def needed_nodes(keeper: ComponentPages, lease: LeaseRecord) -> list[TreeNode]:
    """The nodes whose part of this component the lease needs, the deepest first.

    Found by walking up from its anchor, not by what is locked.
    """
    match keeper:
        case WindowPages():
            held = keeper.held.get(lease.id)
            return [] if held is None else nodes_behind(keeper, lease, held)
        case StatePages():
            state = keeper.held.get(lease.id)
            return [] if state is None or state.source is None else [state.source]
        case _:
            return []


def nodes_behind(keeper: WindowPages, lease: LeaseRecord, held: LeaseWindow) -> list[TreeNode]:
    """The nodes of ``[fence, start)`` on the lease's path."""
    if held.fence >= held.start:
        return []
    page = keeper.component.page_size
    fence, start = held.fence * page, held.start * page
    found = []
    step = lease.anchor
    while step is not None and step.end_tokens > fence:
        if step.end_tokens <= start:
            found.append(step)
        step = step.parent
    return found
