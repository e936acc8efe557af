"""What is read off the daemon's state at the moment of a scrape.

``gauges_of`` makes it from the snapshot that ``kvd status`` prints, so that both say the same.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from kvd.wire.snapshot import AuditState, BufferState, WindowState

if TYPE_CHECKING:
    from kvd.wire.snapshot import PoolState, Snapshot

OVER = frozenset({"ready", "closed", "settled", "forgotten"})
"""States of a part in which nothing is under way any more."""


class PoolGauges(msgspec.Struct, frozen=True):
    """Pages of one component with page ids of its own.

    ``pages`` is by state, and its values add up to all pages. ``memory_bytes`` is by component: its
    own, and those in lockstep with it.
    """

    pool: str
    component: str
    memory_bytes: dict[str, int]
    pages: dict[str, int]
    evictable_pages: int
    locked_pages: int
    saved_pages: dict[str, int]
    """Of the host memory beside it for retracted leases, by state."""
    window: WindowState | None
    buffer: BufferState | None


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
    is_draining: bool
    transfer_generation: int
    last_event: int
    uptime_s: float
    audit: AuditState


def gauges_of(snapshot: Snapshot) -> Gauges:
    """The gauges that a snapshot gives."""
    leases = Counter((lease.reason.partition(" ")[0], lease.state) for lease in snapshot.leases)
    inflight = Counter(room.side for room in snapshot.rooms if room.state not in OVER)
    return Gauges(
        pools=tuple(map(_pool_gauges, snapshot.pools)),
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
        is_draining=snapshot.drain is not None,
        transfer_generation=snapshot.generation,
        last_event=snapshot.last_event,
        uptime_s=snapshot.uptime_s,
        audit=snapshot.audit,
    )


def _pool_gauges(pool: PoolState) -> PoolGauges:
    counted = {
        "free": pool.free_pages,
        "leased": pool.held_pages,
        "cached": pool.cached_pages,
        "quarantined": pool.quarantined_pages,
        "condemned": pool.condemned_pages,
    }
    memory_bytes = {pool.component: pool.page_bytes * pool.total_pages}
    for one in pool.companions:
        memory_bytes[one.component] = one.page_bytes * one.total_pages
    return PoolGauges(
        pool=pool.pool,
        component=pool.component,
        memory_bytes=memory_bytes,
        pages=counted | {"reserved": pool.total_pages - sum(counted.values())},
        evictable_pages=pool.evictable_pages,
        locked_pages=pool.locked_pages,
        saved_pages={
            "used": pool.saved_pages,
            "free": pool.saved_capacity_pages - pool.saved_pages,
        },
        window=pool.window,
        buffer=pool.buffer,
    )
