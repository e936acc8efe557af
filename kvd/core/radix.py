"""The prefix index: which tokens are cached, on which pages, and who keeps them there.

A radix tree over whole pages, one root per namespace. An edge is one ``bytes`` of int32 tokens,
beside it one page id per page; children are found by the bytes of their first page. A whole edge
is tested by one ``startswith``, which is a memcmp; only a mismatch is looked at more closely.

    root ── edge: 4 pages ── node ┬─ edge: 2 pages ── node      end_tokens counts from the root
                                  └─ edge: 9 pages ── node      to the end of a node's edge

A match or an insertion that ends inside an edge splits it at a page boundary: the upper half is a
new node, the lower half stays the same object. So a node that a lease is anchored to keeps its id
and its ``end_tokens`` for as long as the lease lives.

How to use it: ``match``, ``lock`` the node at once, *then* read ``evictable_pages``, ``evict`` if
needed, and later ``extend`` from the locked node and ``relock`` to the new one. A node that nobody
locked may be gone after the next ``evict``.

What must not live here: owners and free pages (the lease table and the pools), clocks, I/O.

Invariants, checked by ``check``:
    I2  parent.lock_ref >= child.lock_ref >= 0; a root carries one lock of its own for good
    I3  evictable_pages = pages of the nodes with lock_ref 0, which are the nodes in the order
    I4  every edge is a positive number of pages, one page id each; no page id occurs twice
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvd.core.radix_audit import Totals, violations
from kvd.core.radix_node import Evicted, Extension, Flushed, LockUnderflow, Node, Victim
from kvd.types import ID_BYTES, NO_PAGES, NO_TOKENS, Pages, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.eviction import EvictionOrder

__all__ = [
    "Evicted",
    "Extension",
    "Flushed",
    "LockUnderflow",
    "Node",
    "RadixTree",
    "Victim",
]

FIRST_SPAN_BYTES = 2048
"""How far the search for a divergence looks at first; doubled while it finds none."""

BARE_ROOTS = 64
"""Empty namespaces allowed beside the used ones before they are swept."""


class RadixTree:
    """The cached prefixes of all namespaces. Theory of operation and invariants: see the module.

    Attributes:
        at: The time of the input being applied, in seconds. The tree has no clock; whoever drives
            it sets this once per input, and it is stamped on the nodes that are made or matched.
        evictable_pages: Pages that ``evict`` can give back now.
        protected_pages: Pages under a lock.
    """

    __slots__ = (
        "_add",
        "_insert",
        "_last_id",
        "_order",
        "_page_bytes",
        "_pop",
        "_remove",
        "_roots",
        "_sweep_above",
        "_touch",
        "at",
        "evictable_pages",
        "match_page_tokens",
        "protected_pages",
    )

    def __init__(self, match_page_tokens: int, order: EvictionOrder) -> None:
        if match_page_tokens < 1:
            raise ValueError(f"match_page_tokens is {match_page_tokens}; it must be at least 1")
        self.match_page_tokens = match_page_tokens
        self.at = 0.0
        self.evictable_pages = 0
        self.protected_pages = 0
        self._page_bytes = match_page_tokens * ID_BYTES
        self._order = order
        self._add = order.add
        self._insert = order.insert
        self._pop = order.pop
        self._remove = order.remove
        self._touch = order.touch
        self._roots: dict[str, Node] = {}
        self._sweep_above = BARE_ROOTS
        self._last_id = 0

    @property
    def cached_pages(self) -> int:
        """Pages the tree holds."""
        return self.evictable_pages + self.protected_pages

    # --- reading -------------------------------------------------------------------------------

    def match(self, tokens: Tokens, namespace: str, limit_tokens: int | None = None) -> Node:
        """Finds the longest cached prefix in whole pages; its length is the node's ``end_tokens``.

        Splits an edge when the match ends inside it, and counts as a use of the path.

        Args:
            tokens: The sequence from its start; a last partial page is ignored.
            namespace: Equal tokens of another namespace never match.
            limit_tokens: Match at most this much, floored to a page.

        Returns:
            The node where the match ends: the namespace's root when nothing matches.
        """
        node = self._find(tokens, namespace, limit_tokens)
        self._touch(node)
        return node

    def probe(self, tokens: Tokens, namespace: str, limit_tokens: int | None = None) -> int:
        """The length in tokens that ``match`` would find. Changes nothing at all."""
        node = self._roots.get(namespace)
        size = len(tokens) if limit_tokens is None else min(len(tokens), limit_tokens * ID_BYTES)
        pos, end = 0, size - size % self._page_bytes
        while node is not None and pos < end:
            node = node.children.get(tokens[pos : pos + self._page_bytes])
            if node is not None:
                shared = self._shared_bytes(node.edge, tokens, pos, end)
                pos += shared
                if shared < len(node.edge):
                    break
        return pos // ID_BYTES

    def path_pages(self, node: Node) -> Pages:
        """The pages from the root to the end of ``node``, in token order."""
        return _pages_between(None, node)

    def path_tokens(self, node: Node) -> Tokens:
        """The tokens from the root to the end of ``node``."""
        pieces = []
        step: Node | None = node
        while step is not None:
            pieces.append(step.edge)
            step = step.parent
        pieces.reverse()
        return Tokens(b"".join(pieces))

    def nodes(self, namespace: str | None = None) -> Iterator[Node]:
        """Every node but the roots, parents first; of one namespace, or of all."""
        stack = [root for name, root in self._roots.items() if namespace in {None, name}]
        while stack:
            node = stack.pop()
            if node.parent is not None:
                yield node
            stack.extend(node.children.values())

    def namespaces(self) -> list[str]:
        """The namespaces that were matched or filled lately, empty ones included."""
        return list(self._roots)

    def _find(self, tokens: Tokens, namespace: str, limit_tokens: int | None) -> Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._add_root(namespace)
        size = len(tokens)
        if limit_tokens is not None:
            size = min(size, limit_tokens * ID_BYTES)
        node = self._walk(root, tokens, 0, size - size % self._page_bytes)
        node.touched_at = self.at
        return node

    # --- locks ---------------------------------------------------------------------------------

    def hold(self, tokens: Tokens, namespace: str, limit_tokens: int | None = None) -> Node:
        """Does ``match`` and ``lock`` in one: the shorter way to the same state.

        Its use of the path counts when the lock goes, which is later than now.
        """
        node = self._find(tokens, namespace, limit_tokens)
        self._lock_up_to(node, None)
        return node

    def lock(self, node: Node) -> None:
        """Keeps ``node`` and its path from eviction until ``unlock``; locks nest."""
        self._lock_up_to(node, None)

    def relock(self, old: Node, new: Node) -> None:
        """Moves one lock from ``old`` down to ``new``; only the nodes between them change.

        Raises:
            ValueError: ``new`` is not in the subtree of ``old``; nothing was changed.
        """
        step: Node | None = new
        while step is not old:
            if step is None:
                raise ValueError(
                    f"a lock moves down only: {new.describe()} is not below {old.describe()}"
                )
            step = step.parent
        self._lock_up_to(new, old)

    def unlock(self, node: Node) -> None:
        """Takes one lock off ``node`` and its path.

        Raises:
            LockUnderflow: no lock is left to take off; nothing was changed.
        """
        if node.lock_ref < (1 if node.parent is not None else 2):
            raise LockUnderflow(f"{node.describe()} was unlocked more often than it was locked")
        freed = 0
        step: Node | None = node
        while step is not None:
            step.lock_ref -= 1
            if not step.lock_ref:
                freed += len(step.pages)
                self._add(step)
            step = step.parent
        if freed:
            self.evictable_pages += freed // ID_BYTES
            self.protected_pages -= freed // ID_BYTES

    def _lock_up_to(self, node: Node, above: Node | None) -> None:
        kept = 0
        step: Node | None = node
        while step is not above and step is not None:
            if not step.lock_ref:
                kept += len(step.pages)
                self._remove(step)
            step.lock_ref += 1
            step.hits += 1
            step = step.parent
        if kept:
            self.evictable_pages -= kept // ID_BYTES
            self.protected_pages += kept // ID_BYTES

    # --- growing -------------------------------------------------------------------------------

    def extend(
        self,
        anchor: Node,
        tokens: Tokens,
        pages: Pages,
        *,
        start_tokens: int = 0,
        priority: int = 0,
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
            pages: The caller's page ids for those tokens; their number says how far to go, so the
                caller keeps a last partial page by not naming it.
            start_tokens: Where in ``tokens`` the continuation begins.
            priority: For the priority order; a node has the highest of what passes through it.

        Returns:
            The end node (not locked), the pages the caller has to free, the pages that count now.

        Raises:
            ValueError: ``tokens`` is too short for that many pages; nothing was changed.
        """
        start = start_tokens * ID_BYTES
        end = start + len(pages) * self.match_page_tokens
        if end > len(tokens):
            raise ValueError(
                f"{len(pages) // ID_BYTES} pages of {self.match_page_tokens} tokens from token "
                f"{start_tokens} need {end // ID_BYTES} tokens; {len(tokens) // ID_BYTES} came"
            )
        node, duplicates, tree_pages = anchor, NO_PAGES, pages
        first_page = tokens[start : start + self._page_bytes]
        if first_page in anchor.children:
            node = self._walk(anchor, tokens, start, end)
            known = (node.end_tokens - anchor.end_tokens) // self.match_page_tokens * ID_BYTES
            duplicates, tree_pages = _swap(pages, known, _pages_between(anchor, node))
            start += known * self.match_page_tokens
            pages = Pages(pages[known:])
            first_page = tokens[start : start + self._page_bytes]
        if start < end:
            self._last_id += 1
            leaf = Node(self._last_id, node.namespace, node, tokens[start:end], pages)
            leaf.created_at = leaf.touched_at = self.at
            node.children[first_page] = leaf
            self.evictable_pages += len(pages) // ID_BYTES
            self._insert(leaf)
            node = leaf
        else:
            self._touch(node)
        if priority:
            _raise_priority(node, priority)
        return Extension(node, duplicates, tree_pages)

    def _add_root(self, namespace: str) -> Node:
        if len(self._roots) >= self._sweep_above:
            self._sweep_roots()
        self._last_id += 1
        root = Node(self._last_id, namespace, None, NO_TOKENS, NO_PAGES)
        root.lock_ref = 1
        root.created_at = self.at
        self._roots[namespace] = root
        return root

    def _sweep_roots(self) -> None:
        self._roots = {
            name: root for name, root in self._roots.items() if root.children or root.lock_ref > 1
        }
        self._sweep_above = 2 * len(self._roots) + BARE_ROOTS

    def _walk(self, node: Node, tokens: Tokens, pos: int, end: int) -> Node:
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
            node = self._split(child, self._shared_bytes(edge, tokens, pos, end))
            # Both halves were used, the upper one last; it also puts the upper one in its place.
            self._touch(child)
            break
        return node

    def _split(self, lower: Node, at_bytes: int) -> Node:
        edge, pages, parent = lower.edge, lower.pages, lower.parent
        at_pages = at_bytes // self.match_page_tokens
        self._last_id += 1
        upper = Node(self._last_id, lower.namespace, parent, edge[:at_bytes], pages[:at_pages])
        upper.created_at, upper.touched_at = lower.created_at, lower.touched_at
        upper.lock_ref, upper.hits, upper.priority = lower.lock_ref, lower.hits, lower.priority
        upper.used, upper.grown = lower.used, lower.grown
        if parent is not None:
            parent.children[edge[: self._page_bytes]] = upper
        lower.parent = upper
        lower.edge, lower.pages = Tokens(edge[at_bytes:]), Pages(pages[at_pages:])
        upper.children[lower.edge[: self._page_bytes]] = lower
        if not upper.lock_ref:
            self._add(upper)
        return upper

    def _shared_bytes(self, edge: Tokens, tokens: Tokens, pos: int, end: int) -> int:
        """How much of ``edge`` equals ``tokens[pos:end]``, in bytes, floored to a page."""
        limit = min(len(edge), end - pos)
        low, span = 0, FIRST_SPAN_BYTES
        while low < limit:
            high = min(low + span, limit)
            if not tokens.startswith(edge[low:high], pos + low):
                size = (high - low) // ID_BYTES
                ours = np.frombuffer(edge, "<i4", size, low)
                theirs = np.frombuffer(tokens, "<i4", size, pos + low)
                low += int((ours != theirs).argmax()) * ID_BYTES
                break
            low, span = high, 2 * span
        return low - low % self._page_bytes

    # --- shrinking -----------------------------------------------------------------------------

    def evict(self, n_pages: int) -> Evicted:
        """Drops whole unlocked leaves in the policy's order until ``n_pages`` or more are out.

        Fewer come back only when nothing unlocked is left.
        """
        wanted, got = n_pages * ID_BYTES, 0
        pieces, victims = [], []
        pop, page_bytes = self._pop, self._page_bytes
        while got < wanted:
            node = pop()
            if node is None or node.parent is None:
                break
            del node.parent.children[node.edge[:page_bytes]]
            pages = node.pages
            pieces.append(pages)
            got += len(pages)
            victims.append(Victim(node.id, node.namespace, node.end_tokens, len(pages) // ID_BYTES))
        self.evictable_pages -= got // ID_BYTES
        return Evicted(Pages(b"".join(pieces)), tuple(victims))

    def flush(self, namespace: str | None = None) -> Flushed:
        """Drops every unlocked node, of one namespace or of all; what is locked stays."""
        pieces, kept = [], 0
        for node in list(self.nodes(namespace)):
            if node.lock_ref:
                kept += len(node.pages)
            else:
                self._remove(node)
                pieces.append(node.pages)
                node.children.clear()  # no cycle is left for the collector to find
                if node.parent is not None and node.parent.lock_ref:
                    del node.parent.children[node.edge[: self._page_bytes]]
        pages = Pages(b"".join(pieces))
        self.evictable_pages -= len(pages) // ID_BYTES
        self._sweep_roots()
        return Flushed(pages, kept // ID_BYTES)

    # --- audit ---------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Every violation of I2, I3 and I4, in words; empty when the tree is sound."""
        totals = Totals(self.match_page_tokens, self.evictable_pages, self.protected_pages)
        return violations(list(self.nodes()), self._order, totals)


def _pages_between(above: Node | None, node: Node) -> Pages:
    pieces = []
    step: Node | None = node
    while step is not above and step is not None:
        pieces.append(step.pages)
        step = step.parent
    pieces.reverse()
    return Pages(b"".join(pieces))


def _swap(pages: Pages, known: int, tree: Pages) -> tuple[Pages, Pages]:
    """The caller's pages that lose to the tree's, and the stretch as the tree has it.

    A page that is the same on both sides (the caller repeats what it gave before) is no duplicate:
    freeing it would free a cached page.

    Args:
        pages: The caller's pages for the whole stretch.
        known: How many bytes of them the tree had already.
        tree: The tree's pages for that part.
    """
    mine, theirs = np.frombuffer(pages[:known], "<i4"), np.frombuffer(tree, "<i4")
    return Pages(mine[mine != theirs].tobytes()), Pages(tree + pages[known:])


def _raise_priority(node: Node, priority: int) -> None:
    step: Node | None = node
    while step is not None and step.priority < priority:
        step.priority = priority
        step = step.parent
