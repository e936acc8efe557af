"""Pages that an arena lends to a receive, and takes back when no remote can write them any more.

What an arena is, and where its pages go when it is closed meanwhile, is in ``arenas``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core.leases.lease_events import tell_extended, tell_opened
from kvd.types import NO_PAGES, Pages, count
from kvd.wire import client

if TYPE_CHECKING:
    from kvd.core.cache.lease import Claim, Lent
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.leases.leased_pool import LeasedPool

RECEIVED: Final = "received"
"""Why lent pages came back of whose end the engine hears anyway."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LentPages:
    """Out of an arena's page table into that of a receive, and back."""

    def __init__(self, leased: LeasedPool) -> None:
        self._leased = leased

    def borrow(self, claim: Claim, lent: Lent, root: RadixNode) -> LeaseRecord:
        """Pages of an arena for one receive; who asked has made sure that the arena has them."""
        leased = self._leased
        arena = leased.leases[lent.arena]
        leased.moved.log.append(claim.pages)
        arena.page_table = _without(arena.page_table, claim.pages)
        n_pages = count(claim.pages)
        lease = leased.enter(claim, root, claim.pages)
        lease.lent = lent
        lease.prefix_tokens = lease.written_tokens = lent.first_page * leased.page_size
        # In this order: a reader that adds up what is held never sees a page twice.
        tell_extended(leased.out, arena)
        tell_opened(leased.out, lease, n_pages, count(claim.tokens), 0, "")
        return lease

    def lent_by(self, arena: LeaseRecord) -> Pages:
        """Pages that it has lent: as long as it has an engine they are noted as that one's."""
        if not arena.is_arena:
            return NO_PAGES
        leases = self._leased.leases.values()
        lent = [lease for lease in leases if lease.lent and lease.lent.arena == arena.id]
        return Pages(b"".join([lease.page_table for lease in lent]))

    def give_back(self, lease: LeaseRecord, pages: Pages, cause: str) -> int:
        """Its own pages go back where it has them from; how many of them are free now."""
        leased, lent = self._leased, lease.lent
        arena = leased.leases.get(lent.arena) if lent is not None else None
        if lent is not None and cause != RECEIVED:
            leased.out.answer(lease.session, client.PagesBack(lent.receive))
        if arena is None:
            if pages:
                leased.return_pages(pages, lease)
            return count(pages)
        leased.moved.log.append(pages)
        arena.page_table = Pages(arena.page_table + pages)
        tell_extended(leased.out, arena)
        return 0


def _without(pages: Pages, gone: Pages) -> Pages:
    """Those of ``pages`` that are not in ``gone``, in their order."""
    ids = np.frombuffer(pages, "<u4")
    return Pages(ids[~np.isin(ids, np.frombuffer(gone, "<u4"))].tobytes())
