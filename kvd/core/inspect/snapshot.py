"""The node's state as plain data: one snapshot between two steps. Reads everything, only reads.

What each thing says is in ``schema``, what its row is in ``rows``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET

from kvd import __version__
from kvd.core.cache.namespaces import told
from kvd.core.inspect.evicted import eviction_state
from kvd.core.inspect.quota_states import quota_states
from kvd.core.inspect.rows import (
    client_rows,
    peer_rows,
    pool_rows,
    receive_row,
    send_row,
    waiting_rows,
)
from kvd.core.inspect.schema import CLIENT, LEASE, PEER, POOL, ROOM, WAITING
from kvd.core.inspect.words import mark_words, node_word
from kvd.core.tiers.demotion import NodeDemotion
from kvd.core.tiers.promotion import PagePromotion, TierWait
from kvd.types import count
from kvd.wire.snapshot import LateMark, PinState, Snapshot, TierState, Totals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.mark_waits import MarkWait
    from kvd.core.leases.pins import PinRecord
    from kvd.core.tiers.tier import StorageTier
    from kvd.wire.snapshot import PoolState, RoomState, WaitingState


def snapshot(node: NodeView) -> Snapshot:
    """Everything there is to see, ages computed against the time of the running step."""
    clients = client_rows(node)
    return Snapshot(
        node=node.settings.name,
        incarnation=node.settings.incarnation,
        version=__version__ + node.settings.build,
        uptime_s=node.out.at_s - node.started_s,
        state=node_word(node),
        transport=node.transport,
        generation=node.peers.generation,
        last_event=node.out.seq,
        pools=pool_states(node),
        leases=tuple([LEASE.state(node, lease) for lease in node.leases.leases.values()]),
        waiting=tuple(waiting_states(node)),
        rooms=tuple(room_states(node)),
        peers=tuple([PEER.state(node, row) for row in peer_rows(node).values()]),
        clients=tuple([CLIENT.state(node, clients[number]) for number in node.sessions.by_id]),
        totals=totals(node),
        recorder=node.recorded.state,
        audit=node.audit.state(),
        drain=node.drainer.state(),
        epochs=dict(sorted(node.epochs.by_namespace.items())),
        slow_path=node.ways.slow_words(),
        pinned_bytes={name: got.pinned_bytes for name, got in node.ways.pinned.items()},
        tiers=tuple([tier_state(node, tier) for tier in node.tiers.each]),
        quotas=quota_states(node),
        evictions=eviction_state(node),
        pins=tuple([pin_state(node, pin) for pin in node.pins.by_id.values()]),
        pins_gave_way=node.pins.gave_way,
        late_marks=tuple(_late_marks(node)),
        kv_events=UNSET if node.announcer is None else node.announcer.state,
    )


def _late_marks(node: NodeView) -> Iterator[LateMark]:
    """What engines have said to wait for, and may still."""
    at_s = node.out.at_s
    waiting: dict[tuple[int, str], list[MarkWait]] = {}
    for wait in node.engine_copies.marks:
        waiting.setdefault((wait.session, wait.device), []).append(wait)
    for wait, *others in waiting.values():
        more = f", and {len(others)} more" if others else ""
        yield LateMark(
            session=wait.session,
            lease=wait.lease,
            waited_s=at_s - wait.since_s,
            left_s=wait.until_s - at_s,
            words=f"{mark_words(node, wait)}{more}",
            device=wait.device,
            orders=1 + len(others),
        )


def totals(node: NodeView) -> Totals:
    """Counters since the incarnation began."""
    decoder, prefiller = node.decoder, node.prefiller
    return Totals(
        steps=node.steps,
        events=node.out.seq,
        leases_opened=node.leases.opened,
        leases_released=node.leases.released,
        handoffs_delivered=decoder.delivered + prefiller.settled_sends.delivered,
        handoffs_failed=decoder.failed + prefiller.settled_sends.failed,
        sent_bytes=prefiller.posts.sent_bytes,
        received_bytes=decoder.received_bytes,
        saved_bytes=decoder.saved_bytes,
        evicted_pages=node.leases.evictor.evicted_pages,
        messages_refused=node.refused,
        violations=node.audit.violations,
        leases_retracted=node.retractor.retracted,
        leases_resumed=node.retractor.resumed,
        restored_bytes=node.retractor.restored_bytes,
        spared_bytes=node.retractor.spared_bytes,
    )


def tier_state(node: NodeView, tier: StorageTier) -> TierState:
    """One tier below the pool."""
    counts, moves = tier.counts, node.tiers.moves
    waits = [waiter.tier for waiter in node.admission.side_queue.waiters.values()]
    return TierState(
        tier=tier.name,
        state=tier.word,
        why=tier.why,
        generation=tier.generation,
        demotion=tier.settings.demotion.value,
        objects=tier.index.n_objects,
        capacity_objects=tier.index.capacity,
        object_bytes=tier.settings.object_bytes,
        writing=moves.n_objects(tier, NodeDemotion),
        reading=moves.n_objects(tier, PagePromotion),
        waiting=sum([isinstance(wait, TierWait) and wait.tier is tier for wait in waits]),
        written=counts.written,
        written_bytes=counts.written_bytes,
        unwritten=counts.unwritten,
        evicted_unwritten=counts.evicted_unwritten,
        dropped=counts.dropped,
        read=counts.read,
        read_bytes=counts.read_bytes,
        bad=counts.bad,
        waits=counts.waits,
        hits=counts.hits,
        late=counts.late,
        no_room=counts.no_room,
        failed_orders=counts.failed_orders,
        cut=counts.cut,
        read_bytes_per_s=tier.read_rate,
        written_bytes_per_s=tier.written_rate,
        is_shared=tier.writes is not None,
        probes=counts.probes,
        probe_hits=counts.probe_hits,
        unasked=counts.unasked,
        missed=tier.index.removed.n_missed,
        missed_soon=tier.index.removed.n_missed_soon,
        over_ceiling=counts.over_ceiling,
        gives_way_s=tier.gives_way_s,
        gave_way_s=counts.gave_way_s + (tier.gives_way_s or 0.0),
    )


def pin_state(node: NodeView, pin: PinRecord) -> PinState:
    """One pin."""
    return PinState(
        pin=pin.id,
        owner=pin.owner,
        session=pin.session,
        lease=pin.lease.id if pin.lease is not None else 0,
        namespace=told(pin.namespace),
        tokens=pin.tokens,
        pages=count(pin.lease.page_table) if pin.lease is not None else 0,
        age_s=node.out.at_s - pin.since_s,
        ttl_s=pin.until_s - node.out.at_s,
        tier=node.pins.tier_of(pin),
        kept=tuple(node.tiers.pins.kept(pin.id)),
    )


def pool_states(node: NodeView) -> tuple[PoolState, ...]:
    """Each component with page ids of its own, the first one first (I1)."""
    return tuple([POOL.state(node, row) for row in pool_rows(node)])


def room_states(node: NodeView) -> list[RoomState]:
    """Every part that is not over, both sides; delivered ones until their lease is released."""
    receives = [receive_row(node.leases, part) for part in node.decoder.open.known()]
    sends = [send_row(node.leases, part) for part in node.prefiller.known()]
    return [ROOM.state(node, row) for row in (*receives, *sends)]


def waiting_states(node: NodeView) -> list[WaitingState]:
    """Every waiter in the order of the queue."""
    holders: dict[str, tuple[str, ...]] = {}
    """By budget: many wait for the same."""
    states = []
    for row in waiting_rows(node):
        budget = row.waiter.budget
        # Found once for a budget: hundreds may wait for the same, and each answer is a look at all
        # leases.
        if row.lacks_pages:
            if budget not in holders:
                holders[budget] = node.owners.of_most_pages(budget)
            row.held_by = holders[budget]
        states.append(WAITING.state(node, row))
    return states
