"""The page budgets of a pool: one for each component that has pages of its own.

A request is admitted when every budget has what it takes, and otherwise none is touched. The order
of a ``Demand`` is theirs: the first component, then each keeper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.lease import Demand, Shortage

if TYPE_CHECKING:
    from kvd.core.lease import Claim
    from kvd.core.lease_table import LeaseTable


class Budgets:
    """What there is, and whether something fits."""

    __slots__ = ("_table", "names", "nothing")

    def __init__(self, table: LeaseTable) -> None:
        self.names = (table.pool.name, *(one.component.name for one in table.beside.each))
        self.nothing: Demand = (0,) * len(self.names)
        """What is promised before anybody is admitted."""
        self._table = table

    def capacity(self) -> Demand:
        """Pages of each that anybody can have."""
        table = self._table
        pools = [table.pool, *(one.pool for one in table.beside.each)]
        return tuple([one.total_pages - 1 - one.condemned_pages for one in pools])

    def headroom(self, name: str) -> int:
        """Pages obtainable now of that component."""
        keeper = self._table.beside.named(name)
        return self._table.headroom_pages if keeper is None else keeper.headroom_pages

    def told(self, name: str) -> str:
        """What its headroom is made of, in words."""
        table = self._table
        keeper = table.beside.named(name)
        if keeper is None:
            return f"{table.pool.free_pages} free, {table.tree.evictable_pages} evictable"
        return f"{keeper.pool.free_pages} free, {keeper.evictable_pages} evictable"

    def least(self, claim: Claim) -> Demand:
        """What a claim takes if it can go on from all that is cached of it; of kv, all its pages.

        A cached page of kv takes one of the pool too, a cached token often takes nothing beside.
        """
        table = self._table
        pages = table.pages_for(claim.room_tokens)
        if not table.beside.each:
            return (pages,)
        prefix = table.tree.probe(claim.tokens, claim.namespace, claim.match_tokens)
        return (pages, *table.beside.demand(claim, prefix))

    def shortage(self, demand: Demand, promised: Demand) -> Shortage | None:
        """The first that has not so many pages left beside what is promised."""
        for name, needed, taken in zip(self.names, demand, promised, strict=True):
            obtainable = self.headroom(name) - taken
            if needed > obtainable:
                return Shortage(needed, obtainable, name)
        return None
