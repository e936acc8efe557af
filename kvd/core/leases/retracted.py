"""A lease leaves the pool and comes back: its pages go when its bytes are saved, and the other way.

Each way is whole: saved pages of every component are taken before the first copy begins, the pool's
pages are given up when the last is over. While copies run both sides belong to the lease. In
between it has neither lock nor page, and knows its tokens.

What must not live here: the pages of the area (``saved_area``); who asks, the copies, and what its
engine is told (``retraction``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import ENGINE, RESTORE, SAVE
from kvd.core.cache.lease_state import LeaseTransition, next_stage
from kvd.core.leases.lease_events import tell_extended
from kvd.types import NO_PAGES, count

if TYPE_CHECKING:
    from kvd.core.cache.lease import Shortage
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.leases.holders import Holders
    from kvd.core.leases.lease_ends import LeaseEnds
    from kvd.core.leases.leased_pool import LeasedPool
    from kvd.core.leases.saved_area import SavedArea
    from kvd.errors import Refusal
    from kvd.types import Pages, Tokens


@mypyc_attr(allow_interpreted_subclasses=True)
class RetractedLeases:
    """The steps of a lease out of the pool and back."""

    def __init__(
        self, leased: LeasedPool, area: SavedArea, ends: LeaseEnds, holders: Holders
    ) -> None:
        self._leased = leased
        self._area = area
        self._ends = ends
        self._holders = holders

    def turn(self, lease: LeaseRecord, turn: LeaseTransition) -> None:
        """The lease goes on to its next state."""
        lease.state = next_stage(lease.state, turn)

    # ---- out ---------------------------------------------------------------------------------

    def leave(self, lease: LeaseRecord, tokens: Tokens) -> None:
        """Unlock the prefix and free the pages; nothing of them is kept."""
        lease.retracted_s = self._leased.out.at_s
        self._vacate(lease, tokens)
        self.turn(lease, LeaseTransition.DROP)

    def begin_save(self, lease: LeaseRecord, tokens: Tokens) -> Shortage | Refusal | None:
        """Take saved pages for all that the lease has of ``tokens``, all or none.

        Nothing else changes yet.
        """
        spans = self._area.spans_to_save(lease, count(tokens))
        if not isinstance(spans, dict):
            return spans
        # Before pages are taken: it raises where the lease is in a state that has no way to be
        # saved.
        self.turn(lease, LeaseTransition.RETRACT)
        self._area.take(lease, tokens, spans)
        lease.holders.add(SAVE)
        return None

    def cut_save(self, lease: LeaseRecord) -> None:
        """The pages were not saved: the lease runs on as before."""
        self.turn(lease, LeaseTransition.CUT)
        self._area.drop(lease)
        self._holders.release(lease, SAVE, "cut")

    def end_save(self, lease: LeaseRecord) -> None:
        """Its bytes are saved: unlock the prefix, free the pages; if nobody wants it, all of it."""
        lease.retracted_s = self._leased.out.at_s
        # The pages before the holder: whoever lets go last forgets the lease.
        if lease.saved is not None:
            self._vacate(lease, lease.saved.tokens)
        self.turn(lease, LeaseTransition.SAVED)
        self._holders.release(lease, SAVE, "retracted")

    # ---- and back ----------------------------------------------------------------------------

    def come_back(self, lease: LeaseRecord, anchor: RadixNode, pages: Pages) -> LeaseRecord:
        """A retracted lease has a lock and pages again."""
        lease.anchor = anchor
        lease.page_table = pages
        lease.owned = anchor.end_tokens // self._leased.page_size
        lease.prefix_tokens = anchor.end_tokens
        # Also what is still to be copied back: its engine is refused until that is over.
        lease.written_tokens = max(anchor.end_tokens, lease.saved_tokens)
        lease.awaited = lease.events = ()  # its pages are others now
        if lease.said:
            # The pages that each rank spoke of are gone; what was saved of them is the same for all
            # ranks.
            lease.said = (lease.written_tokens,) * len(lease.said)
        lease.touched_s = self._leased.out.at_s
        tell_extended(self._leased.out, lease)
        return lease

    def begin_restore(self, lease: LeaseRecord) -> None:
        """Saved bytes are on their way into its pages."""
        self.turn(lease, LeaseTransition.ADMITTED)
        lease.holders.add(RESTORE)

    def end_restore(self, lease: LeaseRecord) -> None:
        """Its pages hold what was saved: those of the area are free now."""
        # Before it lets go: if its engine has, this ends the lease, and only of one that is not
        # RESTORING any more do the windows count as written and may join the tree.
        self.turn(lease, LeaseTransition.RESTORED)
        self._area.drop(lease)
        self._holders.release(lease, RESTORE, "restored")

    def undo_restore(self, lease: LeaseRecord) -> None:
        """It is not restored: the pages go back, the bytes stay saved for whoever wants them."""
        # While it is RESTORING still: by that the components know that its windows are blank. In
        # the next state they would take them for written, and cache them.
        self._vacate(lease, lease.tokens)
        self.turn(lease, LeaseTransition.REFUSED)
        self._holders.release(lease, RESTORE, "refused")

    def give_up(self, lease: LeaseRecord) -> None:
        """Its pages cannot take what was saved: they go back, the bytes stay saved."""
        # As above: before its state says anything else than that its pages are blank.
        self._vacate(lease, lease.tokens)
        self.turn(lease, LeaseTransition.GIVEN_UP)

    def complete(self, lease: LeaseRecord) -> None:
        """It needs nothing of what was saved: the tree had all of it."""
        self.turn(lease, LeaseTransition.COMPLETE)
        self._area.drop(lease)

    def _vacate(self, lease: LeaseRecord, tokens: Tokens) -> None:
        """Unlock the prefix and free the pages; the lease stays, and knows ``tokens``."""
        leased = self._leased
        leased.promises.end(lease)
        if leased.journal is not None and ENGINE in lease.holders:
            # While it has its lock: of one without, nothing is noted.
            leased.journal.note_ended(lease)
        # Components first: what they give to the tree joins it at nodes that the lock still keeps.
        leased.components.end_lease(lease)
        leased.growth += 1  # windows may have joined the tree
        self._ends.unlock(lease)
        # Read before ``owned`` is cleared: after that the tree's pages would count as its own.
        freed = lease.held
        if freed:
            leased.return_pages(freed, lease)
        lease.page_table = lease.deferred = NO_PAGES
        lease.copying = None  # what was saved behind a gap was in these
        lease.unswapped_from = None
        lease.owned = 0
        lease.tokens = tokens
        lease.room_tokens = max(lease.room_tokens, count(tokens))
        leased.releases += 1
