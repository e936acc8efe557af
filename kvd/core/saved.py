"""The saved area: host memory beside the pool that keeps the bytes of retracted leases.

Its pages are counted like the pool's. A lease moves between the two in steps, each of them whole:
saved pages are taken before the copy begins, the pool's pages are given up when it is over, and the
other way round. While a copy runs both sides belong to the lease.

Invariants: null + free + saved = total; no page of the area in two leases; a running lease has
none; one that is being saved has one for each page of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.lease import RESTORE, SAVE, Saved, Shortage
from kvd.core.pages import PagePool
from kvd.core.spec import saved_region
from kvd.core.standing import Turn, standing_next
from kvd.types import count

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.lease import Lease
    from kvd.core.lease_table import LeaseTable
    from kvd.core.spec import PoolSpec
    from kvd.types import Tokens


class SavedArea:
    """The pages of the area, and a lease's way into it and out of it."""

    def __init__(self, spec: PoolSpec, table: LeaseTable, out: Outbox) -> None:
        self.pool = PagePool(saved_region(spec.components[0]), max(1, spec.saved_pages[0]))
        self._table = table
        self._out = out

    @property
    def used_pages(self) -> int:
        """Pages that hold, or are about to hold, what a lease will want back."""
        return self.pool.total_pages - 1 - self.pool.free_pages

    # ---- out ---------------------------------------------------------------------------------

    def begin_save(self, lease: Lease, tokens: Tokens) -> Shortage | None:
        """Take a saved page for each page of ``tokens``, all or none; nothing else changes yet."""
        needed = self._table.pages_for(count(tokens))
        if needed > self.pool.free_pages:
            return Shortage(needed, self.pool.free_pages, self.pool.name)
        self.turn(lease, Turn.RETRACT)
        lease.saved = Saved(tokens, self.pool.take(needed))
        lease.holders.add(SAVE)
        return None

    def cut_save(self, lease: Lease) -> None:
        """The pages were not saved: the lease runs on as before."""
        self.turn(lease, Turn.CUT)
        self.drop(lease)
        self._table.release(lease, SAVE, "cut")

    def end_save(self, lease: Lease) -> None:
        """Its bytes are saved: unlock the prefix, free the pages; if nobody wants it, all of it."""
        self.turn(lease, Turn.SAVED)
        lease.retracted_s = self._out.at_s
        if lease.saved is not None:
            self._table.vacate(lease, lease.saved.tokens)
        self._table.release(lease, SAVE, "retracted")

    def leave(self, lease: Lease, tokens: Tokens) -> None:
        """Unlock the prefix and free the pages; nothing of them is kept."""
        self.turn(lease, Turn.DROP)
        lease.retracted_s = self._out.at_s
        self._table.vacate(lease, tokens)

    # ---- and back ----------------------------------------------------------------------------

    def begin_restore(self, lease: Lease) -> None:
        """Saved bytes are on their way into the row's pages."""
        self.turn(lease, Turn.ADMITTED)
        lease.holders.add(RESTORE)

    def end_restore(self, lease: Lease) -> None:
        """The row holds what was saved: the area's pages are free now."""
        self.turn(lease, Turn.RESTORED)
        self.drop(lease)
        self._table.release(lease, RESTORE, "restored")

    def undo_restore(self, lease: Lease) -> None:
        """Nothing was restored: the pages go back, the bytes stay saved."""
        self.turn(lease, Turn.REFUSED)
        self._table.vacate(lease, lease.tokens)
        self._table.release(lease, RESTORE, "refused")

    def complete(self, lease: Lease) -> None:
        """The row needs nothing of what was saved."""
        self.turn(lease, Turn.COMPLETE)
        self.drop(lease)

    def drop(self, lease: Lease) -> None:
        """Free what it has here."""
        saved, lease.saved = lease.saved, None
        if saved is not None:
            self.pool.give(saved.slots)

    def turn(self, lease: Lease, turn: Turn) -> None:
        """The lease goes on to its next standing."""
        lease.standing = standing_next(lease.standing, turn)
