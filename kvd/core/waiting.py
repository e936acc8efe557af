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
    return WaitingState(
        kind=kind_of(waiter),
        owner=owner_of(node, waiter.claim.session)[0],
        room=waiter.claim.room,
        priority=waiter.claim.priority,
        waited_s=node.out.at_s - waiter.since_s,
        deadline_in_s=waiter.deadline_s - node.out.at_s,
        needed_pages=waiter.needed_pages,
        why=why_waits(node, waiter, ahead),
        budget=waiter.budget or node.leases.pool.name,
        missing_pages=waiter.missing_pages,
        ahead=ahead,
        overtaken=waiter.overtaken,
        held_by=holders if lacks_pages(waiter) else (),
    )


def lacks_pages(waiter: Waiter) -> bool:
    """Whether it waits for memory: not for its peer, nor for those before it."""
    return bool(waiter.budget) and waiter.asker.blocked() is None


def why_waits(node: Node, waiter: Waiter, ahead: int) -> str:
    """For its peer, for pages, or for ``ahead`` others."""
    other = waiter.asker.blocked()
    if other is not None:
        return other
    return node.admission.shortage(waiter) if waiter.budget else f"its turn: {ahead} before it"


def kind_of(waiter: Waiter) -> str:
    """What was asked for: ``lease``, ``receive`` or ``resume``."""
    if waiter.claim.resumes:
        return "resume"
    return "receive" if waiter.claim.room else "lease"
