"""A look at all pages in slices, while somebody looks at a map of them or at the tree.

Theory of operation. A survey walks free lists, tree and leases as the audit's sweep does, a slice
at a time, and the node lives on in between: so it is a picture of no moment, but each page is shown
where it was at some moment of it. Surveys earn ``share`` of the time that passes, and go on while
they have earned it and somebody asks: that is half of what the server has, so that a large pool
leaves something to the tables. All consoles share one survey, whatever part of it they look at.
When nobody has asked for a while, it is dropped.

Costs (one core of a server): some 1.2 us a node, 10 ns a page.

What must not live here: what is made of it (``page_map``, ``tree``).
"""

from __future__ import annotations

import time
from array import array
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from kvd.console.page_owners import FIRST_NODE, FREE, Is, PageOwners, Things, page_owners_of
from kvd.core.audit.rules import PAGE_LOST
from kvd.core.cache.lease import ARRIVAL, ENGINE
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.cache.radix_node import RadixNode
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import numpy.typing as npt

    from kvd.console.console_view import ConsoleView
    from kvd.core.cache.lease_record import LeaseRecord

SLICE_S = 0.001
"""A slice ends with the step that takes it over this; no step takes over a millisecond."""
MAX_CREDIT_S = 0.02
REST_S = 0.2
"""Between the end of a survey and the next: a small pool is not looked at over and over."""
ASKED_S = 1.0
"""So long after the last question, slices go on between looks."""
FORGET_S = 10.0

FREE_PAGES = 65_536
NODES = 256
LEASES = 64
SUMMED_NODES = 4096

GONE = RadixNode(node_id=0, parent=None, key=b"", edge=b"", pages=b"")
"""In place of a node that left the tree before it was looked at."""


class Survey:
    """One survey, under way or over. ``steps`` is its work: each ``next`` some 0.3 ms of it."""

    def __init__(self, node: ConsoleView, before: Survey | None, at_s: float) -> None:
        self.began_s = self.at_s = at_s
        """``at_s`` is its end."""
        self.planes = page_owners_of(node)
        self.steps = self._look(node, before)
        # By node in the order of the walk, parents first; a node is the thing FIRST_NODE + index.
        self.index: dict[int, int] = {}
        """By node id."""
        self.below_pages = array("q")
        """Of a node and its subtree."""
        self.used_s = array("d")
        """When anything in its subtree was last used."""
        self.locked: list[RadixNode] = []
        """Nodes under a lock, roots not among them."""
        self.leases: dict[int, int] = {}
        """Things, by lease id."""
        self._nodes: list[RadixNode] = []
        self._parents: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        self._hits = array("q")
        self._own_pages = array("q")

    def plane(self, component: str) -> PageOwners | None:
        """Of that component; empty: the first one's."""
        if not component:
            return self.planes[0]
        return next((plane for plane in self.planes if plane.name == component), None)

    def below(self, node: RadixNode) -> int | None:
        """Pages of its subtree, its own included; None for a node that it has not seen."""
        index = self.index.get(node.id)
        return None if index is None else self.below_pages[index]

    def last_use(self, node: RadixNode) -> float:
        """When its subtree was last used, as far as is known."""
        index = self.index.get(node.id)
        return node.touched_at if index is None else max(node.touched_at, self.used_s[index])

    # ---- the walk ----------------------------------------------------------------------------

    def _look(self, node: ConsoleView, before: Survey | None) -> Generator[None]:
        for plane in self.planes:
            for first in range(0, plane.total_pages, FREE_PAGES):
                free = np.frombuffer(plane.where.pool.free_slice(first, FREE_PAGES), dtype="<i4")
                if free.size:
                    plane.put(free, FREE)
                    yield
        locks = {plane.name: array("q") for plane in self.planes if plane.has_nodes}
        yield from self._look_at_tree(node, locks)
        yield from self._sum_up()
        of_leases: dict[str, list[Things]] = {plane.name: [] for plane in self.planes}
        yield from self._look_at_leases(node, of_leases)
        for plane in self.planes:
            nodes = self._things_of_nodes(plane, locks.get(plane.name))
            plane.things = plane.things.and_also(nodes, *of_leases[plane.name])
            yield
            last = before.plane(plane.name) if before is not None else None
            plane.keep(last, _nobodys(node, plane))
            yield
            yield from plane.count()
            plane.find_runs()
            yield
        self._nodes = []

    def _look_at_tree(self, node: ConsoleView, locks: dict[str, array[int]]) -> Iterator[None]:
        """Level by level, so that the children of a node stand side by side."""
        nodes = self._nodes = list(node.leases.tree.roots.values())
        planes = [plane for plane in self.planes if plane.has_nodes]
        first = 0
        while first < len(nodes):
            seen, n_children = _next_nodes(nodes, first)
            ids = [tree_node.id for tree_node in seen]
            self.index.update(zip(ids, range(first, first + len(ids)), strict=True))
            self._parents.append(np.repeat(np.arange(first, first + len(ids)), n_children))
            self._own_pages.extend([len(tree_node.pages) // ID_BYTES for tree_node in seen])
            self.used_s.extend([tree_node.touched_at for tree_node in seen])
            self._hits.extend([tree_node.hits for tree_node in seen])
            self.locked += [
                tree_node
                for tree_node in seen
                if tree_node.lock_ref and tree_node.parent is not None
            ]
            for plane in planes:
                locks[plane.name].extend(plane.where.locks_at(seen))
                yield from plane.see(plane.where.at(seen), FIRST_NODE + first)
            first += len(seen)
            yield

    def _sum_up(self) -> Iterator[None]:
        """From the last node to the first: children come before their parent."""
        below, used = self._own_pages[:], self.used_s
        n_nodes = len(below)
        parents = np.concatenate(self._parents) if self._parents else np.zeros(0, np.int64)
        n_roots = n_nodes - parents.size
        self._parents = []
        for end in range(n_nodes, n_roots, -SUMMED_NODES):
            start = max(n_roots, end - SUMMED_NODES)
            above = parents[start - n_roots : end - n_roots].tolist()
            for index, parent in zip(range(end - 1, start - 1, -1), reversed(above), strict=True):
                below[parent] += below[index]
                if used[index] > used[parent]:  # noqa: PLR1730 - calling max() costs more
                    used[parent] = used[index]
            yield
        self.below_pages = below

    def _look_at_leases(
        self, node: ConsoleView, of_leases: dict[str, list[Things]]
    ) -> Iterator[None]:
        first_lease = FIRST_NODE + len(self._nodes)
        numbers = list(node.leases.leases)
        for first in range(0, len(numbers), LEASES):
            by_id = node.leases.leases
            there = [
                by_id[lease_id] for lease_id in numbers[first : first + LEASES] if lease_id in by_id
            ]
            thing = first_lease + len(self.leases)
            self.leases.update((lease.id, thing + k) for k, lease in enumerate(there))
            for plane in self.planes:
                of_leases[plane.name].append(_things_of_leases(there, plane))
                yield from plane.see([plane.where.of(lease) for lease in there], thing)
            yield

    def _things_of_nodes(self, plane: PageOwners, locks: array[int] | None) -> Things:
        n_nodes = len(self._hits)
        lock_counts = np.array(locks, np.int64) if locks else np.zeros(n_nodes, np.int64)
        return Things(
            what=np.where(lock_counts > 0, Is.LOCKED, Is.CACHED).astype(np.uint8),
            session=np.zeros(n_nodes, np.int64),
            since_s=np.array(self.used_s, np.float64),
            hits=np.array(self._hits, np.int64),
            locks=lock_counts,
            is_saved=np.zeros(n_nodes, np.bool_),
        )


def _nobodys(node: ConsoleView, plane: PageOwners) -> npt.NDArray[np.int32]:
    """Pages that the audit has found nowhere, or has condemned."""
    broken = [finding.fault for finding in node.audit.findings.by_key.values() if finding.is_broken]
    pages = [
        fault.pages
        for fault in broken
        if fault.check == PAGE_LOST and fault.component == plane.where.component
    ]
    return np.frombuffer(b"".join([plane.where.pool.condemned_ids(), *pages]), "<i4")


def _next_nodes(nodes: list[RadixNode], first: int) -> tuple[list[RadixNode], list[int]]:
    """Some nodes from that place on, and how many children each has, which join ``nodes``.

    As many levels as it takes: a long chain has one node a level.
    """
    seen: list[RadixNode] = []
    n_children: list[int] = []
    while len(seen) < NODES and first + len(seen) < len(nodes):
        level = [
            node if (above := node.parent) is None or above.children.get(node.key) is node else GONE
            for node in nodes[first + len(seen) : first + NODES]
        ]
        children = [node.children for node in level]
        n_children += map(len, children)
        nodes.extend(chain.from_iterable([some.values() for some in children if some]))
        seen += level
    return seen, n_children


def _things_of_leases(leases: Sequence[LeaseRecord], plane: PageOwners) -> Things:
    what = [_in_area(lease) if plane.where.saves else _in_pool(lease) for lease in leases]
    since_s = [
        lease.since_s if lease.quarantine is None else lease.quarantine.since_s for lease in leases
    ]
    is_saved = [bool(plane.where.saves) or lease.saved is not None for lease in leases]
    return Things.of(what, [lease.session for lease in leases], since_s, is_saved=is_saved)


def _in_pool(lease: LeaseRecord) -> Is:
    if lease.quarantine is not None:
        return Is.QUARANTINED
    if ARRIVAL in lease.holders or lease.state is LeaseStage.RESTORING:
        return Is.ARRIVING
    if lease.state is LeaseStage.RUNNING and ENGINE not in lease.holders:
        return Is.LINGERING
    if lease.reads or lease.state is LeaseStage.SAVING:
        return Is.SENDING
    return Is.HELD


def _in_area(lease: LeaseRecord) -> Is:
    if lease.state is LeaseStage.SAVING:
        return Is.ARRIVING
    return Is.SENDING if lease.state is LeaseStage.RESTORING else Is.SAVED


class Surveyor:
    """Makes surveys while they are asked for. ``share``: of one core, at most."""

    def __init__(
        self,
        node: ConsoleView,
        share: float = 1.0,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        self.spent_s = 0.0
        """By all surveys."""
        self._node = node
        self.share = share
        self._timer = timer
        self._last: Survey | None = None
        self._running: Survey | None = None
        self._credit_s = MAX_CREDIT_S
        self._now_s = self._asked_s = float("-inf")

    def ask(self, now_s: float) -> Survey | None:
        """The last survey, and a slice of the next one; None where there is none yet."""
        self._asked_s = now_s
        self._go_on(now_s)
        return self._last

    def turn(self, now_s: float) -> None:
        """A slice between two looks, if somebody looks; else nothing."""
        if now_s - self._asked_s <= ASKED_S:
            self._go_on(now_s)
        elif now_s - self._asked_s > FORGET_S:
            if self._running is not None:
                self._running.steps.close()  # the walk and its survey know each other
            self._last = self._running = None

    def _go_on(self, now_s: float) -> None:
        """At most one slice, whoever asks at that moment."""
        if now_s <= self._now_s:
            return
        if self._now_s > float("-inf"):
            earned_s = (now_s - self._now_s) * self.share
            self._credit_s = min(self._credit_s + earned_s, MAX_CREDIT_S)
        self._now_s = now_s
        if self._credit_s <= 0.0:
            return
        if self._running is None:
            if self._last is not None and now_s - self._last.at_s < REST_S:
                return
            self._running = Survey(self._node, self._last, now_s)
        begun_s = self._timer()
        spent_s = 0.0
        is_over = False
        while spent_s < SLICE_S and not is_over:
            is_over = next(self._running.steps, self) is self
            spent_s = self._timer() - begun_s
        self._credit_s -= spent_s
        self.spent_s += spent_s
        if is_over:
            self._running.at_s = now_s
            self._last, self._running = self._running, None
