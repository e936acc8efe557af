"""When a ``Tick`` has something to do: a node to which nothing happens needs few of them.

Invariant: a ``Tick`` that comes to a node at rest before ``tick_dues`` says nothing and orders
nothing, so whoever leaves it out changes nothing but what it costs.

What must not live here: timers (``kvd.daemon.beats`` and the simulator have them), and what is due
for the shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.core.inputs import AuditTurn, FromPeer, KvEventsSaid, RecorderSaid, Tick
from kvd.core.peers.peer import Life
from kvd.wire.peer import Ping

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvd.core.inputs import Input
    from kvd.core.node_parts import NodeParts
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings

TICK_S: Final = 0.05
"""From tick to tick while anything happens: the resolution of deadlines and repetitions."""


def is_still(happened: Input) -> bool:
    """Whether it comes to a node to which nothing happens."""
    return isinstance(happened, Tick | AuditTurn | RecorderSaid | KvEventsSaid) or (
        isinstance(happened, FromPeer) and isinstance(happened.message, Ping)
    )


def next_tick_s(now_s: float, dues: Sequence[float]) -> float:
    """When a node at rest has its next tick; in any case within ``TICK_S`` after the first due."""
    # All that is due within one tick waits for the last of it, as it would for a tick.
    until_s = max(min(dues), now_s) + TICK_S
    return max(due for due in dues if due <= until_s)


def tick_dues(node: NodeParts) -> list[float]:
    """When a ``Tick`` has something to do next, if nothing else happens.

    None while anything is under way that has a deadline: then every tick counts.
    """
    if _is_under_way(node):
        return []
    settings = node.settings
    silences = [
        due for peer in node.peers.by_name.values() for due in _silence_dues(peer, settings)
    ]
    ends = [pin.until_s for pin in node.pins.by_id.values()]
    return [node.peers.pulse.due_s, *silences, *ends, *node.tiers.dues()]


def _is_under_way(node: NodeParts) -> bool:
    return bool(
        node.decoder.open.parts
        or node.decoder.quarantines.leases
        or node.prefiller.rooms.by_room
        or node.prefiller.settled_sends.settled
        or node.prefiller.expired_rooms.by_room
        or node.pulls.asks.by_id
        or node.pulls.asks.queued
        or node.admission.queue
        or node.leases.evictor.evictions.fresh
        or node.tiers.moves.under_way
        or node.tiers.promotions.probes.under_way
        or node.kept_answers.writing is not None
        or node.inquiries.open
        or node.drainer.drain is not None
        or not node.peers.generation
        or (node.announcer is not None and node.announcer.is_pending)
    )


def _silence_dues(peer: Peer, settings: Settings) -> Iterator[float]:
    """When this peer becomes suspect, or lost, if it stays silent."""
    if peer.life is Life.UP:
        yield peer.heard_s + settings.suspect_s
    if peer.life is not Life.LOST:
        yield peer.heard_s + settings.lost_s
