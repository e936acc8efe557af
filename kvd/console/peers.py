"""The view of the other daemons: whether they live, whether pages can go, and how much went."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvd.console.view import Field, View
from kvd.core.inspect.words import agent_words, layout_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.console.history import PeerTraffic
    from kvd.core.peers.peer import Peer
    from kvd.wire.console import Query


class PeerRow:
    """One daemon: as it said itself, as we dial it, or both; with what is open with it now."""

    __slots__ = (
        *("address", "in_bytes", "name", "out_bytes", "peer", "posts", "receives", "sends"),
        "traffic",
    )

    def __init__(self, name: str, peer: Peer | None, address: str, traffic: PeerTraffic) -> None:
        self.name = name
        self.peer = peer
        """None: it has not said Hello."""
        self.address = address
        self.traffic = traffic
        self.receives = self.sends = self.posts = 0
        self.in_bytes = traffic.in_bytes
        self.out_bytes = traffic.out_bytes


def neighbours(context: Context) -> dict[str, PeerRow]:
    """Everybody whom we dial or who dialed us, by name; one look at all open parts."""
    peers, recent = context.node.peers, context.recent
    dialed = {one.name: one.address for one in peers.dialed.values()}
    found = {
        name: PeerRow(
            name, peers.by_name.get(name), dialed.get(name, "dialed us"), recent.traffic(name)
        )
        for name in dict.fromkeys([*peers.by_name, *dialed])
    }
    _count_open(context, found)
    return found


def _count_open(context: Context, found: dict[str, PeerRow]) -> None:
    prefiller = context.node.prefiller
    receives, sends = Counter[str](), Counter[str]()
    incoming, outgoing, posts = Counter[str](), Counter[str](), Counter[str]()
    for receive in context.node.decoder.parts.values():
        receives[receive.peer] += 1
        incoming[receive.peer] += receive.moved_bytes
    for send in prefiller.known():
        sends[send.peer] += 1
        posts[send.peer] += len(send.outstanding)
        outgoing[send.peer] += prefiller.posts.live_bytes(send)
    for one in found.values():
        one.receives, one.sends = receives[one.name], sends[one.name]
        one.posts = posts[one.name]
        one.in_bytes += incoming[one.name]
        one.out_bytes += outgoing[one.name]


def _peers(context: Context, _: Query) -> Iterator[PeerRow]:
    yield from neighbours(context).values()


PEERS: View[PeerRow] = View(
    "peers",
    (
        Field("name", "text", lambda _, one: one.name),
        Field("address", "text", lambda _, one: one.address),
        Field("state", "state", lambda _, one: one.peer.life.value if one.peer else "silent"),
        Field("incarnation", "text", lambda _, one: one.peer.incarnation if one.peer else ""),
        Field(
            "generation",
            "count",
            lambda _, one: one.peer.generation if one.peer else None,
            "of its transfer process",
        ),
        Field(
            "agent",
            "text",
            lambda _, one: agent_words(one.peer) if one.peer else "none",
            "whether we can send to it",
        ),
        Field(
            "agent_since",
            "since",
            lambda _, one: (one.peer.agent_since_s or None) if one.peer else None,
        ),
        Field("rtt", "ms", lambda _, one: one.peer.round_trip_s * 1e3 if one.peer else None),
        Field("heard", "since", lambda _, one: one.peer.heard_s if one.peer else None),
        Field(
            "layout",
            "text",
            lambda _, one: layout_words(one.peer) if one.peer else "unknown",
            "whether its pages are like ours",
        ),
        Field("receives", "count", lambda _, one: one.receives, "under way from it"),
        Field("sends", "count", lambda _, one: one.sends, "under way to it"),
        Field("posts", "count", lambda _, one: one.posts, "under way to it"),
        Field("in_bytes", "bytes", lambda _, one: one.in_bytes, "counter"),
        Field("out_bytes", "bytes", lambda _, one: one.out_bytes, "counter"),
        Field("delivered", "count", lambda _, one: one.traffic.delivered, "counter"),
        Field("failed", "count", lambda _, one: one.traffic.failed, "counter"),
        Field("trouble", "text", lambda context, one: context.node.peers.trouble(one.name)),
    ),
    objects=_peers,
    key=lambda one: f"peer:{one.name}",
    sort="name",
)
