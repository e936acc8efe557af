"""States: the component of recurrent layers, one page per request whatever its length.

A state stands for all tokens before one point, so it can be gone on from only there. What a lease
commits last is kept at the node where its tokens end (a **snapshot**); a later lease goes on from
the deepest snapshot on its path. It is copied on write by whoever computes::

    pages   [ the snapshot behind its prefix, to be read, or none | its own, to be written ]

A handoff sends the state whole, with its last pages, so a receive needs no snapshot.

Invariants: a snapshot is never written; it stands for exactly the tokens before its node's end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core.cache.lease import PageSpan
from kvd.core.components.component_pages import ComponentPages
from kvd.types import NO_PAGES, Pages, count, null_pages

if TYPE_CHECKING:
    from kvd.core.cache.lease import Claim
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.spec import Component
    from kvd.core.outbox import Outbox
    from kvd.errors import Refusal

NO_SNAPSHOT = null_pages(1)
"""What a page table has where there is none."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseStates:
    """What one lease has: the snapshot that it reads, and its own page."""

    __slots__ = ("own", "source")

    def __init__(self, source: RadixNode | None, own: Pages) -> None:
        self.source = source
        self.own = own


@mypyc_attr(allow_interpreted_subclasses=True)
class StatePages(ComponentPages):
    """The pages of one component of states; what lies at the end of a node is a snapshot."""

    def __init__(self, component: Component, total_pages: int, out: Outbox) -> None:
        super().__init__(component, total_pages, out)
        self.held: dict[int, LeaseStates] = {}

    @property
    @override
    def held_pages(self) -> int:
        """States that some lease writes."""
        return sum([count(held.own) for held in self.held.values()])

    # ---- a claim -----------------------------------------------------------------------------

    @override
    def limit_tokens(self, claim: Claim) -> int | None:
        """Who computes needs one token to compute, and who resumes has one more than it names."""
        # What is restored or received brings its state along, whatever the tree has.
        if claim.resumes or claim.goes_on or claim.fresh_tokens is not None:
            return None
        return max(0, count(claim.tokens) - 1)

    @override
    def usable(self, node: RadixNode, claim: Claim) -> RadixNode:
        """The nearest node with a snapshot; else the root, from where everything is computed."""
        if claim.fresh_tokens is not None:
            return node
        while node.parent is not None and node not in self.at:
            node = node.parent
        return node

    @override
    def lock(self, anchor: RadixNode, claim: Claim) -> None:
        """Keep the snapshot that is gone on from."""
        source = self._source(anchor, claim)
        if source is not None:
            self._lock_at(source)

    @override
    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """The claim came to nothing."""
        # By the claim and not by a lease: there is none yet.
        self._end_reading(self._source(anchor, claim))

    @override
    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """One, whatever its length."""
        return 1

    @override
    def kept(self, anchor: RadixNode, claim: Claim) -> int:
        """The snapshot that it goes on from."""
        return int(self._source(anchor, claim) is not None)

    @override
    def grant(self, lease: LeaseRecord, claim: Claim, anchor: RadixNode, n_pages: int) -> None:
        """Take the page."""
        # The source was locked with the prefix; here it is only remembered, for the lease's end to
        # unlock.
        self.held[lease.id] = LeaseStates(
            self._source(anchor, claim), self.pool.take_pages(n_pages)
        )

    def _source(self, anchor: RadixNode, claim: Claim) -> RadixNode | None:
        return anchor if claim.fresh_tokens is None and anchor.parent is not None else None

    # ---- a lease that lives ------------------------------------------------------------------

    @override
    def page_table(self, lease: LeaseRecord) -> Pages:
        """The snapshot that it reads, or the null page; then its own."""
        held = self.held.get(lease.id)
        if held is None:
            return NO_PAGES
        source = NO_SNAPSHOT if held.source is None else self.at[held.source].pages
        return Pages(source + held.own)

    @override
    def own_pages(self, lease: LeaseRecord) -> Pages:
        """The page that it writes."""
        held = self.held.get(lease.id)
        return NO_PAGES if held is None else held.own

    @override
    def written_pages(self, lease: LeaseRecord) -> int:
        """Both, once it stands for any token."""
        return count(self.page_table(lease)) if lease.written_tokens else 0

    @override
    def pages_to_keep(self, lease: LeaseRecord, n_tokens: int) -> PageSpan | Refusal:
        """The page that it writes; the snapshot is before it."""
        return PageSpan(1, self.own_pages(lease))

    # ---- and one that ends -------------------------------------------------------------------

    @override
    def end_lease(self, lease: LeaseRecord) -> None:
        """A state of exactly the cached tokens becomes their snapshot."""
        held = self.held.pop(lease.id, None)
        if held is None:
            return
        # Before its own page joins the tree: the snapshot that it went on from is older, and goes
        # first.
        self._end_reading(held.source)
        # A state that has seen more or fewer tokens than the node has cannot be gone on from there.
        anchor = lease.anchor
        is_exact = (
            lease.is_whole
            and lease.cache
            and anchor is not None
            and anchor.parent is not None
            and anchor.end_tokens == count(lease.tokens)
            # Somebody else has left an equal one: the same tokens, so the same state.
            and anchor not in self.at
        )
        if is_exact and anchor is not None:
            self._put_at(anchor, held.own)
        else:
            self.pool.return_pages(held.own)

    @override
    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """Keep its own page, let go of the snapshot."""
        held = self.held[lease.id]
        self._end_reading(held.source)
        # So that the end of the quarantine does not let go of it a second time.
        held.source = None

    def _end_reading(self, source: RadixNode | None) -> None:
        if source is not None:
            self._unlock_at(source)
