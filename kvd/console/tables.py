"""The tables of who holds, sends and waits: rows of ``core.inspect`` with what consoles alone know.

Every column is declared in ``kvd.core.inspect.schema``, with the fields of the snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from typing_extensions import override

from kvd.console.history import WINDOW_S
from kvd.console.view import View
from kvd.core.cache.lease_record import LeaseRecord
from kvd.core.handoff.parts import SendPart
from kvd.core.inspect.evicted import eviction_state
from kvd.core.inspect.rows import (
    ClientRow,
    HandoffRow,
    PeerRow,
    PoolRow,
    WaitingRow,
    client_rows,
    peer_rows,
    pool_rows,
    receive_row,
    send_row,
    waiting_rows,
)
from kvd.core.inspect.schema import CLIENT, LEASE, PEER, POOL, ROOM, WAITING, StateField
from kvd.core.inspect.snapshot import tier_state
from kvd.core.tiers.promotion import TierWait
from kvd.wire.events import DELIVERED

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.core.inspect.view import NodeView
    from kvd.wire.console import Query
    from kvd.wire.events import HandoffEnded
    from kvd.wire.snapshot import EvictedPrefix, TierState

MAX_DELIVERED = 200
"""Handoffs of the last minute that went well."""


class Leases(View[LeaseRecord]):
    """Leases may be gone before their row is made."""

    @override
    def is_there(self, context: Context, lease: LeaseRecord) -> bool:
        """Whether it has not been released meanwhile."""
        return lease.id in context.node.leases.leases


LEASES = Leases(
    "leases",
    LEASE.columns,
    objects=lambda context, _: context.node.leases.leases.values(),
    key=lambda lease: f"lease:{lease.id}",
    sort="since",
)


def _clients(context: Context, _: Query) -> Iterator[ClientRow]:
    for row in client_rows(context.node).values():
        row.alive = [context.engines.is_alive(pid) for pid in row.session.pids]
        row.calls = context.engines.calls(row.session.id)
        yield row


CLIENTS: View[ClientRow] = View(
    "clients",
    CLIENT.columns,
    objects=_clients,
    key=lambda row: f"client:{row.session.id}",
    sort="-held",
)


def _rooms(context: Context, _: Query) -> Iterator[HandoffRow]:
    """What is under way of both sides, what has failed, then what went well, for who wants that.

    The oldest first of what is under way, as it may be stuck, and what is kept on purpose behind
    it; of what is over the latest first. A delivered one is a lease like others.
    """
    context.progress.look(context.node, context.now_s)
    node = context.node
    alive = [receive_row(node.leases, part) for part in node.decoder.open.parts.values()]
    alive += [send_row(node.leases, part) for part in node.prefiller.known()]
    for row in alive:
        row.moved_s = context.progress.moved_s(row.side, row.part)
        if isinstance(row.record, SendPart) and (keeping := row.record.keeping) is not None:
            limit = f"of {keeping.limit}" if keeping.limit else "of any"
            row.state, row.moved_s = f"kept {keeping.takers} {limit}", None
    yield from sorted(alive, key=lambda row: (row.state.startswith("kept "), row.since_s))
    shown = {row.ref for row in alive}
    failed = [_ended_row(failure.end, "failed") for failure in reversed(context.recent.failed)]
    yield from [row for row in failed if row.ref not in shown]
    delivered = 0
    for end in reversed(context.recent.ended):
        if context.now_s - end.at_s > WINDOW_S or delivered == MAX_DELIVERED:
            break
        if end.outcome in DELIVERED:
            delivered += 1
            row = _ended_row(end, "delivered")
            if row.ref not in shown:
                yield row


def _ended_row(end: HandoffEnded, state: str) -> HandoffRow:
    return HandoffRow(
        record=end,
        side=end.side,
        part=end.part,
        state=state,
        decode_prefix_len=end.decode_prefix_len,
        total_bytes=end.moved_bytes if state == "delivered" else None,
        since_s=end.at_s - end.took_s,
        ended_s=end.at_s,
    )


ROOMS: View[HandoffRow] = View("rooms", ROOM.columns, objects=_rooms, key=lambda row: row.ref)


def _peers(context: Context, _: Query) -> Iterator[PeerRow]:
    for row in peer_rows(context.node).values():
        traffic = context.recent.traffic(row.name)
        row.in_bytes += traffic.in_bytes
        row.out_bytes += traffic.out_bytes
        row.delivered, row.failed = traffic.delivered, traffic.failed
        yield row


PEERS: View[PeerRow] = View(
    "peers", PEER.columns, objects=_peers, key=lambda row: f"peer:{row.name}", sort="name"
)


def _pools(context: Context, _: Query) -> Iterator[PoolRow]:
    for row in pool_rows(context.node):
        row.held_by = context.biggest.of(context.node, context.now_s, row.component.name)
        yield row


POOLS: View[PoolRow] = View(
    "pools", POOL.columns, objects=_pools, key=lambda row: f"pool:{row.component.name}"
)


def _waiting(context: Context, _: Query) -> Iterator[WaitingRow]:
    for row in waiting_rows(context.node):
        if row.lacks_pages:
            row.held_by = context.biggest.of(context.node, context.now_s, row.waiter.budget)
        yield row


class EvictedRow(NamedTuple):
    """A prefix that has left the pool, when, and who asked for it after that."""

    left: EvictedPrefix
    gone_s: float
    missed_by: str
    missed_s: float | None


def _evicted(context: Context, _: Query) -> Iterator[EvictedRow]:
    """The last ones, then those before them that were asked for again."""
    state, now_s = eviction_state(context.node), context.node.out.at_s
    missed = {(again.evicted.prefix, again.evicted.ago_s): again for again in state.missed}
    lefts = [*state.evicted, *[again.evicted for again in state.missed]]
    for (prefix, ago_s), left in {(left.prefix, left.ago_s): left for left in lefts}.items():
        again = missed.get((prefix, ago_s))
        # To a millisecond: a moment is what a row has, and the record tells ages.
        yield EvictedRow(
            left,
            round(now_s - ago_s, 3),
            again.missed_by if again is not None else "",
            round(now_s - again.ago_s, 3) if again is not None else None,
        )


EVICTED: View[EvictedRow] = View(
    "evicted",
    (
        StateField("gone", "since", "gone_s"),
        StateField("pages", "pages", "left.pages"),
        StateField("wrote", "text", "left.wrote", "who had brought it"),
        StateField("needed_by", "text", "left.needed_by", "who needed its pages"),
        StateField("need", "text", "left.need"),
        StateField("missed_by", "text", "", "who asked for it again, and found it gone"),
        StateField("missed", "since", "missed_s"),
        StateField("tier", "text", "left.tier", "where it lies now; empty: nowhere"),
        StateField("hits", "count", "left.hits"),
        StateField("unused", "seconds", "left.unused_s", "when it left"),
        StateField("end_tokens", "tokens", "left.end_tokens"),
        StateField("namespace", "text", "left.namespace"),
        StateField("prefix", "text", "left.prefix"),
    ),
    objects=_evicted,
    key=lambda one: f"evicted:{one.left.prefix}:{one.gone_s}",
)


def _tiers(context: Context, _: Query) -> Iterator[TierState]:
    yield from [tier_state(context.node, tier) for tier in context.node.tiers.each]


def _longest_wait(node: NodeView, one: TierState) -> float | None:
    """Since when the oldest of the requests waits that wait for what is read there."""
    waiters = node.admission.side_queue.waiters.values()
    waits = [(waiter.since_s, waiter.tier) for waiter in waiters]
    found = [
        at_s for at_s, wait in waits if isinstance(wait, TierWait) and wait.tier.name == one.tier
    ]
    return min(found, default=None)


TIERS: View[TierState] = View(
    "tiers",
    (
        StateField("tier", "text"),
        StateField("state", "state"),
        StateField("why", "text"),
        StateField("objects", "pages", "", "what lies there"),
        StateField("capacity_objects", "pages"),
        StateField("read_tokens", "tokens", lambda node, one: one.read * node.leases.page_size),
        StateField("read_bytes_per_s", "bytes"),
        StateField("waits", "count", "", "requests that waited for it"),
        StateField("hits", "count", "", "those of them that got pages"),
        StateField("late", "count", "", "those whose time was over before"),
        StateField("bad", "count", "", "pages that were not there, or did not verify"),
        StateField("waiting", "count", "", "now"),
        StateField("waiting_since", "since", _longest_wait, "the first of those"),
    ),
    objects=_tiers,
    key=lambda one: f"tier:{one.tier}",
)


WAITING_REQUESTS: View[WaitingRow] = View(
    "waiting", WAITING.columns, objects=_waiting, key=lambda row: f"waiting:{row.waiter.number}"
)
