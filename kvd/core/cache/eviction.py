"""Which unlocked node of the tree goes first: lru, lfu, slru, fifo, priority.

An order holds the nodes of all namespaces, roots excepted. Where a locked node stands in it means
nothing: the node gets its place when its last lock goes. So locking costs the order nothing, being
unlocked counts as use (except for fifo), and a locked node that comes up is passed once, not every
time one more request asks for room.

Every order keeps one promise, from which the rest follows:

    an unlocked node comes before its parent, or its parent is locked.

Together with "a locked node's ancestors are all locked" it means that the first unlocked node of
an order never has children: an unlocked child would come earlier, a locked child would have locked
it. So the first n unlocked nodes are n victims as they are, children always before their parent.

LRU keeps the promise by moving a used path to the end deepest first, in one ordered dict.
The others have a key per node that grows towards the root, in one heap that lives as long as the
tree. Keys never shrink, so an entry that is out of date comes up too early, never too late: then it
is put back in its place, and nothing is ever searched or rebuilt for an eviction.

What must not live here: pages, tokens, locks, the shape of the tree.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from typing import TYPE_CHECKING, Protocol, assert_never

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.core.cache.radix_node import RadixNode

Key = tuple[int, ...]
"""Compares with the other keys of the same policy; the smallest is evicted first."""

HeapEntry = tuple[Key, int, "RadixNode"]
"""A node in a heap, before those of larger keys and, of the same key, of larger numbers."""

PROTECTED_HITS = 2
"""Leases from which on a node is protected by SLRU: one has written it, another one needed it."""

HEAP_SLACK = 64
"""Out-of-date heap entries allowed beside one per live node before the heap is made anew."""

PEEK_STALE = 2048
"""Out-of-date heap entries that a peek passes at most: some 2 us each, between two steps."""


class Policy(enum.Enum):
    """What is evicted first among the nodes nobody holds."""

    LRU = "lru"  # least recently used
    LFU = "lfu"  # fewest matches, then least recently used
    SLRU = "slru"  # used by one lease at most, then by several; of each, least recently used
    FIFO = "fifo"  # inserted longest ago, whatever was read since
    PRIORITY = "priority"  # lowest priority, then least recently used


class EvictionOrder(Protocol):
    """The nodes of a tree, the next victim first."""

    def add(self, node: RadixNode) -> None:
        """Takes in ``node``, which is new and unlocked; touch its parent next, if unlocked."""

    def release(self, node: RadixNode) -> None:
        """Gives ``node`` its place: its last lock is gone; of a path, the deepest node first."""

    def remove(self, node: RadixNode) -> None:
        """Lets go of ``node``, which leaves the tree."""

    def restore(self, node: RadixNode) -> None:
        """Takes in again what is missing of ``node`` and its path, as used now: a repair."""

    def touch(self, node: RadixNode) -> None:
        """``node`` and its path were used: matched, or continued by a new leaf."""

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """``upper`` is the new upper half of ``lower``, which is touched next."""

    def pin(self, node: RadixNode) -> None:
        """``node`` is locked and not used: it keeps its place although it is passed."""

    def unpin(self, node: RadixNode) -> None:
        """That is over; it is still locked."""

    def stay(self, node: RadixNode) -> None:
        """In the place of ``release``: the lock that is gone was no use of ``node``."""

    def take_victims(self, n_bytes: int) -> list[RadixNode]:
        """Takes out victims until their page ids make ``n_bytes``; that much must be unlocked."""

    def ahead(self) -> Iterator[RadixNode | None]:
        """All that ``take_victims`` would come upon, in its order; changes nothing.

        The unlocked ones are its next victims. A locked one, which it would pass, is named where
        it stands, unless it was passed before. None is a step that found nobody. The order must
        not change meanwhile.
        """

    def ranks(self) -> dict[RadixNode, EvictionRank]:
        """What another order of the same policy goes on from."""

    def __contains__(self, node: object) -> bool: ...

    def __iter__(self) -> Iterator[RadixNode]:
        """All nodes, in no order that means anything."""

    def __len__(self) -> int: ...


@mypyc_attr(allow_interpreted_subclasses=True)
class LruOrder:
    """Least recently used first: one ordered dict, a used path moves to its end deepest first."""

    __slots__ = ("_nodes", "_pinned", "add", "release")

    def __init__(self) -> None:
        self._nodes: OrderedDict[RadixNode, None] = OrderedDict()
        self._pinned: dict[RadixNode, None] = {}
        # The dict's own methods, because these two run for the nodes of every path.
        self.add: Callable[[RadixNode], None] = self._nodes.setdefault
        self.release: Callable[[RadixNode], None] = self._nodes.move_to_end

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def __iter__(self) -> Iterator[RadixNode]:
        return dict.__iter__(self._nodes)  # unordered, and so three times as fast

    def __len__(self) -> int:
        return len(self._nodes)

    def remove(self, node: RadixNode) -> None:
        """Takes ``node`` out, wherever it is."""
        del self._nodes[node]

    def restore(self, node: RadixNode) -> None:
        """Puts all of the path at the recent end, the deepest first."""
        for step in path_of(node):
            self._nodes.setdefault(step)
        # What was missing may stand behind what is above it now: the touch puts that last again.
        self.touch(node)

    def touch(self, node: RadixNode) -> None:
        """Moves the unlocked part of the path to the recent end; above it everything is locked."""
        to_end = self._nodes.move_to_end
        step: RadixNode | None = node
        while step is not None and not step.lock_ref:
            to_end(step)
            step = step.parent

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Puts ``upper`` at the recent end; the touch that follows puts ``lower`` before it."""
        del lower
        self._nodes[upper] = None

    def pin(self, node: RadixNode) -> None:
        """``take_victims`` puts it back where it came upon it."""
        self._pinned[node] = None

    def unpin(self, node: RadixNode) -> None:
        """From now on it goes to the recent end when it is passed, as all others."""
        del self._pinned[node]

    def stay(self, node: RadixNode) -> None:
        """Nothing: it stands where it stood."""

    def take_victims(self, n_bytes: int) -> list[RadixNode]:
        """Takes out the nodes used longest ago."""
        nodes = self._nodes
        out, kept = [], []
        while n_bytes > 0:
            node, _ = nodes.popitem(False)  # noqa: FBT003 - by keyword it takes twice as long
            # Passed once: it goes to the recent end, and gets its true place when its last lock
            # goes.
            if node.lock_ref:
                if node in self._pinned:
                    kept.append(node)
                else:
                    nodes[node] = None
            else:
                n_bytes -= len(node.pages)
                out.append(node)
        # The last one first: so each stands before those that it stood before.
        for node in reversed(kept):
            nodes[node] = None
            nodes.move_to_end(node, last=False)
        return out

    def ahead(self) -> Iterator[RadixNode | None]:
        """The nodes as they stand."""
        return iter(self._nodes)

    def ranks(self) -> dict[RadixNode, EvictionRank]:
        """What a ranked order by recency would remember of each node."""
        return {node: EvictionRank(used, 0) for used, node in enumerate(self._nodes)}


@mypyc_attr(allow_interpreted_subclasses=True)
class EvictionRank:
    """What a ranked order remembers of a node beside what the tree does."""

    __slots__ = ("grown", "used")

    def __init__(self, used: int, grown: int) -> None:
        self.used = used
        self.grown = grown


@mypyc_attr(allow_interpreted_subclasses=True)
class RankedOrder:
    """Lowest key first: one heap of lower bounds, corrected when they come up.

    ``key`` must never shrink for a node and must be larger for its parent.
    """

    __slots__ = ("_clock", "_heap", "_key", "_ranks")

    def __init__(self, key: Callable[[RadixNode, EvictionRank], Key]) -> None:
        self._key = key
        self._clock = 0
        self._ranks: dict[RadixNode, EvictionRank] = {}
        self._heap: list[HeapEntry] = []

    def __contains__(self, node: object) -> bool:
        return node in self._ranks

    def __iter__(self) -> Iterator[RadixNode]:
        return iter(self._ranks)

    def __len__(self) -> int:
        return len(self._ranks)

    def add(self, node: RadixNode) -> None:
        """Takes in ``node`` as used now, and makes its path as young as it is."""
        self._ranks[node] = EvictionRank(0, 0)
        # All of the path: by age a parent must come after its youngest child, or it would be
        # evicted first.
        for step in path_of(node):
            self._ranks[step].grown = self._clock + 1
        self.release(node)

    def release(self, node: RadixNode) -> None:
        """Ranks ``node`` as used now."""
        self._clock = self._ranks[node].used = self._clock + 1
        if len(self._heap) > 2 * len(self._ranks) + HEAP_SLACK:
            # Paid for by the entries pushed since the last time; dropped nodes must not pile up.
            # The node itself is among them: its last lock is gone by now.
            self._heap = [self._entry(one) for one in self._ranks if not one.lock_ref]
            heapify(self._heap)
        else:
            heappush(self._heap, self._entry(node))

    def pin(self, node: RadixNode) -> None:
        """Nothing: its rank is not changed by being passed."""

    def unpin(self, node: RadixNode) -> None:
        """Nothing."""

    def stay(self, node: RadixNode) -> None:
        """Enters ``node`` again with the rank that it has: its entry may have been passed."""
        heappush(self._heap, self._entry(node))

    def remove(self, node: RadixNode) -> None:
        """Forgets ``node``; its entry goes when it comes up."""
        del self._ranks[node]

    def restore(self, node: RadixNode) -> None:
        """Ranks what is missing as high as what is below it, and the path as used now."""
        # From below, because each takes after its children: it must not come before one of them.
        for step in path_of(node):
            if step not in self._ranks:
                below = [self._ranks[one] for one in step.children.values() if one in self._ranks]
                grown = max([one.grown for one in below], default=0)
                self._ranks[step] = EvictionRank(used=0, grown=grown)
                self.release(step)
        self.touch(node)

    def touch(self, node: RadixNode) -> None:
        """Stamps the path as used now."""
        self._clock += 1
        for step in path_of(node):
            self._ranks[step].used = self._clock

    def split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Ranks ``upper`` like ``lower``, after it because it ends earlier."""
        rank = self._ranks[lower]
        self._ranks[upper] = EvictionRank(rank.used, rank.grown)
        # A locked one is entered when its last lock goes.
        if not upper.lock_ref:
            self.release(upper)

    def take_victims(self, n_bytes: int) -> list[RadixNode]:
        """Takes out the nodes of the lowest keys."""
        heap = self._heap
        out: list[RadixNode] = []
        while n_bytes > 0:
            node = heap[0][2]
            # Out of date: locked since, or gone. Nothing was searched for it when that happened.
            if node.lock_ref or node not in self._ranks:
                heappop(heap)  # a release brings a locked one back
            # It was used since: its key has grown, so it is only put further back.
            elif (entry := self._entry(node)) != heap[0]:
                heapreplace(heap, entry)
            else:
                heappop(heap)
                del self._ranks[node]
                n_bytes -= len(node.pages)
                out.append(node)
        return out

    def ahead(self) -> Iterator[RadixNode | None]:
        """The nodes by their keys: a copy of what comes up goes the way of ``take_victims``."""
        for entry in entries_ahead(self._heap, self._ranks, self._entry):
            yield None if entry is None else entry[2]

    def ranks(self) -> dict[RadixNode, EvictionRank]:
        """What it remembers of each node."""
        return self._ranks

    def _entry(self, node: RadixNode) -> HeapEntry:
        return self._key(node, self._ranks[node]), node.id, node


def entries_ahead(
    heap: list[HeapEntry],
    ranks: dict[RadixNode, EvictionRank],
    entry_of: Callable[[RadixNode], HeapEntry],
) -> Iterator[HeapEntry | None]:
    """What comes up in a heap of lower bounds, corrected, without changing it; None: nobody did.

    Whatever of the heap may be next is in ``front``, with its place there; an entry that was out of
    date is there once more, corrected, without a place.
    """
    front = [(entry, 0) for entry in heap[:1]]
    passed: set[RadixNode] = set()
    while front:
        entry, place = heappop(front)
        # A corrected entry stands nowhere in the heap: what is below its old place is in
        # ``front`` already.
        if place >= 0:
            for below in range(2 * place + 1, min(2 * place + 3, len(heap))):
                heappush(front, (heap[below], below))
        node = entry[2]
        # An entry of one that was named already, or has left the tree: nobody searched for it
        # then.
        if node in passed or node not in ranks:
            yield None
        elif not node.lock_ref and (corrected := entry_of(node)) != entry:
            heappush(front, (corrected, -1))
            yield None
        else:
            passed.add(node)
            yield entry


def path_of(node: RadixNode) -> Iterator[RadixNode]:
    """``node`` and what is above it, without the root, which is never evicted."""
    while node.parent is not None:
        yield node
        node = node.parent


def _by_recency(node: RadixNode, rank: EvictionRank) -> Key:
    return rank.used, -node.end_tokens


def _by_hits(node: RadixNode, rank: EvictionRank) -> Key:
    return node.hits, rank.used, -node.end_tokens


def _by_segment(node: RadixNode, rank: EvictionRank) -> Key:
    return int(node.hits >= PROTECTED_HITS), rank.used, -node.end_tokens


def _by_age(node: RadixNode, rank: EvictionRank) -> Key:
    return rank.grown, -node.end_tokens


def _by_priority(node: RadixNode, rank: EvictionRank) -> Key:
    return node.priority, rank.used, -node.end_tokens


def peek(order: EvictionOrder, limit: int) -> list[RadixNode]:
    """The first ``limit`` nodes of ``order.ahead()``: fewer where they are not found soon."""
    found = (node for node in islice(order.ahead(), limit + PEEK_STALE) if node is not None)
    return list(islice(found, limit))


def victims(order: EvictionOrder, n_bytes: int) -> list[RadixNode]:
    """What ``order.take_victims(n_bytes)`` would take now; that much must be unlocked."""
    out: list[RadixNode] = []
    ahead = order.ahead()
    while n_bytes > 0:
        node = next(ahead)
        if node is not None and not node.lock_ref:
            n_bytes -= len(node.pages)
            out.append(node)
    return out


def eviction_order(policy: Policy) -> EvictionOrder:
    """An empty order for ``policy``."""
    return LruOrder() if policy is Policy.LRU else RankedOrder(key_of_policy(policy))


def key_of_policy(policy: Policy) -> Callable[[RadixNode, EvictionRank], Key]:
    """What a ranked order for ``policy`` goes by; of LRU, ``LruOrder`` is the faster way."""
    match policy:
        case Policy.LRU:
            return _by_recency
        case Policy.LFU:
            return _by_hits
        case Policy.SLRU:
            return _by_segment
        case Policy.FIFO:
            return _by_age
        case Policy.PRIORITY:
            return _by_priority
        case _:
            assert_never(policy)
