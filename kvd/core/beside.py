"""Components beside the first: pages of their own, in leases and at the nodes of the tree.

A pool's first component has one page for each page of tokens, and the tree is made of those. What
else a sequence owns is kept beside it, one keeper per component and one class per extent:
``windows`` (the tail), ``states`` (one per request), ``buffers`` (copies on a device). A keeper has
its page pool, knows what each lease has of it, and what lies at which node. Nodes without are
tombstones: their tokens are cached, and this component of them is not.

    node     | 4 pages of kv | 4 pages of kv | 4 pages of kv |      the path of a lease
    windows  |      -        |   4 pages     |   4 pages     |      live for one window back

The lease table calls every keeper at the same moments as its own pool and tree, so that all
components move together or not at all; see ``lease_table``.

Invariant, for each keeper: null + free + held + cached + quarantined = total.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView

    from kvd.core.lease import Claim, Lease, Rows
    from kvd.core.pages import PagePool
    from kvd.core.radix_node import Node
    from kvd.core.spec import Component
    from kvd.errors import Refusal
    from kvd.types import Pages


class Keeper(Protocol):
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
    def nodes(self) -> KeysView[Node]:
        """Nodes that have something of it."""

    @property
    def unlocked(self) -> KeysView[Node]:
        """Those whose pages can be had now."""

    @property
    def leases(self) -> KeysView[int]:
        """Leases that it has something for, by number."""

    def pages_at(self, node: Node) -> Pages:
        """Its pages beside that node; none at a tombstone."""

    def locks_at(self, node: Node) -> int:
        """How many leases need what is beside that node."""

    # ---- a claim: match, lock, count, then take ----

    def limit_tokens(self, claim: Claim) -> int | None:
        """The longest prefix that the claim may take from the tree; None where any is right."""

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int:
        """The token of a received prompt from which on this component of it is always sent."""

    def usable(self, node: Node, claim: Claim) -> Node:
        """``node``, or the nearest above it, from where the sequence can go on."""

    def lock(self, anchor: Node, claim: Claim) -> None:
        """Keep what the claim needs of the path; undone by ``unlock`` or when the lease ends."""

    def unlock(self, anchor: Node, claim: Claim) -> None:
        """The claim came to nothing."""

    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """Pages of its own that it takes behind that prefix."""

    def kept(self, anchor: Node, claim: Claim) -> int:
        """Pages of the tree that it keeps locked while it goes on from there."""

    def make_room(self, n_pages: int) -> None:
        """Have so many free pages; there is headroom for them."""

    def grant(self, lease: Lease, claim: Claim, anchor: Node, n_pages: int) -> None:
        """Take the pages: the lease begins, or has pages again."""

    # ---- a lease that lives ----

    def growth(self, lease: Lease, room_tokens: int) -> int:
        """Further pages that the lease takes when it is extended to so many tokens."""

    def extend(self, lease: Lease, room_tokens: int) -> None:
        """Take them."""

    def slide(self, lease: Lease, upto_tokens: int) -> Refusal | None:
        """The engine computes from there on: give back what is behind, have what is ahead."""

    def row(self, lease: Lease) -> Pages:
        """What the engine is told; the null page stands for none."""

    def own(self, lease: Lease) -> Pages:
        """The pages that are this lease's own."""

    def content(self, lease: Lease, n_tokens: int) -> Rows | Refusal:
        """The rows that the sequence needs to go on behind ``n_tokens``; or why they are not there.

        These are what is saved of a lease that is retracted, and what it must have back.
        """

    # ---- and one that ends ----

    def end(self, lease: Lease) -> None:
        """Give to the tree what may be kept, free the rest; nothing where it has none."""

    def quarantine(self, lease: Lease) -> None:
        """A remote may still write them: keep them from everybody, unlock the rest."""

    # ---- the tree moves ----

    def split(self, upper: Node, lower: Node) -> None:
        """``upper`` is the new upper half of ``lower``."""

    def dropped(self, nodes: Iterable[Node]) -> None:
        """``nodes`` left the tree: what was beside them is free."""
