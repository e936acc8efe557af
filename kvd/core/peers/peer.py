"""What is known of one other daemon: who it is now, how it lives, what it said of itself.

Plain records. Who writes them: ``Peers`` (``registry``), with ``Agents`` the sending agent and with
``Pulse`` what pings bring; ``Drainer`` what a peer says of its draining.

A daemon that drains says so in its Pings, at once and then with every heartbeat; so whoever wants
something of it is refused at once, and not after a deadline. A daemon that does not say so knows
nothing of it, nor of the codes that came with it: it is told in words that it has.

What must not live here: when a record changes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from kvd.core.inputs import PathSide, WritePath
from kvd.errors import Code, Refusal

if TYPE_CHECKING:
    from kvd.core.layout.shards import Shard, ShardRoute


RETRY_S = 2.0
"""A failed agent is tried again after this; a send that comes earlier fails at once."""

SERVING, DRAINING, LEAVING = "serving", "draining", "leaving"


class Life(enum.Enum):
    """How sure we are that a peer lives."""

    UP = "up"
    SUSPECT = "suspect"
    LOST = "lost"


class Agent(enum.Enum):
    """The sending agent towards a peer's current incarnation and generation."""

    NONE = "none"
    LOADING = "loading"
    LOADED = "loaded"
    FAILED = "failed"
    DROPPING = "dropping"


class PeerDrain(msgspec.Struct, frozen=True):
    """What it said last: its ``state``, empty before it has said any, why, and since when."""

    state: str = ""
    why: str = ""
    since_s: float = 0.0

    @property
    def is_serving(self) -> bool:
        """Whether something new can be asked of it."""
        # Empty counts as serving: an older daemon never says its state.
        return self.state not in {DRAINING, LEAVING}


UNSAID = PeerDrain()


class StreamClaim(msgspec.Struct, frozen=True):
    """The streams that a peer called its own when it echoed our ping ``number``."""

    number: int = 0
    streams: tuple[str, ...] = ()


NO_CLAIM = StreamClaim()


class Layout(msgspec.Struct, frozen=True):
    """Which layout of a peer was read last: the SHA-256 of its text, and how it differs."""

    digest: bytes
    difference: str = ""


UNREAD = Layout(b"")


class Heard(msgspec.Struct, frozen=True):
    """Words, and when they were said."""

    why: str = ""
    at_s: float = float("-inf")


UNHEARD = Heard()


class EpochsApart(msgspec.Struct, frozen=True):
    """A base of namespaces, the epoch that we were in, what to do about it, and since when."""

    base: str = ""
    epoch: int = 0
    why: str = ""
    at_s: float = float("-inf")


TOGETHER = EpochsApart()


GB: Final = 1e9


class PeerWay(msgspec.Struct, frozen=True):
    """How bytes of one kind of memory go to another kind of a peer's.

    ``bytes_s`` is what was seen of the first of them; 0 where nothing was measured.
    """

    source: PathSide
    destination: PathSide
    path: WritePath
    bytes_s: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether UCX has no way of its own for it."""
        return self.path is WritePath.EMULATED

    @property
    def words(self) -> str:
        """Like ``device to host: emulated, 0.9 GB/s``."""
        speed = f", {self.bytes_s / GB:.1f} GB/s" if self.bytes_s else ""
        return f"{self.source.value} to {self.destination.value}: {self.path.value}{speed}"

    @property
    def advice(self) -> str:
        """What it means, and what to do; empty where it is a way of its own."""
        if not self.is_slow:
            return ""
        both = self.source is self.destination
        to = (
            "from device to device of one host cuda_ipc (UCX_TLS must not leave it out, both "
            "daemons must see the device), between hosts GPUDirect RDMA"
            if both
            else "GPUDirect RDMA; on one host there is none"
        )
        return (
            f"UCX has no way of its own from {self.source.value} to {self.destination.value} "
            "memory here and emulates one in software, at about 1 GB/s: keep the pool in host "
            "memory (no pool.device) and let engines move blocks by kvd's mover (worker.blocks), "
            f"or give UCX a way: {to}"
        )


@dataclass(slots=True, eq=False, repr=False)
class Peer:
    """One other daemon. Read it; the module says who writes it."""

    name: str
    link: str = ""
    incarnation: str = ""
    home: str = ""
    """Of this incarnation: whose births are in order with its own (``claims``)."""
    replaced: dict[str, int] = field(default_factory=dict)
    """Processes of other homes that had this name before, and their generations then."""
    generation: int = 0
    metadata: bytes = b""
    max_prompt_tokens: int = 0
    max_aux_bytes: int = 0
    max_frame_bytes: int = 0
    serves_pulls: bool = False
    """Whether it can be asked what it has of a prompt."""
    knows_epochs: bool = False
    """Whether it reads which epoch that is of."""
    life: Life = Life.LOST
    heard_s: float = 0.0
    layout: Layout = UNREAD
    refusal: Refusal | None = None
    """Why we send it nothing."""
    source_refusal: Refusal | None = None
    """Why we take nothing from it."""
    split: tuple[int, ...] = ()
    """How many of its pages each of ours is, for each component compared."""
    shards: tuple[Shard, ...] = ()
    """What of the model it has."""
    outgoing: tuple[ShardRoute, ...] = ()
    """What of its shards ours can fill."""
    incoming: tuple[ShardRoute, ...] = ()
    """What of ours its shards can fill; ``shards.lacking`` says what they cannot."""
    agent: Agent = Agent.NONE
    agent_since_s: float = 0.0
    agent_rest_s: float = RETRY_S
    agent_why: str = ""
    streams: tuple[str, ...] = ()
    """The connections of the agent, if it is loaded."""
    ways: tuple[PeerWay, ...] = ()
    """How bytes travel to it, while the agent is loaded."""
    claim: StreamClaim = NO_CLAIM
    """What it said last of the connections of its agent to us."""
    offer_floor: int = 0
    settled_floor: int = 0
    ping: int = 0
    ping_sent_s: float = 0.0
    round_trip_s: float = 0.0
    drain: PeerDrain = UNSAID
    news: float = 0.0
    """New processes and generations of it that were believed lately, as of ``news_s``."""
    news_s: float = 0.0
    epochs: EpochsApart = TOGETHER
    """That something was not handed over because it is in another epoch of a model."""
    refused: Heard = UNHEARD
    """Why a Hello in its name was refused last."""
    refuses: Heard = UNHEARD
    """Why it refused a message of ours last."""


@dataclass(slots=True, eq=False, repr=False)
class Dialed:
    """A configured link and the name that must answer on it."""

    name: str
    address: str
    answered: bool = False
    by_address: bool = False
    """Whether an engine named the address, and no configuration: its name is the address until its
    Hello says another, and it is hung up on when nothing is open on it."""
    used_s: float = 0.0
    trouble: str = ""
    """Why the last handshake on it failed, and when."""
    trouble_s: float = 0.0


def peer_drains(peer: Peer, now_s: float, side: str) -> Refusal | None:
    """Why nothing is received from this peer now; None while it serves."""
    if peer.drain.is_serving:
        return None
    return Refusal(
        Code.PEER_DRAINING,
        f"{drain_words(peer, now_s)}: receive from another node, or ask again when it is back",
        side=side,
        numbers={"since_s": round(now_s - peer.drain.since_s, 3)},
    )


def drain_words(peer: Peer, now_s: float) -> str:
    """That it begins nothing new, or has said goodbye; empty while it serves."""
    said = peer.drain
    if said.is_serving:
        return ""
    ago_s = now_s - said.since_s
    why = f" ({said.why})" if said.why else ""
    if said.state == LEAVING:
        return f"{peer.name} said goodbye {ago_s:.1f} s ago{why}"
    return f"{peer.name} has been draining for {ago_s:.1f} s{why} and begins nothing new"


def lost_because(peer: Peer, now_s: float) -> str:
    """Why it counts as lost: it said goodbye, or has been silent."""
    if peer.drain.state == LEAVING:
        return drain_words(peer, now_s)
    return f"{peer.name} has been silent for {now_s - peer.heard_s:.1f} s"


def as_told(refusal: Refusal | None, peer: Peer) -> Refusal | None:
    """The refusal as it crosses the link: over there it is the *peer* that drains.

    A daemon that never said its state cannot read the new code, so it hears an older one.
    """
    if refusal is None or refusal.code not in {Code.DRAINING, Code.PEER_DRAINING}:
        return refusal
    code = Code.PEER_DRAINING if peer.drain.state else Code.SHUTTING_DOWN
    return msgspec.structs.replace(refusal, code=code)
