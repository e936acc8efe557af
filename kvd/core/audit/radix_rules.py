"""The audit of the prefix index: what must be true of a tree, said about the nodes it has.

``is_sound`` is the quick question, asked of every node by the standing audit; ``node_faults`` the
answer in words, asked only where it is not.

What must not live here: anything that changes a tree, and the leases' half of I2.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np

from kvd.core.audit.fault import Fault
from kvd.types import ID_BYTES, NULL_PAGE, Pages

if TYPE_CHECKING:
    from kvd.core.cache.eviction import EvictionOrder
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode

_PAGES = attrgetter("pages")


def tree_faults(tree: RadixTree) -> list[Fault]:
    """Every violation of I2, I3 and I4 that a tree alone can tell."""
    nodes = list(tree.nodes())
    page_bytes = tree.match_page_tokens * ID_BYTES
    found = [
        fault
        for node in nodes
        if not is_sound(node, tree.order, page_bytes)
        for fault in node_faults(node, tree.order, page_bytes)
    ]
    if len(nodes) != len(tree.order):
        found.append(
            Fault(
                "I3",
                "order-size",
                f"{len(nodes)} nodes are in the tree, {len(tree.order)} in the eviction order",
            )
        )
    return found + total_faults(tree) + _page_faults(nodes)


def total_faults(tree: RadixTree) -> list[Fault]:
    """I3: the counters are the sums over the nodes in the eviction order, which are all."""
    # In one piece, so as fast as it goes: 0.1 us a node.
    nodes = list(tree.order)
    cached = sum(map(len, map(_PAGES, nodes)))
    locked = sum([len(node.pages) for node in nodes if node.lock_ref])
    evictable, protected = (cached - locked) // ID_BYTES, locked // ID_BYTES
    if (evictable, protected) == (tree.evictable_pages, tree.protected_pages):
        return []
    return [
        Fault(
            "I3",
            "totals",
            f"{tree.evictable_pages} evictable and {tree.protected_pages} protected pages are "
            f"counted, {evictable} and {protected} are in the eviction order",
        )
    ]


def is_sound(node: RadixNode, order: EvictionOrder, page_bytes: int) -> bool:
    """Whether ``node_faults`` has nothing to say; ``node`` is no root."""
    parent, edge, key = node.parent, node.edge, node.key
    n_bytes = len(edge)
    return (
        parent is not None
        and parent.children.get(key) is node
        and len(key) == page_bytes <= n_bytes
        and edge.startswith(key)
        and n_bytes % page_bytes == 0
        and len(node.pages) * page_bytes == n_bytes * ID_BYTES
        and node.end_tokens == parent.end_tokens + n_bytes // ID_BYTES
        and 0 <= node.lock_ref <= parent.lock_ref
        and node in order
    )


def is_linked(node: RadixNode) -> bool:
    """Whether its parent knows it: what was evicted or flushed no longer is."""
    return node.parent is not None and node.parent.children.get(node.key) is node


def node_faults(node: RadixNode, order: EvictionOrder, page_bytes: int) -> list[Fault]:
    """Every violation of I2, I3 and I4 at one node that is no root."""
    parent, edge, name = node.parent, node.edge, node.describe()
    n_tokens = len(edge) // ID_BYTES
    found = []
    if parent is None or node.key != edge[:page_bytes] or not is_linked(node):
        found.append(("I4", "child-key", f"{name} is not its parent's child under its first page"))
    elif node.end_tokens != parent.end_tokens + n_tokens:
        found.append(("I4", "end", f"{name} has {n_tokens} tokens after {parent.describe()}"))
    elif parent.lock_ref < node.lock_ref:
        found.append(("I2", "locks-grow", f"{name} has more locks than {parent.describe()} above"))
    if node.lock_ref < 0:
        found.append(("I2", "lock-below-zero", f"{name} has less than no lock"))
    if node not in order:
        found.append(("I3", "not-in-order", f"{name} is not in the eviction order"))
    if not edge or len(edge) % page_bytes:
        found.append(("I4", "edge", f"{name} has {n_tokens} tokens, not whole pages"))
    if len(node.pages) * page_bytes != len(edge) * ID_BYTES:
        found.append(("I4", "edge-pages", f"{name} has {n_tokens} tokens on its pages"))
    return [Fault(rule, check, what, node=node.id) for rule, check, what in found]


def _page_faults(nodes: list[RadixNode]) -> list[Fault]:
    pages = np.frombuffer(b"".join(node.pages for node in nodes), "<i4")
    ids, times = np.unique(pages, return_counts=True)
    twice = ids[times > 1]
    found = [
        Fault(
            "I4",
            "page-twice",
            f"page {page} is in the tree more than once",
            pages=Pages(np.int32(page).tobytes()),
        )
        for page in twice[:1].tolist()
    ]
    if ids.size and ids[0] <= NULL_PAGE:
        what = f"page {ids[0]} is in the tree; page ids start at {NULL_PAGE + 1}"
        found.append(Fault("I4", "null-page", what))
    return found
