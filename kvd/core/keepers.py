"""The keepers of a pool together: all its components beside the first that have their own pages.

Components in lockstep with the first have no keeper: their pages follow from its.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from kvd.core.buffers import Buffers
from kvd.core.spec import Buffer, PerRequest, Tail, Whole
from kvd.core.states import States
from kvd.core.windows import Windows

if TYPE_CHECKING:
    from kvd.core.beside import Keeper
    from kvd.core.effects import Outbox
    from kvd.core.lease import Claim, Claimed, Demand, Lease
    from kvd.core.radix import RadixTree
    from kvd.core.radix_node import Node
    from kvd.core.spec import PoolSpec
    from kvd.errors import Refusal
    from kvd.types import Pages


class Keepers:
    """Each keeper in the order of the specification; what is asked of one is asked of all."""

    __slots__ = ("_tree", "each")

    def __init__(self, spec: PoolSpec, tree: RadixTree, out: Outbox) -> None:
        self.each = _made(spec, tree, out)
        self._tree = tree
        tree.beside = self.each

    def named(self, component: str) -> Keeper | None:
        """The keeper of that component; None for the first, and for those in lockstep."""
        return next((one for one in self.each if one.component.name == component), None)

    # ---- a claim -----------------------------------------------------------------------------

    def lock_prefix(self, claim: Claim) -> Node:
        """Lock the longest cached prefix from which every component can go on."""
        limits = [claim.match_tokens, *(keeper.limit_tokens(claim) for keeper in self.each)]
        limit = min((one for one in limits if one is not None), default=None)
        found = self._tree.match(claim.tokens, claim.namespace, limit)
        node = None
        while found is not node:
            node = found
            for keeper in self.each:
                found = keeper.usable(found, claim)
        if not self._may_fit(found, claim):
            found = self._tree.match(claim.tokens, claim.namespace, 0)
        self._tree.lock(found)
        for keeper in self.each:
            keeper.lock(found, claim)
        return found

    def _may_fit(self, anchor: Node, claim: Claim) -> bool:
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

    def unlock(self, anchor: Node, claim: Claim) -> None:
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

    def grant(self, lease: Lease, claimed: Claimed) -> None:
        """Take the promised pages."""
        for keeper, n_pages in zip(self.each, claimed.demand[1:], strict=True):
            keeper.grant(lease, claimed.claim, claimed.anchor, n_pages)

    # ---- a lease that lives, and one that ends -----------------------------------------------

    def growth(self, lease: Lease, room_tokens: int) -> Demand:
        """Further pages of each that an extension takes."""
        return tuple([keeper.growth(lease, room_tokens) for keeper in self.each])

    def extend(self, lease: Lease, room_tokens: int) -> None:
        """Take them."""
        for keeper in self.each:
            keeper.extend(lease, room_tokens)

    def slide(self, lease: Lease, upto_tokens: int) -> Refusal | None:
        """The engine computes from ``upto_tokens`` on; or why nothing was changed."""
        for keeper in self.each:
            refusal = keeper.slide(lease, upto_tokens)
            if refusal is not None:
                return refusal
        return None

    def rows(self, lease: Lease) -> tuple[Pages, ...]:
        """What the engine is told of each."""
        return tuple([keeper.row(lease) for keeper in self.each]) if self.each else ()

    def quarantine(self, lease: Lease) -> None:
        """A remote may still write its pages."""
        for keeper in self.each:
            keeper.quarantine(lease)

    def end(self, lease: Lease) -> None:
        """Give to the tree what may be kept, free the rest."""
        for keeper in self.each:
            keeper.end(lease)


def _made(spec: PoolSpec, tree: RadixTree, out: Outbox) -> tuple[Keeper, ...]:
    made: list[Keeper] = []
    for component, pages in zip(spec.components[1:], spec.pages[1:], strict=True):
        match component.extent:
            case Whole():
                continue
            case Tail():
                made.append(Windows(component, pages, tree, out))
            case PerRequest():
                made.append(States(component, pages, out))
            case Buffer():
                made.append(Buffers(component, pages))
            case _:
                assert_never(component.extent)
    return tuple(made)
