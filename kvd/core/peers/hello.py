"""What a Hello must satisfy before its sender is a peer: each refusal says what to change."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, Protocol

from kvd.errors import Code, Refusal
from kvd.types import short
from kvd.wire.peer import PROTOCOL, Hello

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.core.peers.claims import NameClaims
    from kvd.core.peers.peer import Dialed, Peer
    from kvd.core.settings import Settings
    from kvd.wire.peer import Message


INCARNATION: Final = re.compile("[0-9a-f]{32}")
"""Nothing else compares with an incarnation."""

NODE: Final = re.compile("[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""As the configuration allows; whatever else would stand in tables, metrics and refusals."""

MAX_PEERS: Final = 4096
"""Names kept: far above any cluster, and an end to a stranger that invents names."""

MAX_LAYOUT_CHARS: Final = 16_384
"""Of a pool layout as text: 128 shards are 4 KiB at most, a component some 200 characters. Nothing
longer is read."""

MAX_LAYOUT_PARTS: Final = 2048
"""Values in it, counted by what stands between them before it is read: to read a value costs up to
half a microsecond, and 128 shards are 640 of them."""

NEWS_AT_ONCE: Final = 16
NEWS_PER_S: Final = 4.0
"""New processes or generations of one node that are believed: each makes a sending agent, and
nobody restarts as often. What is above that is heard with the next Hello."""


class KnownPeers(Protocol):
    """Who is known already, as far as a Hello is measured by it."""

    def unlisted(self, peer: str) -> Refusal | None:
        """Why a node of that name may exchange nothing; None: it may."""

    @property
    def by_name(self) -> Mapping[str, Peer]:
        """Peers by the names of their nodes."""

    @property
    def by_incarnation(self) -> Mapping[str, Peer]:
        """Peers by their lives."""

    @property
    def dialed(self) -> Mapping[str, Dialed]:
        """Links that this node made, and whom it wanted there."""

    @property
    def claims(self) -> NameClaims:
        """Processes that want the name of another one."""


def unwelcome(message: Hello, link: str, peers: KnownPeers, mine: Settings) -> Refusal | None:
    """Why ``mine`` does not exchange KV with the sender; None when it does."""
    is_named = INCARNATION.fullmatch(message.source) and NODE.fullmatch(message.node)
    if not is_named or message.generation < 1:
        return Refusal(
            Code.BAD_REQUEST,
            f"a Hello of node {message.node[:80]!r}, incarnation {message.source[:40]!r}, "
            f"generation {message.generation}: a name, 32 hex digits, and 1 or more are expected",
            side=mine.name,
        )
    if message.source == mine.incarnation or message.node == mine.name:
        return Refusal(
            Code.PEER_UNKNOWN,
            f"a peer calls itself {message.node!r}, which is this node's own name: "
            "give every node its own node.name",
            side=mine.name,
        )
    if message.protocol != PROTOCOL:
        return Refusal(
            Code.VERSIONS_DIFFER,
            f"{message.node} speaks peer protocol {message.protocol}, {mine.name} speaks "
            f"{PROTOCOL}: run the same kvd version on both",
            side=mine.name,
            numbers={"theirs": message.protocol, "ours": PROTOCOL},
        )
    # Before its name is looked up or kept: who may not speak leaves no trace but this refusal.
    refusal = peers.unlisted(message.node)
    if refusal is not None:
        return refusal
    # Names are kept, so a stranger that invents names must meet a limit; known ones always may.
    if message.node not in peers.by_name and len(peers.by_name) >= MAX_PEERS:
        return Refusal(
            Code.NO_ROOM,
            f"{len(peers.by_name)} nodes have said Hello to {mine.name}, which is its limit: name "
            "those that may in peers.allow",
            side=mine.name,
            numbers={"peers": len(peers.by_name), "limit": MAX_PEERS},
        )
    return _too_long(message, mine.name) or _unexpected_name(message, link, peers, mine.name)


def impostor(message: Message, proven: str, peers: KnownPeers, mine: Settings) -> Refusal | None:
    """Why a message is not acted on though its sender may connect: it speaks as another node.

    ``proven`` is whose key the sender has; empty where links need no keys, and then anyone may.
    """
    if not proven:
        return None
    if isinstance(message, Hello):
        claimed = message.node
    else:
        speaker = peers.by_incarnation.get(message.source)
        # Of an incarnation that nobody knows there is no name to steal: it is refused later for
        # that.
        claimed = proven if speaker is None else speaker.name
    if claimed == proven:
        return None
    return Refusal(
        Code.PEER_UNKNOWN,
        f"the key of {proven!r} speaks as {claimed[:80]!r}: make node.name there and peers.keys of "
        f"{mine.name} equal",
        side=mine.name,
    )


def _too_long(message: Hello, side: str) -> Refusal | None:
    """Before a word of it is read: what it would cost to read."""
    text = message.layout
    for n, limit, what in (
        (len(text), MAX_LAYOUT_CHARS, "characters"),
        (_parts_at_most(text), MAX_LAYOUT_PARTS, "values"),
    ):
        if n > limit:
            return Refusal(
                Code.TOO_LARGE,
                f"{message.node[:80]} describes its pool in {n} {what}, {limit} are read at most",
                side=side,
                numbers={what: n, "limit": limit},
            )
    return None


def _parts_at_most(text: str) -> int:
    if len(text) > MAX_LAYOUT_CHARS:
        return 0  # it is refused for that
    return text.count(",") + text.count("[") + text.count("{")


def _unexpected_name(message: Hello, link: str, peers: KnownPeers, side: str) -> Refusal | None:
    """One link and one process have one name each, and a name has one process."""
    dialed = peers.dialed.get(link)
    # Whoever answers at a configured address must be whom the operator named there: else a wrong
    # address would have a room's pages written by another node.
    is_nameless = dialed is not None and dialed.name == dialed.address  # an engine gave that alone
    if dialed is not None and dialed.name != message.node and not is_nameless:
        by = f"an engine of {side}" if dialed.by_address else f"peers.connect of {side}"
        return Refusal(
            Code.PEER_UNKNOWN,
            f"the daemon at {dialed.address} calls itself {message.node!r}, "
            f"{by} calls it {dialed.name!r}: make the names equal",
            side=side,
        )
    speaker = peers.by_incarnation.get(message.source)
    if speaker is not None and speaker.name != message.node:
        return Refusal(
            Code.PEER_UNKNOWN,
            f"incarnation {short(message.source)} calls itself {message.node!r}, "
            f"it was {speaker.name!r} before",
            side=side,
        )
    known = peers.by_name.get(message.node)
    # A delayed Hello of a former process must not take the name back: it would prove the living one
    # gone, and free pages that it writes.
    if known is not None and message.source != known.incarnation:
        return peers.claims.refusal(known, message)
    return None
