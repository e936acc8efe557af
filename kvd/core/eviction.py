"""Which unlocked node of the tree goes first: lru, lfu, fifo, priority.

An order holds exactly the unlocked nodes of all namespaces; a node leaves it when it is locked
and joins it again when its last lock goes. So what is popped needs no test, and the locked nodes
of a thousand running requests cost nothing when one more asks for room.

Every order keeps one promise, from which the rest follows:

    an unlocked node comes before its parent, or its parent is locked.

Together with "a locked node's ancestors are all locked" it means that the first node of an order
never has children: an unlocked child would come earlier, a locked child would have locked it.
So popping n times evicts n nodes, children always before their parent.

LRU keeps the promise by moving a used path to the end deepest first, in one ordered dict.
The others rank a node by a tuple that grows towards the root, in one heap that lives as long as
the tree. Ranks never shrink, so an entry that is out of date ranks too early, never too late: it
is put back in its place when it comes up, and nothing is ever searched or rebuilt for an eviction.

Being unlocked counts as use (except for fifo): a path is as recent as its last release.

What must not live here: pages, tokens, locks, the shape of the tree.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from typing import TYPE_CHECKING, Protocol, assert_never

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.radix_node import Node

Rank = tuple[int, ...]
"""Compares with the other ranks of the same policy; the smallest is evicted first."""

HEAP_SLACK = 64
"""Out-of-date heap entries allowed beside one per live node before the heap is made anew."""


class Policy(enum.Enum):
    """What is evicted first among the nodes nobody holds."""

    LRU = "lru"  # least recently used
    LFU = "lfu"  # fewest matches, then least recently used
    FIFO = "fifo"  # inserted longest ago, whatever was read since
    PRIORITY = "priority"  # lowest priority, then least recently used


class EvictionOrder(Protocol):
    """The unlocked nodes of a tree, the next victim first."""

    def add(self, node: Node) -> None:
        """Takes in ``node``, which is unlocked now; of a path, the deepest node first."""

    def remove(self, node: Node) -> None:
        """Lets go of ``node``, which is locked or leaves the tree."""

    def touch(self, node: Node) -> None:
        """``node`` and its path were matched."""

    def insert(self, leaf: Node) -> None:
        """Takes in ``leaf``, which is new; its path was used."""

    def pop(self) -> Node | None:
        """Takes out the next victim, which never has children; None when all nodes are locked."""

    def __contains__(self, node: object) -> bool: ...

    def __len__(self) -> int: ...


class LruOrder:
    """Least recently used first: one ordered dict, a used path moves to its end deepest first."""

    __slots__ = ("_nodes", "add", "remove")

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()
        # The dict's own methods, because these two run once per node of every path.
        self.add: Callable[[Node], None] = self._nodes.setdefault
        self.remove: Callable[[Node], None] = self._nodes.__delitem__

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def touch(self, node: Node) -> None:
        """Moves the unlocked part of the path to the recent end; above it everything is locked."""
        to_end = self._nodes.move_to_end
        step: Node | None = node
        while step is not None and not step.lock_ref:
            to_end(step)
            step = step.parent

    def insert(self, leaf: Node) -> None:
        """Puts ``leaf`` and then its path at the recent end."""
        self._nodes[leaf] = None
        step = leaf.parent
        while step is not None and not step.lock_ref:
            self._nodes.move_to_end(step)
            step = step.parent

    def pop(self) -> Node | None:
        """The node used longest ago."""
        return self._nodes.popitem(last=False)[0] if self._nodes else None


class RankedOrder:
    """Lowest rank first: one heap of lower bounds, corrected when they come up.

    ``rank`` must never shrink for a node and must be larger for its parent.
    """

    __slots__ = ("_clock", "_heap", "_nodes", "_rank")

    def __init__(self, rank: Callable[[Node], Rank]) -> None:
        self._rank = rank
        self._clock = 0
        self._nodes: set[Node] = set()
        self._heap: list[tuple[Rank, int, Node]] = []

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __len__(self) -> int:
        return len(self._nodes)

    def add(self, node: Node) -> None:
        """Ranks ``node`` as used now."""
        self._clock = node.used = self._clock + 1
        self._enter(node)

    def remove(self, node: Node) -> None:
        """Forgets ``node``; its entry goes when it comes up."""
        self._nodes.remove(node)

    def touch(self, node: Node) -> None:
        """Stamps the path as used now."""
        self._clock += 1
        step: Node | None = node
        while step is not None:
            step.used = self._clock
            step = step.parent

    def insert(self, leaf: Node) -> None:
        """Stamps the path as used and as grown now: a parent cannot go before its new child."""
        self._clock += 1
        step: Node | None = leaf
        while step is not None:
            step.used = step.grown = self._clock
            step = step.parent
        self._enter(leaf)

    def pop(self) -> Node | None:
        """The node of the lowest rank."""
        heap = self._heap
        while heap:
            listed, node_id, node = heap[0]
            if node not in self._nodes:
                heappop(heap)
            elif (rank := self._rank(node)) != listed:
                heapreplace(heap, (rank, node_id, node))
            else:
                heappop(heap)
                self._nodes.remove(node)
                return node
        return None

    def _enter(self, node: Node) -> None:
        self._nodes.add(node)
        if len(self._heap) > 2 * len(self._nodes) + HEAP_SLACK:
            # Paid for by the entries pushed since the last time; dropped nodes must not pile up.
            self._heap = [(self._rank(member), member.id, member) for member in self._nodes]
            heapify(self._heap)
        else:
            heappush(self._heap, (self._rank(node), node.id, node))


def _by_hits(node: Node) -> Rank:
    return node.hits, node.used, -node.end_tokens


def _by_age(node: Node) -> Rank:
    return node.grown, -node.end_tokens


def _by_priority(node: Node) -> Rank:
    return node.priority, node.used, -node.end_tokens


def eviction_order(policy: Policy) -> EvictionOrder:
    """An empty order for ``policy``."""
    match policy:
        case Policy.LRU:
            return LruOrder()
        case Policy.LFU:
            return RankedOrder(_by_hits)
        case Policy.FIFO:
            return RankedOrder(_by_age)
        case Policy.PRIORITY:
            return RankedOrder(_by_priority)
        case _:
            assert_never(policy)
