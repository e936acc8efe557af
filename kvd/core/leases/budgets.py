"""The budgets of a pool, one for each component that has pages of its own: whether something fits.

A request is admitted when every one has what it takes; what leases are promised is nobody else's
headroom.

What must not live here: how pages are obtained (``page_supply``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import Shortage

if TYPE_CHECKING:
    from kvd.core.cache.lease import Claim, Demand
    from kvd.core.cache.pages import PagePool
    from kvd.core.cache.radix import RadixTree
    from kvd.core.components.all_components import AllComponentPages
    from kvd.core.leases.promises import Promises


@mypyc_attr(allow_interpreted_subclasses=True)
class Budgets:
    """What there is, and whether something fits."""

    __slots__ = ("_components", "_page_size", "_pool", "_promises", "_tree", "names", "nothing")

    def __init__(
        self,
        pool: PagePool,
        tree: RadixTree,
        components: AllComponentPages,
        promises: Promises,
        page_size: int,
    ) -> None:
        self.names = (pool.name, *(keeper.component.name for keeper in components.each))
        self.nothing: Demand = (0,) * len(self.names)
        """What is kept for others before anybody is admitted."""
        self._pool, self._tree = pool, tree
        self._components, self._promises = components, promises
        self._page_size = page_size

    def capacity(self, name: str) -> int:
        """Pages of that component that anybody can have."""
        component = self._components.named(name)
        pool = self._pool if component is None else component.pool
        return pool.total_pages - 1 - pool.condemned_pages

    def headroom(self, name: str) -> int:
        """Pages obtainable now of that component, by whom none are promised."""
        component = self._components.named(name)
        return self._promises.headroom_pages if component is None else component.headroom_pages

    def told(self, name: str) -> str:
        """What its headroom is made of, in words."""
        component = self._components.named(name)
        if component is None:
            said = f"{self._pool.free_pages} free, {self._tree.evictable_pages} evictable"
        else:
            said = f"{component.pool.free_pages} free, {component.evictable_pages} evictable"
        promised = self.promised(name)
        return f"{said}, {promised} of them promised to leases" if promised else said

    def promised(self, name: str) -> int:
        """Pages of that component that are promised to leases."""
        component = self._components.named(name)
        return self._promises.n_pages if component is None else component.promised_pages

    def least(self, claim: Claim) -> Demand:
        """What a claim takes if it can go on from all that is cached of it; of kv, all its pages.

        A cached page of kv is one of the pool too; of other components it often takes none.
        """
        if claim.lent is not None:
            return self.nothing
        claim = claim.whole
        pages = -(-claim.room_tokens // self._page_size)
        if not self._components.each:
            return (pages,)
        prefix = self._tree.probe(claim.tokens, claim.namespace, claim.match_tokens)
        return (pages, *self._components.demand(claim, prefix))

    def shortage(self, demand: Demand, kept: Demand) -> Shortage | None:
        """The first that has not so many pages left after what is kept for others."""
        for name, needed, taken in zip(self.names, demand, kept, strict=True):
            obtainable = self.headroom(name) - taken
            if needed > obtainable:
                return Shortage(needed, obtainable, name)
        return None
