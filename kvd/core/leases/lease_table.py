"""The lease table: the parts that move pages and locks, made for one pool.

What lives here: which parts there are, and which of the others each may call; the arrows go one
way, so that what a part does can be read without its callers::

    grants --> retracted --> holders --> commits
       |           |            |
       |           '--> ends <--'  --> lent, giving_way, saved
       '--> supply --> ends
               '-----> evictor

What must not: how anything moves. What all of them share is ``leased_pool``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.eviction import eviction_order
from kvd.core.cache.quota_order import QuotaOrder
from kvd.core.leases.commits import Commits
from kvd.core.leases.evictor import Evictor
from kvd.core.leases.giving_way import GivingWay
from kvd.core.leases.grants import Grants
from kvd.core.leases.holders import Holders
from kvd.core.leases.lease_ends import LeaseEnds
from kvd.core.leases.leased_pool import LeasedPool
from kvd.core.leases.lent_pages import LentPages
from kvd.core.leases.page_supply import PageSupply
from kvd.core.leases.retracted import RetractedLeases
from kvd.core.leases.saved_area import SavedArea

if TYPE_CHECKING:
    from kvd.core.cache.eviction import Policy
    from kvd.core.layout.quota import Quota
    from kvd.core.layout.spec import PoolSpec
    from kvd.core.outbox import Outbox


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseTable(LeasedPool):
    """One pool, its leases, and every way in which they move."""

    def __init__(
        self,
        spec: PoolSpec,
        policy: Policy,
        out: Outbox,
        *,
        is_journaled: bool = False,
        quotas: tuple[Quota, ...] = (),
    ) -> None:
        by_quota = QuotaOrder(policy, quotas) if quotas else None
        order = eviction_order(policy) if by_quota is None else by_quota
        super().__init__(spec, order, out, is_journaled=is_journaled)
        self.evictor = Evictor(self, by_quota)
        self.giving_way = GivingWay(self)
        self.lent = LentPages(self)
        self.commits = Commits(self)
        self.saved: SavedArea = SavedArea(spec, self)
        self.ends = LeaseEnds(self, self.lent, self.giving_way, self.saved)
        self.holders = Holders(self, self.commits, self.giving_way, self.lent, self.ends)
        self.retracted = RetractedLeases(self, self.saved, self.ends, self.holders)
        self.supply = PageSupply(self, self.evictor, self.giving_way, self.ends)
        self.grants = Grants(
            self, self.supply, self.evictor, self.commits, self.lent, self.retracted
        )
