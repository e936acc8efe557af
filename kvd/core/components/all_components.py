"""All components of a pool beside the first, together: what is asked of one is asked of each.

    node     | 4 pages of kv | 4 pages of kv | 4 pages of kv |      the path of a lease
    windows  |      -        |   4 pages     |   4 pages     |      live for one window back

A node without is a tombstone: its tokens are cached, and this component of them is not. The lease
table calls every component at the same moments as its own pool and tree, so that all of them move
together or not at all; see ``leases.grants``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from mypy_extensions import mypyc_attr

from kvd.core.components.device_buffer import Buffers
from kvd.core.components.state import StatePages
from kvd.core.components.windows import WindowPages
from kvd.core.layout.spec import Buffer, PerRequest, Tail, Whole

if TYPE_CHECKING:
    from kvd.core.cache.lease import Claim, Claimed, Demand
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.layout.spec import PoolSpec
    from kvd.core.outbox import Outbox
    from kvd.errors import Refusal
    from kvd.types import Pages


@mypyc_attr(allow_interpreted_subclasses=True)
class AllComponentPages:
    """In the order of the specification: what is asked of one is asked of all."""

    __slots__ = ("_tree", "each")

    def __init__(self, spec: PoolSpec, tree: RadixTree, out: Outbox) -> None:
        self.each = _made(spec, tree, out)
        self._tree = tree
        tree.components.extend(self.each)

    def named(self, component: str) -> ComponentPages | None:
        """The pages of that component; None for the first, and for those in lockstep."""
        return next((keeper for keeper in self.each if keeper.component.name == component), None)

    # ---- a claim -----------------------------------------------------------------------------

    def lock_prefix(self, claim: Claim) -> RadixNode:
        """Lock the longest cached prefix from which every component can go on."""
        limits = [claim.match_tokens, *(keeper.limit_tokens(claim) for keeper in self.each)]
        # Before the match, and not by walking back up: a match splits the edge that it ends in.
        limit = min((tokens for tokens in limits if tokens is not None), default=None)
        found = self._tree.match(claim.tokens, claim.namespace, limit)
        # Each may have to go further up, and then the others must be able to go on from there too.
        node = None
        while found is not node:
            node = found
            for keeper in self.each:
                found = keeper.usable(found, claim)
        # The tree is only a saving: a claim that fits without it must not wait for ever because of
        # it.
        if not self._may_fit(found, claim):
            found = self._tree.match(claim.tokens, claim.namespace, 0)
        # The tree first: a component that cuts a node for its lock does so under this lock.
        self._tree.lock(found)
        for keeper in self.each:
            keeper.lock(found, claim)
        return found

    def _may_fit(self, anchor: RadixNode, claim: Claim) -> bool:
        """False where what it would keep and what it takes are more pages than there are.

        It would wait for ever, and everybody behind it: with nothing cached it may fit.
        """
        return all(
            keeper.kept(anchor, claim) + keeper.demand(claim, anchor.end_tokens)
            < keeper.pool.total_pages
            for keeper in self.each
        )

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int | None:
        """From where on a remote writes what lies beside the first component; None: nothing does.

        What it writes has only to be whole where all of it is sent, as a state is.
        """
        if not self.each:
            return None
        return min([keeper.fresh_tokens(prompt_tokens, cached=cached) for keeper in self.each])

    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """The claim came to nothing."""
        for keeper in self.each:
            keeper.unlock(anchor, claim)

    def demand(self, claim: Claim, prefix_tokens: int) -> Demand:
        """Pages of each that the claim takes behind that prefix."""
        return tuple([keeper.demand(claim, prefix_tokens) for keeper in self.each])

    def make_room(self, demand: Demand) -> None:
        """Have so many free pages of each."""
        for keeper, n_pages in zip(self.each, demand, strict=True):
            keeper.make_room(n_pages)

    def grant(self, lease: LeaseRecord, claimed: Claimed) -> None:
        """Take the pages that are there for it."""
        for keeper, n_pages in zip(self.each, claimed.demand[1:], strict=True):
            keeper.grant(lease, claimed.claim, claimed.anchor, n_pages)

    # ---- a lease that lives, and one that ends -----------------------------------------------

    def growth(self, lease: LeaseRecord, room_tokens: int) -> Demand:
        """Further pages of each that an extension takes."""
        return tuple([keeper.growth(lease, room_tokens) for keeper in self.each])

    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Take them."""
        for keeper in self.each:
            keeper.extend(lease, room_tokens)

    def shorten(self, lease: LeaseRecord, room_tokens: int) -> None:
        """The lease keeps so many tokens, and is only read from now on."""
        for keeper in self.each:
            keeper.shorten(lease, room_tokens)

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """The engine computes from ``upto_tokens`` on; or why nothing was changed."""
        # All are asked before the first slides: what that gave back could not be had again.
        for keeper in self.each:
            refusal = keeper.unslidable(lease, upto_tokens)
            if refusal is not None:
                return refusal
        for keeper in self.each:
            keeper.slide(lease, upto_tokens)
        return None

    def page_tables(self, lease: LeaseRecord) -> tuple[Pages, ...]:
        """What the engine is told of each."""
        return tuple([keeper.page_table(lease) for keeper in self.each]) if self.each else ()

    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """A remote may still write its pages."""
        for keeper in self.each:
            keeper.quarantine_lease(lease)

    def end_lease(self, lease: LeaseRecord) -> None:
        """Give to the tree what may be kept, free the rest."""
        for keeper in self.each:
            keeper.end_lease(lease)


def _made(spec: PoolSpec, tree: RadixTree, out: Outbox) -> tuple[ComponentPages, ...]:
    made: list[ComponentPages] = []
    for component, pages in zip(spec.components[1:], spec.pages[1:], strict=True):
        match component.extent:
            case Whole():
                continue
            case Tail():
                made.append(WindowPages(component, pages, out, tree))
            case PerRequest():
                made.append(StatePages(component, pages, out))
            case Buffer():
                made.append(Buffers(component, pages, out))
            case _:
                assert_never(component.extent)
    return tuple(made)
