"""Why each request in the admission queue waits: which budget, how much is missing, who has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.owners import owner_of
from kvd.wire.snapshot import WaitingState

if TYPE_CHECKING:
    from kvd.core.admission import Waiter
    from kvd.core.node import Node


def waiting_states(node: Node) -> list[WaitingState]:
    """Every waiter in the order of the queue."""
    holders: dict[str, tuple[str, ...]] = {}
    """By budget: many wait for the same."""
    states = []
    ahead = 0
    for waiter in node.admission.queue:
        if waiter.budget not in holders:
            holders[waiter.budget] = node.owners.of_most_pages(waiter.budget)
        states.append(_state(node, waiter, ahead, holders[waiter.budget]))
        ahead += waiter.asker.blocked() is None
    return states


def _state(node: Node, waiter: Waiter, ahead: int, holders: tuple[str, ...]) -> WaitingState:
    other = waiter.asker.blocked()
    was_matched = bool(waiter.budget)
    if other is not None:
        why, holders = other, ()
    elif was_matched:
        why = node.admission.shortage(waiter)
    else:
        why, holders = f"its turn: {ahead} before it", ()
    return WaitingState(
        kind=_kind(waiter),
        owner=owner_of(node, waiter.claim.session)[0],
        room=waiter.claim.room,
        priority=waiter.claim.priority,
        waited_s=node.out.at_s - waiter.since_s,
        deadline_in_s=waiter.deadline_s - node.out.at_s,
        needed_pages=waiter.needed_pages,
        why=why,
        budget=waiter.budget or node.leases.pool.name,
        missing_pages=waiter.missing_pages,
        ahead=ahead,
        overtaken=waiter.overtaken,
        held_by=holders,
    )


def _kind(waiter: Waiter) -> str:
    if waiter.claim.resumes:
        return "resume"
    return "receive" if waiter.claim.room else "lease"
