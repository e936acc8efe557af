"""Device buffers: the component whose pages hold copies of pages that lie elsewhere.

Each lease gets a fixed number of them when it begins, at most as many as the configured tokens per
request take. They are never sent and never cached: what is in them is in the first component too.
Which page of the lease is in which of them is ``residency``; how it gets there is ``fetch``.

Invariant: no page of a buffer changes hands while a copy may still write it. Whoever orders a copy
holds the lease until it is over (``lease.FETCH``), so ``end_lease`` never sees one under way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.cache.lease import FETCH, PageSpan
from kvd.core.cache.pages import PagePool
from kvd.core.components.residency import Residency
from kvd.core.layout.spec import Buffer
from kvd.types import NO_PAGES, Pages, count, pack_ids, page_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView, Sequence

    from kvd.core.cache.lease import Claim, LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.spec import Component
    from kvd.errors import Refusal


_NOWHERE: dict[RadixNode, None] = {}


class Buffers:
    """The pages of one component of device copies."""

    evictable_pages = 0
    cached_pages = 0

    def __init__(self, component: Component, total_pages: int) -> None:
        assert isinstance(component.extent, Buffer)
        self.component = component
        self.pool = PagePool(component.name, total_pages)
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
    def held_pages(self) -> int:
        """Pages of all leases."""
        return sum([count(pages) for pages in self.held.values()])

    @property
    def headroom_pages(self) -> int:
        """Pages obtainable now."""
        return self.pool.free_pages

    # ---- what there is: nothing at nodes -----------------------------------------------------

    @property
    def nodes(self) -> KeysView[RadixNode]:
        """None."""
        return _NOWHERE.keys()

    @property
    def unlocked(self) -> KeysView[RadixNode]:
        """None."""
        return _NOWHERE.keys()

    @property
    def leases(self) -> KeysView[int]:
        """Leases that it has something for."""
        return self.held.keys()

    def pages_at(self, node: RadixNode) -> Pages:
        """None."""
        return NO_PAGES

    def locks_at(self, node: RadixNode) -> int:
        """None."""
        return 0

    # ---- a claim -----------------------------------------------------------------------------

    def limit_tokens(self, claim: Claim) -> int | None:
        """Any prefix: copies are made of whatever there is."""
        return None

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int:
        """None of it is sent token by token."""
        return prompt_tokens

    def usable(self, node: RadixNode, claim: Claim) -> RadixNode:
        """Any node."""
        return node

    def lock(self, anchor: RadixNode, claim: Claim) -> None:
        """Nothing of the tree is needed."""

    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """Nothing was locked."""

    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """As many as the sequence has pages, up to the configured number."""
        return self._wanted(claim.room_tokens)

    def _wanted(self, room_tokens: int) -> int:
        return min(self.most_pages, -(-room_tokens // self.component.page_size))

    def kept(self, anchor: RadixNode, claim: Claim) -> int:
        """Nothing of the tree."""
        return 0

    def make_room(self, n_pages: int) -> None:
        """Nothing is ever cached, so there is nothing to drop."""

    def grant(self, lease: LeaseRecord, claim: Claim, anchor: RadixNode, n_pages: int) -> None:
        """Take the pages."""
        self.held[lease.id] = self.pool.take_pages(n_pages)
        self.resident[lease.id] = Residency(n_pages)

    def growth(self, lease: LeaseRecord, room_tokens: int) -> int:
        """Up to the configured number."""
        return max(0, self._wanted(room_tokens) - count(self.held[lease.id]))

    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Take as many more."""
        more = self.pool.take_pages(self.growth(lease, room_tokens))
        pages = self.held[lease.id] = Pages(self.held[lease.id] + more)
        self.resident[lease.id].grow(count(pages))

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """Nothing: only windows slide."""
        return None

    def page_table(self, lease: LeaseRecord) -> Pages:
        """Its device pages, in the order of their slots."""
        return self.held.get(lease.id, NO_PAGES)

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

    def own_pages(self, lease: LeaseRecord) -> Pages:
        """All of them."""
        return self.held.get(lease.id, NO_PAGES)

    def pages_to_keep(self, lease: LeaseRecord, n_tokens: int) -> PageSpan | Refusal:
        """None: all of it is in the first component too."""
        return PageSpan(0, NO_PAGES)

    def end_lease(self, lease: LeaseRecord) -> None:
        """They hold copies: all are free."""
        self._forget(lease)
        pages = self.held.pop(lease.id, NO_PAGES)
        if pages:
            self.pool.return_pages(pages)

    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """No remote writes them, so they are not kept."""
        self._forget(lease)
        pages = self.held[lease.id]
        self.held[lease.id] = NO_PAGES
        if pages:
            self.pool.return_pages(pages)

    def _forget(self, lease: LeaseRecord) -> None:
        resident = self.resident.pop(lease.id, None)
        assert resident is None or not resident.n_copying, f"copies write the buffer of {lease.id}"

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Nothing lies at nodes."""

    def dropped(self, nodes: Iterable[RadixNode]) -> None:
        """Nothing lies at nodes."""
