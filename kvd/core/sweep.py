"""One look at everything a node has, in slices, while the node goes on living between them.

Rules about one thing (``rules``, ``radix_audit``) are exact whenever they are asked. What is true
only of everything together, that each page is in exactly one place, is made exact by ``moves``: a
sweep counts how often it sees each page, learns at each turn which pages have moved meanwhile, and
at the end judges those that have not. They were where they are all the time, so they must have been
seen exactly once. What has moved is judged by the next sweep; a lost page never moves again.

    FREE    the free list, from the bottom of the stack: what lies still keeps its index
    TREE    from the roots down; what is split meanwhile keeps its lower half on our stack
    LEASES  those that were there when the phase began: a later one has only pages that moved
    PARTS   receives, sends, posts
    TOTALS  the counters, the queue, the registers: sums, in one piece
    PAGES   the judgement; only a suspicion costs a look at all places at once, which names them

Plain data between two turns: no iterator, nothing that a copy of the node could not carry.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from kvd.core.places import count_faults, page_faults
from kvd.core.radix_audit import is_linked, is_sound, node_faults, total_faults
from kvd.core.rules import (
    lease_faults,
    lock_faults,
    missing_locks,
    post_faults,
    queue_faults,
    ready_faults,
    receive_faults,
    register_faults,
    send_faults,
)
from kvd.core.saved_rules import saved_faults
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.core.cross import Cross
    from kvd.core.fault import Fault
    from kvd.core.node import Node
    from kvd.core.radix_node import Node as TreeNode

FREE_SLICE_PAGES = 65_536
JUDGED_SLICE_PAGES = 262_144
SAVED_AT_ONCE_PAGES = 16_384
"""A saved area of so many pages is checked whole, in 0.2 ms; of a larger one the numbers are."""

# What things cost in units of work, about a microsecond each; the shell learns how much really.
PAGES_SEEN_PER_UNIT = 128
PAGES_JUDGED_PER_UNIT = 1024
NODE_UNITS = 2
LEASE_UNITS = 8
PART_UNITS = 8


class Phase(enum.Enum):
    """What a sweep looks at now."""

    FREE = "free"
    TREE = "tree"
    LEASES = "leases"
    PARTS = "parts"
    TOTALS = "totals"
    PAGES = "pages"
    OVER = "over"


class Sweep:
    """One sweep. ``learn`` what moved, then ``look`` until it is OVER; take ``faults`` any time."""

    __slots__ = (
        "_anchored",
        "_is_blind",
        "_is_suspicious",
        "_next",
        "_parts",
        "_seen",
        "_stack",
        "_touched",
        "_uncounted",
        "began_s",
        "faults",
        "objects",
        "phase",
        "was_refuted",
    )

    def __init__(self, node: Node, at_s: float) -> None:
        total = node.leases.pool.total_pages
        self.began_s = at_s
        self.phase = Phase.FREE
        self.objects = 0
        """Nodes, leases and parts looked at."""
        self.faults: list[Fault] = []
        self.was_refuted = False
        """A suspicion about pages came to nothing: somebody moves pages without saying so."""
        self._seen = bytearray(total)
        self._seen[0] = 1  # the null page is nowhere
        self._uncounted = 1
        """Pages looked at, less those that ``_seen`` tells of; 0 at the end."""
        self._touched = bytearray(total)
        self._anchored: Counter[TreeNode | None] = Counter()
        self._is_blind = False
        self._is_suspicious = False
        self._next = 0
        """Index of the next page of the phase, or of the next lease or part."""
        self._stack: list[TreeNode] = []
        self._parts: list[tuple[str, int]] = []

    def learn(self, moved: bytes | None) -> None:
        """These pages have changed their place since the last turn; None: too many to tell."""
        if moved is None:
            self._is_blind = True
        elif moved:
            ids = np.frombuffer(moved, dtype="<i4")
            touched = np.frombuffer(self._touched, dtype=np.uint8)
            touched[ids[(ids >= 0) & (ids < touched.size)]] = 1

    def look(self, node: Node, cross: Cross, work: int) -> int:
        """One slice of at most about ``work`` units; returns how many it took."""
        used = work
        match self.phase:
            case Phase.FREE:
                used = self._look_at_free(node, cross, work)
            case Phase.TREE:
                used = self._look_at_tree(node, cross, work)
            case Phase.LEASES:
                used = self._look_at_leases(node, cross, work)
            case Phase.PARTS:
                used = self._look_at_parts(node, cross, work)
            case Phase.TOTALS:
                used = self._look_at_totals(node, cross)
            case Phase.PAGES:
                used = self._judge(node, work)
            case Phase.OVER:
                pass
        return used

    # ---- phases ------------------------------------------------------------------------------

    def _look_at_free(self, node: Node, cross: Cross, work: int) -> int:
        pool = node.leases.pool
        wanted = min(FREE_SLICE_PAGES, max(1, work) * PAGES_SEEN_PER_UNIT)
        pages = pool.free_slice(self._next, wanted)
        self._count([pages])
        self._next += wanted
        if self._next >= pool.free_pages:
            self._begin(Phase.TREE)
            self._stack = list(node.leases.tree.roots.values())
            self._anchored = cross.anchored
        return 1 + len(pages) // ID_BYTES // PAGES_SEEN_PER_UNIT

    def _look_at_tree(self, node: Node, cross: Cross, work: int) -> int:
        stack = self._stack
        tree = node.leases.tree
        order, page_bytes = tree.order, tree.match_page_tokens * ID_BYTES
        pieces = []
        used = 0
        while stack and used < work:
            edge = stack.pop()
            if edge.parent is None:
                if tree.roots.get(edge.namespace) is not edge:
                    continue  # an empty one that was swept away
            elif not is_sound(edge, order, page_bytes):
                if not is_linked(edge) and self._has_moved(edge):
                    continue  # evicted or flushed since its parent was looked at
                self.faults += node_faults(edge, order, page_bytes)
            stack.extend(edge.children.values())
            if edge.lock_ref:
                self._look_at_locks(edge, cross)
            pieces.append(edge.pages)
            used += NODE_UNITS
        self.objects += len(pieces)
        n_pages = self._count(pieces)
        if not stack:
            self._begin(Phase.LEASES)
            self._anchored = Counter()
            self._parts = [("lease", lease_id) for lease_id in node.leases.leases]
        return 1 + used + n_pages // PAGES_SEEN_PER_UNIT

    def _look_at_locks(self, edge: TreeNode, cross: Cross) -> None:
        """Counting who is anchored where takes one look at all leases: an old count does, mostly.

        Where it does not fit, the present one decides, and is the old one from then on.
        """
        if missing_locks(edge, self._anchored):
            self._anchored = cross.anchored
            self.faults += lock_faults(edge, cross)

    def _look_at_leases(self, node: Node, cross: Cross, work: int) -> int:
        pieces = []
        used = 0
        while self._next < len(self._parts) and used < work:
            lease = node.leases.leases.get(self._parts[self._next][1])
            self._next += 1
            if lease is not None:
                self.faults += lease_faults(node, lease, cross)
                pieces.append(lease.held)
                used += LEASE_UNITS + len(lease.row) // ID_BYTES // PAGES_SEEN_PER_UNIT
        self.objects += len(pieces)
        self._count(pieces)
        if self._next >= len(self._parts):
            self._begin(Phase.PARTS)
            self._parts = list(_all_parts(node))
        return 1 + used

    def _look_at_parts(self, node: Node, cross: Cross, work: int) -> int:
        last = min(len(self._parts), self._next + max(1, work // PART_UNITS))
        for kind, number in self._parts[self._next : last]:
            self.faults += _part_faults(node, cross, kind, number)
        used = last - self._next
        self.objects += used
        self._next = last
        if last >= len(self._parts):
            self._begin(Phase.TOTALS)
        return 1 + used * PART_UNITS

    def _look_at_totals(self, node: Node, cross: Cross) -> int:
        self.faults += total_faults(node.leases.tree)
        self.faults += queue_faults(node, cross)
        self.faults += register_faults(node)
        if node.leases.saved.pool.total_pages <= SAVED_AT_ONCE_PAGES:
            self.faults += saved_faults(node)
        if count_faults(node):
            self._is_suspicious = True
        self._begin(Phase.PAGES)
        last_word = node.prefiller.last_word
        return 1 + (len(node.leases.tree.order) + len(last_word.by_handoff)) // 16

    def _judge(self, node: Node, work: int) -> int:
        """Pages that lay still and were not seen exactly once; who has them, if there are any."""
        first = self._next
        slice_pages = min(JUDGED_SLICE_PAGES, max(1, work) * PAGES_JUDGED_PER_UNIT)
        self._next = last = min(len(self._seen), first + slice_pages)
        has_doubt = False
        self._uncounted -= int(np.frombuffer(self._seen, dtype=np.uint8)[first:last].sum())
        if self._uncounted and last == len(self._seen):
            self._is_suspicious = True  # at one moment in two places
        if not self._is_blind:
            seen = np.frombuffer(self._seen, dtype=np.uint8)[first:last]
            touched = np.frombuffer(self._touched, dtype=np.uint8)[first:last]
            has_doubt = bool(((seen != 1) & (touched == 0)).any())
        if has_doubt or (self._is_suspicious and last == len(self._seen)):
            found = page_faults(node)
            self.was_refuted = has_doubt and not found
            self.faults += found
            last = len(self._seen)
        if last == len(self._seen):
            self._begin(Phase.OVER)
        return 1 + slice_pages // PAGES_JUDGED_PER_UNIT

    # ---- small things ------------------------------------------------------------------------

    def _begin(self, phase: Phase) -> None:
        self.phase = phase
        self._next = 0
        self._parts = []

    def _count(self, pieces: Sequence[bytes]) -> int:
        """See these pages once more; returns how many they are."""
        ids = np.frombuffer(b"".join(pieces), dtype="<i4")
        seen = np.frombuffer(self._seen, dtype=np.uint8)
        n_pages = ids.size
        if n_pages and (ids.min() < 0 or ids.max() >= seen.size):
            self._is_suspicious = True
            ids = ids[(ids >= 0) & (ids < seen.size)]
        seen[ids] += 1  # a page that is among them twice is counted once: see _judge
        self._uncounted += ids.size
        return n_pages

    def _has_moved(self, edge: TreeNode) -> bool:
        """Whether its pages were given back since the sweep began."""
        page = int.from_bytes(edge.pages[:ID_BYTES], "little", signed=True)
        return self._is_blind or (0 <= page < len(self._touched) and self._touched[page] == 1)


def _all_parts(node: Node) -> Iterator[tuple[str, int]]:
    """What is under way now, by kind and number."""
    decoder, prefiller = node.decoder, node.prefiller
    yield from (("receive", one) for one in decoder.parts)
    yield from (("ready", one) for one in decoder.ready)
    yield from (("send", one) for one in prefiller.by_room)
    yield from (("settled", one) for one in prefiller.last_word.settled)
    yield from (("post", one) for one in prefiller.posts.parts)


def _part_faults(node: Node, cross: Cross, kind: str, number: int) -> Iterable[Fault]:
    """What is wrong with one of them, if it is still there."""
    decoder, prefiller = node.decoder, node.prefiller
    match kind:
        case "receive" if number in decoder.parts:
            return receive_faults(node, decoder.parts[number], cross)
        case "ready" if number in decoder.ready:
            return ready_faults(node, number, decoder.ready[number])
        case "send" if number in prefiller.by_room:
            return send_faults(node, prefiller.by_room[number], cross)
        case "settled" if number in prefiller.last_word.settled:
            return send_faults(node, prefiller.last_word.settled[number], cross)
        case "post" if number in prefiller.posts.parts:
            return post_faults(node, number, prefiller.posts.parts[number])
        case _:
            return ()
