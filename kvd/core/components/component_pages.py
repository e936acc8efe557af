"""One component that has pages of its own beside the first: what it can be asked, and when.

The moments are those of a lease: a claim is matched, locked, counted and granted; the lease grows
and slides; it ends. And those of the tree: a node is split, nodes leave. A component says only what
it does at a moment; where it says nothing, nothing happens.

What lies at nodes is alike for all of them: pages, and the leases that need them; what nobody needs
gives way when there is no room, used longest ago first, and the node stays.

Invariant: null + free + held + cached + quarantined = total.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import PageSpan
from kvd.core.cache.pages import PagePool
from kvd.types import NO_PAGES, Pages, count
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView

    from kvd.core.cache.lease import Claim
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.spec import Component
    from kvd.core.outbox import Outbox
    from kvd.errors import Refusal


@mypyc_attr(allow_interpreted_subclasses=True)
class PagesAtNode:
    """What lies at one node: a window, or the state at its end; and how many leases need it."""

    __slots__ = ("locks", "pages")

    def __init__(self, pages: Pages, locks: int = 0) -> None:
        self.pages = pages
        self.locks = locks


@mypyc_attr(allow_interpreted_subclasses=True)
class ComponentPages:
    """One component beside the first. Its own class says what it does otherwise than this one."""

    held: dict[int, Any]
    """By lease, what it has of it."""

    def __init__(self, component: Component, total_pages: int, out: Outbox) -> None:
        self.component = component
        self.pool = PagePool(component.name, total_pages)
        self.at: dict[RadixNode, PagesAtNode] = {}
        """What lies at nodes; one without is a tombstone."""
        self.unlocked: OrderedDict[RadixNode, None] = OrderedDict()
        """Those whose pages no lease needs, used longest ago first."""
        self.evictable_pages = 0
        """The pages of these."""
        self.promised_pages = 0
        """To leases that do not have them yet (``leases.promises``)."""
        self._out = out

    # ---- what there is -----------------------------------------------------------------------

    @property
    def cached_pages(self) -> int:
        """Pages at nodes of the tree."""
        return sum([count(there.pages) for there in self.at.values()])

    @property
    def held_pages(self) -> int:
        """Pages that are some lease's own, in quarantine or not."""
        raise NotImplementedError

    @property
    def headroom_pages(self) -> int:
        """Pages obtainable now by whom none are promised."""
        # Condemned pages that still lie at nodes count as evictable, and do not come back when they
        # are.
        there = self.pool.free_pages + self.evictable_pages - self.pool.doomed_pages
        return there - self.promised_pages

    @property
    def nodes(self) -> KeysView[RadixNode]:
        """Nodes that have something of it."""
        return self.at.keys()

    @property
    def leases(self) -> KeysView[int]:
        """Leases that it has something for, by number."""
        return self.held.keys()

    def pages_at(self, node: RadixNode) -> Pages:
        """Its pages at that node; none at a tombstone."""
        return self.at[node].pages if node in self.at else NO_PAGES

    def locks_at(self, node: RadixNode) -> int:
        """How many leases need what is at that node."""
        return self.at[node].locks if node in self.at else 0

    # ---- at nodes ----------------------------------------------------------------------------

    def _put_at(self, node: RadixNode, pages: Pages) -> None:
        """Pages of a lease stay at that node, which had none; nobody needs them yet."""
        # Said where they go, because no pool is asked: a sweep must know that they have moved.
        self.pool.moved.log.append(pages)
        self.at[node] = PagesAtNode(pages)
        self._let_go(node)

    def _lock_at(self, node: RadixNode) -> None:
        there = self.at[node]
        if not there.locks:
            self.evictable_pages -= count(there.pages)
            del self.unlocked[node]
        there.locks += 1

    def _unlock_at(self, node: RadixNode) -> None:
        there = self.at[node]
        there.locks -= 1
        if not there.locks:
            self._let_go(node)

    def _let_go(self, node: RadixNode) -> None:
        # At the recent end: that somebody needed them until now is their last use.
        self.unlocked[node] = None
        self.evictable_pages += count(self.at[node].pages)

    def make_room(self, n_pages: int) -> None:
        """Have so many free pages; there is headroom for them."""
        # Once, unless what it drops is condemned: those pages do not come back.
        while n_pages > self.pool.free_pages and self.unlocked:
            short = n_pages - self.pool.free_pages
            # Found first and taken then: whole nodes, because a window with some of its pages is
            # none.
            nodes: list[RadixNode] = []
            for node in self.unlocked:
                if short <= 0:
                    break
                short -= count(self.at[node].pages)
                nodes.append(node)
            freed = self._take_from(nodes)
            self.pool.return_pages(freed)
            tell_evicted(self._out, count(freed), len(nodes), "room", self.component.name)

    def _take_from(self, nodes: Iterable[RadixNode]) -> Pages:
        """These nodes, whose pages nobody needs, have none any more."""
        pieces = []
        for node in nodes:
            del self.unlocked[node]
            pieces.append(self.at.pop(node).pages)
        freed = Pages(b"".join(pieces))
        self.evictable_pages -= count(freed)
        return freed

    # ---- a claim: match, lock, count, then take ----------------------------------------------

    def limit_tokens(self, claim: Claim) -> int | None:
        """The longest prefix that the claim may take from the tree; None where any is right."""
        return None

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int:
        """The token of a received prompt from which on this component of it is always sent."""
        return prompt_tokens

    def usable(self, node: RadixNode, claim: Claim) -> RadixNode:
        """``node``, or the nearest above it, from where the sequence can go on."""
        return node

    def lock(self, anchor: RadixNode, claim: Claim) -> None:
        """Keep what the claim needs of the path; undone by ``unlock`` or when the lease ends."""

    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """The claim came to nothing."""

    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """Pages of its own that it takes behind that prefix."""
        raise NotImplementedError

    def kept(self, anchor: RadixNode, claim: Claim) -> int:
        """Pages of the tree that it keeps locked while it goes on from there."""
        return 0

    def grant(self, lease: LeaseRecord, claim: Claim, anchor: RadixNode, n_pages: int) -> None:
        """Take the pages: the lease begins, or has pages again."""
        raise NotImplementedError

    # ---- a lease that lives ------------------------------------------------------------------

    def growth(self, lease: LeaseRecord, room_tokens: int) -> int:
        """Further pages that the lease takes when it is extended to so many tokens."""
        return 0

    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Take them."""

    def shorten(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Give back what lies behind so many tokens, of a lease that nobody computes any more."""

    def unslidable(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """Why the engine cannot compute from there on; changes nothing."""
        return None

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> None:
        """It does, which ``unslidable`` allows: give back what is behind, have what is ahead."""

    def page_table(self, lease: LeaseRecord) -> Pages:
        """What the engine is told; the null page stands for none."""
        return self.own_pages(lease)

    def own_pages(self, lease: LeaseRecord) -> Pages:
        """The pages that are this lease's own."""
        raise NotImplementedError

    def written_pages(self, lease: LeaseRecord) -> int:
        """How many pages of its row there is KV for, as far as its engine has said so."""
        return -(-lease.written_tokens // self.component.page_size)

    def pages_beside(self, lease: LeaseRecord, begin: int, end: int) -> PageSpan:
        """Pages of its own for the tokens ``[begin, end)``, where its row has them by tokens."""
        return PageSpan(0, NO_PAGES)

    def pages_to_keep(self, lease: LeaseRecord, n_tokens: int) -> PageSpan | Refusal:
        """The pages that it needs to go on behind ``n_tokens``; or why they are not there.

        These are what is saved of a lease that is retracted, and what it must have back.
        """
        return PageSpan(0, NO_PAGES)

    # ---- and one that ends -------------------------------------------------------------------

    def end_lease(self, lease: LeaseRecord) -> None:
        """Give to the tree what may be kept, free the rest; nothing where it has none."""
        raise NotImplementedError

    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """A remote may still write them: keep them from everybody, unlock the rest."""
        raise NotImplementedError

    # ---- the tree moves ----------------------------------------------------------------------

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """``upper`` is the new upper half of ``lower``, which keeps the end and what is there."""

    def dropped(self, nodes: Iterable[RadixNode]) -> None:
        """``nodes`` left the tree: what was at them is free."""
        # Nobody needs it: a component's lock lies on a path that the lease's own lock keeps (I2).
        freed = self._take_from([node for node in nodes if node in self.at])
        if freed:
            self.pool.return_pages(freed)


def tell_evicted(out: Outbox, n_pages: int, n_nodes: int, reason: str, component: str = "") -> None:
    """Cached pages are free; of the first component whole nodes of them, and no name is said."""
    # In a full pool for every request: with its number and time, and by position, as others of them
    # are made in ``leases.lease_events``.
    out.seq = seq = out.seq + 1
    out.events.append(events.Evicted(seq, out.at_s, n_pages, n_nodes, reason, component))
