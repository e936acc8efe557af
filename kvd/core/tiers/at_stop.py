"""Demotion at a stop: what is cached and in no tier is written before the pool ends with its node.

Only where the pool ends with it. What would be evicted last is written first, and of a prompt the
first page: whatever this comes to within its bound, it is the part of the cache that is worth most,
and all of it is found again. Pages are under a lease while they are written, as in every demotion.

What is written last would be the youngest of the tier after a restart, and last to go. So each
order says how many pages the stop has come to before (``behind``), and what lies in the tier
already is dated along with the rest.

It writes no more than the tier keeps: what is of a floor of others, or pinned, stays there, and
what is above a ceiling goes first. Beyond that what is written last would push out what was first.

Over is this with the last page, at the bound, where as much was looked at as the tier keeps, or as
soon as the tier does not serve: nobody waits for it to come back. What was ordered and not answered
by then may be there for the next daemon, or is not: an object is whole, or none.

What must not live here: what is written while the node serves (``demotion``), when a node is
drained (``handoff.drain``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.core.cache.eviction import path_of
from kvd.core.tiers.demotion import NodeDemotion
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvd.core.cache.eviction import EvictionOrder
    from kvd.core.cache.quiet_locks import QuietLocks
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.outbox import Outbox
    from kvd.core.tiers.demotion import Demoter
    from kvd.core.tiers.index import ObjectShare, TierIndex
    from kvd.core.tiers.moves import TierMoves

AT_STOP: Final = " at stop"
"""Behind the reason of the leases."""

NO_MORE: Final = "the tier holds no more"

MOST_HASHED: Final = 8192
"""Pages in one turn, or one node: nobody else is served any more."""


def hottest_first(order: EvictionOrder, quiet: QuietLocks) -> list[RadixNode]:
    """All nodes: those that somebody uses, then the others, the next victim last."""
    ahead = [node for node in order.ahead() if node is not None]
    victims = [node for node in ahead if not node.lock_ref or quiet.is_alone_at(node)]
    unused = set(victims)
    return [*[node for node in order if node not in unused], *reversed(victims)]


@mypyc_attr(allow_interpreted_subclasses=True)
class StopRooms:
    """How many more pages may be looked at, by share, that stay beside each other in a tier."""

    __slots__ = ("_ceilings", "_staying", "whole")

    def __init__(self, index: TierIndex, pinned: Mapping[ObjectShare, int]) -> None:
        """``pinned``: objects of pins that the pool has no more."""
        self._staying = dict.fromkeys(index.shares, 0)
        """Objects that stay whatever others write; what is of their own share takes their place."""
        self._ceilings: dict[ObjectShare, int] = {}
        for share in index.shares:
            quota, n_pinned = share.quota, pinned.get(share, 0)
            if quota is not None:
                floor_pages = min(quota.floor_pages, share.n_pages)
                self._staying[share] = max(0, floor_pages - n_pinned)
                if quota.ceiling_pages is not None:
                    self._ceilings[share] = max(0, quota.ceiling_pages - n_pinned)
        self.whole = index.capacity - sum(pinned.values()) - sum(self._staying.values())

    @property
    def is_full(self) -> bool:
        """Whether nothing more may be looked at."""
        return self.whole <= 0 and not any(self._staying.values())

    def of(self, share: ObjectShare) -> int:
        """How many more of that one."""
        room = max(0, self.whole) + self._staying[share]
        return min(room, self._ceilings.get(share, room))

    def take(self, share: ObjectShare, n_pages: int) -> None:
        """So many were looked at."""
        own = min(n_pages, self._staying[share])
        self._staying[share] -= own
        self.whole -= n_pages - own
        if share in self._ceilings:
            self._ceilings[share] = max(0, self._ceilings[share] - n_pages)


@mypyc_attr(allow_interpreted_subclasses=True)
class StopDemotion:
    """Of one tier: what is still to be written, and until when."""

    __slots__ = (
        "_behind",
        "_demoter",
        "_is_told",
        "_moves",
        "_n_pages",
        "_nodes",
        "_order",
        "_out",
        "_rooms",
        "_since_s",
        "_skipped",
        "_under_way",
        "_until_s",
        "_upto",
        "_written",
    )

    def __init__(
        self,
        demoter: Demoter,
        nodes: Sequence[RadixNode],
        order: EvictionOrder,
        moves: TierMoves,
        out: Outbox,
        pinned: Mapping[ObjectShare, int],
    ) -> None:
        """``nodes``: the hottest first; ``pinned`` as ``StopRooms`` has it."""
        tier = demoter.tier
        self._demoter = demoter
        self._order = order
        self._moves = moves
        self._out = out
        self._nodes = [node for node in reversed(nodes) if demoter.wants(node)]
        """The hottest last."""
        self._n_pages = sum([node.n_pages for node in self._nodes])
        """Of these."""
        self._upto: dict[int, int] = {}
        """Of each node that was looked at: so many of its pages, by its number."""
        self._behind = 1
        """So many pages are used after those that come next; 0 would be used now."""
        self._rooms = StopRooms(tier.index, pinned)
        self._skipped = 0
        """Pages that were passed by: their share has no more room."""
        self._under_way = dict(demoter.under_way())
        """What was ordered before and has no place among the rest yet, as ``_upto``."""
        for node_id, upto in self._under_way.items():
            self._upto[node_id] = upto
        for move in moves.under_way.values():
            if isinstance(move, NodeDemotion) and move.tier is tier:
                self._rooms.take(tier.index.share_of(move.namespace), len(move.keys))
        self._since_s = out.at_s
        self._written = tier.counts.written
        self._is_told = False
        self._until_s = out.at_s + tier.settings.stop_s
        out.emit(
            events.StopDemotionBegan(
                tier=tier.name, pages=self.left_pages, for_s=tier.settings.stop_s
            )
        )

    def turn(self) -> bool:
        """Order what may be ordered now; whether there is nothing more to wait for."""
        if self._is_told:
            return True
        why = self._ends()
        if not why:
            self._go_on()
            if self._nodes or self._n_moving:
                return False
            why = NO_MORE if self._skipped else ""
        self._is_told = True
        counts = self._demoter.tier.counts
        self._out.emit(
            events.StopDemotionEnded(
                tier=self._demoter.tier.name,
                pages=counts.written - self._written,
                left=self.left_pages + self._n_moving,
                took_s=self._out.at_s - self._since_s,
                why=why,
            )
        )
        return True

    @property
    def left_pages(self) -> int:
        """Cached pages that were not looked at, or found no room."""
        upto = self._upto.get(self._nodes[-1].id, 0) if self._nodes else 0
        return self._n_pages - upto + self._skipped

    @property
    def _n_moving(self) -> int:
        return self._moves.n_objects(self._demoter.tier, NodeDemotion)

    def _ends(self) -> str:
        """Why it ends before all is written; empty while it goes on."""
        tier = self._demoter.tier
        if not tier.is_written:
            if tier.is_serving:
                return tier.why
            why = f": {tier.why}" if tier.why else ""
            return f"the tier is {tier.word}{why}"
        if self._out.at_s >= self._until_s:
            return "its time was over"
        if self._rooms.is_full and self._nodes and not self._n_moving:
            return NO_MORE
        return ""

    def _go_on(self) -> None:
        most, hashed = self._demoter.room(), 0
        while self._nodes:
            node = self._nodes[-1]
            # One that was flushed meanwhile has left the order.
            # The first page of the prompt first.
            for step in reversed([*path_of(node)]) if node in self._order else ():
                self._age(step, range(self._under_way.pop(step.id, 0)))
                if self._is_done(step):
                    continue
                if self._rooms.is_full:
                    return
                if self._rooms.of(self._share_of(step)) <= 0:
                    break
                if most <= 0 or hashed >= MOST_HASHED:
                    return
                hashed += step.n_pages
                most -= self._look_at(step, most)
                if not self._is_done(step) and self._rooms.of(self._share_of(step)) > 0:
                    return
            if node in self._order:
                self._skipped += node.n_pages - self._upto.get(node.id, 0)
            self._n_pages -= node.n_pages
            self._nodes.pop()

    def _share_of(self, node: RadixNode) -> ObjectShare:
        return self._demoter.tier.index.share_of(node.namespace)

    def _is_done(self, node: RadixNode) -> bool:
        return self._upto.get(node.id, 0) >= node.n_pages

    def _look_at(self, node: RadixNode, most: int) -> int:
        """Order up to ``most`` of its pages; how many were."""
        first, share = self._upto.get(node.id, 0), self._share_of(node)
        end = min(node.n_pages, first + self._rooms.of(share))
        places = self._demoter.lacking(node, range(first, end), most)
        upto = places[-1] + 1 if len(places) >= most else end
        self._upto[node.id] = upto
        self._rooms.take(share, upto - first)
        self._age(node, sorted({*range(first, upto)} - {*places}))
        if places:
            self._demoter.begin(node, places, AT_STOP, self._behind)
            self._behind += len(places)
        elif end == node.n_pages:
            # What is there already must not go for what is written after it.
            self._demoter.touch(node)
        return len(places)

    def _age(self, node: RadixNode, places: Sequence[int]) -> None:
        """These of its pages are in the tier, or are on their way."""
        if places:
            self._demoter.age(node, places, self._behind)
            self._behind += len(places)
