"""How a lease ends: its lock goes, and its pages go back or stay in quarantine.

A quarantined lease keeps its held pages and nothing else: a remote may still write them, so they
are neither free nor anyone's.

What must not live here: who holds a lease until then (``holders``), which writers there are and how
it is proven that they are over (``handoff.quarantine``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from mypy_extensions import mypyc_attr

from kvd.core.leases.lease_events import tell_quarantine_ended, tell_quarantined, tell_released
from kvd.types import NO_PAGES, NO_TOKENS, count

if TYPE_CHECKING:
    from kvd.core.cache.lease import Quarantine, Writer
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.giving_way import GivingWay
    from kvd.core.leases.leased_pool import LeasedPool
    from kvd.core.leases.lent_pages import LentPages
    from kvd.core.leases.saved_area import SavedArea


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseEnds:
    """Takes lock and pages from leases that nobody holds any more."""

    def __init__(
        self, leased: LeasedPool, lent: LentPages, giving_way: GivingWay, saved: SavedArea
    ) -> None:
        self._leased = leased
        self._lent = lent
        self._giving_way = giving_way
        self._saved = saved

    def end_lease(self, lease: LeaseRecord, cause: str) -> None:
        """Nobody holds it: unlock the prefix, free the held pages and what is saved."""
        leased = self._leased
        if leased.components.each:
            # Under the lock: what they give to the tree joins it at nodes that the lock keeps.
            leased.components.end_lease(lease)
            leased.growth += 1
        was_locked = self.unlock(lease)
        self._saved.drop(lease)
        self.forget(lease, cause, self._lent.give_back(lease, lease.held, cause), was_locked)

    def unlock(self, lease: LeaseRecord) -> int:
        """Take its lock off the tree; the node at whose end it was, 0 where nothing was locked."""
        anchor = lease.anchor
        if anchor is None:
            return 0
        self._leased.tree.unlock(anchor)
        lease.anchor = None
        return anchor.id if anchor.parent is not None else 0

    def forget(self, lease: LeaseRecord, cause: str, freed_pages: int, was_locked: int) -> None:
        """It has neither lock nor page any more."""
        leased = self._leased
        del leased.leases[lease.id]
        if lease.promise is not None:
            leased.promises.end(lease)
        if lease.sends is not None:
            self._giving_way.forget(lease)
        leased.releases += 1
        leased.released += 1
        tell_released(leased.out, lease, cause, freed_pages, was_locked)

    # ---- quarantine --------------------------------------------------------------------------

    def quarantine(self, lease: LeaseRecord, quarantine: Quarantine) -> None:
        """A remote may still write the held pages: keep them from everybody, unlock the rest."""
        leased = self._leased
        leased.promises.end(lease)
        # Cached pages are never written by a remote, so they are unlocked; only its own are kept.
        leased.components.quarantine_lease(lease)
        was_locked = self.unlock(lease)
        # Before ``owned`` and ``deferred`` are cleared, which say what is its own.
        lease.page_table = lease.held
        lease.deferred = NO_PAGES
        lease.unswapped_from = None
        lease.owned = 0
        lease.tokens = NO_TOKENS
        lease.holders = set()
        lease.quarantine = quarantine
        leased.releases += 1
        tell_quarantined(leased.out, lease, was_locked)

    def narrow_quarantine(self, lease: LeaseRecord, writers: tuple[Writer, ...]) -> None:
        """Some of the writers are over; these may still write."""
        if lease.quarantine is not None:
            lease.quarantine = msgspec.structs.replace(lease.quarantine, writers=writers)

    def end_quarantine(self, lease: LeaseRecord, proof: str) -> None:
        """The writer has settled, is proven gone, or was fenced: the pages are free."""
        n_pages = count(lease.page_table)
        n_freed = self._lent.give_back(lease, lease.page_table, proof)
        self._leased.components.end_lease(lease)
        tell_quarantine_ended(self._leased.out, lease, n_pages, proof)
        self.forget(lease, proof, n_freed, 0)
