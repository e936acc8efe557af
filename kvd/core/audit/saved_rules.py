"""The rules about retraction: the pages of the saved area, and what a lease has of it and the pool.

What must not live here: holders that are gone, like any other's (``rules``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvd.core.audit.fault import Fault
from kvd.core.cache.lease import RESTORE, SAVE
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.inspect.page_states import Place, tile_faults
from kvd.types import count

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease import Lease, SavedPart
    from kvd.core.node import Node

AWAY = {LeaseStage.RETRACTED, LeaseStage.RESUMING}
"""Neither lock nor page of the pool."""

COPYING = {SAVE: LeaseStage.SAVING, RESTORE: LeaseStage.RESTORING}
"""The standing in which each of these holds a lease."""


def saved_faults(node: Node) -> list[Fault]:
    """I1 of the saved area: null + free + saved = total, per component; each page in one place."""
    found = []
    for component, pool in node.leases.saved.pools.items():
        places = [
            Place("the free list", pool.free_ids()),
            *(
                Place(f"lease {lease.id}", part.slots, lease=lease.id)
                for lease, part in _parts(node)
                if part.component == component
            ),
        ]
        found += tile_faults(places, pool, pool.name)
    return found


def saved_count_faults(node: Node) -> Iterator[Fault]:
    """I1 of the saved area by the numbers alone: cheap, for the standing audit."""
    area = node.leases.saved
    saved: Counter[str] = Counter()
    for _, part in _parts(node):
        saved[part.component] += count(part.slots)
    for component, pool in area.pools.items():
        taken = area.used_pages(component)
        if saved[component] != taken and not pool.condemned_pages:
            what = f"{taken} pages of {pool.name} are taken, leases have {saved[component]}"
            yield Fault("I1", "saved-count", what, component=pool.name)


def _parts(node: Node) -> Iterator[tuple[Lease, SavedPart]]:
    """What every lease has there."""
    for lease in node.leases.leases.values():
        if lease.saved is not None:
            yield from ((lease, part) for part in lease.saved.parts)


def broken_standing(node: Node, lease: Lease) -> Iterator[str]:
    """What a lease has that its standing does not allow, or lacks."""
    standing = lease.state
    if standing in AWAY and (lease.anchor is not None or lease.page_table):
        yield "it has a lock or pages"
    if standing is LeaseStage.RUNNING and lease.saved is not None:
        yield f"it has {lease.saved_pages} saved pages"
    wanted = {holder for holder, when in COPYING.items() if when is standing}
    if lease.holders & COPYING.keys() != wanted:
        yield f"it is held by {sorted(lease.holders)}"
    if lease.saved is not None:
        table, pages = node.leases, node.leases.pages_for(count(lease.saved.tokens))
        for part in lease.saved.parts:
            if part.component == table.pool.name and count(part.slots) != pages:
                yield f"{count(part.slots)} pages are saved of {pages}"
