"""Device buffers: the component whose pages hold copies of pages that lie elsewhere.

Each lease gets a fixed number of them when it begins, at most as many as the configured tokens per
request take. They are never sent and never cached: what is in them is in the first component too.
Which page of the lease is in which of them is ``residency``; how it gets there is ``fetch``.

Invariant: no page of a buffer changes hands while a copy may still write it. Whoever orders a copy
holds the lease until it is over (``lease.FETCH``), so ``end_lease`` never sees one under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core.cache.lease import FETCH
from kvd.core.components.component_pages import ComponentPages
from kvd.core.components.residency import Residency
from kvd.core.layout.spec import Buffer
from kvd.types import NO_PAGES, Pages, count, pack_ids, page_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.core.cache.lease import Claim
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.spec import Component
    from kvd.core.outbox import Outbox


@mypyc_attr(allow_interpreted_subclasses=True)
class Buffers(ComponentPages):
    """The pages of one component of device copies. Nothing of it lies at nodes."""

    def __init__(self, component: Component, total_pages: int, out: Outbox) -> None:
        super().__init__(component, total_pages, out)
        assert isinstance(component.extent, Buffer)
        self.held: dict[int, Pages] = {}
        """By lease."""
        self.resident: dict[int, Residency] = {}
        """By lease."""
        self.hits = 0
        """Pages wanted by a fetch that were there already, since the node began."""
        self.misses = 0
        """Those that were copied for it."""
        self.copied_bytes = 0
        """All that was copied, what was told to be wanted next included."""
        self.most_pages = -(-component.extent.tokens // component.page_size)
        """Of one lease."""

    @property
    @override
    def held_pages(self) -> int:
        """Pages of all leases."""
        return sum([count(pages) for pages in self.held.values()])

    # ---- a claim -----------------------------------------------------------------------------

    @override
    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """As many as the sequence has pages, up to the configured number."""
        return self._wanted(claim.room_tokens)

    def _wanted(self, room_tokens: int) -> int:
        return min(self.most_pages, -(-room_tokens // self.component.page_size))

    @override
    def grant(self, lease: LeaseRecord, claim: Claim, anchor: RadixNode, n_pages: int) -> None:
        """Take the pages."""
        self.held[lease.id] = self.pool.take_pages(n_pages)
        self.resident[lease.id] = Residency(n_pages)

    @override
    def growth(self, lease: LeaseRecord, room_tokens: int) -> int:
        """Up to the configured number."""
        return max(0, self._wanted(room_tokens) - count(self.held[lease.id]))

    @override
    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Take as many more."""
        # Behind those it has: which slot is which page of these must not change under what is
        # there.
        more = self.pool.take_pages(self.growth(lease, room_tokens))
        pages = self.held[lease.id] = Pages(self.held[lease.id] + more)
        self.resident[lease.id].grow(count(pages))

    def device_pages(self, lease: LeaseRecord, pages: Sequence[int]) -> Pages:
        """Where those logical pages of the lease are, or are being copied to."""
        slots, held = self.resident[lease.id].slots, page_ids(self.held[lease.id])
        return Pages(pack_ids([held[slots[page]] for page in pages]))

    def count_use(self, lease: LeaseRecord, hits: int, misses: int) -> None:
        """So many of the pages wanted were there, and so many not."""
        self.resident[lease.id].hits += hits
        self.resident[lease.id].misses += misses
        self.hits += hits
        self.misses += misses

    def begin_copy(self, lease: LeaseRecord, pages: Sequence[int], ticket: int) -> None:
        """A copy reads those logical pages of it, and writes their slots, from now on."""
        # Held, so that it does not end; read, so that a commit frees no page that the copy reads.
        lease.holders.add(FETCH)
        lease.reads += 1
        self.resident[lease.id].copying(pages, ticket)

    @override
    def own_pages(self, lease: LeaseRecord) -> Pages:
        """Its device pages, in the order of their slots; the engine is told the same."""
        return self.held.get(lease.id, NO_PAGES)

    @override
    def end_lease(self, lease: LeaseRecord) -> None:
        """They hold copies: all are free."""
        # First, because it asserts that no copy still writes the pages which go back below.
        self._forget(lease)
        pages = self.held.pop(lease.id, NO_PAGES)
        if pages:
            self.pool.return_pages(pages)

    @override
    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """No remote writes them, so they are not kept."""
        self._forget(lease)
        pages = self.held[lease.id]
        # Empty, but there: the audit wants every component to know every lease that has pages.
        self.held[lease.id] = NO_PAGES
        if pages:
            self.pool.return_pages(pages)

    def _forget(self, lease: LeaseRecord) -> None:
        resident = self.resident.pop(lease.id, None)
        assert resident is None or not resident.n_copying, f"copies write the buffer of {lease.id}"
