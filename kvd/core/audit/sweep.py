"""One look at everything a node has, in slices, while the node goes on living between them.

Rules about one thing (``rules``) are exact whenever they are asked. What is true only of everything
together, that each page is in exactly one place, is made exact by ``moved_pages``: a sweep counts
how often it sees each page, learns at each turn which pages have moved meanwhile, and at the end
judges those that have not. They were where they are all the time, so they must have been seen
exactly once. What has moved is judged by the next sweep; a lost page never moves again.

    FREE    the free lists, from the bottom of each stack: what lies still keeps its index
    TREE    from the roots down; what is split meanwhile keeps its lower half on our stack
    LEASES  those that were there when the phase began: a later one has only pages that moved
    PARTS   receives, sends, posts
    TOTALS  the counters, the queue, the registers: sums, in one piece
    PAGES   the judgement; only a suspicion costs a look at all places at once, which names them

All of it is done for the first component and, where there are any, for those with pages beside it.

Plain data between two turns: no iterator, nothing that a copy of the node could not carry.
"""

from __future__ import annotations

import enum
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from mypy_extensions import mypyc_attr

from kvd.core.audit import component_rules
from kvd.core.audit.rules import (
    is_linked,
    is_sound,
    is_uncounted,
    lease_faults,
    lock_faults,
    missing_locks,
    node_faults,
    post_faults,
    promise_faults,
    queue_faults,
    quota_faults,
    ready_faults,
    receive_faults,
    register_faults,
    saved_faults,
    send_faults,
    tile_faults,
    total_faults,
)
from kvd.core.audit.tier_rules import tier_faults
from kvd.core.inspect.page_states import pools_of
from kvd.types import ID_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kvd.core.audit.backrefs import Backrefs, Needs
    from kvd.core.audit.rules import Fault
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.components.component_pages import ComponentPages
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.types import Pages


@mypyc_attr(allow_interpreted_subclasses=True)
class SweptPages:
    """One pool during one sweep. ``see`` and ``learn`` all the time, then ``judge``."""

    def __init__(self, total_pages: int) -> None:
        self.total_pages = total_pages
        self.is_suspicious = False
        """Something does not add up: only a look at all places at once can tell what."""
        self._seen = bytearray(total_pages)
        self._seen[0] = 1  # the null page is nowhere
        self._uncounted = 1
        """Pages looked at, less those that ``_seen`` tells of; 0 at the end."""
        self._touched = bytearray(total_pages)
        self._is_blind = False

    def learn(self, moved: bytes | None) -> None:
        """These pages have changed their place since the last turn; None: too many to tell."""
        if moved is None:
            # Which pages lay still is not known: this sweep judges no single one, the next does.
            self._is_blind = True
        elif moved:
            ids = np.frombuffer(moved, dtype="<i4")
            touched = np.frombuffer(self._touched, dtype=np.uint8)
            touched[ids[(ids >= 0) & (ids < touched.size)]] = 1

    def see(self, pieces: Sequence[bytes]) -> int:
        """See these pages once more; returns how many they are."""
        ids = np.frombuffer(b"".join(pieces), dtype="<i4")
        seen = np.frombuffer(self._seen, dtype=np.uint8)
        n_pages = ids.size
        # Only noted: which page it is, and who names it, takes the look at all places that
        # ``_judge`` asks.
        if n_pages and (ids.min() < 0 or ids.max() >= seen.size):
            self.is_suspicious = True
            ids = ids[(ids >= 0) & (ids < seen.size)]
        seen[ids] += 1  # a page that is among them twice is counted once: see judge
        self._uncounted += ids.size
        return n_pages

    def has_moved(self, pages: Pages) -> bool:
        """Whether the first of these was given back since the sweep began."""
        page = int.from_bytes(pages[:ID_BYTES], "little", signed=True)
        return self._is_blind or (0 <= page < len(self._touched) and self._touched[page] == 1)

    def judge(self, first: int, last: int) -> bool:
        """Whether a page of this range lay still, and was not seen exactly once."""
        seen = np.frombuffer(self._seen, dtype=np.uint8)[first:last]
        # What was looked at and not counted is a page that one call of ``see`` had twice.
        self._uncounted -= int(seen.sum())
        if self._uncounted and last == self.total_pages:
            self.is_suspicious = True  # at one moment in two places
        if self._is_blind:
            return False
        touched = np.frombuffer(self._touched, dtype=np.uint8)[first:last]
        return bool(((seen != 1) & (touched == 0)).any())


FREE_SLICE_PAGES = 65_536
JUDGED_SLICE_PAGES = 262_144
SAVED_AT_ONCE_PAGES = 16_384
"""A saved area of so many pages is checked whole, in 0.2 ms; of a larger one the numbers are."""

# What things cost in units of work, about a microsecond each; the shell learns how much really.
PAGES_SEEN_PER_UNIT = 128
PAGES_JUDGED_PER_UNIT = 1024
NODE_UNITS = 2
BESIDE_UNITS = 1
LEASE_UNITS = 8
PART_UNITS = 8


class SweepPhase(enum.Enum):
    """What a sweep looks at now."""

    FREE = "free"
    TREE = "tree"
    LEASES = "leases"
    PARTS = "parts"
    TOTALS = "totals"
    PAGES = "pages"
    OVER = "over"


@mypyc_attr(allow_interpreted_subclasses=True)
class Sweep:
    """One sweep. ``learn`` what moved, then ``look`` until it is OVER; take ``faults`` any time."""

    def __init__(self, node: NodeView, at_s: float) -> None:
        self.began_s = at_s
        self.phase = SweepPhase.FREE
        self.objects = 0
        """Nodes, leases and parts looked at."""
        self.faults: list[Fault] = []
        self.was_refuted = False
        """A suspicion about pages came to nothing: somebody moves pages without saying so."""
        pools = [places.pool for places in pools_of(node.leases)]
        self._tallies = [SweptPages(pool.total_pages) for pool in pools]
        for tally, pool in zip(self._tallies, pools, strict=True):
            tally.learn(pool.condemned_ids())  # wherever they are, they are not judged
        self._anchored: Counter[RadixNode | None] = Counter()
        self._needs: Needs = ()
        self._pool = 0
        """Index of the pool whose free list is looked at, or that is judged."""
        self._next = 0
        """Index of the next page of that pool, or of the next lease or part of the phase."""
        self._stack: list[RadixNode] = []
        self._parts: list[tuple[str, int]] = []

    def learn(self, node: NodeView) -> None:
        """Which pages have changed their place since the last turn."""
        for tally, places in zip(self._tallies, pools_of(node.leases), strict=True):
            tally.learn(places.pool.moved.drain())

    def look(self, node: NodeView, refs: Backrefs, work: int) -> int:
        """One slice of at most about ``work`` units; returns how many it took."""
        used = work
        match self.phase:
            case SweepPhase.FREE:
                used = self._look_at_free(node, refs, work)
            case SweepPhase.TREE:
                used = self._look_at_tree(node, refs, work)
            case SweepPhase.LEASES:
                used = self._look_at_leases(node, refs, work)
            case SweepPhase.PARTS:
                used = self._look_at_parts(node, refs, work)
            case SweepPhase.TOTALS:
                used = self._look_at_totals(node, refs)
            case SweepPhase.PAGES:
                used = self._judge(node, work)
            case SweepPhase.OVER:
                pass
        return used

    # ---- phases ------------------------------------------------------------------------------

    def _look_at_free(self, node: NodeView, refs: Backrefs, work: int) -> int:
        pool = pools_of(node.leases)[self._pool].pool
        wanted = min(FREE_SLICE_PAGES, max(1, work) * PAGES_SEEN_PER_UNIT)
        pages = pool.free_slice(self._next, wanted)
        self._tallies[self._pool].see([pages])
        # By what was asked for, not by what came: the stack may have become shorter since.
        self._next += wanted
        if self._next >= pool.free_pages and self._is_last_pool():
            self._begin(SweepPhase.TREE)
            # From the top at one moment: what is inserted later has only pages that moved.
            self._stack = list(node.leases.tree.roots.values())
            # Counted once for the whole phase; where a node does not fit them ``_look_at_locks``
            # counts again.
            self._anchored = refs.anchored
            self._needs = refs.needs
        return 1 + len(pages) // ID_BYTES // PAGES_SEEN_PER_UNIT

    def _look_at_tree(self, node: NodeView, refs: Backrefs, work: int) -> int:
        stack = self._stack
        tree = node.leases.tree
        order, page_bytes = tree.order, tree.match_page_tokens * ID_BYTES
        edges: list[RadixNode] = []
        used = 0
        while stack and used < work:
            edge = stack.pop()
            if edge.parent is None:
                if tree.roots.get(edge.namespace) is not edge:
                    continue  # an empty one that was swept away
            elif not is_sound(edge, order, page_bytes):
                if not is_linked(edge) and self._tallies[0].has_moved(edge.pages):
                    continue  # evicted or flushed since its parent was looked at
                self.faults += node_faults(edge, order, page_bytes)
            stack.extend(edge.children.values())
            if edge.lock_ref:
                self._look_at_locks(edge, refs)
            edges.append(edge)
            used += NODE_UNITS
        self.objects += len(edges)
        n_pages = self._tallies[0].see([edge.pages for edge in edges])
        for index, keeper in enumerate(node.leases.components.each):
            n_pages += self._look_beside(index, keeper, edges, refs)
            used += len(edges) * BESIDE_UNITS
        if not stack:
            self._begin(SweepPhase.LEASES)
            self._anchored = Counter()
            self._needs = ()
            # By number: a lease that ends before its turn has given its pages back, and those have
            # moved.
            self._parts = [("lease", lease_id) for lease_id in node.leases.leases]
        return 1 + used + n_pages // PAGES_SEEN_PER_UNIT

    def _look_at_locks(self, edge: RadixNode, refs: Backrefs) -> None:
        """Counting who is anchored where takes one look at all leases: an old count does, mostly.

        Where it does not fit, the present one decides, and is the old one from then on.
        """
        if missing_locks(edge, self._anchored):
            self._anchored = refs.anchored
            self.faults += lock_faults(edge, refs)

    def _look_beside(
        self, index: int, keeper: ComponentPages, edges: Sequence[RadixNode], refs: Backrefs
    ) -> int:
        """What a component has at these nodes; returns how many pages.

        What each node is needed for is counted as seldom as who is anchored there.
        """
        pieces = []
        for edge in edges:
            if edge.parent is None:
                continue
            if keeper.locks_at(edge) != self._needs[index][edge]:
                self._needs = refs.needs
            self.faults += component_rules.component_node_faults(keeper, edge, self._needs[index])
            pieces.append(keeper.pages_at(edge))
        return self._tallies[1 + index].see(pieces)

    def _look_at_leases(self, node: NodeView, refs: Backrefs, work: int) -> int:
        leases: list[LeaseRecord] = []
        used = 0
        keepers = node.leases.components.each
        while self._next < len(self._parts) and used < work:
            lease = node.leases.leases.get(self._parts[self._next][1])
            self._next += 1
            if lease is not None:
                self.faults += lease_faults(node, lease, refs)
                leases.append(lease)
                used += LEASE_UNITS + len(lease.page_table) // ID_BYTES // PAGES_SEEN_PER_UNIT
                if keepers:
                    self.faults += component_rules.component_lease_faults(node, lease)
                    used += LEASE_UNITS * len(keepers)
        self.objects += len(leases)
        for tally, where in zip(self._tallies, pools_of(node.leases), strict=True):
            tally.see([where.of(lease) for lease in leases])
        if self._next >= len(self._parts):
            self._begin(SweepPhase.PARTS)
            self._parts = list(_all_parts(node))
        return 1 + used

    def _look_at_parts(self, node: NodeView, refs: Backrefs, work: int) -> int:
        last = min(len(self._parts), self._next + max(1, work // PART_UNITS))
        for kind, number in self._parts[self._next : last]:
            self.faults += _part_faults(node, refs, kind, number)
        used = last - self._next
        self.objects += used
        self._next = last
        if last >= len(self._parts):
            self._begin(SweepPhase.TOTALS)
        return 1 + used * PART_UNITS

    def _look_at_totals(self, node: NodeView, refs: Backrefs) -> int:
        self.faults += total_faults(node.leases.tree)
        self.faults += promise_faults(node.leases)
        self.faults += quota_faults(node.leases)
        self.faults += queue_faults(node, refs)
        self.faults += register_faults(node)
        self.faults += tier_faults(node)
        area = node.leases.saved
        # Nobody notes moves of saved pages, so it is the whole area in this piece, or numbers
        # alone.
        if sum(map(area.capacity_pages, area.pools)) <= SAVED_AT_ONCE_PAGES:
            self.faults += saved_faults(node.leases)
        self.faults += component_rules.component_register_faults(node)
        things = len(node.leases.tree.order) + node.prefiller.settled_sends.n_records
        for tally, where in zip(self._tallies, pools_of(node.leases), strict=True):
            # The numbers show at once what the pages would only show to a sweep in which none of
            # them moved.
            tally.is_suspicious |= is_uncounted(where)
        for keeper in node.leases.components.each:
            things += BESIDE_UNITS * (len(keeper.nodes) + len(keeper.leases))
        self._begin(SweepPhase.PAGES)
        return 1 + things // 16

    def _judge(self, node: NodeView, work: int) -> int:
        """Pages that lay still and were not seen exactly once; who has them, if there are any."""
        tally = self._tallies[self._pool]
        first = self._next
        slice_pages = min(JUDGED_SLICE_PAGES, max(1, work) * PAGES_JUDGED_PER_UNIT)
        self._next = last = min(tally.total_pages, first + slice_pages)
        has_doubt = tally.judge(first, last)
        # Only now is the price of all places paid, and once: what it finds is of the whole pool.
        if has_doubt or (tally.is_suspicious and last == tally.total_pages):
            found = _page_faults(node.leases, self._pool)
            self.was_refuted |= has_doubt and not found
            self.faults += found
            last = tally.total_pages
        if last == tally.total_pages and self._is_last_pool():
            self._begin(SweepPhase.OVER)
        return 1 + slice_pages // PAGES_JUDGED_PER_UNIT

    # ---- small things ------------------------------------------------------------------------

    def _begin(self, phase: SweepPhase) -> None:
        self.phase = phase
        self._pool = self._next = 0
        self._parts = []

    def _is_last_pool(self) -> bool:
        """Goes on to the next pool, if there is one."""
        self._pool += 1
        self._next = 0
        return self._pool == len(self._tallies)


def _page_faults(table: LeaseTable, pool: int) -> list[Fault]:
    """All pages of one pool at once, and what lies at its nodes: exact, and as long as it is."""
    where = pools_of(table)[pool]
    gone = () if where.keeper is None else component_rules.gone_faults(where.keeper)
    return [*tile_faults(where), *gone]


def _all_parts(node: NodeView) -> Iterator[tuple[str, int]]:
    """What is under way now, by kind and number."""
    decoder, prefiller = node.decoder, node.prefiller
    yield from (("receive", number) for number in decoder.open.parts)
    yield from (("ready", number) for number in decoder.open.ready)
    yield from (("send", send.id) for send in prefiller.rooms.live())
    yield from (("settled", number) for number in prefiller.settled_sends.settled)
    yield from (("post", number) for number in prefiller.posts.parts)


def _part_faults(node: NodeView, refs: Backrefs, kind: str, number: int) -> Iterable[Fault]:
    """What is wrong with one of them, if it is still there."""
    decoder, prefiller = node.decoder, node.prefiller
    match kind:
        case "receive" if number in decoder.open.parts:
            return receive_faults(node, decoder.open.parts[number], refs)
        case "ready" if number in decoder.open.ready:
            return ready_faults(node.leases, number, decoder.open.ready[number])
        case "send" if number in refs.sends:
            return send_faults(node, refs.sends[number], refs)
        case "settled" if number in prefiller.settled_sends.settled:
            return send_faults(node, prefiller.settled_sends.settled[number], refs)
        case "post" if number in prefiller.posts.parts:
            return post_faults(node.prefiller, number, prefiller.posts.parts[number])
        case _:
            return ()
