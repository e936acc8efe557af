"""Promised pages: capacity that a lease is sure of, and that lies in the cache until it is needed.

A reserve (``reserve_tokens``) takes its pages when the lease is opened, and cached KV gives way to
it then. A promise takes none::

    pool   | held, locked, in quarantine | cached, nobody locks it          | free       |
                                         | headroom of everybody |  promised             |

Cached KV stays where it is and is found; it gives way when the lease goes on into its promise
(``Grants.extend``), which cannot fail: free and evictable pages cover all promises, of every
component (I10). So whatever makes fewer of them asks first, and what is promised is not there for
anybody else: a claim, which takes pages; the lock of its prefix, which turns evictable pages into
protected ones; a commit whose duplicates stay with their lease, as a post still reads them or its
engine goes on with them; an arena. What asks ``headroom_pages`` has asked.

A promise is of tokens: pages for the first ``upto_tokens`` of the lease. Of a component beside the
first it is what ``growth`` says that they take more than the lease has, which changes as the lease
slides; so it is counted anew whenever the lease has moved. It ends with its engine's hold of the
lease and with what takes the lease's pages: a retraction, after which a resume asks for it again.
Otherwise only pages that are found broken can end it (``cut``), the youngest promise first.

What must not live here: what is taken, evicted and locked (``grants``, ``evictor``).
"""

from __future__ import annotations

from operator import add, sub
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease_record import LeasePromise
from kvd.types import count

if TYPE_CHECKING:
    from kvd.core.cache.lease import Demand
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.pages import PagePool
    from kvd.core.cache.radix import RadixTree
    from kvd.core.components.all_components import AllComponentPages


@mypyc_attr(allow_interpreted_subclasses=True)
class Promises:
    """Which leases are promised pages, and how many of each component."""

    __slots__ = ("_components", "_page_size", "_pool", "_tree", "n_pages", "of_leases")

    def __init__(
        self, pool: PagePool, tree: RadixTree, components: AllComponentPages, page_size: int
    ) -> None:
        self.of_leases: dict[int, LeaseRecord] = {}
        """Those with a promise, used up or not, the oldest first."""
        self.n_pages = 0
        """Promised of the first component; ``ComponentPages`` has its own."""
        self._pool = pool
        self._tree = tree
        self._components = components
        self._page_size = page_size

    def promise(self, lease: LeaseRecord, upto_tokens: int) -> None:
        """The lease is sure of pages for its first tokens; its claim has counted them."""
        lease.promise = LeasePromise(upto_tokens)
        self.of_leases[lease.id] = lease
        self.count_again(lease)

    def count_again(self, lease: LeaseRecord) -> None:
        """The lease has moved: so many pages are promised to it from now on."""
        promise = lease.promise
        if promise is not None and lease.id in self.of_leases:
            self._set_pages(promise, self.lacking(lease, promise.upto_tokens))

    def lacking(self, lease: LeaseRecord, upto_tokens: int) -> Demand:
        """Pages that the lease has not, of those for so many first tokens."""
        needed = -(-upto_tokens // self._page_size) - count(lease.page_table)
        return (max(0, needed), *self._components.growth(lease, upto_tokens))

    def end(self, lease: LeaseRecord) -> bool:
        """Nothing is promised to the lease any more; whether pages were.

        How far it went stays known: a retracted lease asks for as much when it resumes.
        """
        promise = lease.promise
        if promise is None or self.of_leases.pop(lease.id, None) is None:
            return False
        had_any = any(promise.pages)
        self._set_pages(promise, ())
        return had_any

    def cut(self) -> list[str]:
        """Promise no more than there is, after pages were found broken; whose it was, in words."""
        said = []
        for lease in reversed(list(self.of_leases.values())):
            if not any(self.uncovered()):
                break
            promise = lease.promise
            if promise is not None and any(promise.pages):
                said.append(f"lease {lease.id} is promised {promise.pages[0]} pages less")
                self.end(lease)
        return said

    def recount(self) -> None:
        """The sums, and what each lease is promised, as they should be."""
        self.n_pages = 0
        for component in self._components.each:
            component.promised_pages = 0
        for lease in self.of_leases.values():
            if lease.promise is not None:
                lease.promise.pages = ()
                self.count_again(lease)

    def is_counted(self) -> bool:
        """Whether the sums, and what each lease is promised, are what they should be."""
        sums = (self.n_pages, *[keeper.promised_pages for keeper in self._components.each])
        owed = (0,) * len(sums)
        for lease in self.of_leases.values():
            promise = lease.promise
            if promise is None or promise.pages != self.lacking(lease, promise.upto_tokens):
                return False
            owed = tuple(map(add, owed, promise.pages))
        return owed == sums

    @property
    def headroom_pages(self) -> int:
        """Pages of the first component obtainable now by whom none are promised."""
        there = self._pool.free_pages + self._tree.evictable_pages - self._pool.doomed_pages
        return there - self.n_pages

    def uncovered(self) -> Demand:
        """Promised pages of each component that neither free nor evictable pages cover."""
        each = [keeper.headroom_pages for keeper in self._components.each]
        return tuple([max(0, -pages) for pages in (self.headroom_pages, *each)])

    def _set_pages(self, promise: LeasePromise, pages: Demand) -> None:
        none = (0,) * (1 + len(self._components.each))
        first, *beside = map(sub, pages or none, promise.pages or none)
        self.n_pages += first
        for component, change in zip(self._components.each, beside, strict=True):
            component.promised_pages += change
        promise.pages = pages
