"""States: the component of recurrent layers, one page per request whatever its length.

A state stands for all tokens before one point, so it can be gone on from only there. What a lease
commits last is kept at the node where its tokens end (a **snapshot**); a later lease goes on from
the deepest snapshot on its path. It is copied on write by whoever computes::

    pages   [ the snapshot behind its prefix, to be read, or none | its own, to be written ]

A handoff sends the state whole, with its last pages, so a receive needs no snapshot.

Invariants: a snapshot is never written; it stands for exactly the tokens before its node's end.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvd.core.cache.lease import PageSpan
from kvd.core.cache.pages import PagePool
from kvd.types import NO_PAGES, Pages, count, null_pages
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView

    from kvd.core.cache.lease import Claim, LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.effects import Outbox
    from kvd.core.layout.spec import Component
    from kvd.errors import Refusal

NO_SNAPSHOT = null_pages(1)
"""What a page table has where there is none."""


class StateSnapshot:
    """The state at the end of one node, and the leases that go on from it."""

    __slots__ = ("locks", "page")

    def __init__(self, page: Pages) -> None:
        self.page = page
        self.locks = 0


class LeaseStates:
    """What one lease has: the snapshot that it reads, and its own page."""

    __slots__ = ("own", "source")

    def __init__(self, source: RadixNode | None, own: Pages) -> None:
        self.source = source
        self.own = own


class StatePages:
    """The pages of one component of states. ``snapshots``: by the node at whose end they are."""

    def __init__(self, component: Component, total_pages: int, out: Outbox) -> None:
        self.component = component
        self.pool = PagePool(component.name, total_pages)
        self.snapshots: dict[RadixNode, StateSnapshot] = {}
        self.held: dict[int, LeaseStates] = {}
        """By lease."""
        self._unlocked: OrderedDict[RadixNode, None] = OrderedDict()
        """Snapshots without a lock, used longest ago first."""
        self._out = out

    @property
    def evictable_pages(self) -> int:
        """Snapshots that no lease goes on from."""
        return len(self._unlocked)

    @property
    def cached_pages(self) -> int:
        """Snapshots."""
        return len(self.snapshots)

    @property
    def held_pages(self) -> int:
        """States that some lease writes."""
        return sum([count(held.own) for held in self.held.values()])

    @property
    def headroom_pages(self) -> int:
        """Pages obtainable now."""
        return self.pool.free_pages + len(self._unlocked) - self.pool.doomed_pages

    # ---- what there is -----------------------------------------------------------------------

    @property
    def nodes(self) -> KeysView[RadixNode]:
        """Nodes with a snapshot at their end."""
        return self.snapshots.keys()

    @property
    def unlocked(self) -> KeysView[RadixNode]:
        """Those whose snapshot no lease goes on from."""
        return self._unlocked.keys()

    @property
    def leases(self) -> KeysView[int]:
        """Leases that it has something for."""
        return self.held.keys()

    def pages_at(self, node: RadixNode) -> Pages:
        """The snapshot at the end of that node."""
        snapshot = self.snapshots.get(node)
        return NO_PAGES if snapshot is None else snapshot.page

    def locks_at(self, node: RadixNode) -> int:
        """Leases that go on from there."""
        snapshot = self.snapshots.get(node)
        return 0 if snapshot is None else snapshot.locks

    # ---- a claim -----------------------------------------------------------------------------

    def limit_tokens(self, claim: Claim) -> int | None:
        """Who computes needs one token to compute, and who resumes has one more than it names."""
        if claim.resumes or claim.fresh_tokens is not None:
            return None
        return max(0, count(claim.tokens) - 1)

    def fresh_tokens(self, prompt_tokens: int, *, cached: bool) -> int:
        """None of it is sent token by token."""
        return prompt_tokens

    def usable(self, node: RadixNode, claim: Claim) -> RadixNode:
        """The nearest node with a snapshot; else the root, from where everything is computed."""
        if claim.fresh_tokens is not None:
            return node
        while node.parent is not None and node not in self.snapshots:
            node = node.parent
        return node

    def lock(self, anchor: RadixNode, claim: Claim) -> None:
        """Keep the snapshot that is gone on from."""
        source = self._source(anchor, claim)
        if source is not None:
            snapshot = self.snapshots[source]
            snapshot.locks += 1
            self._unlocked.pop(source, None)

    def unlock(self, anchor: RadixNode, claim: Claim) -> None:
        """The claim came to nothing."""
        self._let_go(self._source(anchor, claim))

    def demand(self, claim: Claim, prefix_tokens: int) -> int:
        """One, whatever its length."""
        return 1

    def kept(self, anchor: RadixNode, claim: Claim) -> int:
        """The snapshot that it goes on from."""
        return int(self._source(anchor, claim) is not None)

    def make_room(self, n_pages: int) -> None:
        """Drop the snapshots used longest ago; their nodes stay."""
        short = min(n_pages - self.pool.free_pages, len(self._unlocked))
        if short <= 0:
            return
        nodes = [self._unlocked.popitem(last=False)[0] for _ in range(short)]
        freed = Pages(b"".join([self.snapshots.pop(node).page for node in nodes]))
        self.pool.return_pages(freed)
        self._out.emit(
            events.Evicted(pages=short, nodes=short, reason="room", component=self.component.name)
        )
        self.make_room(n_pages)  # more only where what it dropped is condemned

    def grant(self, lease: LeaseRecord, claim: Claim, anchor: RadixNode, n_pages: int) -> None:
        """Take the page."""
        self.held[lease.id] = LeaseStates(
            self._source(anchor, claim), self.pool.take_pages(n_pages)
        )

    def _source(self, anchor: RadixNode, claim: Claim) -> RadixNode | None:
        return anchor if claim.fresh_tokens is None and anchor.parent is not None else None

    # ---- a lease that lives ------------------------------------------------------------------

    def growth(self, lease: LeaseRecord, room_tokens: int) -> int:
        """None: a state does not grow."""
        return 0

    def extend(self, lease: LeaseRecord, room_tokens: int) -> None:
        """Nothing: a state does not grow."""

    def slide(self, lease: LeaseRecord, upto_tokens: int) -> Refusal | None:
        """Nothing: only windows slide."""
        return None

    def page_table(self, lease: LeaseRecord) -> Pages:
        """The snapshot that it reads, or the null page; then its own."""
        held = self.held.get(lease.id)
        if held is None:
            return NO_PAGES
        source = NO_SNAPSHOT if held.source is None else self.snapshots[held.source].page
        return Pages(source + held.own)

    def own_pages(self, lease: LeaseRecord) -> Pages:
        """The page that it writes."""
        held = self.held.get(lease.id)
        return NO_PAGES if held is None else held.own

    def pages_to_keep(self, lease: LeaseRecord, n_tokens: int) -> PageSpan | Refusal:
        """The page that it writes; the snapshot is before it."""
        return PageSpan(1, self.own_pages(lease))

    # ---- and one that ends -------------------------------------------------------------------

    def end_lease(self, lease: LeaseRecord) -> None:
        """A state of exactly the cached tokens becomes their snapshot."""
        held = self.held.pop(lease.id, None)
        if held is None:
            return
        self._let_go(held.source)
        # A state that has seen more or fewer tokens than the node has cannot be gone on from there.
        anchor = lease.anchor
        is_exact = (
            lease.is_whole
            and lease.cache
            and anchor is not None
            and anchor.parent is not None
            and anchor.end_tokens == count(lease.tokens)
            and anchor not in self.snapshots
        )
        if is_exact and anchor is not None:
            self.pool.moved.log.append(held.own)
            self.snapshots[anchor] = StateSnapshot(held.own)
            self._unlocked[anchor] = None
        else:
            self.pool.return_pages(held.own)

    def quarantine_lease(self, lease: LeaseRecord) -> None:
        """Keep its own page, let go of the snapshot."""
        held = self.held[lease.id]
        self._let_go(held.source)
        held.source = None

    def _let_go(self, source: RadixNode | None) -> None:
        if source is None:
            return
        snapshot = self.snapshots[source]
        snapshot.locks -= 1
        if not snapshot.locks:
            self._unlocked[source] = None

    # ---- the tree moves ----------------------------------------------------------------------

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """The lower half keeps the end, and with it the snapshot."""

    def dropped(self, nodes: Iterable[RadixNode]) -> None:
        """Their tokens are no longer cached: their snapshots are free."""
        pieces = []
        for node in nodes:
            snapshot = self.snapshots.pop(node, None)
            if snapshot is not None:
                del self._unlocked[node]
                pieces.append(snapshot.page)
        if pieces:
            self.pool.return_pages(Pages(b"".join(pieces)))
