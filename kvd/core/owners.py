"""Names for what holds a page: who, for what, in which room, and for how long."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.core.lease import Lease
    from kvd.core.node import Node

HOLDERS_NAMED = 3
"""Of the leases that hold the most pages: enough to act on, few enough for a sentence."""


def owner_of(node: Node, session: int) -> tuple[str, int]:
    """Name and first pid of a session; a dead one says so."""
    found = node.sessions.by_id.get(session)
    return (found.name, found.pids[0]) if found else (f"session {session} (gone)", 0)


def describe_holder(node: Node, lease: Lease) -> str:
    """A lease as one short phrase."""
    name, pid = owner_of(node, lease.session)
    room = f" room {lease.room}" if lease.room else ""
    age_s = node.out.at_s - lease.since_s
    return f"lease {lease.id} of {name} (pid {pid}) for {lease.reason}{room}, {age_s:.1f} s"


class Owners:
    """Who holds most of the pool, in words."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def of_most_pages(self) -> tuple[str, ...]:
        """The leases that hold or quarantine the most pages, the biggest first."""
        holding = [one for one in self._node.leases.leases.values() if one.held_pages]
        biggest = heapq.nlargest(HOLDERS_NAMED, holding, key=lambda one: one.held_pages)
        return tuple(
            f"{describe_holder(self._node, one)} ({one.held_pages} pages"
            f"{' in quarantine' if one.quarantine else ''})"
            for one in biggest
        )
