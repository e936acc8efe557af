"""The five HTTP pages of a daemon: probes, metrics, and what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from kvd import __version__
from kvd.core.inspect.snapshot import snapshot
from kvd.core.layout.spec import PoolSpec
from kvd.observe.exposition import CONTENT_TYPE, Build, Exposition
from kvd.observe.http import PLAIN, HttpPages, Response
from kvd.wire import peer
from kvd.wire.attach import PROTOCOL
from kvd.wire.kv_events import topic_of

if TYPE_CHECKING:
    from kvd.config import Config
    from kvd.core.node import NodeState
    from kvd.observe.metrics import Metrics
    from kvd.wire.snapshot import Snapshot

JSON = "application/json"

HIDDEN = "(set)"
"""What /status says in the place of a namespace; ``kvd status`` asks the admin socket."""


class KvEventInfo(msgspec.Struct, frozen=True):
    """Where a router finds the KV events of this node."""

    endpoint: str
    replay_endpoint: str
    topic: str
    block_size: int


class Info(msgspec.Struct, frozen=True):
    """What a router or an operator needs to know before talking to this node."""

    node: str
    incarnation: str
    version: str
    client_protocol: int
    peer_protocol: int
    client: str
    peers: str
    pool: PoolSpec
    kv_events: KvEventInfo | None = None
    """None: there are none."""


def exposition_of(node: NodeState, metrics: Metrics) -> Exposition:
    """The Prometheus page of a node."""
    return Exposition(
        metrics,
        Build(version=__version__, proto=str(peer.PROTOCOL), nixl=node.transport),
        lambda: snapshot(node),
    )


def http_pages(config: Config, node: NodeState, exposition: Exposition) -> HttpPages:
    """The pages of a node; each is answered from the state between two steps."""
    info = Info(
        node=config.node.name,
        incarnation=node.settings.incarnation,
        version=__version__,
        client_protocol=PROTOCOL,
        peer_protocol=peer.PROTOCOL,
        client=config.sockets.client,
        peers=config.peers.listen,
        pool=node.settings.spec,
        kv_events=_kv_event_info(config, node.settings.spec),
    )
    # Made once: nothing in it changes while the daemon lives.
    info_page = Response(200, JSON, msgspec.json.encode(info))

    def readyz() -> Response:
        # Asked first: while it drains nobody should be sent here, whether it could transfer or not.
        if node.drainer.drain is not None:
            return Response(503, PLAIN, f"{node.drainer.words()}\n".encode())
        if node.peers.generation:
            return Response(200, PLAIN, b"ready\n")
        return Response(503, PLAIN, b"the transfer process is restarting\n")

    def livez() -> Response:
        return Response(200, PLAIN, b"alive\n")

    return {
        "/livez": livez,
        "/healthz": livez,
        "/readyz": readyz,
        "/metrics": lambda: Response(200, CONTENT_TYPE, exposition.render()),
        "/info": lambda: info_page,
        "/status": lambda: Response(200, JSON, msgspec.json.encode(_for_anyone(snapshot(node)))),
    }


def _kv_event_info(config: Config, spec: PoolSpec) -> KvEventInfo | None:
    told = config.kv_events
    if not told.enabled:
        return None
    return KvEventInfo(
        endpoint=told.listen,
        replay_endpoint=told.replay,
        topic=topic_of(config.node.name, str(told.model)).decode(),
        block_size=spec.match_page_tokens,
    )


def _for_anyone(shot: Snapshot) -> Snapshot:
    """Without namespaces: they hold cache salts, and any user of this host may read this page."""
    leases = tuple(
        replace(lease, namespace=HIDDEN) if lease.namespace else lease for lease in shot.leases
    )
    return replace(shot, leases=leases)
