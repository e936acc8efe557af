"""The prefix index: which tokens are cached, on which pages, and who keeps them there.

A radix tree over whole pages, one root per namespace. An edge is one ``bytes`` of int32 tokens,
with it one page id per page; children are found by the bytes of their first page. A whole edge
is tested by one ``startswith``, which is a memcmp; only a mismatch is looked at more closely.

    root ── edge: 4 pages ── node ┬─ edge: 2 pages ── node      end_tokens counts from the root
                                  └─ edge: 9 pages ── node      to the end of a node's edge

A match or an insertion that ends inside an edge splits it at a page boundary: the upper half is a
new node, the lower half stays the same object. So a node that a lease is anchored to keeps its id
and its ``end_tokens`` for as long as the lease lives.

How to use it: ``match``, ``lock`` the node at once, *then* read ``evictable_pages``, ``evict`` if
needed, and later ``extend`` from the locked node and ``relock`` to the new one. A node that nobody
locked may be gone after the next ``evict``.

What must not live here: owners and free pages (the lease table and the pools), clocks, I/O, and
what is broken and what follows of it for leases (``audit``).

Invariants, checked by ``audit.rules``:
    I2  parent.lock_ref >= child.lock_ref >= 0; a root carries one lock of its own for good
    I3  evictable_pages = pages of the nodes with lock_ref 0
    I4  every edge is a positive number of pages, one page id each; no page id occurs twice
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Protocol

import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core.cache.moved_pages import MovedPages
from kvd.core.cache.radix_node import NO_CHILDREN, LockUnderflow, RadixNode, path_between, too_few
from kvd.core.cache.tree_changes import EvictedNodes, Extension, FlushedNodes
from kvd.types import ID_BYTES, NO_PAGES, NO_TOKENS, Pages, Tokens

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from kvd.core.cache.eviction import EvictionOrder


FIRST_SPAN_BYTES = 2048
"""How far the search for a divergence looks at first; doubled while it finds none."""


def shared_bytes(edge: Tokens, tokens: Tokens, pos: int, end: int) -> int:
    """How much of ``edge`` equals ``tokens[pos:end]`` from its start, in bytes of whole tokens."""
    limit = min(len(edge), end - pos)
    # Only the span that differs is looked into token by token; doubled, they stay few.
    low, span = 0, FIRST_SPAN_BYTES
    while low < limit:
        high = min(low + span, limit)
        if not tokens.startswith(edge[low:high], pos + low):
            size = (high - low) // ID_BYTES
            ours = np.frombuffer(edge, "<i4", size, low)
            theirs = np.frombuffer(tokens, "<i4", size, pos + low)
            return low + int((ours != theirs).argmax()) * ID_BYTES
        low, span = high, 2 * span
    return limit


def outdone_pages(mine: Pages, tree: Pages) -> tuple[Pages, Pages]:
    """The pages of ``mine`` that lose to the tree's, and all of them as the tree has them.

    A page that is the same on both sides (its owner repeats what it gave before) is not among the
    losers: freeing it would free a cached page.

    Args:
        mine: The caller's pages.
        tree: The tree's pages for the first part of the same tokens.
    """
    first = np.frombuffer(mine[: len(tree)], "<i4")
    losers = first[first != np.frombuffer(tree, "<i4")]
    return Pages(losers.tobytes()), Pages(tree + mine[len(tree) :])


BARE_ROOTS = 64
"""Empty namespaces allowed beside the used ones before they are swept."""


class PagesAtNodes(Protocol):
    """Pages of another component that lie at the nodes: told when a node is split or leaves."""

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """``upper`` is the new upper half of ``lower``."""

    def dropped(self, nodes: Iterable[RadixNode]) -> None:
        """``nodes`` left the tree: what was at them is free."""


class TreeWatch(PagesAtNodes, Protocol):
    """Whoever tells others of what is cached."""

    def joined(self, leaf: RadixNode) -> None:
        """``leaf`` is new, with its pages."""

    def hidden(self, node: RadixNode) -> None:
        """No prompt finds ``node``, nor what is below it, from now on."""

    def flushed(self, keys: Collection[str] | None) -> None:
        """These namespaces were flushed, or all; what is locked stayed."""


@mypyc_attr(allow_interpreted_subclasses=True)
class RadixTree:
    """The cached prefixes of all namespaces. Theory of operation and invariants: see the module.

    Attributes:
        at: The time of the input being applied, in seconds. The tree has no clock; whoever drives
            it sets this once per input, and it is stamped on the nodes that are made or matched.
        roots: By namespace, those that were matched or filled lately; empty ones included.
        order: Who is evicted first. Read these two; only the tree writes them.
        components: Who keeps other pages at the nodes; ``AllComponentPages`` adds them.
        watch: Who tells others of what is cached, if anybody; ``watch_with`` sets it.
    """

    def __init__(
        self, match_page_tokens: int, order: EvictionOrder, moved: MovedPages | None = None
    ) -> None:
        if match_page_tokens < 1:
            raise ValueError(f"match_page_tokens is {match_page_tokens}; it must be at least 1")
        self.match_page_tokens = match_page_tokens
        self.at = 0.0
        self.components: list[PagesAtNodes] = []
        # In bytes of page ids: what a node has is len(node.pages), without a division.
        self.evictable_bytes = 0
        self.protected_bytes = 0
        self._page_bytes = match_page_tokens * ID_BYTES
        self.watch: TreeWatch | None = None
        self._moved = moved or MovedPages()
        self._take_order(order)
        self.roots: dict[str, RadixNode] = {}
        self._sweep_above = BARE_ROOTS
        self._last_id = 0

    def _take_order(self, order: EvictionOrder) -> None:
        self.order = order
        self._add = order.add if self.watch is None else self._add_and_tell
        self._take = order.take_victims
        self._release = order.release
        self._touch = order.touch

    def reorder(self, order: EvictionOrder) -> None:
        """Goes by another order from now on, which has taken over from the one before."""
        self._take_order(order)

    def watch_with(self, watch: TreeWatch) -> None:
        """Tells it of everything that joins, splits, leaves or is hidden from now on."""
        self.watch = watch
        self.components.append(watch)
        self._add = self._add_and_tell

    def _add_and_tell(self, leaf: RadixNode) -> None:
        assert self.watch is not None
        self.order.add(leaf)
        self.watch.joined(leaf)

    @property
    def evictable_pages(self) -> int:
        """Pages that ``evict`` can give back now."""
        return self.evictable_bytes // ID_BYTES

    @property
    def protected_pages(self) -> int:
        """Pages under a lock."""
        return self.protected_bytes // ID_BYTES

    @property
    def cached_pages(self) -> int:
        """Pages the tree holds."""
        return (self.evictable_bytes + self.protected_bytes) // ID_BYTES

    # --- reading -------------------------------------------------------------------------------

    def match(self, tokens: Tokens, namespace: str, limit_tokens: int | None = None) -> RadixNode:
        """Finds the longest cached prefix in whole pages; its length is the node's ``end_tokens``.

        Splits an edge when the match ends inside it, and counts as a use of the path.

        Args:
            tokens: The sequence from its start; a last partial page is ignored.
            namespace: Equal tokens of another namespace never match.
            limit_tokens: Match at most this much, floored to a page.

        Returns:
            The node where the match ends: the namespace's root when nothing matches.
        """
        size = len(tokens) if limit_tokens is None else min(len(tokens), limit_tokens * ID_BYTES)
        root = self.roots.get(namespace) or self._add_root(namespace)
        # Whole pages only: a partial one may still be written, and could not be shared.
        node = self._walk(root, tokens, 0, size - size % self._page_bytes)
        node.touched_at = self.at
        self._touch(node)
        return node

    def probe(self, tokens: Tokens, namespace: str, limit_tokens: int | None = None) -> int:
        """The length in tokens that ``match`` would find. Changes nothing at all."""
        node = self.roots.get(namespace)
        size = len(tokens) if limit_tokens is None else min(len(tokens), limit_tokens * ID_BYTES)
        pos, end = 0, size - size % self._page_bytes
        while node is not None and pos < end:
            node = node.children.get(tokens[pos : pos + self._page_bytes])
            if node is None:
                break
            edge = node.edge
            stop = pos + len(edge)
            if stop <= end and tokens.startswith(edge, pos):
                pos = stop
                continue
            shared = shared_bytes(edge, tokens, pos, end)
            pos += shared - shared % self._page_bytes
            break
        return pos // ID_BYTES

    def path_pages(self, node: RadixNode) -> Pages:
        """The pages from the root to the end of ``node``, in token order."""
        above = node.parent
        if above is None or above.parent is None:  # a shared beginning, and nothing below it
            return node.pages
        return Pages(b"".join([step.pages for step in reversed(path_between(None, node))]))

    def path_tokens(self, node: RadixNode) -> Tokens:
        """The tokens from the root to the end of ``node``."""
        return Tokens(b"".join([step.edge for step in reversed(path_between(None, node))]))

    def nodes(self, namespaces: Collection[str] | None = None) -> Iterator[RadixNode]:
        """Every node but the roots, parents first; of these namespaces, or of all."""
        roots = self.roots.items()
        stack = [root for name, root in roots if namespaces is None or name in namespaces]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    # --- locks ---------------------------------------------------------------------------------

    def hold(self, tokens: Tokens, namespace: str, limit_tokens: int | None = None) -> RadixNode:
        """Does ``match`` and ``lock`` in one: the shorter way to the same state.

        Its use of the path counts when the lock goes, which is later than now.
        """
        size = len(tokens) if limit_tokens is None else min(len(tokens), limit_tokens * ID_BYTES)
        root = self.roots.get(namespace) or self._add_root(namespace)
        node = self._walk(root, tokens, 0, size - size % self._page_bytes)
        node.touched_at = self.at
        self.lock(node)
        return node

    def lock(self, node: RadixNode) -> None:
        """Keeps ``node`` and its path from eviction until ``unlock``; locks nest."""
        # Up to the root, so that a locked node's ancestors are all locked (I2): an eviction order
        # may then take any unlocked node without looking whether something locked is below it.
        kept = 0
        step: RadixNode | None = node
        while step is not None:
            locks = step.lock_ref
            if not locks:
                kept += len(step.pages)
            step.lock_ref = locks + 1
            step.hits += 1
            step = step.parent
        # Only what was unlocked until now moves from one sum to the other: I3 without a walk.
        if kept:
            self.evictable_bytes -= kept
            self.protected_bytes += kept

    def relock(self, old: RadixNode, new: RadixNode) -> None:
        """Moves one lock from ``old`` down to ``new``; only the nodes between them change.

        Raises:
            ValueError: ``new`` is not in the subtree of ``old``; nothing was changed.
        """
        # Between the two the lock is new; from ``old`` upwards it is the same one as before, so
        # nothing there changes, and no node is unlocked for a moment in which it could be evicted.
        path = path_between(old, new)
        if not path and new is not old:
            raise ValueError(
                f"a lock only moves down: {new.describe()} is not below {old.describe()}"
            )
        kept = 0
        for step in path:
            if not step.lock_ref:
                kept += len(step.pages)
            step.lock_ref += 1
            step.hits += 1
        self.evictable_bytes -= kept
        self.protected_bytes += kept

    def unlock(self, node: RadixNode) -> None:
        """Takes one lock off ``node`` and its path.

        Raises:
            LockUnderflow: no lock is left to take off; nothing was changed.
        """
        # The root's own lock is never taken off: it would be evicted with its namespace in use.
        if node.lock_ref < (1 if node.parent is not None else 2):
            raise LockUnderflow(f"{node.describe()} was unlocked more often than it was locked")
        self._unlock_path(node)

    def _unlock_path(self, node: RadixNode) -> None:
        freed = 0
        step: RadixNode | None = node
        while step is not None:
            step.lock_ref = locks = step.lock_ref - 1
            if not locks:
                freed += len(step.pages)
                # From the deepest node up: each order gives a parent its place after its children.
                self._release(step)
            step = step.parent
        if freed:
            self.evictable_bytes += freed
            self.protected_bytes -= freed

    def unlock_from(self, old: RadixNode, new: RadixNode) -> None:
        """Does ``relock`` from ``old`` to ``new`` and ``unlock`` of that in one.

        Args:
            old: Where one lock of the caller is.
            new: Itself, or what ``extend`` has made below it.
        """
        if new is old:
            self.unlock(old)
            return
        # Locked and unlocked at once, none of these moves from one sum to the other.
        step = new
        while step is not old:
            step.hits += 1
            if not step.lock_ref:
                self._release(step)
            assert step.parent is not None
            step = step.parent
        self._unlock_path(old)

    # --- growing -------------------------------------------------------------------------------

    def extend(
        self,
        anchor: RadixNode,
        tokens: Tokens,
        pages: Pages,
        *,
        start_tokens: int = 0,
        priority: int = 0,
        writer: int = 0,
    ) -> Extension:
        """Continues the sequence that ends at ``anchor`` by one page of tokens per page id.

        ``tokens`` may be the whole sequence with ``start_tokens = anchor.end_tokens``: then nothing
        but what is new is ever copied, and a buffer that is new from end to end is kept as it is.

            tokens  | before start |  in the tree already  |  new: joins the tree  | rest, ignored
            pages                  |  duplicates           |  taken                |
                                   ^ anchor.end_tokens     ^ page boundary         ^ new end

        Args:
            anchor: A root or a node that the caller has locked.
            tokens: From ``start_tokens`` on, what follows the anchor.
            pages: The caller's for those tokens; how many says how far: no partial page is named.
            start_tokens: Where in ``tokens`` the continuation begins.
            priority: For that order; a node has the highest of what passes through it.
            writer: The session that a new node is told to be of.

        Raises:
            ValueError: ``tokens`` is too short for that many pages; nothing was changed.
        """
        start = start_tokens * ID_BYTES
        end = start + len(pages) * self.match_page_tokens
        if end > len(tokens):
            raise too_few(tokens, start_tokens, end // ID_BYTES)
        node, duplicates, tree_pages = anchor, NO_PAGES, pages
        first_page = tokens[start : start + self._page_bytes]
        if first_page in anchor.children:
            node = self._walk(anchor, tokens, start, end)
            known = (node.end_tokens - anchor.end_tokens) // self.match_page_tokens * ID_BYTES
            there = [step.pages for step in reversed(path_between(anchor, node))]
            duplicates, tree_pages = outdone_pages(pages, Pages(b"".join(there)))
            start, pages = start + known * self.match_page_tokens, Pages(pages[known:])
            first_page = tokens[start : start + self._page_bytes]
        if start < end:
            self._last_id = node_id = self._last_id + 1
            edge = tokens if end - start == len(tokens) else tokens[start:end]
            leaf = RadixNode(node_id, node, first_page, edge, pages, writer, self.at)
            if node.children is NO_CHILDREN:
                node.children = {}
            node.children[first_page] = leaf
            self.evictable_bytes += len(pages)
            self._add(leaf)
        else:
            leaf, pages = node, NO_PAGES
        # A new leaf makes its path as young as itself. A locked parent has no place in the order.
        if not node.lock_ref:
            self._touch(node)
        if priority:
            _prefer(leaf, priority)
        return Extension(leaf, duplicates, tree_pages, pages)

    def _add_root(self, namespace: str) -> RadixNode:
        if len(self.roots) >= self._sweep_above:
            self._sweep_roots()
        self._last_id += 1
        root = RadixNode(self._last_id, None, namespace.encode(), NO_TOKENS, NO_PAGES)
        # So that no walk has to ask whether it has come to a root, which must never be evicted.
        root.lock_ref = 1
        self.roots[namespace] = root
        return root

    def _sweep_roots(self) -> None:
        # Namespaces are named by requests, so whoever sends a new one each time would fill memory.
        self.roots = {
            name: root for name, root in self.roots.items() if root.children or root.lock_ref > 1
        }
        self._sweep_above = 2 * len(self.roots) + BARE_ROOTS

    def _walk(self, node: RadixNode, tokens: Tokens, pos: int, end: int) -> RadixNode:
        """Follows ``tokens[pos:end]`` (bytes) down from ``node``, splitting where it must end."""
        page_bytes = self._page_bytes
        while pos < end:
            child = node.children.get(tokens[pos : pos + page_bytes])
            if child is None:
                break
            edge = child.edge
            stop = pos + len(edge)
            if stop <= end and tokens.startswith(edge, pos):
                node, pos = child, stop
                continue
            shared = shared_bytes(edge, tokens, pos, end)
            # At least one page is shared, since the child was found by all of its first: no half is
            # empty.
            node = self._split(child, shared - shared % page_bytes)
            # Both halves were used, the upper one last; it also puts the upper one in its place.
            self._touch(child)
            break
        return node

    def _split(self, lower: RadixNode, at_bytes: int) -> RadixNode:
        # The pages below go to another node without being moved: a sweep that has seen one half
        # must know.
        edge, pages, parent = lower.edge, lower.pages, lower.parent
        self._moved.log.append(pages)
        at_pages = at_bytes // self.match_page_tokens
        self._last_id += 1
        above, first = edge[:at_bytes], pages[:at_pages]
        upper = RadixNode(
            self._last_id, parent, lower.key, above, first, lower.writer, lower.touched_at
        )
        # Whoever locked the whole crosses both halves; the lower one keeps its identity, because
        # leases are anchored at ends of edges and an end stays where it is.
        upper.lock_ref, upper.hits = lower.lock_ref, lower.hits
        upper.priority = lower.priority
        if parent is not None:
            parent.children[upper.key] = upper
        lower.parent = upper
        lower.edge, lower.pages = Tokens(edge[at_bytes:]), Pages(pages[at_pages:])
        lower.key = lower.edge[: self._page_bytes]
        upper.children = {lower.key: lower}
        # After the tree is whole again: who is told may look at both halves.
        self.order.split(upper, lower)
        for pages_at_nodes in self.components:
            pages_at_nodes.split(upper, lower)
        return upper

    def cut(self, node: RadixNode, at_tokens: int) -> None:
        """Splits ``node``, so that the half above it ends at that token, inside its edge."""
        self._split(node, (at_tokens - node.end_tokens) * ID_BYTES + len(node.edge))
        self._touch(node)

    # --- shrinking -----------------------------------------------------------------------------

    def evict(self, n_pages: int) -> EvictedNodes:
        """Drops whole unlocked leaves in the policy's order until ``n_pages`` or more are out.

        Fewer come back only when nothing unlocked is left.
        """
        # No more than there is: ``take_victims`` would look for more until its order is empty.
        wanted = n_pages * ID_BYTES
        if wanted > self.evictable_bytes:  # noqa: PLR1730 - calling min() costs more
            wanted = self.evictable_bytes
        victims = self._take(wanted)
        pieces = []
        for node in victims:
            if node.parent is not None:
                del node.parent.children[node.key]
            pieces.append(node.pages)
        pages: Pages = b"".join(pieces)  # type: ignore[assignment]  # see RadixNode
        self.evictable_bytes -= len(pages)
        for pages_at_nodes in self.components:
            pages_at_nodes.dropped(victims)
        return EvictedNodes(pages, victims)

    def flush(self, namespaces: Collection[str] | None = None) -> FlushedNodes:
        """Drops every unlocked node, of these namespaces or of all; what is locked stays."""
        pieces, gone, kept = [], [], 0
        # Parents come first, and a node below a locked one may go while that stays: a list, because
        # the walk goes by the children that are taken out.
        for node in list(self.nodes(namespaces)):
            if node.lock_ref:
                kept += len(node.pages)
            else:
                self.order.remove(node)
                gone.append(node)
                pieces.append(node.pages)
                node.children = NO_CHILDREN  # no cycle is left for the collector to find
                if node.parent is not None and node.parent.lock_ref:
                    del node.parent.children[node.key]
        pages = Pages(b"".join(pieces))
        self.evictable_bytes -= len(pages)
        for pages_at_nodes in self.components:
            pages_at_nodes.dropped(gone)
        if self.watch is not None:
            self.watch.flushed(namespaces)
        # What was dropped may have been all of a namespace.
        self._sweep_roots()
        return FlushedNodes(pages, kept // ID_BYTES, gone)


# What is done to a tree that is broken: hide what no prompt may find, drop it, count again.


def subtree(node: RadixNode) -> list[RadixNode]:
    """``node`` and all below, parents first."""
    found = [node]
    for edge in found:  # grows while it is walked
        found.extend(edge.children.values())
    return found


def hide(tree: RadixTree, node: RadixNode) -> None:
    """No prompt finds ``node`` or what is below it any more; whoever locks it keeps it.

    Its first page of tokens becomes one that no engine has: negative, and nobody can guess it.
    """
    parent = node.parent
    assert parent is not None
    if tree.watch is not None:
        tree.watch.hidden(node)
    page_bytes = tree.match_page_tokens * ID_BYTES
    _unlink(node, parent)
    digest = hashlib.shake_256(b"%d %b" % (node.id, bytes(node.edge[:page_bytes])))
    # By its id and tokens, not at random: a replay of the same inputs must come to the same tree.
    key = bytearray(digest.digest(page_bytes))
    for last in range(ID_BYTES - 1, page_bytes, ID_BYTES):
        key[last] |= 0x80
    node.key = bytes(key)
    node.edge = Tokens(node.key + node.edge[page_bytes:])
    # The dict that all leaves share: it is never written.
    if parent.children is NO_CHILDREN:
        parent.children = {}
    parent.children[node.key] = node


def drop(tree: RadixTree, node: RadixNode) -> Pages:
    """Takes ``node`` and all below, which nobody locks, out of the tree; returns their pages."""
    gone = subtree(node)
    for edge in gone:
        # A broken node may stand in no order: that may be what it is dropped for.
        if edge in tree.order:
            tree.order.remove(edge)
    if node.parent is not None:
        _unlink(node, node.parent)
    for edge in gone:
        edge.children = NO_CHILDREN
    for pages_at_nodes in tree.components:
        pages_at_nodes.dropped(gone)
    recount(tree)
    return Pages(b"".join([edge.pages for edge in gone]))


def add_locks(node: RadixNode, n_locks: int) -> None:
    """Gives it the locks that it lacks of those that leases count on; ``recount`` the tree then."""
    node.lock_ref += n_locks


def recount(tree: RadixTree) -> None:
    """The sums over the nodes, as they are."""
    evictable = protected = 0
    for node in tree.nodes():
        if node.lock_ref:
            protected += len(node.pages)
        else:
            evictable += len(node.pages)
    tree.evictable_bytes, tree.protected_bytes = evictable, protected


def _prefer(leaf: RadixNode, priority: int) -> None:
    """Its path has at least that priority."""
    step: RadixNode | None = leaf
    # Above one that is as high all are.
    while step is not None and step.priority < priority:
        step.priority = priority
        step = step.parent


def _unlink(node: RadixNode, parent: RadixNode) -> None:
    """Under whatever key its parent knows it."""
    for key in [key for key, child in parent.children.items() if child is node]:
        del parent.children[key]
