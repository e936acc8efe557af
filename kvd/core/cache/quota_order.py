"""Which unlocked node goes first where namespaces have quotas.

A ranked order with a heap for each share, under one clock. A node is of the share of its root; so
a tree's promise, a child before its parent, holds in each heap. What goes next is the first of some
heap: that of the lowest turn (``quotas``), and among equals that of the lowest key, as if there was
one heap. The turn of a share changes only with what comes and goes of it, so an eviction looks at
each share once, and then at one for each node: O(log n) a victim.

It counts the pages of the shares as nodes are added and taken out; locks change no count.

What must not live here: what a turn is (``quotas``), and that anybody is told (``leases.evictor``).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core.cache.eviction import (
    HEAP_SLACK,
    HeapEntry,
    RankedOrder,
    entries_ahead,
    key_of_policy,
    path_of,
)
from kvd.core.cache.quotas import QuotaShare, share_of
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvd.core.cache.eviction import EvictionOrder, Policy
    from kvd.core.cache.left_prefix import QuotaReason
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.layout.quota import Quota


@mypyc_attr(allow_interpreted_subclasses=True)
class TreeShare(QuotaShare):
    """A share of the tree, with its nodes: ``heap`` as in ``RankedOrder``."""

    __slots__ = ("heap", "n_nodes")

    def __init__(self, quota: Quota | None) -> None:
        super().__init__(quota)
        self.heap: list[HeapEntry] = []
        self.n_nodes = 0


@mypyc_attr(allow_interpreted_subclasses=True)
class QuotaOrder(RankedOrder):
    """A policy's order, but for the turns of quotas.

    ``went`` has, by node id, why victims went out of their turn, until somebody clears it.
    """

    __slots__ = ("_by_namespace", "_share", "rest", "went")

    def __init__(self, policy: Policy, quotas: Iterable[Quota]) -> None:
        super().__init__(key_of_policy(policy))
        self.rest = TreeShare(None)
        self._by_namespace: dict[str, TreeShare] = {}
        self._share: dict[RadixNode, TreeShare] = {}
        self.went: dict[int, QuotaReason] = {}
        self.share_out(quotas)

    @property
    def shares(self) -> list[TreeShare]:
        """Those of quotas, as they were configured, and the rest."""
        return [*self._by_namespace.values(), self.rest]

    def share_named(self, namespace: str) -> TreeShare:
        """That of a quota."""
        return self._by_namespace[namespace]

    def take_over(self, order: EvictionOrder) -> None:
        """All that another order of the same tree has, ranked as there."""
        self._ranks = order.ranks()
        self._clock = max([rank.used for rank in self._ranks.values()], default=0)
        self.share_out([share.quota for share in self.shares if share.quota is not None])

    def share_out(self, quotas: Iterable[Quota]) -> None:
        """These are the quotas from now on; what came of those before is still known."""
        known = self._by_namespace
        self._by_namespace = {quota.namespace: TreeShare(quota) for quota in quotas}
        for namespace, share in self._by_namespace.items():
            share.come_after(known.get(namespace))
        self.rest, self._share = TreeShare(None), {}
        by_root: dict[RadixNode, TreeShare] = {}
        for node in self._ranks:
            root = _root_of(node)
            found = by_root.get(root)
            if found is None:
                found = by_root[root] = self._share_of_root(root)
            self._count(node, found)
            if not node.lock_ref:
                found.heap.append(self._entry(node))
        for share in self.shares:
            heapify(share.heap)

    def count_again(self) -> None:
        """Of each share what is there, as it should be: a repair."""
        self.share_out([share.quota for share in self.shares if share.quota is not None])

    def counted(self) -> dict[str | None, tuple[int, int]]:
        """By namespace of a quota, None for the rest: pages as counted, and as they are."""
        found = dict.fromkeys(self.shares, 0)
        for node in self._ranks:
            above = node.parent
            # Of its parent's share, so that each takes one look, however deep the tree is.
            share = self._share.get(above) if above is not None else None
            if share is None:
                share = self._share_of_root(_root_of(node))
            found[share] += len(node.pages)
        return {
            share.quota.namespace if share.quota is not None else None: (
                share.n_pages,
                n_bytes // ID_BYTES,
            )
            for share, n_bytes in found.items()
        }

    # ---- as every order ----------------------------------------------------------------------

    @override
    def add(self, node: RadixNode) -> None:
        """As in ``RankedOrder``; its pages count from now on."""
        assert node.parent is not None
        share = self._share.get(node.parent)
        self._count(node, share if share is not None else self._share_of_root(_root_of(node)))
        super().add(node)

    @override
    def release(self, node: RadixNode) -> None:
        """Ranks ``node`` as used now."""
        self._clock = self._ranks[node].used = self._clock + 1
        self.stay(node)

    @override
    def stay(self, node: RadixNode) -> None:
        """Enters ``node`` with the rank that it has."""
        share = self._share[node]
        if len(share.heap) > 2 * share.n_nodes + HEAP_SLACK:
            # Made of the entries themselves: every unlocked node of the share is among them.
            live = {entry[2]: None for entry in share.heap if not entry[2].lock_ref}
            live[node] = None
            share.heap = [
                self._entry(one) for one in live if one in self._ranks and self._share[one] is share
            ]
            heapify(share.heap)
        else:
            heappush(share.heap, self._entry(node))

    @override
    def remove(self, node: RadixNode) -> None:
        """Forgets ``node``; its pages count no more."""
        super().remove(node)
        share = self._share.pop(node)
        share.n_pages -= len(node.pages) // ID_BYTES
        share.n_nodes -= 1

    @override
    def restore(self, node: RadixNode) -> None:
        """As in ``RankedOrder``."""
        share = self._share_of_root(_root_of(node))
        for step in path_of(node):
            if step not in self._ranks:
                self._count(step, share)
        super().restore(node)

    @override
    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """As in ``RankedOrder``; the halves have the pages that the whole had."""
        share = self._share[upper] = self._share[lower]
        share.n_nodes += 1
        super().split(upper, lower)

    @override
    def take_victims(self, n_bytes: int) -> list[RadixNode]:
        """Takes out the first nodes of the lowest turn, of all shares."""
        out: list[RadixNode] = []
        shares = self.shares
        fronts: list[tuple[int, HeapEntry, int]] = []
        for number in range(len(shares)):
            self._put_front(fronts, shares, number)
        while n_bytes > 0:
            turn, entry, number = heappop(fronts)
            node, share = entry[2], shares[number]
            heappop(share.heap)
            del self._ranks[node], self._share[node]
            n_pages = len(node.pages) // ID_BYTES
            reason = share.going(turn, n_pages)
            if reason is not None:
                self.went[node.id] = reason
            share.n_pages -= n_pages
            share.n_nodes -= 1
            n_bytes -= len(node.pages)
            out.append(node)
            self._put_front(fronts, shares, number)
        return out

    def _put_front(
        self, fronts: list[tuple[int, HeapEntry, int]], shares: list[TreeShare], number: int
    ) -> None:
        """The next victim of that share, if it has one, among those of the others."""
        share = shares[number]
        heap = share.heap
        while heap:
            first = heap[0]
            node = first[2]
            # As in ``RankedOrder.take_victims``; of another share since quotas have changed never:
            # the heaps were made anew then.
            if node.lock_ref or node not in self._ranks:
                heappop(heap)
            elif (entry := self._entry(node)) != first:
                heapreplace(heap, entry)
            else:
                turn = share.turn(len(node.pages) // ID_BYTES)
                heappush(fronts, (turn, entry, number))
                return

    @override
    def ahead(self) -> Iterator[RadixNode | None]:
        """As ``take_victims`` goes; a locked node is named before the next victim of its share."""
        shares = self.shares
        left = [share.n_pages for share in shares]
        walks = [entries_ahead(share.heap, self._ranks, self._entry) for share in shares]
        fronts: list[tuple[int, HeapEntry, int]] = []
        passed: list[list[RadixNode]] = [[] for _ in shares]
        waiting = list(range(len(shares)))
        while waiting or fronts:
            for number in waiting:
                for entry in walks[number]:
                    if entry is None:
                        yield None
                    elif entry[2].lock_ref:
                        passed[number].append(entry[2])
                    else:
                        n_pages = len(entry[2].pages) // ID_BYTES
                        turn = shares[number].turn_at(left[number], n_pages)
                        heappush(fronts, (turn, entry, number))
                        break
                else:
                    yield from passed[number]
            waiting = []
            if fronts:
                _, entry, number = heappop(fronts)
                yield from passed[number]
                passed[number] = []
                left[number] -= len(entry[2].pages) // ID_BYTES
                yield entry[2]
                waiting = [number]

    # ---- shares ------------------------------------------------------------------------------

    def _count(self, node: RadixNode, share: TreeShare) -> None:
        self._share[node] = share
        share.n_pages += len(node.pages) // ID_BYTES
        share.n_nodes += 1

    def _share_of_root(self, root: RadixNode) -> TreeShare:
        return share_of(root.key.decode(), self._by_namespace, self.rest)


def _root_of(node: RadixNode) -> RadixNode:
    while node.parent is not None:
        node = node.parent
    return node
