"""Which leases cross which nodes of the tree: found by walking up from the leases, never down.

A walk stops where others have been, so it costs the nodes that are locked, not the tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.named import lease_holder

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvd.console.scene import Scene
    from kvd.core.cache.lease import Lease
    from kvd.core.cache.radix_node import RadixNode as TreeNode
    from kvd.wire.console import Holder

HOLDERS = 8
"""Named of each node, those that have been there for longest: a root is crossed by all leases."""


def locks_of(node: TreeNode) -> int:
    """Locks by leases: a root has one of its own."""
    return node.lock_ref - (node.parent is None)


class Crossings:
    """The holders of nodes as they were when this was made: one look at all leases."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._first = first_holders(scene.node.leases.leases.values())

    def of(self, node: TreeNode) -> tuple[Holder, ...]:
        """Some ``HOLDERS`` leases that lock this node."""
        if not locks_of(node):
            return ()
        return tuple([lease_holder(self._scene, one) for one in self._first.get(node, ())])


def first_holders(leases: Iterable[Lease]) -> dict[TreeNode, list[Lease]]:
    """By node, the first leases that cross it.

    Whoever crosses a node crosses those above it: from where one has enough, all have.
    """
    first: dict[TreeNode, list[Lease]] = {}
    for lease in leases:
        step = lease.anchor
        while step is not None:
            found = first.get(step)
            if found is None:
                first[step] = [lease]
            elif len(found) < HOLDERS:
                found.append(lease)
            else:
                break
            step = step.parent
    return first


def holder_counts(leases: Collection[Lease]) -> dict[TreeNode, int]:
    """By node, how many leases cross it; every node on the path of one is there."""
    counts: dict[TreeNode, int] = {}
    open_below: dict[TreeNode, int] = {}
    """Nodes on paths below a node whose own count is not added to it yet."""
    for lease in leases:
        step = lease.anchor
        while step is not None and step not in counts:
            counts[step] = 0
            step = step.parent
            if step is not None:
                open_below[step] = open_below.get(step, 0) + 1
        if lease.anchor is not None:
            counts[lease.anchor] += 1
    ready = [node for node in counts if node not in open_below]
    while ready:
        node = ready.pop()
        above = node.parent
        if above is not None:
            counts[above] += counts[node]
            open_below[above] -= 1
            if not open_below[above]:
                ready.append(above)
    return counts
