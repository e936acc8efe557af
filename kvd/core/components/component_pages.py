"""All components of a pool that have pages of their own beside the first, one by one and together.

    node     | 4 pages of kv | 4 pages of kv | 4 pages of kv |      the path of a lease
    windows  |      -        |   4 pages     |   4 pages     |      live for one window back

A node without is a tombstone: its tokens are cached, and this component of them is not. The lease
table calls every component at the same moments as its own pool and tree, so that all of them move
together or not at all; see ``lease_table``.

Invariant, for each component: null + free + held + cached + quarantined = total.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, assert_never

from kvd.core.components.device_buffer import Buffers
from kvd.core.components.state import StatePages
from kvd.core.components.windows import WindowPages
from kvd.core.layout.spec import Buffer, PerRequest, Tail, Whole

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView

    from kvd.core.cache.lease import Claim, Claimed, Demand, LeaseRecord, PageSpan
    from kvd.core.cache.pages import PagePool
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.effects import Outbox
    from kvd.core.layout.spec import Component, PoolSpec
    from kvd.errors import Refusal
    from kvd.types import Pages


class ComponentPages(Protocol):
    """One component beside the first."""

    component: Component
    pool: PagePool

    @property
    def evictable_pages(self) -> int:
        """Cached pages that can be had now."""

    @property
    def cached_pages(self) -> int:
        """Pages at nodes of the tree."""

    @property
    def held_pages(self) -> int:
        """Pages that are some lease's own, in quarantine or not."""

    @property
    def headroom_pages(self) -> int:
        """Pages obtainable now."""

    # ---- what there is, for reports and audits ----

    @property
    def nodes(self) -> KeysView[RadixNode]:
        """Nodes that have something of it."""

    @property
    def unlocked(self) -> KeysView[RadixNode]:
        """Those whose pages can be had now."""

    @property
    def leases(self) -> KeysView[int]:
        """Leases that it has something for, by number."""

    def pages_at(self, node: RadixNode) -> Pages:
        """Its pages at that node; none at a tombstone."""

    def locks_at(self, node: RadixNode) -> int:
        """How many leases need what is at that node."""

    # ---- a claim: match, lock, count, then take ----

    def limit_tokens(self, claim: Claim) -> int | None:
        """The longest prefix that the claim may take from the tree; None where any is right."""

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int:
        """The token of a received prompt from which on this component of it is always sent."""

    def usable(self, node: RadixNode, claim: Claim) -> RadixNode:
        """``node``, or the nearest above it, from where the sequence can go on."""

    def lock(self, anchor: RadixNode, claim: Claim) -> None:
        """Keep what the claim needs of the path; undone by ``unlock`` or when the lease ends."""

    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """The claim came to nothing."""

    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """Pages of its own that it takes behind that prefix."""

    def kept(self, anchor: RadixNode, claim: Claim) -> int:
        """Pages of the tree that it keeps locked while it goes on from there."""

    def make_room(self, n_pages: int) -> None:
        """Have so many free pages; there is headroom for them."""

    def grant(self, lease: LeaseRecord, claim: Claim, anchor: RadixNode, n_pages: int) -> None:
        """Take the pages: the lease begins, or has pages again."""

    # ---- a lease that lives ----

    def growth(self, lease: LeaseRecord, room_tokens: int) -> int:
        """Further pages that the lease takes when it is extended to so many tokens."""

    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Take them."""

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """The engine computes from there on: give back what is behind, have what is ahead."""

    def page_table(self, lease: LeaseRecord) -> Pages:
        """What the engine is told; the null page stands for none."""

    def own_pages(self, lease: LeaseRecord) -> Pages:
        """The pages that are this lease's own."""

    def pages_to_keep(self, lease: LeaseRecord, n_tokens: int) -> PageSpan | Refusal:
        """The pages that it needs to go on behind ``n_tokens``; or why they are not there.

        These are what is saved of a lease that is retracted, and what it must have back.
        """

    # ---- and one that ends ----

    def end_lease(self, lease: LeaseRecord) -> None:
        """Give to the tree what may be kept, free the rest; nothing where it has none."""

    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """A remote may still write them: keep them from everybody, unlock the rest."""

    # ---- the tree moves ----

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """``upper`` is the new upper half of ``lower``."""

    def dropped(self, nodes: Iterable[RadixNode]) -> None:
        """``nodes`` left the tree: what was at them is free."""


class AllComponentPages:
    """In the order of the specification: what is asked of one is asked of all."""

    __slots__ = ("_tree", "each")

    def __init__(self, spec: PoolSpec, tree: RadixTree, out: Outbox) -> None:
        self.each = _made(spec, tree, out)
        self._tree = tree
        tree.components.extend(self.each)

    def named(self, component: str) -> ComponentPages | None:
        """The pages of that component; None for the first, and for those in lockstep."""
        return next((one for one in self.each if one.component.name == component), None)

    # ---- a claim -----------------------------------------------------------------------------

    def lock_prefix(self, claim: Claim) -> RadixNode:
        """Lock the longest cached prefix from which every component can go on."""
        limits = [claim.match_tokens, *(one.limit_tokens(claim) for one in self.each)]
        limit = min((tokens for tokens in limits if tokens is not None), default=None)
        found = self._tree.match(claim.tokens, claim.namespace, limit)
        # Each may have to go further up, and then the others must be able to go on from there too.
        node = None
        while found is not node:
            node = found
            for one in self.each:
                found = one.usable(found, claim)
        if not self._may_fit(found, claim):
            found = self._tree.match(claim.tokens, claim.namespace, 0)
        # The tree first: a component that cuts a node for its lock does so under this lock.
        self._tree.lock(found)
        for one in self.each:
            one.lock(found, claim)
        return found

    def _may_fit(self, anchor: RadixNode, claim: Claim) -> bool:
        """False where what it would keep and what it takes are more pages than there are.

        It would wait for ever, and everybody behind it: with nothing cached it may fit.
        """
        return all(
            one.kept(anchor, claim) + one.demand(claim, anchor.end_tokens) < one.pool.total_pages
            for one in self.each
        )

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int | None:
        """From where on a remote writes what lies beside the first component; None: nothing does.

        What it writes has only to be whole where all of it is sent, as a state is.
        """
        if not self.each:
            return None
        return min([one.fresh_tokens(prompt_tokens, cached=cached) for one in self.each])

    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """The claim came to nothing."""
        for one in self.each:
            one.unlock(anchor, claim)

    def demand(self, claim: Claim, prefix_tokens: int) -> Demand:
        """Pages of each that the claim takes behind that prefix."""
        return tuple([one.demand(claim, prefix_tokens) for one in self.each])

    def make_room(self, demand: Demand) -> None:
        """Have so many free pages of each."""
        for one, n_pages in zip(self.each, demand, strict=True):
            one.make_room(n_pages)

    def grant(self, lease: LeaseRecord, claimed: Claimed) -> None:
        """Take the promised pages."""
        for one, n_pages in zip(self.each, claimed.demand[1:], strict=True):
            one.grant(lease, claimed.claim, claimed.anchor, n_pages)

    # ---- a lease that lives, and one that ends -----------------------------------------------

    def growth(self, lease: LeaseRecord, room_tokens: int) -> Demand:
        """Further pages of each that an extension takes."""
        return tuple([one.growth(lease, room_tokens) for one in self.each])

    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Take them."""
        for one in self.each:
            one.extend(lease, room_tokens)

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """The engine computes from ``upto_tokens`` on; or why nothing was changed."""
        for one in self.each:
            refusal = one.slide(lease, upto_tokens)
            if refusal is not None:
                return refusal
        return None

    def page_tables(self, lease: LeaseRecord) -> tuple[Pages, ...]:
        """What the engine is told of each."""
        return tuple([one.page_table(lease) for one in self.each]) if self.each else ()

    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """A remote may still write its pages."""
        for one in self.each:
            one.quarantine_lease(lease)

    def end_lease(self, lease: LeaseRecord) -> None:
        """Give to the tree what may be kept, free the rest."""
        for one in self.each:
            one.end_lease(lease)


def _made(spec: PoolSpec, tree: RadixTree, out: Outbox) -> tuple[ComponentPages, ...]:
    made: list[ComponentPages] = []
    for component, pages in zip(spec.components[1:], spec.pages[1:], strict=True):
        match component.extent:
            case Whole():
                continue
            case Tail():
                made.append(WindowPages(component=component, total_pages=pages, tree=tree, out=out))
            case PerRequest():
                made.append(StatePages(component, pages, out))
            case Buffer():
                made.append(Buffers(component, pages))
            case _:
                assert_never(component.extent)
    return tuple(made)
