"""What is read off the daemon's state at the moment of a scrape.

``gauges_of`` makes it from the snapshot that ``kvd status`` prints, so that both say the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.snapshot import AuditState

if TYPE_CHECKING:
    from kvd.wire.snapshot import Snapshot

OVER = frozenset({"ready", "closed", "settled", "forgotten"})
"""States of a part in which nothing is under way any more."""


class PoolGauges(msgspec.Struct, frozen=True):
    """Pages of one component. ``pages`` is by state, and its values add up to all pages."""

    pool: str
    component: str
    page_bytes: int
    pages: dict[str, int]
    evictable_pages: int
    locked_pages: int
    saved_pages: dict[str, int]
    """Of the host memory beside it for retracted leases, by state."""


class PeerGauges(msgspec.Struct, frozen=True):
    """One other daemon."""

    peer: str
    is_up: bool
    generation: int
    round_trip_s: float


class Gauges(msgspec.Struct, frozen=True):
    """The state of the node. ``leases`` is by reason and state, ``inflight`` by role."""

    pools: tuple[PoolGauges, ...]
    leases: dict[tuple[str, str], int]
    oldest_lease_s: float
    inflight: dict[str, int]
    waiting: int
    peers: tuple[PeerGauges, ...]
    engine_clients: int
    transfer_generation: int
    last_event: int
    uptime_s: float
    audit: AuditState


def gauges_of(snapshot: Snapshot) -> Gauges:
    """The gauges that a snapshot gives."""
    leases = Counter((lease.reason.partition(" ")[0], lease.state) for lease in snapshot.leases)
    inflight = Counter(room.side for room in snapshot.rooms if room.state not in OVER)
    return Gauges(
        pools=tuple(
            PoolGauges(
                pool=pool.pool,
                component=pool.component,
                page_bytes=pool.page_bytes,
                pages={
                    "free": pool.free_pages,
                    "leased": pool.held_pages,
                    "cached": pool.cached_pages,
                    "quarantined": pool.quarantined_pages,
                    "reserved": pool.total_pages
                    - pool.free_pages
                    - pool.held_pages
                    - pool.cached_pages
                    - pool.quarantined_pages,
                },
                evictable_pages=pool.evictable_pages,
                locked_pages=pool.locked_pages,
                saved_pages={
                    "used": pool.saved_pages,
                    "free": pool.saved_capacity_pages - pool.saved_pages,
                },
            )
            for pool in snapshot.pools
        ),
        leases=dict(leases),
        oldest_lease_s=max((lease.age_s for lease in snapshot.leases), default=0.0),
        inflight={"decode": inflight["decode"], "prefill": inflight["prefill"]},
        waiting=len(snapshot.waiting),
        peers=tuple(
            PeerGauges(
                peer=peer.name,
                is_up=peer.state == "up",
                generation=peer.generation,
                round_trip_s=peer.round_trip_ms / 1e3,
            )
            for peer in snapshot.peers
        ),
        engine_clients=len(snapshot.clients),
        transfer_generation=snapshot.generation,
        last_event=snapshot.last_event,
        uptime_s=snapshot.uptime_s,
        audit=snapshot.audit,
    )
