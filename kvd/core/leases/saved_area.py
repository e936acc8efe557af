"""The saved area: host memory beside the pool that keeps the bytes of retracted leases.

One pool of saved pages for each component with page ids of its own and with bytes, but for buffers:
what is in them is in the first component too. What is in lockstep with the first component is in
lockstep here as well. So a lease has one part per such component, some pages of it in one piece::

    kv       all pages of its tokens, the cached ones included: they may be gone when it is back
    windows  those mapped that its next token looks back at; the null page is never copied
    states   the one that it writes

What must not live here: when a lease leaves the pool for it and comes back (``retracted``).

Invariants: null + free + saved = total, per pool; no page of the area in two leases; a running
lease has none; one that is being saved has one of kv for each page of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd.core.cache.lease import PageSpan, Saved, SavedPart, Shortage
from kvd.core.cache.pages import PagePool
from kvd.core.layout.spec import (
    Buffer,
    Tail,
    companion_factor,
    companion_pages,
    has_bytes,
    is_companion,
    node_page_bytes,
    saved_region,
)
from kvd.errors import Code, Refusal
from kvd.types import NO_PAGES, Pages, count, slice_pages

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.layout.spec import Component, PoolSpec
    from kvd.core.leases.leased_pool import LeasedPool
    from kvd.types import Tokens


class SavedMove(msgspec.Struct, frozen=True):
    """Pages of one component that are saved or restored: ``pages[i]`` of it and ``slots[i]``."""

    component: str
    pages: Pages
    slots: Pages


class SavedArea:
    """The pages of the area, and which of a lease's they stand for."""

    def __init__(self, spec: PoolSpec, leased: LeasedPool) -> None:
        self.pools: dict[str, PagePool] = {}
        """By component: those that can be saved."""
        self._components: dict[str, Component] = {}
        self._companions: list[tuple[Component, int]] = []
        for component, pages in zip(spec.components, spec.saved_pages, strict=True):
            # What is in a buffer is in the first component too, and comes back by a fetch.
            if isinstance(component.extent, Buffer) or not has_bytes(component):
                continue
            if is_companion(spec, component):
                self._companions.append((component, companion_factor(spec, component)))
            else:
                self._components[component.name] = component
                # One page at least, the null page, also where nothing can be saved: then each save
                # is refused with numbers, like one that finds it full.
                self.pools[component.name] = PagePool(saved_region(component), max(1, pages))
        self._first = spec.components[0].name
        self._spec = spec
        self._leased = leased

    def used_pages(self, component: str) -> int:
        """Pages that hold, or are about to hold, what a lease will want back of that component."""
        pool = self.pools.get(component)
        return pool.total_pages - 1 - pool.free_pages if pool is not None else 0

    def capacity_pages(self, component: str) -> int:
        """Pages that exist for it, the null page not counted."""
        pool = self.pools.get(component)
        return pool.total_pages - 1 if pool is not None else 0

    # ---- what is saved -----------------------------------------------------------------------

    def spans_to_save(
        self, lease: LeaseRecord, n_tokens: int
    ) -> dict[str, PageSpan] | Shortage | Refusal:
        """By component, the pages that have to be saved; or which of them find no room here."""
        wanted = self._wanted(lease, n_tokens)
        if isinstance(wanted, Refusal):
            return wanted
        for component, span in wanted.items():
            pool, needed = self.pools[component], count(span.pages)
            if needed > pool.free_pages:
                return Shortage(needed, pool.free_pages, component)
        return wanted

    def take(self, lease: LeaseRecord, tokens: Tokens, spans: dict[str, PageSpan]) -> None:
        """Pages of the area for these, for which there is room; ``tokens`` are what they hold."""
        parts = tuple(
            SavedPart(component, span.first, self.pools[component].take_pages(count(span.pages)))
            for component, span in spans.items()
        )
        n_pages, n_bytes = self._amount(parts)
        fresh_tokens = self._fresh_tokens(parts, count(tokens))
        lease.saved = Saved(
            tokens=tokens, parts=parts, fresh_tokens=fresh_tokens, n_pages=n_pages, n_bytes=n_bytes
        )

    def drop(self, lease: LeaseRecord) -> None:
        """Free what it has here."""
        # Off the lease first: whoever ends it drops too, and pages given back twice are condemned.
        saved, lease.saved = lease.saved, None
        if saved is not None:
            for part in saved.parts:
                self.pools[part.component].return_pages(part.slots)

    def _wanted(self, lease: LeaseRecord, n_tokens: int) -> dict[str, PageSpan] | Refusal:
        """By component, the pages that have to be saved."""
        leased, wanted = self._leased, {}
        if self._first in self.pools:
            wanted[self._first] = PageSpan(
                0, slice_pages(lease.page_table, 0, leased.pages_for(n_tokens))
            )
        for keeper in leased.components.each:
            span = keeper.pages_to_keep(lease, n_tokens)
            if isinstance(span, Refusal):
                return span
            if span.pages and keeper.component.name in self.pools:
                wanted[keeper.component.name] = span
        return wanted

    def _amount(self, parts: tuple[SavedPart, ...]) -> tuple[int, int]:
        """Pages and bytes of the parts, with what is in lockstep with them."""
        n_pages = n_bytes = 0
        for part in parts:
            times = [(self._components[part.component], 1)]
            if part.component == self._first:
                times += self._companions
            for component, factor in times:
                n_pages += count(part.slots) * factor
                n_bytes += count(part.slots) * factor * node_page_bytes(self._spec, component)
        return n_pages, n_bytes

    def _fresh_tokens(self, parts: tuple[SavedPart, ...], n_tokens: int) -> int:
        """The first token of which something beside the first component is saved."""
        fresh = n_tokens
        for part in parts:
            component = self._components[part.component]
            if isinstance(component.extent, Tail):
                fresh = min(fresh, part.first * component.page_size)
        return fresh

    # ---- what is copied ----------------------------------------------------------------------

    def to_save(self, lease: LeaseRecord) -> list[SavedMove]:
        """Everything that the lease has, of every component."""
        moved = self._moved(lease, 0)
        assert not isinstance(moved, Refusal), "what was taken for its pages fits them"
        return moved

    def to_restore(self, lease: LeaseRecord) -> list[SavedMove] | Refusal:
        """What the tree did not give it; or which pages were mapped and never saved."""
        return self._moved(lease, lease.owned)

    def _moved(self, lease: LeaseRecord, first: int) -> list[SavedMove] | Refusal:
        """Saved pages and the lease's pages for them, kv from page ``first`` on."""
        saved = lease.saved
        if saved is None:
            return []
        n_tokens = count(saved.tokens)
        spans = self._wanted(lease, n_tokens)
        if isinstance(spans, Refusal):
            return spans
        if self._first in spans:
            # Of kv only what the tree did not give. Of the others all: what they had was their own.
            used = spans[self._first].pages
            spans[self._first] = PageSpan(first, slice_pages(used, first))
        parts = {part.component: part for part in saved.parts}
        moved = []
        for component, now in spans.items():
            slots = _slots_for(parts.get(component), now)
            if slots is None:
                return self._unsaved(lease, component, now, parts.get(component))
            moved.append(SavedMove(component, now.pages, slots))
            if component == self._first:
                moved += [
                    SavedMove(
                        companion.name, companion_pages(now.pages, k), companion_pages(slots, k)
                    )
                    for companion, k in self._companions
                ]
        return [move for move in moved if move.pages]

    def _unsaved(
        self, lease: LeaseRecord, component: str, now: PageSpan, part: SavedPart | None
    ) -> Refusal:
        first = part.first if part is not None else 0
        last = first + count(part.slots) if part is not None else 0
        return Refusal(
            Code.INTERNAL,
            f"lease {lease.id} has pages [{now.first}, {now.first + count(now.pages)}) of "
            f"{component} in its row and [{first}, {last}) saved: the others would hold what was "
            "never written; it stays retracted, release it and compute it again",
            numbers={"first": now.first, "pages": count(now.pages), "saved": last - first},
        )


def _slots_for(part: SavedPart | None, now: PageSpan) -> Pages | None:
    """The saved pages of exactly these; None where one of them was not saved."""
    if not now.pages:
        return NO_PAGES
    # A shorter match may map pages that were the tree's when the lease was saved, and were not
    # copied.
    if part is None or now.first < part.first:
        return None
    skip, n_pages = now.first - part.first, count(now.pages)
    slots = slice_pages(part.slots, skip, skip + n_pages)
    return slots if count(slots) == n_pages else None
