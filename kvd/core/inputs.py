"""Everything that can happen to a node. Each input carries its time: the core has no clock."""

from __future__ import annotations

import enum

import msgspec

from kvd.core.effects import KeptFlush
from kvd.core.layout.quota import Quota
from kvd.errors import Refusal
from kvd.types import NO_TOKENS, Pages, Tokens
from kvd.wire.admin import AdminRequest
from kvd.wire.attach import CopyBegins, CopyEnds, CopyWaits, KeepsBlocks
from kvd.wire.client import Request, SayWritten
from kvd.wire.peer import Message
from kvd.wire.snapshot import KvEventState, RecorderState


class TimedInput(msgspec.Struct, frozen=True):
    """What every input begins with: when it happened, by the monotonic clock of its daemon."""

    at_s: float


class ClientJoined(TimedInput, frozen=True, tag="ClientJoined"):
    """A process opened the session, or joined it."""

    session: int
    name: str
    pid: int
    keeps_blocks: bool = False
    """As it said to the daemon before this one: KV of it is in its blocks first."""
    kind: str = ""
    """What the engine is (``wire.attach.Attach``)."""


class ClientHungUp(TimedInput, frozen=True, tag="ClientHungUp"):
    """The last process of the session is dead or has closed its attach socket."""

    session: int


class Heir(msgspec.Struct, frozen=True):
    """A process that has the connection of one that is dead, which had forked it.

    ``pid`` is 0 where it cannot be seen.
    """

    pid: int
    of_pid: int


class ProcessesNow(TimedInput, frozen=True, tag="ProcessesNow"):
    """One of the processes that keep a session has ended or has left: these keep it now."""

    session: int
    pids: tuple[int, ...]
    heirs: tuple[Heir, ...] = ()


class HungUpOn(TimedInput, frozen=True, tag="HungUpOn"):
    """The daemon hung up on a session whose processes live: it is served no more.

    They may go on writing the pages of its leases, so those stay held until ``ClientHungUp``.
    ``pids`` are those that are waited for; said again when they are fewer.
    """

    session: int
    why: Refusal
    pids: tuple[int, ...]


class ClientCameBack(TimedInput, frozen=True, tag="ClientReturned"):
    """A session of before the restart is back, by the process that had opened it.

    Its engine still uses the pages of ``leases``; those of its other former leases are free.
    """

    session: int
    pid: int
    leases: tuple[int, ...]
    is_whole: bool = True
    """No other process of it is awaited; otherwise ``SessionWhole`` says when none is any more."""
    keeps_blocks: bool = False
    """Its KV is in blocks of its own first (``wire.attach.KeepsBlocks``)."""
    kind: str = ""
    """What the engine is (``wire.attach.Attach``)."""


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
    keeps_blocks: bool = False
    """As one of its processes had said (``wire.attach.KeepsBlocks``)."""


class PoolAdopted(TimedInput, frozen=True, tag="Adopted"):
    """What the pool held before the restart, and was proven; before anything happens, or never.

    ``branches``: parents first, otherwise the least recently used first; a parent was used when the
    last branch behind it was. ``unproven``: pages that an engine of before may still read, and that
    nobody is given before all former leases have ended and no former session is waited for.
    """

    generation: int
    branches: tuple[Branch, ...]
    sessions: tuple[FormerSession, ...]
    unproven: Pages
    last_lease: int
    """The highest number that a lease has had; the next one is above."""


class FromClient(TimedInput, frozen=True, tag="FromClient"):
    """A request of an engine; ``tokens`` is its second frame."""

    session: int
    message: Request
    tokens: Tokens = NO_TOKENS


class FromWorker(TimedInput, frozen=True, tag="FromWorker"):
    """A word of one process of a session; the answer goes to that ``worker`` alone."""

    session: int
    worker: int
    """A number that the shell gave it, and gives to no other."""
    message: SayWritten


class WorkerCopies(TimedInput, frozen=True, tag="WorkerCopies"):
    """A process of a session copies between pages and its blocks; answered as ``FromWorker``."""

    session: int
    worker: int
    message: KeepsBlocks | CopyWaits | CopyBegins | CopyEnds
    rank: int = 0
    """As which it has joined, of ``ranks``."""
    ranks: int = 1


class WorkerGone(TimedInput, frozen=True, tag="WorkerGone"):
    """A process is proven dead, or has said that it touches no page: no copy of it moves a byte."""

    session: int
    worker: int


class SessionWhole(TimedInput, frozen=True, tag="SessionWhole"):
    """Each process of a session of before the restart is back or dead: no copy of before moves."""

    session: int


class RankLeft(TimedInput, frozen=True, tag="RankLeft"):
    """The process that spoke for a rank is dead or has left; others of the session live."""

    session: int
    rank: int
    ranks: int
    pid: int


class FromOperator(TimedInput, frozen=True, tag="FromOperator"):
    """A request on the admin socket; the answer goes to ``operator``."""

    operator: bytes
    message: AdminRequest


class StopAsked(TimedInput, frozen=True, tag="StopAsked"):
    """The process was asked to end: drain for ``drain_s`` at most, then say ``ReadyToStop``."""

    why: str
    drain_s: float


class Unreadable(TimedInput, frozen=True, tag="Unreadable"):
    """Something came in on a socket that is no message of it; its sender was told."""

    socket: str
    sender: str
    refusal: Refusal


class LinkDialed(TimedInput, frozen=True, tag="LinkDialed"):
    """A configured peer: Hello goes out on ``link`` until it answers by this name."""

    link: str
    name: str
    address: str


class FromPeer(TimedInput, frozen=True, tag="FromPeer"):
    """A message that came in on ``link``.

    ``proven`` is the node whose key its sender has shown; empty where links need no keys.
    """

    link: str
    message: Message
    proven: str = ""


class HandshakeFailed(TimedInput, frozen=True, tag="HandshakeFailed"):
    """A connection with a peer ended before its first message; ``times`` since the last such input.

    ``link`` is empty where somebody dialed us: then nobody knows yet who it was.
    """

    link: str
    address: str
    reason: str
    why: str
    times: int


class TransferReady(TimedInput, frozen=True, tag="TransferReady"):
    """A transfer process serves; every older one has been reaped."""

    generation: int
    metadata: bytes
    transport: str
    why: str


class TransferGone(TimedInput, frozen=True, tag="TransferGone"):
    """The transfer process is dead and reaped: nothing writes through it, or from it, any more."""

    why: str


class WritePath(enum.Enum):
    """How the bytes of a peer travel, found out by the first write."""

    SAME_HOST = "same-host"  # one process copies into the other: nothing is ever in between
    NETWORK = "network"
    EMULATED = "emulated"  # in software, through a socket: UCX reaches that memory in no other way


class PathSide(enum.Enum):
    """Which memory bytes leave, or reach."""

    HOST = "host"
    DEVICE = "device"


class AgentLoaded(TimedInput, frozen=True, tag="AgentLoaded"):
    """The sending agent exists, and a first write through it has arrived by ``path``.

    ``streams``: its connections with that peer, ``sender>receiver``.
    """

    incarnation: str
    generation: int
    streams: tuple[str, ...] = ()
    path: WritePath = WritePath.NETWORK


class PathFound(TimedInput, frozen=True, tag="PathFound"):
    """How bytes that leave a device or reach one travel to a peer, as the first of them did.

    ``bytes_s``: so fast.
    """

    incarnation: str
    generation: int
    source: PathSide
    destination: PathSide
    path: WritePath
    bytes_s: float = 0.0


class MemoryPinned(TimedInput, frozen=True, tag="MemoryPinned"):
    """So much of a region that copies of devices read or write is registered with CUDA.

    ``why`` if that is not all of it: the rest is copied by way of a stage.
    """

    region: str
    pinned_bytes: int
    region_bytes: int
    took_s: float
    why: str = ""


class AgentFailed(TimedInput, frozen=True, tag="AgentFailed"):
    """The sending agent could not be made."""

    incarnation: str
    generation: int
    why: str


class AgentDropped(TimedInput, frozen=True, tag="AgentDropped"):
    """The sending agent is destroyed: we send nothing more through it.

    ``unconfirmed_bytes`` were sent and not confirmed. Zero proves that no late byte can land. Above
    zero, bytes may be in the network or in the peer's socket buffers, where only the peer can tell:
    its ``Quiet``, or the end of its transfer process, proves the rest.
    """

    incarnation: str
    generation: int
    unconfirmed_bytes: int = 0


class PostMoved(TimedInput, frozen=True, tag="PostMoved"):
    """Bytes of a running post that are known to have arrived.

    ``pages``: so many of its first pages are whole over there, where that is known.
    """

    post: int
    moved_bytes: int
    pages: int = 0


class PostDone(TimedInput, frozen=True, tag="PostDone"):
    """Every byte of the post has landed; ``active_s`` counts from its first write.

    ``sums``: of the pages of ours that its seal chose, 8 bytes each, ascending.
    """

    post: int
    moved_bytes: int
    sums: bytes = b""
    active_s: float = 0.0


class PostFailed(TimedInput, frozen=True, tag="PostFailed"):
    """The post writes nothing new; late bytes may land until its sending agent is destroyed.

    A post refused before its first write names a reason and never touched the peer.
    """

    post: int
    why: str


class Unposted(TimedInput, frozen=True, tag="Unposted"):
    """Nothing of the post was written, and nothing will be: its event did not come."""

    post: int
    why: str


class Verified(TimedInput, frozen=True, tag="Verified"):
    """What ``Verify`` of that ticket found: the logical pages that are not what was sent.

    ``why`` is given where the pages could not be summed at all.
    """

    ticket: int
    bad_pages: tuple[int, ...]
    why: str = ""


class LandedGood(TimedInput, frozen=True, tag="LandedGood"):
    """The first so many pages of what ``SumLanded`` of that ticket names are what was sent."""

    ticket: int
    pages: int


class Quiet(TimedInput, frozen=True, tag="Quiet"):
    """What was in doubt when ``Quiesce`` was ordered for the lease is over."""

    lease: int


class Awaiting(TimedInput, frozen=True, tag="Awaiting"):
    """These leases are not quiet before each of ``streams`` has ended or is exempt.

    What follows was known after the transfer process had looked which connections there are.
    """

    leases: tuple[int, ...]
    streams: tuple[str, ...]


class Copied(TimedInput, frozen=True, tag="Copied"):
    """Every byte of the copy is in its place."""

    ticket: int
    n_bytes: int


class CopyFailed(TimedInput, frozen=True, tag="CopyFailed"):
    """The copy was refused and wrote nothing."""

    ticket: int
    why: str


class TierFound(TimedInput, frozen=True, tag="TierFound"):
    """Objects that lie in a tier since before; before ``TierReady``, oldest used first.

    ``keys`` follow each other, ``KEY_BYTES`` each.
    """

    tier: str
    namespace: str
    keys: bytes


class TierReady(TimedInput, frozen=True, tag="TierReady"):
    """A storage process serves this tier from now on."""

    tier: str
    generation: int
    n_removed: int = 0
    """Of what lay there, so much was no object of this pool."""
    removed_why: str = ""
    """Of the first of these."""


class Demoted(TimedInput, frozen=True, tag="Demoted"):
    """The pages of a ``Demote`` are read no more.

    ``written``: which of its objects lie in the tier now, by their places in the order.
    """

    ticket: int
    written: tuple[int, ...]
    n_bytes: int
    why: str = ""
    """Why the others do not; empty: there are none."""


class Promoted(TimedInput, frozen=True, tag="Promoted"):
    """The pages of a ``Promote`` are written no more.

    ``bad``: places in the order of objects that are not there or did not verify; each of the other
    pages holds what its key names.
    """

    ticket: int
    bad: tuple[int, ...]
    n_bytes: int
    why: str = ""
    """Of the first bad one."""


class TierProbed(TimedInput, frozen=True, tag="TierProbed"):
    """The answer to a ``ProbeTier``: so many of its first objects were there a moment ago.

    ``why``: of the next one nobody knows; empty: it was not there, or there is none.
    """

    ticket: int
    n_there: int
    why: str = ""


class StorageGone(TimedInput, frozen=True, tag="StorageGone"):
    """The storage process is reaped: nothing of it reads or writes a page any more."""

    generation: int
    why: str


class Tick(TimedInput, frozen=True, tag="Tick"):
    """Time passed: repetitions, deadlines, heartbeats."""


class EpochsFound(TimedInput, frozen=True, tag="EpochsFound"):
    """The epochs of namespaces that the daemon before has kept; before ``PoolAdopted``.

    ``is_first``: none has kept any, so its namespaces may bear epochs in their names.
    """

    by_base: dict[str, int] = msgspec.field(name="by_family")
    """By base; recordings have the other name."""
    is_first: bool = False
    flushes: tuple[KeptFlush, ...] = ()
    """What it had flushed, and how long ago by now."""


class EpochsKept(TimedInput, frozen=True, tag="EpochsKept"):
    """What ``KeepEpochs`` asked for is on disk; with ``why`` it is not."""

    ticket: int
    why: str = ""


class AuditTurn(TimedInput, frozen=True, tag="AuditTurn"):
    """The standing audit may look at so much: ``work`` units, about a microsecond each.

    ``spent_s`` is what its turns have cost since the last one that said so.
    """

    work: int
    spent_s: float = 0.0


class CheckedAll(TimedInput, frozen=True, tag="CheckedAll"):
    """Ask every rule now: whoever asks has seen that one of them does not hold, or holds again."""


class Recalled(TimedInput, frozen=True, tag="Recalled"):
    """The last events about a finding of the audit, as ``Recall`` asked."""

    finding: int
    lines: tuple[str, ...]


class RecorderSaid(TimedInput, frozen=True, tag="RecorderSaid"):
    """How the flight recorder does; ``since_s`` in it is not used."""

    recorder: RecorderState


class RecorderSaved(TimedInput, frozen=True, tag="RecordingSaved"):
    """The flight recorder wrote a file."""

    path: str
    why: str


class KvEventsSaid(TimedInput, frozen=True, tag="KvEventsSaid"):
    """What became of the KV events that were told; what the node knows itself is not used."""

    state: KvEventState


class BlocksMissed(TimedInput, frozen=True, tag="BlocksMissed"):
    """KV events: somebody listens who has missed some: tell of everything once more."""


class Reconfigured(TimedInput, frozen=True, tag="Reconfigured"):
    """The configuration was read again. The figures hold from here on; the texts are for events.

    ``allow``, ``max_queue``, ``overtakers`` and ``quotas`` are as in ``Settings``; ``disk_quotas``
    and ``store_quotas`` as in ``TierSettings``, of each tier that is not shared, of one that is.
    """

    allow: tuple[str, ...]
    max_queue: int
    overtakers: int
    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]
    quotas: tuple[Quota, ...] = ()
    disk_quotas: tuple[Quota, ...] = ()
    store_quotas: tuple[Quota, ...] = ()


class ReloadRefused(TimedInput, frozen=True, tag="ConfigRefused"):
    """The configuration was read again and is invalid."""

    errors: tuple[str, ...]


TransferReport = (
    AgentLoaded
    | PathFound
    | MemoryPinned
    | AgentFailed
    | AgentDropped
    | PostMoved
    | PostDone
    | PostFailed
    | Unposted
    | Verified
    | LandedGood
    | Quiet
    | Awaiting
    | Copied
    | CopyFailed
)
"""What a transfer process says; the daemon stamps it with its own time."""

StorageReport = Demoted | Promoted | TierProbed
"""What a storage process says; the daemon stamps it with its own time."""

Input = (
    ClientJoined
    | ClientHungUp
    | ProcessesNow
    | HungUpOn
    | ClientCameBack
    | PoolAdopted
    | EpochsFound
    | EpochsKept
    | FromClient
    | FromWorker
    | WorkerCopies
    | WorkerGone
    | SessionWhole
    | RankLeft
    | FromOperator
    | StopAsked
    | Unreadable
    | LinkDialed
    | FromPeer
    | HandshakeFailed
    | TransferReady
    | TransferGone
    | TransferReport
    | TierFound
    | TierReady
    | StorageReport
    | StorageGone
    | Tick
    | AuditTurn
    | CheckedAll
    | Recalled
    | RecorderSaid
    | RecorderSaved
    | BlocksMissed
    | KvEventsSaid
    | Reconfigured
    | ReloadRefused
)
