"""Locks that are no use of what they lock: the order of eviction stays as it was without them.

Pages are read out of the pool because they will be evicted soon. If the lock that keeps them
meanwhile counted as a use, they would be the last to be evicted after it. So here a node that
nobody else has used under the lock gets back the place that it had; it counts no hit either.

Theory of operation. A node may keep its place while its children keep theirs: an order has each
child before its parent. Under a lock of others nodes below move, and where the last of several
locks goes nobody tells the order. So a node keeps its place only if this lock was its first, nobody
has locked it since, and the same is true of all below it on the locked path.

It writes nodes, which otherwise only the tree does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from kvd.core.cache.radix import RadixTree
    from kvd.core.cache.radix_node import RadixNode

USED = -1
"""In the place of hits: others had it locked already."""


@mypyc_attr(allow_interpreted_subclasses=True)
class QuietLock:
    """The quiet locks of one node: how many, and its hits when the first of them came."""

    __slots__ = ("hits", "n_locks")

    def __init__(self, hits: int) -> None:
        self.hits = hits
        self.n_locks = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class QuietLocks:
    """Those of one tree. A node has its locks in ``lock_ref`` as all others."""

    __slots__ = ("_tree", "by_node")

    def __init__(self, tree: RadixTree) -> None:
        self.by_node: dict[RadixNode, QuietLock] = {}
        self._tree = tree

    def is_alone_at(self, node: RadixNode) -> bool:
        """Whether a node is locked by these, and by nobody else."""
        known = self.by_node.get(node)
        return known is not None and known.n_locks == node.lock_ref

    def lock(self, node: RadixNode) -> None:
        """As ``RadixTree.lock``."""
        kept, order = 0, self._tree.order
        step = node
        while step.parent is not None:
            locks = step.lock_ref
            known = self.by_node.get(step)
            if known is None:
                known = self.by_node[step] = QuietLock(USED if locks else step.hits)
                order.pin(step)
            known.n_locks += 1
            if not locks:
                kept += len(step.pages)
            step.lock_ref = locks + 1
            step = step.parent
        step.lock_ref += 1  # a root is in no order
        self._tree.evictable_bytes -= kept
        self._tree.protected_bytes += kept

    def unlock(self, node: RadixNode) -> None:
        """Takes such a lock off; whoever calls this has made it."""
        freed, order = 0, self._tree.order
        is_used = False
        step = node
        while step.parent is not None:
            # The upper half of a node that was split since is not known here.
            known = self.by_node.get(step)
            is_used = is_used or known is None or known.hits != step.hits
            if known is not None:
                known.n_locks -= 1
                if not known.n_locks:
                    del self.by_node[step]
                    order.unpin(step)
            step.lock_ref = locks = step.lock_ref - 1
            if not locks:
                freed += len(step.pages)
                # From below, as the tree does it.
                if is_used:
                    order.release(step)
                else:
                    order.stay(step)
            step = step.parent
        step.lock_ref -= 1
        self._tree.evictable_bytes += freed
        self._tree.protected_bytes -= freed
