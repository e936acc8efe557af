"""Everything that happens, as typed events with contiguous sequence numbers (I8).

One stream, made by the core; log, metrics, consoles and recordings only subscribe to it. ``at_s``
is the daemon's monotonic clock; ``seq`` starts at 1 with the incarnation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from kvd.wire.cache_events import CacheThrashing, FloorBroken, PinBegan, PinEnded, PinLeftPool
from kvd.wire.numbered_event import NumberedEvent

if TYPE_CHECKING:
    from collections.abc import Container, Iterator


class ClientAttached(NumberedEvent, frozen=True, kw_only=True, tag="client-attached"):
    """A session opened, or one more process joined it."""

    session: int
    name: str
    pid: int


class ClientGone(NumberedEvent, frozen=True, kw_only=True, tag="client-gone"):
    """The last process of a session hung up; what it held was given back."""

    session: int
    name: str
    leases: int
    handoffs: int


class ClientHungUpOn(NumberedEvent, frozen=True, kw_only=True, tag="client-hung-up-on"):
    """The daemon hung up on a session whose processes live, and serves it no more.

    ``leases`` with ``held_pages`` stay held until all of ``pids`` are dead, because those may go on
    writing; ``handoffs`` were given up.
    """

    session: int
    name: str
    pids: tuple[int, ...]
    code: str
    why: str
    leases: int
    held_pages: int
    handoffs: int


class ClientOutlived(NumberedEvent, frozen=True, kw_only=True, tag="client-outlived"):
    """Process ``pid``, which had opened the session, is gone, and ``pids`` keep it.

    They are ranks that joined, or children that it had forked. What the session holds is free when
    they have ended.
    """

    session: int
    name: str
    pid: int
    pids: tuple[int, ...]


class Adopted(NumberedEvent, frozen=True, kw_only=True, tag="adopted"):
    """The pool is what it was before the restart, as far as that was proven.

    ``pages`` are cached, in ``nodes`` of the tree; ``leases`` of ``sessions`` keep ``held_pages``
    of their own and ``unproven_pages`` that they may read. ``generation``: how often that was done.
    """

    generation: int
    pages: int
    nodes: int
    sessions: int
    leases: int
    held_pages: int
    unproven_pages: int


class ClientReturned(NumberedEvent, frozen=True, kw_only=True, tag="client-returned"):
    """A session of before the restart is back.

    It still uses ``kept`` leases, which can only be released; ``ended`` others have ended.
    """

    session: int
    name: str
    pid: int
    kept: int
    ended: int


class DrainBegan(NumberedEvent, frozen=True, kw_only=True, tag="drain-began"):
    """From here on nothing new is begun; ``refused`` waited and were told so.

    ``receives`` and ``sends`` are under way and go on; ``deadline_s`` from now what is left of them
    is given up, 0: never. ``is_stop``: the process ends when it is drained.
    """

    who: str
    why: str
    receives: int
    sends: int
    leases: int
    refused: int
    deadline_s: float = 0.0
    is_stop: bool = False


class Drained(NumberedEvent, frozen=True, kw_only=True, tag="drained"):
    """No handoff is under way and nobody waits; ``cut`` of them were given up at the deadline."""

    lasted_s: float
    cut: int
    leases: int


class DrainEnded(NumberedEvent, frozen=True, kw_only=True, tag="drain-ended"):
    """The node serves again."""

    lasted_s: float


class PeerDraining(NumberedEvent, frozen=True, kw_only=True, tag="peer-draining"):
    """A peer said that it is ``draining`` or ``leaving``, or that it is ``serving`` again."""

    peer: str
    state: str
    why: str
    refused: int
    """Receives from it that waited here and were told so."""


class LeaseOpened(NumberedEvent, frozen=True, gc=False, tag="lease-opened"):
    """A prefix was locked and pages are held.

    ``missed_tokens``: whole pages of the prompt that the tree had not; ``why_missed`` by the first
    of them: ``new``, ``evicted``, ``beside`` (it is there, its window or state is not), or empty.
    ``locked_node`` is the end of what is locked, 0 where nothing is.
    """

    seq: int
    at_s: float
    lease: int
    session: int
    reason: str
    room: int
    prefix_tokens: int
    held_pages: int
    prompt_tokens: int = 0
    missed_tokens: int = 0
    why_missed: str = ""
    locked_node: int = 0


class LeaseExtended(NumberedEvent, frozen=True, kw_only=True, tag="lease-extended"):
    """More pages are held; ``locked_node`` says what a lease that is resumed locks again."""

    lease: int
    held_pages: int
    locked_node: int = 0


class LeaseWritten(NumberedEvent, frozen=True, kw_only=True, tag="lease-written"):
    """KV of so many tokens is in its pages now: its engine says so, and each rank of it."""

    lease: int
    written_tokens: int


class EngineCopied(NumberedEvent, frozen=True, kw_only=True, tag="engine-copied"):
    """An engine's own copy between pages of a lease and its blocks is over.

    ``way`` is ``save`` or ``load``. ``why`` is why it was not done; empty: all of it was.
    ``mark_us`` is what of ``waited_us`` it waited for the engine to compute.
    """

    session: int
    lease: int
    way: str
    device: str
    rank: int
    pages: int
    n_bytes: int = 0
    waited_us: int = 0
    moved_us: int = 0
    why: str = ""
    mark_us: int = 0


class LeaseCommitted(NumberedEvent, frozen=True, gc=False, tag="lease-committed"):
    """Whole pages joined the tree; ``duplicate_pages`` were there already and were given back.

    The lock has moved down to ``locked_node``.
    """

    seq: int
    at_s: float
    lease: int
    cached_tokens: int
    duplicate_pages: int
    locked_node: int = 0


class LeaseReleased(NumberedEvent, frozen=True, gc=False, tag="lease-released"):
    """The lease is gone: unlocked, its held pages free. It locked ``locked_node`` until now."""

    seq: int
    at_s: float
    lease: int
    reason: str
    cause: str
    freed_pages: int
    age_s: float
    locked_node: int = 0


class LeaseRetracted(NumberedEvent, frozen=True, kw_only=True, tag="retracted"):
    """A running lease gave its pages back; the bytes of ``kv_tokens`` tokens are saved, or none."""

    lease: int
    session: int
    kv_tokens: int
    freed_pages: int
    saved_pages: int
    saved_bytes: int
    took_s: float


class LeaseResumed(NumberedEvent, frozen=True, kw_only=True, tag="resumed"):
    """A retracted lease runs again. ``spared_bytes`` were saved, and not needed: the tree had them.

    ``took_s`` is from the request, ``away_s`` from its retraction.
    """

    lease: int
    session: int
    prefix_tokens: int
    restored_tokens: int
    restored_bytes: int
    spared_bytes: int
    took_s: float
    away_s: float


class Quarantined(NumberedEvent, frozen=True, kw_only=True, tag="quarantined"):
    """A remote may still write its pages, so nobody has them. It locked ``locked_node`` so far."""

    lease: int
    pages: int
    peer: str
    incarnation: str
    why: str
    locked_node: int = 0


class QuarantineEnded(NumberedEvent, frozen=True, kw_only=True, tag="quarantine-ended"):
    """The writer settled, is proven gone, or was fenced; the pages are free."""

    lease: int
    pages: int
    proof: str
    age_s: float


class Evicted(NumberedEvent, frozen=True, gc=False, tag="evicted"):
    """Cached pages gave way."""

    seq: int
    at_s: float
    pages: int
    nodes: int
    reason: str
    component: str = ""
    """Whose pages, where they are not the first one's: their nodes stay without them."""


class Waiting(NumberedEvent, frozen=True, kw_only=True, tag="waiting"):
    """A request waits for room."""

    session: int
    room: int
    needed_pages: int
    headroom_pages: int


class Moved(NumberedEvent, frozen=True, gc=False, tag="moved"):
    """A part changed its state. ``side`` is decode or prefill."""

    seq: int
    at_s: float
    side: str
    part: int
    room: int
    peer: str
    before: str
    after: str
    trigger: str
    why: str = ""


class HandoffEnded(NumberedEvent, frozen=True, gc=False, tag="handoff-ended"):
    """A part is over on this side; ``moved_bytes`` were sent, ``saved_bytes`` were not needed.

    ``lease`` is the one that a receive had pages under; 0 if it never had any, and for a send.
    """

    seq: int
    at_s: float
    side: str
    part: int
    room: int
    peer: str
    outcome: str
    code: str
    reason: str
    prompt_tokens: int
    decode_prefix_len: int
    moved_bytes: int
    saved_bytes: int
    took_s: float
    lease: int = 0


class PagesCorrupt(NumberedEvent, frozen=True, kw_only=True, tag="pages-corrupt"):
    """What arrived is not what was sent: nothing was cached, the pages go to quarantine.

    ``pages`` are the first few wrong page ids, ``logical_pages`` their places in the prompt.
    ``checked_pages`` of ``total_pages`` were summed, ``bad_pages`` of those are wrong.
    """

    part: int
    room: int
    peer: str
    component: str
    pages: tuple[int, ...]
    logical_pages: tuple[int, ...]
    bad_pages: int
    checked_pages: int
    total_pages: int
    why: str


class PeerUp(NumberedEvent, frozen=True, kw_only=True, tag="peer-up"):
    """A Hello opened or renewed a link."""

    peer: str
    incarnation: str
    generation: int


class PeerSuspect(NumberedEvent, frozen=True, kw_only=True, tag="peer-suspect"):
    """Silent past the first limit."""

    peer: str
    incarnation: str
    silent_s: float


class PeerLost(NumberedEvent, frozen=True, kw_only=True, tag="peer-lost"):
    """Silent past the second limit: rooms with it are drained, not freed."""

    peer: str
    incarnation: str
    silent_s: float


class PeerReplaced(NumberedEvent, frozen=True, kw_only=True, tag="peer-replaced"):
    """A new incarnation: proof that the old one will never write again."""

    peer: str
    before: str
    after: str


class PeerRefused(NumberedEvent, frozen=True, kw_only=True, tag="peer-refused"):
    """A daemon that we will not exchange KV with, and why."""

    peer: str
    code: str
    why: str


class PeerHandshakeFailed(NumberedEvent, frozen=True, kw_only=True, tag="handshake-failed"):
    """Somebody could not connect to us, or we not to a peer: keys that differ, or are missing.

    ``peer`` is whom we dialed; empty where somebody dialed us. ``times``: since the last such
    event, of which there is one in ten seconds for a peer and a reason.
    """

    peer: str
    address: str
    reason: str
    why: str
    times: int


class AgentChanged(NumberedEvent, frozen=True, kw_only=True, tag="agent-changed"):
    """The sending agent towards a peer: loading, loaded, failed, dropping, dropped."""

    peer: str
    incarnation: str
    generation: int
    state: str
    why: str = ""


class SlowPath(NumberedEvent, frozen=True, kw_only=True, tag="slow-path"):
    """Bytes travel many times slower than they could: which, why, and what to do.

    ``peer`` is whose they are to be; empty where they stay in this node.
    """

    peer: str
    incarnation: str
    what: str
    why: str


class Pinned(NumberedEvent, frozen=True, kw_only=True, tag="pinned"):
    """Memory that copies of devices read or write is registered with CUDA: they do it alone."""

    region: str
    pinned_bytes: int
    took_s: float


class TransferStarted(NumberedEvent, frozen=True, kw_only=True, tag="transfer-started"):
    """The transfer process serves; a new generation says that the old one was reaped."""

    generation: int
    why: str


class MessageRefused(NumberedEvent, frozen=True, kw_only=True, tag="message-refused"):
    """Something arrived that could not be acted on."""

    socket: str
    sender: str
    code: str
    why: str


class Flushed(NumberedEvent, frozen=True, kw_only=True, tag="flushed"):
    """The tree was emptied of everything that is not locked, by an operator or an engine."""

    freed_pages: int
    kept_pages: int
    namespace: str | None = None
    """Of this one alone; None: all of it."""


class EpochBegan(NumberedEvent, frozen=True, kw_only=True, tag="epoch"):
    """A base and its members have new weights: nothing that was cached of them is found again."""

    namespace: str
    epoch: int
    who: str


class TierUp(NumberedEvent, frozen=True, kw_only=True, tag="tier-up"):
    """A storage process serves a tier, in which it found so many objects that may be used."""

    tier: str
    generation: int
    objects: int


class TierDown(NumberedEvent, frozen=True, kw_only=True, tag="tier-down"):
    """It ended, with so many orders of this tier under way."""

    tier: str
    cut: int
    why: str


class TierAway(NumberedEvent, frozen=True, kw_only=True, tag="tier-away"):
    """Orders of a tier came to nothing: it is left alone for so long, and nobody waits for it.

    Where ``why`` says that nothing is written, what lies there is read as before.
    """

    tier: str
    for_s: float
    why: str


class TierBack(NumberedEvent, frozen=True, kw_only=True, tag="tier-back"):
    """An order of a tier that was away has come to something."""

    tier: str


class PagesDemoted(NumberedEvent, frozen=True, kw_only=True, tag="demoted"):
    """Cached pages were written to a tier; ``lost`` of those that were ordered are not there."""

    tier: str
    lease: int
    pages: int
    lost: int
    n_bytes: int
    took_s: float
    why: str = ""


class StopDemotionBegan(NumberedEvent, frozen=True, kw_only=True, tag="stop-demotion-began"):
    """The process ends and its pool with it: what a tier has not of ``pages`` is written.

    For ``for_s`` at most.
    """

    tier: str
    pages: int
    for_s: float


class StopDemotionEnded(NumberedEvent, frozen=True, kw_only=True, tag="stop-demotion-ended"):
    """That is over: ``pages`` were written, and ``left`` are not known to be there; ``why`` not."""

    tier: str
    pages: int
    left: int
    took_s: float
    why: str = ""


class PagesPromoted(NumberedEvent, frozen=True, kw_only=True, tag="promoted"):
    """Pages of a tier are in the pool again; ``bad`` more were ordered and are of no use."""

    tier: str
    lease: int
    pages: int
    bad: int
    n_bytes: int
    took_s: float
    why: str = ""


class Violation(NumberedEvent, frozen=True, kw_only=True, tag="violation"):
    """An invariant does not hold: a bug, named with what it touches."""

    what: str
    rule: str = ""
    lease: int = 0
    tree_node: int = 0
    owner: str = ""
    pid: int = 0
    room: int = 0
    pages: int = 0
    transitions: tuple[str, ...] = ()
    done: str = ""
    """What was done about it; empty where it is only told."""


class ViolationHealed(NumberedEvent, frozen=True, kw_only=True, tag="violation-healed"):
    """What the audit had found is no longer so."""

    what: str
    lasted_s: float


class RecordingStarted(NumberedEvent, frozen=True, kw_only=True, tag="recording-started"):
    """From here on the flight recorder has every input."""


class RecordingEnded(NumberedEvent, frozen=True, kw_only=True, tag="recording-ended"):
    """The flight recorder has lost the thread; the node goes on unrecorded."""

    why: str


class RecordingSaved(NumberedEvent, frozen=True, kw_only=True, tag="recording-saved"):
    """A recording was written: ``kvd replay`` reads it."""

    path: str
    why: str


class ConfigReloaded(NumberedEvent, frozen=True, kw_only=True, tag="config-reloaded"):
    """The configuration was read again: what holds from here on, and what waits for a restart.

    Each as ``key: before -> after``.
    """

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


class ConfigRefused(NumberedEvent, frozen=True, kw_only=True, tag="config-refused"):
    """The configuration was read again and is invalid: nothing was changed."""

    errors: tuple[str, ...]


Event = (
    ClientAttached
    | ClientGone
    | ClientHungUpOn
    | ClientOutlived
    | Adopted
    | ClientReturned
    | DrainBegan
    | Drained
    | DrainEnded
    | PeerDraining
    | LeaseOpened
    | LeaseExtended
    | LeaseWritten
    | EngineCopied
    | LeaseCommitted
    | LeaseReleased
    | LeaseRetracted
    | LeaseResumed
    | Quarantined
    | QuarantineEnded
    | Evicted
    | CacheThrashing
    | FloorBroken
    | PinBegan
    | PinEnded
    | PinLeftPool
    | Waiting
    | Moved
    | HandoffEnded
    | PagesCorrupt
    | PeerUp
    | PeerSuspect
    | PeerLost
    | PeerReplaced
    | PeerRefused
    | PeerHandshakeFailed
    | AgentChanged
    | SlowPath
    | Pinned
    | TransferStarted
    | MessageRefused
    | Flushed
    | EpochBegan
    | TierUp
    | TierDown
    | TierAway
    | TierBack
    | PagesDemoted
    | StopDemotionBegan
    | StopDemotionEnded
    | PagesPromoted
    | Violation
    | ViolationHealed
    | RecordingStarted
    | RecordingEnded
    | RecordingSaved
    | ConfigReloaded
    | ConfigRefused
)

REFERENCES: Final = {
    "lease": "lease",
    "room": "room",
    "session": "client",
    "peer": "peer",
    "locked_node": "node",
    "tree_node": "node",
}
"""Fields of events that name a thing, and how a reference (``lease:7``) calls its kind."""

_RANKS: Final = ("room", "lease", "node", "client", "peer")
"""By what an event is about first: the narrowest."""

_NAMED: Final[dict[type, list[tuple[str, str]]]] = {
    kind: sorted(
        [(name, REFERENCES[name]) for name in kind.__struct_fields__ if name in REFERENCES],
        key=lambda named: _RANKS.index(named[1]),
    )
    for kind in get_args(Event)
}


def refs_of(event: Event) -> Iterator[str]:
    """What it names, the narrowest first: ``room:12``, ``lease:7``."""
    for field, kind in _NAMED[type(event)]:
        name = getattr(event, field)
        if name:
            yield f"{kind}:{name}"


WORK: Final = frozenset(
    {
        *(LeaseOpened, LeaseExtended, LeaseWritten, LeaseCommitted, LeaseReleased, EngineCopied),
        *(Evicted, Waiting, Moved, HandoffEnded, PagesDemoted, PagesPromoted),
    }
)
"""What requests do all the time: under load the ring has seconds of it. The rest is kept longer,
and so are handoffs that failed."""

DELIVERED: Final = frozenset({"delivered", "committed"})
"""Outcomes of handoffs that went well."""

FAILED: Final = "handoff-failed"
"""By this kind ``handoff-ended`` can be asked for without those."""


def is_of(event: Event, kinds: Container[str]) -> bool:
    """Whether it is asked for by these kinds."""
    is_failed = isinstance(event, HandoffEnded) and event.outcome not in DELIVERED
    return event.__struct_config__.tag in kinds or (is_failed and FAILED in kinds)
