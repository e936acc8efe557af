"""I9 of tiers: what moves is kept for it and for nothing else, and nobody waits for what is over.

That a page is in one place, and a node locked as often as leases cross it, is asked of the leases
of moves as of all others (``rules``). Here is what only tiers have: orders, the bound of a tier,
the locks that are no use, and who waits for a promotion.

What must not live here: any change of state.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvd.core.audit.rules import Fault
from kvd.core.tiers.demotion import NodeDemotion
from kvd.core.tiers.promotion import PagePromotion, TierWait
from kvd.types import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.inspect.view import NodeView
    from kvd.core.tiers.moves import TierMove


def tier_faults(node: NodeView) -> Iterator[Fault]:
    """Every rule of tiers that does not hold now; nothing to ask where there are none."""
    if not node.tiers.each:
        return
    for move in node.tiers.moves.under_way.values():
        yield from _move_faults(node, move)
    yield from _bound_faults(node)
    yield from _quiet_faults(node)
    yield from _wait_faults(node)


def _move_faults(node: NodeView, move: TierMove) -> Iterator[Fault]:
    """An order under way: its pages are its lease's, and a process has it."""
    lease = move.lease
    if node.leases.leases.get(lease.id) is not lease or move.verb not in lease.holders:
        what = f"{move.words} of tier {move.tier.name} has no lease that is kept for it"
        yield Fault("I9", f"tier-move-{move.ticket}", what, lease=lease.id)
        return
    # The row of a lost one was cut when it was lost.
    if isinstance(move, PagePromotion) and lease.lost is None and lease.reads == 0:
        held = count(lease.held)
        if held != move.n_objects:
            what = (
                f"{move.words} of tier {move.tier.name} writes pages, lease {lease.id} has {held}"
            )
            yield Fault("I9", f"tier-pages-{move.ticket}", what, lease=lease.id)
    if not move.tier.generation:
        what = f"{move.words} of tier {move.tier.name} is under way, and no process serves it"
        yield Fault("I9", f"tier-process-{move.ticket}", what, lease=lease.id)


def _bound_faults(node: NodeView) -> Iterator[Fault]:
    """A tier is not beyond its bound, and keeps room for what is written to it, no more."""
    for tier in node.tiers.each:
        index = tier.index
        reserved = node.tiers.moves.n_objects(tier, NodeDemotion)
        if index.reserved != reserved:
            what = f"{index.reserved} objects are reserved, {reserved} are being written"
            yield Fault("I9", "tier-reserved", f"of tier {tier.name} {what}")
        if not index.counted():
            what = f"{index.n_objects} objects are counted, or those of a quota, and are not there"
            yield Fault("I9", "tier-count", f"of tier {tier.name} {what}")
        under_way = node.tiers.moves.under_way.values()
        moving = [
            (move.share, move.n_objects)
            for move in under_way
            if move.tier is tier and isinstance(move, NodeDemotion)
        ]
        if tier.writes is not None and not tier.writes.are_counted(moving):
            what = "objects are counted as written, or on their way there, and are not"
            yield Fault("I9", "store-count", f"of tier {tier.name} {what}")
        # What a process has found may be more, until it serves.
        if tier.generation and index.n_objects + index.reserved > index.capacity:
            what = f"{index.n_objects} objects and {index.reserved} more, it holds {index.capacity}"
            yield Fault("I9", "tier-bound", f"tier {tier.name} has {what}")


def _quiet_faults(node: NodeView) -> Iterator[Fault]:
    """The locks that are no use are those of demotions: each is taken off by one."""
    crossing: Counter[RadixNode] = Counter()
    for move in node.tiers.moves.under_way.values():
        step = move.lease.anchor if isinstance(move, NodeDemotion) else None
        while step is not None and step.parent is not None:
            crossing[step] += 1
            step = step.parent
    for edge, lock in node.tiers.quiet.by_node.items():
        # Fewer are known of the upper half of a node that was split since.
        if not 0 < lock.n_locks <= crossing[edge]:
            what = f"{edge.describe()} has {lock.n_locks} quiet locks, {crossing[edge]} demotions"
            yield Fault("I9", f"quiet-{edge.id}", f"{what} cross it", node=edge.id)


def _wait_faults(node: NodeView) -> Iterator[Fault]:
    """Whoever waits for a promotion, or for what could be one, waits for what is under way."""
    tiers = node.tiers
    under_way = {**tiers.moves.under_way, **tiers.promotions.probes.under_way}
    for waiter in node.admission.side_queue.waiters.values():
        wait = waiter.tier
        promotion = wait.promotion if isinstance(wait, TierWait) else None
        if promotion is not None and under_way.get(promotion.ticket) is not promotion:
            session, call = waiter.claim.session, waiter.claim.call
            what = f"a request of session {session} (call {call}) waits for {promotion.name}"
            yield Fault("I9", f"forgotten-{session}-{call}", f"{what}, which is over")
