"""Names for what holds a page: who, for what, in which room, and for how long."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvd.core.cache.lease import ENGINE
from kvd.core.cache.lease_state import Standing
from kvd.types import count

if TYPE_CHECKING:
    from kvd.core.cache.lease import Lease
    from kvd.core.effects import Outbox
    from kvd.core.leases.adopt import Adoption
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.sessions import Sessions

HOLDERS_NAMED = 3
"""Of the leases that hold the most pages: enough to act on, few enough for a sentence."""


class HolderView(Protocol):
    """What is read to name a holder; a node has it."""

    leases: LeaseTable
    sessions: Sessions
    former: Adoption
    out: Outbox


def owner_of(node: HolderView, session: int) -> tuple[str, int]:
    """Name and first pid of a session; a dead one says so."""
    if not session:
        return "kvd", 0
    found = node.sessions.by_id.get(session)
    return (found.name, found.pids[0]) if found else (f"session {session} (gone)", 0)


def describe_holder(node: HolderView, lease: Lease) -> str:
    """A lease as one short phrase."""
    name, pid = owner_of(node, lease.session)
    shunned = hung_up_words(node, lease)
    if lease.standing is Standing.FORMER:
        former = f"lease {lease.id} of {name} (pid {pid}), {said_of_former(node, lease)}"
        return f"{former}, {shunned}" if shunned else former
    room = f" room {lease.room}" if lease.room else ""
    age_s = node.out.at_s - lease.since_s
    said = f"lease {lease.id} of {name} (pid {pid}) for {lease.reason}{room}, {age_s:.1f} s"
    return f"{said}, {shunned}" if shunned else said


def hung_up_words(node: HolderView, lease: Lease) -> str:
    """That kvd hung up on its engine, which holds it until it is dead; empty where it did not."""
    session = node.sessions.by_id.get(lease.session)
    if session is None or session.hang_up is None or ENGINE not in lease.holders:
        return ""
    return f"hung up on for {node.out.at_s - session.hang_up.since_s:.1f} s"


def said_of_former(node: HolderView, lease: Lease) -> str:
    """Why it is there, of a lease of before the restart."""
    age_s = node.out.at_s - lease.since_s
    session = node.sessions.by_id.get(lease.session)
    if lease is node.former.unproven:
        n_leases = len(node.former.leases)
        by = f"{n_leases} leases of that time" if n_leases else "an engine that is not back yet"
        why = f"not proven, and {by} may still read them"
    elif session is not None and session.is_former:
        why = f"it has not come back yet, for {age_s:.1f} s"
    else:
        why = f"it is back and still uses it, {age_s:.1f} s after the restart"
    return f"from before the restart: {why}"


class Kept(NamedTuple):
    """What one lease keeps of a component: pages of its own, and cached ones that it locks."""

    pages: int
    locked: int
    lease: Lease


class Owners:
    """Who holds most of the pool."""

    def __init__(self, node: HolderView) -> None:
        self._node = node

    def of_most_pages(self, budget: str) -> tuple[str, ...]:
        """The leases that keep the most pages of that component from others, in words.

        ``budget`` is its name; an unknown one stands for the first component, of whose cached
        pages a lease locks those of its prefix, maybe with others.
        """
        of = "" if self._node.leases.beside.named(budget) is None else f" of {budget}"
        return tuple(
            f"{describe_holder(self._node, one.lease)} ({one.pages} pages{of}"
            f"{' in quarantine' if one.lease.quarantine else ''}"
            f"{f', locks {one.locked} cached' if one.locked else ''})"
            for one in self.biggest(budget)
        )

    def biggest(self, budget: str) -> tuple[Kept, ...]:
        """The same as they are, the biggest first; one look at all leases."""
        table = self._node.leases
        keeper = table.beside.named(budget)
        kept = [
            (one.held_pages, one.owned, one) if keeper is None else (count(keeper.own(one)), 0, one)
            for one in table.leases.values()
        ]
        found = heapq.nlargest(HOLDERS_NAMED, kept, key=lambda one: one[0] + one[1])
        return tuple(Kept(*one) for one in found if one[0] or one[1])
