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

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.pages import PagePool
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.leases.lease_table import LeaseTable


class Place(msgspec.Struct, frozen=True):
    """Something that has pages; at most one of ``lease`` and ``node`` is not 0."""

    name: str
    pages: Pages
    lease: int = 0
    node: int = 0


class PoolPlaces:
    """One pool of a node, and who has its pages: the free list, nodes of the tree, leases.

    Its pages are those of the first component (``keeper`` is None), of one beside it, or of the
    saved area of the component ``saves``.
    """

    __slots__ = ("keeper", "pool", "saves", "table")

    def __init__(
        self,
        table: LeaseTable,
        pool: PagePool,
        keeper: ComponentPages | None = None,
        saves: str = "",
    ) -> None:
        self.table = table
        self.pool = pool
        self.keeper = keeper
        self.saves = saves

    @property
    def component(self) -> str:
        """How faults and ``kvd why page`` call it: the first component's has no name."""
        return self.pool.name if self.saves or self.keeper is not None else ""

    def nodes(self) -> Iterable[RadixNode]:
        """Those that may have some."""
        if self.saves:
            return ()
        return self.table.tree.nodes() if self.keeper is None else self.keeper.nodes

    def at(self, nodes: Iterable[RadixNode]) -> list[Pages]:
        """What each of these nodes has."""
        if self.keeper is None:
            return [node.pages for node in nodes]
        return [self.keeper.pages_at(node) for node in nodes]

    def locks_at(self, nodes: Iterable[RadixNode]) -> list[int]:
        """The locks of each of these nodes that keep these pages."""
        if self.keeper is None:
            return [node.lock_ref for node in nodes]
        return [self.keeper.locks_at(node) for node in nodes]

    def of(self, lease: LeaseRecord) -> Pages:
        """The pages that are this lease's own."""
        if self.saves:
            parts = () if lease.saved is None else lease.saved.parts
            return Pages(b"".join([part.slots for part in parts if part.component == self.saves]))
        return lease.held if self.keeper is None else self.keeper.own_pages(lease)

    def cached(self) -> Iterator[tuple[RadixNode, Pages]]:
        """Each node and what it has."""
        nodes = list(self.nodes())
        return zip(nodes, self.at(nodes), strict=True)

    def owned(self) -> Iterator[tuple[LeaseRecord, Pages]]:
        """Each lease and what it has."""
        return ((lease, self.of(lease)) for lease in self.table.leases.values())

    def places(self) -> Iterator[Place]:
        """All of them: what they have tiles the pool."""
        yield Place("the free list", self.pool.free_ids())
        for edge, pages in self.cached():
            yield Place(f"node {edge.id}", pages, node=edge.id)
        for lease, pages in self.owned():
            yield Place(f"lease {lease.id}", pages, lease=lease.id)

    def nobodys(self) -> int:
        """How many condemned pages nobody names any more."""
        if not self.pool.condemned_pages:
            return 0
        # A condemned page still counts where somebody has it: as held or cached, and not once more
        # here.
        named = np.frombuffer(b"".join([place.pages for place in self.places()]), "<i4")
        return int(np.setdiff1d(np.frombuffer(self.pool.condemned_ids(), "<i4"), named).size)


def pools_of(table: LeaseTable) -> list[PoolPlaces]:
    """Of each component with pages of its own, the first one first."""
    each = [PoolPlaces(table, keeper.pool, keeper) for keeper in table.components.each]
    return [PoolPlaces(table, table.pool), *each]


def saved_pools_of(table: LeaseTable) -> list[PoolPlaces]:
    """The saved area of each component that can be saved."""
    return [PoolPlaces(table, pool, saves=name) for name, pool in table.saved.pools.items()]


def pool_named(table: LeaseTable, name: str) -> PoolPlaces | None:
    """The pool of that name; empty: that of the first component."""
    known = (*pools_of(table), *saved_pools_of(table))
    return next((places for places in known if places.pool.name == (name or table.pool.name)), None)


def has_any(pages: bytes, ids: np.ndarray) -> bool:
    """Whether one of ``ids`` is among the pages."""
    return bool(np.isin(np.frombuffer(pages, "<u4"), ids).any())


def needed_nodes(keeper: ComponentPages, lease: LeaseRecord) -> list[RadixNode]:
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


def nodes_behind(keeper: WindowPages, lease: LeaseRecord, held: LeaseWindow) -> list[RadixNode]:
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
