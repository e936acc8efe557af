"""The head of every frame: which daemon, how it is, and its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvd import __version__
from kvd.core.inspect.snapshot import totals
from kvd.core.inspect.words import node_word
from kvd.core.peers.peer import Life
from kvd.wire.console import Latency, Vitals

if TYPE_CHECKING:
    from kvd.console.scene import Scene


class Worry(msgspec.Struct, frozen=True):
    """How many concerns there are, and how grave the gravest is: empty where there is none."""

    count: int = 0
    worst: str = ""


class Loop(msgspec.Struct, frozen=True):
    """How the event loop does: see ``Vitals``."""

    lag_s: float = 0.0
    console_share: float = 0.0


def vitals(scene: Scene, worry: Worry, latency: Latency, loop: Loop) -> Vitals:
    """One walk over the open parts and the peers; everything else is counted already."""
    node = scene.node
    decoder, prefiller = node.decoder, node.prefiller
    return Vitals(
        at_s=scene.now_s,
        node=node.settings.name,
        incarnation=node.settings.incarnation,
        version=__version__,
        state=node_word(node),
        transport=node.transport,
        generation=node.peers.generation,
        started_s=node.started_s,
        lag_s=loop.lag_s,
        clients=len(node.sessions.by_id),
        leases=len(node.leases.leases),
        rooms=len(decoder.parts) + len(prefiller.rooms.by_room),
        waiting=len(node.admission),
        peers=len({*node.peers.by_name, *(one.name for one in node.peers.dialed.values())}),
        peers_up=sum(peer.life is Life.UP for peer in node.peers.by_name.values()),
        findings=worry.count,
        worst=worry.worst,
        last_event=node.out.seq,
        totals=totals(node),
        sources=scene.recent.sources(),
        latency=latency,
        moving_bytes_in=sum(part.moved_bytes for part in decoder.parts.values()),
        moving_bytes_out=sum(part.moved_bytes for part in prefiller.rooms.live()),
        console_share=loop.console_share,
    )
