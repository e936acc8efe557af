"""How bytes travel: to each peer, by the kind of memory that they leave and reach, and in here.

The transfer process sees it from the first writes of each kind, and says so. What UCX has no way
for it emulates in software, at about 1 GB/s where copy engines move 50: nobody would notice, but
for requests that are slow. So it is told, with what to do about it, wherever a peer is shown::

    log         slow-path, once for each kind of memory and agent
    kvd status  below the peer          kvd why peer:NAME, handoffs with it
    kvd doctor  of the running daemon, and by transfers of its own

Memory of this host that copies of devices read and write is registered with CUDA meanwhile; what
is not passes a stage, at the speed of the processor's memory copies. That is said too.

What must not live here: how it is seen (``transfer.post_queue``), which way is taken (UCX).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.inputs import PathSide
from kvd.core.peers.peer import PeerWay
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.inputs import AgentLoaded, MemoryPinned, PathFound
    from kvd.core.outbox import Outbox
    from kvd.core.peers.peer import Peer


def way_words(peer: Peer) -> str:
    """How bytes travel to a peer, as far as it is known."""
    return "; ".join([way.words for way in peer.ways])


def slow_words(peer: Peer) -> str:
    """Which of its ways are slow, and what to do; empty where none is."""
    return "; ".join([f"{way.words}: {way.advice}" for way in peer.ways if way.is_slow])


class Ways:
    """Takes note of what the transfer process sees. ``pinned``: by region."""

    def __init__(self, out: Outbox) -> None:
        self.pinned: dict[str, MemoryPinned] = {}
        self._out = out

    def loaded(self, peer: Peer, got: AgentLoaded) -> None:
        """Its agent is new, and a first write of host memory has arrived."""
        host = PathSide.HOST
        peer.ways = (PeerWay(source=host, destination=host, path=got.path),)

    def found(self, peer: Peer, got: PathFound) -> None:
        """Bytes of a device have arrived, or reached one."""
        way = PeerWay(
            source=got.source, destination=got.destination, path=got.path, bytes_s=got.bytes_s
        )
        sides = (way.source, way.destination)
        others = [known for known in peer.ways if (known.source, known.destination) != sides]
        peer.ways = (*others, way)
        if way.is_slow:
            self._out.emit(
                events.SlowPath(
                    peer=peer.name,
                    incarnation=peer.incarnation,
                    what=f"{way.words}",
                    why=way.advice,
                )
            )

    def memory_pinned(self, got: MemoryPinned) -> None:
        """Memory that copies of devices read or write is registered with CUDA, or is not."""
        self.pinned[got.region] = got
        self._out.emit(
            events.Pinned(region=got.region, pinned_bytes=got.pinned_bytes, took_s=got.took_s)
        )
        if got.why:
            self._out.emit(
                events.SlowPath(
                    peer="", incarnation="", what=_unpinned(got), why=f"{got.why}; {_UNPINNED}"
                )
            )

    def gone(self) -> None:
        """Our transfer process is reaped, and what it had pinned with it."""
        self.pinned = {}

    def slow_words(self) -> str:
        """What of this node's own copies is slow, and what to do; empty where nothing is."""
        slow = [got for got in self.pinned.values() if got.why]
        return "; ".join([f"{_unpinned(got)}: {got.why}; {_UNPINNED}" for got in slow])


_UNPINNED = (
    "the rest is copied by way of a stage, at the speed of the processor's memory copies: look at "
    "the free memory of this host and at the limits of the unit or container, or lower "
    "pool.saved_size"
)


def _unpinned(got: MemoryPinned) -> str:
    """Like ``region kv.saved: 0.25 of 1.00 GiB are registered with CUDA``."""
    of, done = got.region_bytes / 2**30, got.pinned_bytes / 2**30
    return f"region {got.region}: {done:.2f} of {of:.2f} GiB are registered with CUDA"
