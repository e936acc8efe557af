"""What the shell must do after a step, in this order; ``outbox`` is where a step collects it.

``Doubt`` says how far the bytes of a writer that is over may still be from having landed.
"""

from __future__ import annotations

import enum

import msgspec

from kvd.core.layout.seal import UNSEALED, Seal
from kvd.core.layout.shards import PageWindow, ShardCopy, Straight
from kvd.errors import Refusal
from kvd.types import Pages, Tokens
from kvd.wire.admin import AdminReply
from kvd.wire.client import Reply
from kvd.wire.events import Event
from kvd.wire.peer import Message


class Doubt(enum.IntEnum):
    """Which bytes for a lease's pages must come to rest before anybody else gets these pages.

    The larger one reaches further.
    """

    NONE = 0
    """None: every byte has landed, or was never sent."""
    ARRIVED = 1
    """What has reached this host: the writer says that it was all, and what it says is doubted."""
    SENT = 2
    """What the writer has sent: the network or a dead writer's system may still bring it."""


class AnswerEngine(msgspec.Struct, frozen=True, gc=False, tag="Answer"):
    """Send ``message`` to the engine of ``session``."""

    session: int
    message: Reply


class AnswerWorker(msgspec.Struct, frozen=True, tag="AnswerWorker"):
    """Tell a process of a session what became of its word; ``refusal`` None: it counts."""

    worker: int
    call: int
    refusal: Refusal | None


class AnswerOperator(msgspec.Struct, frozen=True, tag="Report"):
    """Send ``message`` to the operator."""

    operator: bytes
    message: AdminReply


class SendToPeer(msgspec.Struct, frozen=True, tag="Send"):
    """Send ``message`` on ``link``."""

    link: str
    message: Message


class HangUpLink(msgspec.Struct, frozen=True, tag="HangUpLink"):
    """End a link that was dialed by its address: nothing is open on it any more."""

    link: str


class LoadAgent(msgspec.Struct, frozen=True, tag="LoadAgent"):
    """Make a sending agent towards this incarnation and generation."""

    incarnation: str
    generation: int
    metadata: bytes


class DropAgent(msgspec.Struct, frozen=True, tag="DropAgent"):
    """Destroy the sending agent: the only true abort."""

    incarnation: str
    generation: int


class Post(msgspec.Struct, frozen=True, tag="Post"):
    """Write our pages ``source[i]`` over the peer's pages ``destination[i]``.

    ``source[i]`` is logical page ``first_page + i`` of the prompt, summed as ``seal`` says.
    With ``split`` above 1 the peer's page is that part of ours, and everything is counted in its
    pages: ``source[i]`` is ``page * split + s``, piece ``s`` of our page.
    ``making`` says which shards of ours go over the pages of the peer's ``peer_shard``. Nothing is
    read before the CUDA events behind ``after`` have come, IPC handles of 64 bytes one after the
    other; empty: there is none.
    """

    post: int
    incarnation: str
    generation: int
    component: str
    source: Pages
    destination: Pages
    seal: Seal = UNSEALED
    first_page: int = 0
    split: int = 1
    peer_shard: int = 0
    making: ShardCopy = Straight()
    after: bytes = b""


class Forget(msgspec.Struct, frozen=True, tag="Forget"):
    """Nobody wants this post any more: if its event has not come yet, it is not to be posted."""

    post: int


class Verify(msgspec.Struct, frozen=True, tag="Verify"):
    """Sum what arrived in our ``pages``, logical page ``seal.first`` first, and say ``Verified``.

    ``sums``: what the writer says they must be, for the pages that the seal chooses. Only
    ``window`` of each page of our ``shard`` is summed; None is all of it.
    """

    ticket: int
    component: str
    seal: Seal
    pages: Pages
    sums: bytes
    shard: int = 0
    window: PageWindow | None = None


class SumLanded(msgspec.Struct, frozen=True, tag="SumLanded"):
    """Sum the first ``landed`` of the pages that ``Verify`` of this ticket will name: all whole.

    Not answered. A transfer process that never heard it sums them when it hears ``Verify``.
    ``sums``: what the writer says of the first ``summed`` of them, behind those that were said
    before. Then it says ``LandedGood`` if they are what was sent; what is not, or was never asked,
    ``Verify`` finds out.
    """

    ticket: int
    component: str
    seal: Seal
    pages: Pages
    landed: int
    shard: int = 0
    window: PageWindow | None = None
    summed: int = 0
    sums: bytes = b""


class ForgetSums(msgspec.Struct, frozen=True, tag="ForgetSums"):
    """There will be no ``Verify`` of this ticket: nobody wants what was summed for it."""

    ticket: int


class Quiesce(msgspec.Struct, frozen=True, tag="Quiesce"):
    """Say ``Quiet`` when nothing of what is in doubt can still land in the lease's pages.

    ``ARRIVED``: what has reached this host has come to rest. ``SENT``: and every connection on
    which a peer may have sent until now has ended, but for those named by ``Exempt``.
    """

    lease: int
    doubt: Doubt


class Exempt(msgspec.Struct, frozen=True, tag="Exempt"):
    """These connections are of living writers: not to be waited for any more for these leases."""

    leases: tuple[int, ...]
    streams: tuple[str, ...]


class Copy(msgspec.Struct, frozen=True, tag="Copy"):
    """Copy pages ``source[i]`` of one of our regions over pages ``destination[i]`` of another."""

    ticket: int
    source_region: str
    source: Pages
    destination_region: str
    destination: Pages


class RestartTransfer(msgspec.Struct, frozen=True, tag="RestartTransfer"):
    """Kill and reap the transfer process, then start the next generation: a fence."""

    why: str


class ReadyToStop(msgspec.Struct, frozen=True, tag="ReadyToStop"):
    """The stop that was asked for goes on: nothing is under way, or nothing is waited for."""


class Recall(msgspec.Struct, frozen=True, tag="Recall"):
    """Say ``Recalled`` with the last events about what the audit has found; 0: about nothing."""

    finding: int
    lease: int
    node: int
    room: int


class NoteHeld(msgspec.Struct, frozen=True, tag="NoteHeld"):
    """Journal: from now on these pages are the lease's own, beside those that were before.

    ``anchor`` is the last page of the cached path that it keeps from eviction, 0 for none. Only
    leases whose engine may touch their pages are noted, not those that are still being received.
    """

    lease: int
    session: int
    anchor: int
    pages: Pages


class NoteCached(msgspec.Struct, frozen=True, tag="NoteCached"):
    """Journal: ``pages`` joined the tree with these tokens, and the lease keeps up to ``anchor``.

    They follow page ``before``, 0 at the beginning of a sequence; the first of them is the
    ``first``-th page of it. There are none where the tree had them all already, and then ``before``
    and ``first`` are 0. ``lease`` and ``anchor`` are 0 where no engine has the lease.
    """

    lease: int
    anchor: int
    namespace: str
    before: int
    first: int
    pages: Pages
    tokens: Tokens


class NoteFreed(msgspec.Struct, frozen=True, tag="NoteFreed"):
    """Journal: these pages are nobody's now, and may be written by whoever gets them next.

    Some may have been noted so before, or never as anybody's.
    """

    pages: Pages


class NoteEnded(msgspec.Struct, frozen=True, tag="NoteEnded"):
    """Journal: the lease keeps nothing any more, neither pages of its own nor a path."""

    lease: int


class KeptFlush(msgspec.Struct, frozen=True):
    """A flush of a namespace that a tier may have something of, or of all: None.

    What was written to a tier of this node alone since then bears ``stamp``.
    """

    namespace: str | None
    stamp: str
    ago_s: float


class KeepEpochs(msgspec.Struct, frozen=True, tag="KeepEpochs"):
    """Write down the epoch of each base, for the next daemon of this node; say ``EpochsKept``.

    And what was flushed.
    """

    ticket: int
    by_base: dict[str, int] = msgspec.field(name="by_family")
    """By base of namespaces; recordings have the other name."""
    flushes: tuple[KeptFlush, ...] = ()


class Demote(msgspec.Struct, frozen=True, tag="Demote"):
    """Write our ``pages[i]`` as object ``keys[i]`` of a tier; say ``Demoted``.

    ``keys`` follow each other, ``KEY_BYTES`` each. The pages stay as they are until that is said.
    They count as used now, the first one last. At a stop, which writes the hottest first, they
    count as used before the ``behind`` objects that the stop has come to earlier.
    """

    ticket: int
    tier: str
    namespace: str
    keys: bytes
    pages: Pages
    behind: int = 0


class Promote(msgspec.Struct, frozen=True, tag="Promote"):
    """Read object ``keys[i]`` of a tier over our ``pages[i]``, verify it, and say ``Promoted``."""

    ticket: int
    tier: str
    namespace: str
    keys: bytes
    pages: Pages


class DropObjects(msgspec.Struct, frozen=True, tag="DropObjects"):
    """Remove these objects of a tier; before anything that is ordered after it. Not answered."""

    tier: str
    namespace: str
    keys: bytes


class AgeObjects(msgspec.Struct, frozen=True, tag="AgeObjects"):
    """A stop has come to these, which lie in a tier: as ``Demote.behind``. Not answered."""

    tier: str
    namespace: str
    keys: bytes
    behind: int


class DropNamespace(msgspec.Struct, frozen=True, tag="DropNamespace"):
    """Remove every object of a namespace; as ``DropObjects``."""

    tier: str
    namespace: str


class ProbeTier(msgspec.Struct, frozen=True, tag="ProbeTier"):
    """Find out how many of the first of these objects a tier that others write to has.

    Say ``TierProbed``; it waits for no other order, and none for it.
    """

    ticket: int
    tier: str
    namespace: str
    keys: bytes


class PaceWrites(msgspec.Struct, frozen=True, tag="PaceWrites"):
    """What is written to a tier takes at most this ``share`` of its time from now on; 1: all of it.

    At once, also for what was ordered before. Not where processors are to spare: who is to be made
    way for has them then. Not answered.
    """

    tier: str
    share: float


class RestartStorage(msgspec.Struct, frozen=True, tag="RestartStorage"):
    """Kill and reap the storage process, say ``StorageGone``, then start the next: a fence."""

    why: str


class BlocksStored(msgspec.Struct, frozen=True, tag="BlocksStored"):
    """KV events: these blocks can be read here now, and could not before.

    They follow block ``before``, 0 at the beginning of a prompt. ``names``: ``NAME_BYTES`` each.
    """

    medium: str
    before: int
    names: bytes
    tokens: Tokens
    lora_name: str
    salt: str


class BlocksRemoved(msgspec.Struct, frozen=True, tag="BlocksRemoved"):
    """KV events: these blocks, each of which was stored, are not in that medium any more."""

    medium: str
    names: bytes


class BlocksCleared(msgspec.Struct, frozen=True, tag="BlocksCleared"):
    """KV events: consumers forget all they know of this node; what it has is stored next."""


BlockEvent = BlocksStored | BlocksRemoved | BlocksCleared
"""What routers are told, in this order."""

StorageOrder = Demote | Promote | DropObjects | AgeObjects | DropNamespace | ProbeTier | PaceWrites
"""What goes to the storage process, as it stands and in this order."""

TransferOrder = (
    LoadAgent
    | DropAgent
    | Post
    | Forget
    | Verify
    | SumLanded
    | ForgetSums
    | Quiesce
    | Exempt
    | Copy
)
"""What goes to the transfer process, as it stands."""

Effect = (
    AnswerEngine
    | AnswerWorker
    | AnswerOperator
    | SendToPeer
    | HangUpLink
    | TransferOrder
    | RestartTransfer
    | Recall
    | ReadyToStop
    | NoteHeld
    | NoteCached
    | NoteFreed
    | NoteEnded
    | KeepEpochs
    | StorageOrder
    | RestartStorage
    | BlockEvent
)


class Step(msgspec.Struct, frozen=True, gc=False):
    """The outcome of one input."""

    effects: list[Effect]
    events: list[Event]
