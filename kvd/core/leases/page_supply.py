"""Where the pages for a claim come from: free pages, cached KV, and leases that give way.

What is free or evictable is headroom. Where that is short leases give way, and no more of them than
it takes; then what is cached is evicted until so many pages are free.

What must not live here: which leases give way (``giving_way``), what is evicted (``evictor``),
whether something fits (``budgets``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.types import NO_PAGES, count

if TYPE_CHECKING:
    from kvd.core.cache.lease import Demand, Shortage
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.evictor import Evictor
    from kvd.core.leases.giving_way import GivingWay
    from kvd.core.leases.lease_ends import LeaseEnds
    from kvd.core.leases.leased_pool import LeasedPool


@mypyc_attr(allow_interpreted_subclasses=True)
class PageSupply:
    """Obtains pages of every component for who asks."""

    def __init__(
        self, leased: LeasedPool, evictor: Evictor, giving_way: GivingWay, ends: LeaseEnds
    ) -> None:
        self._leased = leased
        self._evictor = evictor
        self._giving_way = giving_way
        self._ends = ends

    def obtain(self, n_pages: int) -> int:
        """Pages obtainable of the first component, after leases have given way for so many."""
        obtainable = self._leased.headroom_pages
        if n_pages <= obtainable or not self._giving_way.leases:
            return obtainable
        idle = self._giving_way.idle()
        # Not in vain: of leases that lie on one path this counts more than there is to gain.
        if sum([count(lease.page_table) for lease in idle]) < n_pages - obtainable:
            return obtainable
        for lease in idle:
            self._go(lease)
            obtainable = self._leased.headroom_pages
            if n_pages <= obtainable:
                break
        return obtainable

    def shortage(self, demand: Demand, kept: Demand) -> Shortage | None:
        """What is short of a demand when all that can has given way for it."""
        budgets = self._leased.budgets
        shortage = budgets.shortage(demand, kept)
        if shortage is None or not self._giving_way.leases:
            return shortage
        for lease in self._giving_way.idle():
            self._go(lease)
            shortage = budgets.shortage(demand, kept)
            if shortage is None:
                break
        return shortage

    def make_room(self, n_pages: int, session: int, need: str) -> None:
        """Have ``n_pages`` free pages, evicting if that is enough; otherwise change nothing.

        What is claimed is locked before this is called, so nothing of it is evicted here.
        """
        leased = self._leased
        # Twice only where some are condemned.
        while (short := n_pages - leased.pool.free_pages) > 0:
            if short > leased.tree.evictable_pages:
                return
            self._evictor.evict(short, "room", session, need)

    def have_room(self, demand: Demand, session: int, need: str) -> None:
        """Free pages for all of it, for which there is headroom."""
        self.make_room(demand[0], session, need)
        components = self._leased.components
        if components.each:
            components.make_room(demand[1:])

    def _go(self, lease: LeaseRecord) -> None:
        """It gives way: who held it is told when this step is over."""
        lease.holders = set()
        self._giving_way.gone.append(lease)
        self._ends.end_lease(lease, "gave-way")
        # They are others' from here on.
        lease.page_table, lease.owned = NO_PAGES, 0
