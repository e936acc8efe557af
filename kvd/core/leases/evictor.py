"""Cached pages leave the tree: which go first is its order, for whom they went is noted here.

What must not live here: when pages are needed (``page_supply``), what a record of what has left
looks like (``cache.evictions``), which namespace is above its quota (``cache.quota_order``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.evictions import FLUSH, MOST_FRESH, OPERATOR, SOON_S, Evictions
from kvd.core.cache.quota_order import QuotaOrder
from kvd.core.components.component_pages import tell_evicted
from kvd.core.leases.lease_events import tell_floor_broken, tell_thrashing
from kvd.types import ID_BYTES, NO_PAGES, count
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvd.core.cache.eviction import Policy
    from kvd.core.layout.quota import Quota
    from kvd.core.leases.leased_pool import LeasedPool


@mypyc_attr(allow_interpreted_subclasses=True)
class Evictor:
    """Takes cached pages out of the tree, and remembers for whose sake."""

    def __init__(self, leased: LeasedPool, quotas: QuotaOrder | None) -> None:
        self.quotas: QuotaOrder | None = quotas
        """The order of eviction, where namespaces have quotas."""
        self.evictions = Evictions(is_single=not leased.components.each)
        self.evicted_pages = 0
        self._leased = leased

    def evict(self, n_pages: int, reason: str, session: int = 0, need: str = OPERATOR) -> int:
        """Take at least ``n_pages`` cached pages out of the tree, if so many are evictable.

        ``session`` needs them, for ``need``.
        """
        leased = self._leased
        evicted = leased.tree.evict(n_pages)
        if self.quotas is not None:
            self._note_quotas(self.quotas, session, need)
        n_freed = len(evicted.pages) // ID_BYTES
        # Noted as nobody's before anybody is given them: the journal hears in this order.
        leased.return_pages(evicted.pages)
        self.evicted_pages += n_freed
        self.evictions.left(evicted.victims, evicted.pages, session, need, leased.out.at_s)
        if len(self.evictions.fresh) >= MOST_FRESH:
            self.settle_evictions()
        tell_evicted(leased.out, n_freed, len(evicted.victims), reason)
        return n_freed

    def flush(
        self, keys: Collection[str] | None = None, namespace: str | None = None
    ) -> tuple[int, int]:
        """Drop every unlocked cached page, of these keys of the tree or of all.

        Args:
            keys: None: all of them.
            namespace: what these are called for whoever watches.

        Returns:
            Pages freed, and pages kept by a lock.
        """
        leased = self._leased
        flushed = leased.tree.flush(keys)
        # Of a key alone an epoch is over: nothing of it is ever asked for.
        if keys is None or namespace is not None:
            self.evictions.note_flush(namespace, leased.out.at_s)
        self.evictions.left(flushed.nodes, NO_PAGES, 0, FLUSH, leased.out.at_s)
        n_freed = count(flushed.pages)
        leased.return_pages(flushed.pages)
        leased.out.emit(
            events.Flushed(freed_pages=n_freed, kept_pages=flushed.kept_pages, namespace=namespace)
        )
        return n_freed, flushed.kept_pages

    def settle_evictions(self) -> None:
        """Enter what was evicted and missed; who begins to thrash is told."""
        for began in self.evictions.settle():
            tell_thrashing(self._leased.out, began)

    # ---- quotas ------------------------------------------------------------------------------

    def set_quotas(self, policy: Policy, quotas: tuple[Quota, ...]) -> None:
        """These hold from now on. A tree that never had any goes on without what they take."""
        if self.quotas is not None:
            self.quotas.share_out(quotas)
        elif quotas:
            self.quotas = QuotaOrder(policy, quotas)
            self.quotas.take_over(self._leased.tree.order)
            self._leased.tree.reorder(self.quotas)

    def _note_quotas(self, order: QuotaOrder, session: int, need: str) -> None:
        """What went out of its turn; of a floor that went it is told, and for whom."""
        if not order.went:
            return
        self.evictions.by_quota.update(order.went)
        taken: dict[str, int] = {}
        for reason in order.went.values():
            if reason.beyond_pages < 0:
                taken[reason.namespace] = taken.get(reason.namespace, 0) - reason.beyond_pages
        order.went = {}
        out = self._leased.out
        for namespace, n_pages in taken.items():
            share, at_s = order.share_named(namespace), out.at_s
            # Once where it goes on: under load every request would tell of it.
            if share.taken_pages == n_pages or at_s - share.taken_at_s > SOON_S:
                tell_floor_broken(out, share, n_pages, session, need)
            share.taken_at_s = at_s
