"""Everything that can happen to a node. Each input carries its time: the core has no clock."""

from __future__ import annotations

import enum

import msgspec

from kvd.errors import Refusal
from kvd.types import NO_TOKENS, Pages, Tokens
from kvd.wire.admin import AdminRequest
from kvd.wire.client import Request
from kvd.wire.peer import Message
from kvd.wire.snapshot import RecorderState


class ClientJoined(msgspec.Struct, frozen=True, tag="ClientJoined"):
    """A process opened the session, or joined it."""

    at_s: float
    session: int
    name: str
    pid: int


class ClientHungUp(msgspec.Struct, frozen=True, tag="ClientHungUp"):
    """The last process of the session is dead or has closed its attach socket."""

    at_s: float
    session: int


class HungUpOn(msgspec.Struct, frozen=True, tag="HungUpOn"):
    """The daemon hung up on a session whose processes live: it is served no more.

    They may go on writing the pages of its leases, so those stay held until ``ClientHungUp``.
    ``pids`` are those that are waited for; said again when they are fewer.
    """

    at_s: float
    session: int
    why: Refusal
    pids: tuple[int, ...]


class ClientCameBack(msgspec.Struct, frozen=True, tag="ClientReturned"):
    """A session of before the restart is back, by the process that had opened it.

    Its engine still uses the pages of ``leases``; those of its other former leases are free.
    """

    at_s: float
    session: int
    pid: int
    leases: tuple[int, ...]


class Branch(msgspec.Struct, frozen=True):
    """Cached pages in one piece that were proven, behind the end of branch ``parent``.

    ``parent`` is the place of an earlier one in the list; -1: it begins a sequence of
    ``namespace``. ``tokens`` are whole pages, one for each of ``pages``.
    """

    parent: int
    namespace: str
    tokens: Tokens
    pages: Pages


class FormerLease(msgspec.Struct, frozen=True):
    """A lease of before the restart. It keeps its number, and can only be released.

    ``prefix`` are the tokens of the path that it keeps, as far as that was proven; ``held`` are
    its own pages.
    """

    id: int
    namespace: str
    prefix: Tokens
    held: Pages


class FormerSession(msgspec.Struct, frozen=True):
    """An engine of before the restart that is not proven dead."""

    id: int
    name: str
    pids: tuple[int, ...]
    leases: tuple[FormerLease, ...]


class PoolAdopted(msgspec.Struct, frozen=True, tag="Adopted"):
    """What the pool held before the restart, and was proven; the first input, or none.

    ``branches``: parents first, otherwise the least recently used first; a parent was used when the
    last branch behind it was. ``unproven``: pages that an engine of before may still read, and that
    nobody is given before all former leases have ended and no former session is waited for.
    """

    at_s: float
    generation: int
    branches: tuple[Branch, ...]
    sessions: tuple[FormerSession, ...]
    unproven: Pages
    last_lease: int
    """The highest number that a lease has had; the next one is above."""


class FromClient(msgspec.Struct, frozen=True, tag="FromClient"):
    """A request of an engine; ``tokens`` is its second frame."""

    at_s: float
    session: int
    message: Request
    tokens: Tokens = NO_TOKENS


class FromOperator(msgspec.Struct, frozen=True, tag="FromOperator"):
    """A request on the admin socket; the answer goes to ``operator``."""

    at_s: float
    operator: bytes
    message: AdminRequest


class StopAsked(msgspec.Struct, frozen=True, tag="StopAsked"):
    """The process was asked to end: drain for ``drain_s`` at most, then say ``ReadyToStop``."""

    at_s: float
    why: str
    drain_s: float


class Unreadable(msgspec.Struct, frozen=True, tag="Unreadable"):
    """Something came in on a socket that is no message of it; its sender was told."""

    at_s: float
    socket: str
    sender: str
    refusal: Refusal


class LinkDialed(msgspec.Struct, frozen=True, tag="LinkDialed"):
    """A configured peer: Hello goes out on ``link`` until it answers by this name."""

    at_s: float
    link: str
    name: str
    address: str


class FromPeer(msgspec.Struct, frozen=True, tag="FromPeer"):
    """A message that came in on ``link``.

    ``proven`` is the node whose key its sender has shown; empty where links need no keys.
    """

    at_s: float
    link: str
    message: Message
    proven: str = ""


class HandshakeFailed(msgspec.Struct, frozen=True, tag="HandshakeFailed"):
    """A connection with a peer ended before its first message; ``times`` since the last such input.

    ``link`` is empty where somebody dialed us: then nobody knows yet who it was.
    """

    at_s: float
    link: str
    address: str
    reason: str
    why: str
    times: int


class TransferReady(msgspec.Struct, frozen=True, tag="TransferReady"):
    """A transfer process serves; every older one has been reaped."""

    at_s: float
    generation: int
    metadata: bytes
    transport: str
    why: str


class TransferGone(msgspec.Struct, frozen=True, tag="TransferGone"):
    """The transfer process is dead and reaped: nothing writes through it, or from it, any more."""

    at_s: float
    why: str


class WritePath(enum.Enum):
    """How the bytes of a peer travel, found out by the first write."""

    SAME_HOST = "same-host"  # one process copies into the other: nothing is ever in between
    NETWORK = "network"


class AgentLoaded(msgspec.Struct, frozen=True, tag="AgentLoaded"):
    """The sending agent exists, and a first write through it has arrived by ``path``.

    ``streams``: its connections with that peer, ``sender>receiver``.
    """

    at_s: float
    incarnation: str
    generation: int
    streams: tuple[str, ...] = ()
    path: WritePath = WritePath.NETWORK


class AgentFailed(msgspec.Struct, frozen=True, tag="AgentFailed"):
    """The sending agent could not be made."""

    at_s: float
    incarnation: str
    generation: int
    why: str


class AgentDropped(msgspec.Struct, frozen=True, tag="AgentDropped"):
    """The sending agent is destroyed: we send nothing more through it.

    ``unconfirmed_bytes`` were sent and not confirmed. Zero proves that no late byte can land. Above
    zero, bytes may be in the network or in the peer's socket buffers, where only the peer can tell:
    its ``Quiet``, or the end of its transfer process, proves the rest.
    """

    at_s: float
    incarnation: str
    generation: int
    unconfirmed_bytes: int = 0


class PostMoved(msgspec.Struct, frozen=True, tag="PostMoved"):
    """Bytes of a running post that are known to have arrived."""

    at_s: float
    post: int
    moved_bytes: int


class PostDone(msgspec.Struct, frozen=True, tag="PostDone"):
    """Every byte of the post has landed; ``active_s`` counts from its first write.

    ``sums``: of the pages of ours that its seal chose, 8 bytes each, ascending.
    """

    at_s: float
    post: int
    moved_bytes: int
    sums: bytes = b""
    active_s: float = 0.0


class PostFailed(msgspec.Struct, frozen=True, tag="PostFailed"):
    """The post writes nothing new; late bytes may land until its sending agent is destroyed.

    A post refused before its first write names a reason and never touched the peer.
    """

    at_s: float
    post: int
    why: str


class Unposted(msgspec.Struct, frozen=True, tag="Unposted"):
    """Nothing of the post was written, and nothing will be: its event did not come."""

    at_s: float
    post: int
    why: str


class Verified(msgspec.Struct, frozen=True, tag="Verified"):
    """What ``Verify`` of that ticket found: the logical pages that are not what was sent.

    ``why`` is given where the pages could not be summed at all.
    """

    at_s: float
    ticket: int
    bad_pages: tuple[int, ...]
    why: str = ""


class Quiet(msgspec.Struct, frozen=True, tag="Quiet"):
    """What was in doubt when ``Quiesce`` was ordered for the lease is over."""

    at_s: float
    lease: int


class Awaiting(msgspec.Struct, frozen=True, tag="Awaiting"):
    """These leases are not quiet before each of ``streams`` has ended or is exempt.

    What follows was known after the transfer process had looked which connections there are.
    """

    at_s: float
    leases: tuple[int, ...]
    streams: tuple[str, ...]


class Copied(msgspec.Struct, frozen=True, tag="Copied"):
    """Every byte of the copy is in its place."""

    at_s: float
    ticket: int
    n_bytes: int


class CopyFailed(msgspec.Struct, frozen=True, tag="CopyFailed"):
    """The copy was refused and wrote nothing."""

    at_s: float
    ticket: int
    why: str


class Tick(msgspec.Struct, frozen=True, tag="Tick"):
    """Time passed: repetitions, deadlines, heartbeats."""

    at_s: float


class AuditTurn(msgspec.Struct, frozen=True, tag="AuditTurn"):
    """The standing audit may look at so much: ``work`` units, about a microsecond each.

    ``spent_s`` is what its turns have cost since the last one that said so.
    """

    at_s: float
    work: int
    spent_s: float = 0.0


class CheckedAll(msgspec.Struct, frozen=True, tag="CheckedAll"):
    """Ask every rule now: whoever asks has seen that one of them does not hold, or holds again."""

    at_s: float


class Recalled(msgspec.Struct, frozen=True, tag="Recalled"):
    """The last events about a finding of the audit, as ``Recall`` asked."""

    at_s: float
    finding: int
    lines: tuple[str, ...]


class RecorderSaid(msgspec.Struct, frozen=True, tag="RecorderSaid"):
    """How the flight recorder does; ``since_s`` in it is not used."""

    at_s: float
    recorder: RecorderState


class RecorderSaved(msgspec.Struct, frozen=True, tag="RecordingSaved"):
    """The flight recorder wrote a file."""

    at_s: float
    path: str
    why: str


class Reconfigured(msgspec.Struct, frozen=True, tag="Reconfigured"):
    """The configuration was read again. The figures hold from here on; the texts are for events.

    ``allow``, ``max_queue`` and ``overtakers`` are as in ``Settings``.
    """

    at_s: float
    allow: tuple[str, ...]
    max_queue: int
    overtakers: int
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


class ReloadRefused(msgspec.Struct, frozen=True, tag="ConfigRefused"):
    """The configuration was read again and is invalid."""

    at_s: float
    errors: tuple[str, ...]


TransferReport = (
    AgentLoaded
    | AgentFailed
    | AgentDropped
    | PostMoved
    | PostDone
    | PostFailed
    | Unposted
    | Verified
    | Quiet
    | Awaiting
    | Copied
    | CopyFailed
)
"""What a transfer process says; the daemon stamps it with its own time."""

Input = (
    ClientJoined
    | ClientHungUp
    | HungUpOn
    | ClientCameBack
    | PoolAdopted
    | FromClient
    | FromOperator
    | StopAsked
    | Unreadable
    | LinkDialed
    | FromPeer
    | HandshakeFailed
    | TransferReady
    | TransferGone
    | TransferReport
    | Tick
    | AuditTurn
    | CheckedAll
    | Recalled
    | RecorderSaid
    | RecorderSaved
    | Reconfigured
    | ReloadRefused
)
