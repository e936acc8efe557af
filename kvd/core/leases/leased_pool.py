"""One pool and the leases that have pages of it: the state that every part moves a little of.

What lives here: which leases there are, the pages, tree and components that they share, what is
promised to them, and two counters by which whoever waits knows that it may look again. What must
not: how anything moves. That is said once each in ``grants``, ``commits``, ``holders``,
``lease_ends``, ``lent_pages``, ``retracted`` and ``evictor``, which ``lease_table`` puts together.

Invariants: null + free + held + cached + quarantined = total (I1); no page in two leases.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.cache.moved_pages import MovedPages
from kvd.core.cache.pages import PagePool
from kvd.core.cache.radix import RadixTree
from kvd.core.components.all_components import AllComponentPages
from kvd.core.layout.spec import lockstep_bytes
from kvd.core.leases.budgets import Budgets
from kvd.core.leases.journal_notes import JournalNotes
from kvd.core.leases.promises import Promises

if TYPE_CHECKING:
    from kvd.core.cache.eviction import EvictionOrder
    from kvd.core.cache.lease import Claim
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.spec import PoolSpec
    from kvd.core.outbox import Outbox
    from kvd.types import Pages


@mypyc_attr(allow_interpreted_subclasses=True)
class LeasedPool:
    """Pages, tree and leases of one pool."""

    def __init__(
        self, spec: PoolSpec, order: EvictionOrder, out: Outbox, *, is_journaled: bool = False
    ) -> None:
        component = spec.components[0]
        self.moved = MovedPages()
        self.pool: PagePool = PagePool(component.name, spec.pages[0], self.moved)
        self.tree: RadixTree = RadixTree(spec.match_page_tokens, order, self.moved)
        self.components: AllComponentPages = AllComponentPages(spec, self.tree, out)
        self.page_size: int = component.page_size
        self.promises: Promises = Promises(self.pool, self.tree, self.components, self.page_size)
        self.budgets: Budgets = Budgets(
            self.pool, self.tree, self.components, self.promises, self.page_size
        )
        self.capacity_pages: int = spec.pages[0] - 1
        """Pages that exist, the null page not counted."""
        self.page_bytes: int = lockstep_bytes(spec)
        self.leases: dict[int, LeaseRecord] = {}
        self.opened: int = 0
        self.number_above: int = 0
        """What a lease's number is above its place among those opened here: the numbers of before
        the restart are not used again."""
        self.released: int = 0
        self.releases: int = 0
        """Grows whenever headroom may have grown: a blocked request need not look before.

        Eviction is no reason: it makes free pages of evictable ones, and both are headroom.
        """
        self.growth: int = 0
        """Grows whenever more may be cached of a prompt than before."""
        self.has_short_path: bool = not self.components.each
        """Whether a lease may be opened and ended on the short path: the same in fewer calls."""
        self.out: Outbox = out
        self.journal: JournalNotes | None = JournalNotes(self.pool, out) if is_journaled else None
        self.return_pages = (
            self.pool.return_pages if self.journal is None else self.journal.return_pages
        )

    @property
    def headroom_pages(self) -> int:
        """Pages obtainable now by whom none are promised."""
        return self.promises.headroom_pages

    def pages_for(self, n_tokens: int) -> int:
        """Pages that ``n_tokens`` take."""
        return -(-n_tokens // self.page_size)

    def bytes_of(self, n_tokens: int) -> int:
        """Bytes of the pages that ``n_tokens`` take."""
        return self.pages_for(n_tokens) * self.page_bytes

    def enter(self, claim: Claim, anchor: RadixNode, pages: Pages) -> LeaseRecord:
        """A new lease, by the next number; its claim has locked ``anchor`` and taken the pages."""
        self.opened = opened = self.opened + 1
        lease = LeaseRecord(opened + self.number_above, claim, anchor, pages)
        lease.since_s = lease.touched_s = self.out.at_s
        self.leases[lease.id] = lease
        return lease
