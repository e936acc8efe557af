"""The audit of the prefix index: what must be true of a tree, said about the nodes it has.

What must not live here: anything that changes a tree, and the leases' half of I2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvd.types import ID_BYTES, NULL_PAGE

if TYPE_CHECKING:
    from kvd.core.eviction import EvictionOrder
    from kvd.core.radix_node import Node


class Totals(msgspec.Struct, frozen=True):
    """What the tree says about itself."""

    match_page_tokens: int
    evictable_pages: int
    protected_pages: int


def violations(nodes: list[Node], order: EvictionOrder, totals: Totals) -> list[str]:
    """Every violation of I2, I3 and I4, in words.

    Args:
        nodes: All nodes but the roots.
        order: The order that must hold all of them.
        totals: The tree's page size and counters.
    """
    found = [fault for node in nodes for fault in _node_faults(node, order, totals)]
    free = [node for node in nodes if not node.lock_ref]
    evictable = sum(len(node.pages) for node in free) // ID_BYTES
    cached = sum(len(node.pages) for node in nodes) // ID_BYTES
    if (evictable, cached - evictable) != (totals.evictable_pages, totals.protected_pages):
        found.append(
            f"I3: {totals.evictable_pages} evictable and {totals.protected_pages} protected pages "
            f"are counted, {evictable} and {cached - evictable} are in the tree"
        )
    if len(nodes) != len(order):
        found.append(f"I3: {len(nodes)} nodes are in the tree, {len(order)} in the eviction order")
    return found + _page_faults(nodes)


def _node_faults(node: Node, order: EvictionOrder, totals: Totals) -> list[str]:
    page_bytes = totals.match_page_tokens * ID_BYTES
    parent, edge, name = node.parent, node.edge, node.describe()
    found = []
    if parent is None or node.key != edge[:page_bytes] or parent.children[node.key] is not node:
        found.append(f"I4: {name} is not its parent's child under its first page")
    elif node.end_tokens != parent.end_tokens + len(edge) // ID_BYTES:
        found.append(f"I4: {name} has {len(edge) // ID_BYTES} tokens after {parent.describe()}")
    elif parent.lock_ref < node.lock_ref:
        found.append(f"I2: {name} has more locks than {parent.describe()} above it")
    if node.lock_ref < 0:
        found.append(f"I2: {name} has less than no lock")
    if node not in order:
        found.append(f"I3: {name} is not in the eviction order")
    if not edge or len(edge) % page_bytes:
        found.append(f"I4: {name} has {len(edge) // ID_BYTES} tokens, not whole pages")
    if len(node.pages) * totals.match_page_tokens != len(edge):
        found.append(f"I4: {name} has {len(edge) // ID_BYTES} tokens on its pages")
    return found


def _page_faults(nodes: list[Node]) -> list[str]:
    pages = np.frombuffer(b"".join(node.pages for node in nodes), "<i4")
    ids, times = np.unique(pages, return_counts=True)
    found = [f"I4: page {page} is in the tree more than once" for page in ids[times > 1].tolist()]
    if ids.size and ids[0] <= NULL_PAGE:
        found.append(f"I4: page {ids[0]} is in the tree; page ids start at {NULL_PAGE + 1}")
    return found
