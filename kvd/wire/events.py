"""Everything that happens, as typed events with contiguous sequence numbers (I8).

One stream, made by the core; log, metrics, consoles and recordings only subscribe to it. ``at_s``
is the daemon's monotonic clock; ``seq`` starts at 1 with the incarnation.
"""

from __future__ import annotations

import msgspec

from kvd.wire.config_events import ConfigEvent
from kvd.wire.drain_events import DrainEvent
from kvd.wire.recording_events import RecordingEnded, RecordingSaved, RecordingStarted
from kvd.wire.restart_events import RestartEvent
from kvd.wire.session_events import ClientHungUpOn


class ClientAttached(msgspec.Struct, frozen=True, tag="client-attached"):
    """A session opened, or one more process joined it."""

    seq: int
    at_s: float
    session: int
    name: str
    pid: int


class ClientGone(msgspec.Struct, frozen=True, tag="client-gone"):
    """The last process of a session hung up; what it held was given back."""

    seq: int
    at_s: float
    session: int
    name: str
    leases: int
    handoffs: int


class LeaseOpened(msgspec.Struct, frozen=True, tag="lease-opened"):
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


class LeaseExtended(msgspec.Struct, frozen=True, tag="lease-extended"):
    """More pages are held; ``locked_node`` says what a lease that is resumed locks again."""

    seq: int
    at_s: float
    lease: int
    held_pages: int
    locked_node: int = 0


class LeaseCommitted(msgspec.Struct, frozen=True, tag="lease-committed"):
    """Whole pages joined the tree; ``duplicate_pages`` were there already and were given back.

    The lock has moved down to ``locked_node``.
    """

    seq: int
    at_s: float
    lease: int
    cached_tokens: int
    duplicate_pages: int
    locked_node: int = 0


class LeaseReleased(msgspec.Struct, frozen=True, tag="lease-released"):
    """The lease is gone: unlocked, its held pages free. It locked ``locked_node`` until now."""

    seq: int
    at_s: float
    lease: int
    reason: str
    cause: str
    freed_pages: int
    age_s: float
    locked_node: int = 0


class LeaseRetracted(msgspec.Struct, frozen=True, tag="retracted"):
    """A running lease gave its pages back; the bytes of ``kv_tokens`` tokens are saved, or none."""

    seq: int
    at_s: float
    lease: int
    session: int
    kv_tokens: int
    freed_pages: int
    saved_pages: int
    saved_bytes: int
    took_s: float


class LeaseResumed(msgspec.Struct, frozen=True, tag="resumed"):
    """A retracted lease runs again. ``spared_bytes`` were saved, and not needed: the tree had them.

    ``took_s`` is from the request, ``away_s`` from its retraction.
    """

    seq: int
    at_s: float
    lease: int
    session: int
    prefix_tokens: int
    restored_tokens: int
    restored_bytes: int
    spared_bytes: int
    took_s: float
    away_s: float


class Quarantined(msgspec.Struct, frozen=True, tag="quarantined"):
    """A remote may still write its pages, so nobody has them. It locked ``locked_node`` so far."""

    seq: int
    at_s: float
    lease: int
    pages: int
    peer: str
    incarnation: str
    why: str
    locked_node: int = 0


class QuarantineEnded(msgspec.Struct, frozen=True, tag="quarantine-ended"):
    """The writer settled, is proven gone, or was fenced; the pages are free."""

    seq: int
    at_s: float
    lease: int
    pages: int
    proof: str
    age_s: float


class Evicted(msgspec.Struct, frozen=True, tag="evicted"):
    """Cached pages gave way."""

    seq: int
    at_s: float
    pages: int
    nodes: int
    reason: str
    component: str = ""
    """Whose pages, where they are not the first one's: their nodes stay without them."""


class Waiting(msgspec.Struct, frozen=True, tag="waiting"):
    """A request waits for room."""

    seq: int
    at_s: float
    session: int
    room: int
    needed_pages: int
    headroom_pages: int


class Moved(msgspec.Struct, frozen=True, tag="moved"):
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


class HandoffEnded(msgspec.Struct, frozen=True, tag="handoff-ended"):
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


class PagesCorrupt(msgspec.Struct, frozen=True, tag="pages-corrupt"):
    """What arrived is not what was sent: nothing was cached, the pages go to quarantine.

    ``pages`` are the first few wrong page ids, ``logical_pages`` their places in the prompt.
    ``checked_pages`` of ``total_pages`` were summed, ``bad_pages`` of those are wrong.
    """

    seq: int
    at_s: float
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


class PeerUp(msgspec.Struct, frozen=True, tag="peer-up"):
    """A Hello opened or renewed a link."""

    seq: int
    at_s: float
    peer: str
    incarnation: str
    generation: int


class PeerSuspect(msgspec.Struct, frozen=True, tag="peer-suspect"):
    """Silent past the first limit."""

    seq: int
    at_s: float
    peer: str
    incarnation: str
    silent_s: float


class PeerLost(msgspec.Struct, frozen=True, tag="peer-lost"):
    """Silent past the second limit: rooms with it are drained, not freed."""

    seq: int
    at_s: float
    peer: str
    incarnation: str
    silent_s: float


class PeerReplaced(msgspec.Struct, frozen=True, tag="peer-replaced"):
    """A new incarnation: proof that the old one will never write again."""

    seq: int
    at_s: float
    peer: str
    before: str
    after: str


class PeerRefused(msgspec.Struct, frozen=True, tag="peer-refused"):
    """A daemon that we will not exchange KV with, and why."""

    seq: int
    at_s: float
    peer: str
    code: str
    why: str


class PeerHandshakeFailed(msgspec.Struct, frozen=True, tag="handshake-failed"):
    """Somebody could not connect to us, or we not to a peer: keys that differ, or are missing.

    ``peer`` is whom we dialed; empty where somebody dialed us. ``times``: since the last such
    event, of which there is one in ten seconds for a peer and a reason.
    """

    seq: int
    at_s: float
    peer: str
    address: str
    reason: str
    why: str
    times: int


class AgentChanged(msgspec.Struct, frozen=True, tag="agent-changed"):
    """The sending agent towards a peer: loading, loaded, failed, dropping, dropped."""

    seq: int
    at_s: float
    peer: str
    incarnation: str
    generation: int
    state: str
    why: str = ""


class TransferStarted(msgspec.Struct, frozen=True, tag="transfer-started"):
    """The transfer process serves; a new generation says that the old one was reaped."""

    seq: int
    at_s: float
    generation: int
    why: str


class MessageRefused(msgspec.Struct, frozen=True, tag="message-refused"):
    """Something arrived that could not be acted on."""

    seq: int
    at_s: float
    socket: str
    sender: str
    code: str
    why: str


class Flushed(msgspec.Struct, frozen=True, tag="flushed"):
    """An operator emptied the tree of everything that is not locked."""

    seq: int
    at_s: float
    freed_pages: int
    kept_pages: int


class Violation(msgspec.Struct, frozen=True, tag="violation"):
    """An invariant does not hold: a bug, named with what it touches."""

    seq: int
    at_s: float
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


class ViolationHealed(msgspec.Struct, frozen=True, tag="violation-healed"):
    """What the audit had found is no longer so."""

    seq: int
    at_s: float
    what: str
    lasted_s: float


Event = (
    ClientAttached
    | ClientGone
    | ClientHungUpOn
    | RestartEvent
    | DrainEvent
    | LeaseOpened
    | LeaseExtended
    | LeaseCommitted
    | LeaseReleased
    | LeaseRetracted
    | LeaseResumed
    | Quarantined
    | QuarantineEnded
    | Evicted
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
    | TransferStarted
    | MessageRefused
    | Flushed
    | Violation
    | ViolationHealed
    | RecordingStarted
    | RecordingEnded
    | RecordingSaved
    | ConfigEvent
)
