"""Messages between an operator's tool and the daemon: the admin socket (ZMQ DEALER to ROUTER).

One frame each way. Every request gets exactly one answer; a verb that changes something says what
it changed, what it refused, and why.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvd.errors import Refusal
from kvd.wire.bounds import Call, Figure, Name, Namespace, Reason
from kvd.wire.console import MAX_FRAMES, MAX_QUERIES, EventQuery, MapQuery, Query, Vitals
from kvd.wire.events import Event
from kvd.wire.snapshot import AuditState, Snapshot


class OperatorRequest(msgspec.Struct, frozen=True, array_like=True):
    """What every request begins with: the number that its answer bears."""

    call: Call


class ShowStatus(OperatorRequest, frozen=True, tag="status"):
    """Answer: ``Status``."""


class ShowTree(OperatorRequest, frozen=True, tag="tree"):
    """The radix tree, biggest subtrees first, at most ``limit`` nodes. Answer: ``Tree``."""

    limit: Figure = 200


class Why(OperatorRequest, frozen=True, tag="why"):
    """Who holds it, why, since when. Answer: ``Because``.

    ``kind``: page, node, room, lease, receive, send, client; or peer, which has a ``name`` and no
    ``id``; or evicted, which has neither. ``component``: whose page it is; empty for the first one.
    """

    kind: Name
    id: Figure
    component: Name = ""
    name: Name = ""


class AskOtherEnd(OperatorRequest, frozen=True, tag="other-end"):
    """What the peers of a room here say of their ends of it. Answer within 1 s: ``OtherEnds``."""

    room: int


class Look(OperatorRequest, frozen=True, tag="look"):
    """What is on a console's screen now. Answer: ``Frame``, ``frames`` of them, all to this call.

    The first comes at once, the others ``every_s``, as changes of the one before. The next look of
    the same console ends this one; that is its answer (``cancelled``) where it had no frame. So
    nobody is owed more than was asked for: one that stops gets ``frames`` at most, and asks in time
    for more if it goes on.
    """

    queries: Annotated[tuple[Query | MapQuery, ...], msgspec.Meta(max_length=MAX_QUERIES)] = ()
    events: EventQuery | None = None
    frames: Annotated[int, msgspec.Meta(ge=1, le=MAX_FRAMES)] = 1
    every_s: Annotated[float, msgspec.Meta(ge=0.05, le=60)] = 0.1


class ListEvents(OperatorRequest, frozen=True, tag="events"):
    """Events after ``after_seq``, waiting up to ``wait_s`` for one. Answer: ``EventPage``."""

    after_seq: Figure
    wait_s: float = 0.0


class Flush(OperatorRequest, frozen=True, tag="flush"):
    """Drop every unlocked cached page; ``STRICT``: nothing at all if any is locked. ``Report``."""

    mode: Name = "unlocked"
    namespace: Namespace | None = None
    """Of this one, and of its members where it is a base; None: all of them."""


class RaiseEpoch(OperatorRequest, frozen=True, tag="epoch"):
    """A base and its members have new weights: what is cached is never found again. ``Report``."""

    namespace: Namespace
    epoch: Figure | None = None
    """None: the next one."""


class Evict(OperatorRequest, frozen=True, tag="evict"):
    """Evict at least ``pages`` pages in eviction order. Answer: ``Report``."""

    pages: Figure


class Pin(OperatorRequest, frozen=True, tag="pin"):
    """Keep what leads to a ``node`` of the tree or to a ``page``, softly. Answer: ``Report``."""

    kind: Name
    id: Figure
    ttl_s: float
    who: Name = ""


class Unpin(OperatorRequest, frozen=True, tag="unpin"):
    """That pin is over. Answer: ``Report``."""

    pin: Figure


class AbortRoom(OperatorRequest, frozen=True, tag="abort-room"):
    """Give up every part of a room on this node. Answer: ``Report``."""

    room: int
    reason: Reason


class Fence(OperatorRequest, frozen=True, tag="fence"):
    """Restart this node's transfer process, so that nothing can write through the old one."""


class Drain(OperatorRequest, frozen=True, tag="drain"):
    """Begin nothing new; what is under way ends, or is given up after ``deadline_s`` (0: never).

    ``who`` asks, as they call themselves. Asked again, the new deadline counts. Answer: ``Report``.
    """

    who: Name = ""
    why: Reason = ""
    deadline_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0


class Undrain(OperatorRequest, frozen=True, tag="undrain"):
    """Serve again. Answer: ``Report``."""


Plannable = Flush | RaiseEpoch | Evict | Pin | Unpin | AbortRoom | Fence | Drain | Undrain
"""What changes something by a plan, so that it can be shown before."""


class Rehearse(OperatorRequest, frozen=True, tag="rehearse"):
    """What that verb would report now; nothing is changed. Answer: ``Report``."""

    verb: Plannable


class Audit(OperatorRequest, frozen=True, tag="audit"):
    """Check every invariant now. Answer: ``Report``; ``refused`` is what is broken now."""


class Record(OperatorRequest, frozen=True, tag="record"):
    """Save what the flight recorder has. Answer: ``Recorded``.

    The live node's state is hashed for it if it has at most ``hash_objects`` objects (tree nodes,
    leases, parts...): about 10 us each, during which the loop stands still.
    """

    hash_objects: Figure = 2000


class Reload(OperatorRequest, frozen=True, tag="reload"):
    """Read the configuration again. Answer: ``Reloaded``."""


AdminRequest = (
    ShowStatus
    | ShowTree
    | Why
    | AskOtherEnd
    | Look
    | ListEvents
    | Flush
    | Evict
    | Pin
    | Unpin
    | AbortRoom
    | Fence
    | Drain
    | Undrain
    | RaiseEpoch
    | Rehearse
    | Audit
    | Record
    | Reload
)


class Beside(msgspec.Struct, frozen=True):
    """What lies at a node of a component beside the first: a window, or a snapshot.

    A window without ``pages`` is a tombstone: the node's tokens are cached, their window is not.
    ``locks`` are the leases that need it.
    """

    component: str
    pages: int
    locks: int


class TreeNode(msgspec.Struct, frozen=True):
    """One node: ``holders`` are the leases whose path crosses it; ``lock_ref`` is their number."""

    id: int
    parent: int
    namespace: str
    start_tokens: int
    end_tokens: int
    pages: int
    lock_ref: int
    hits: int
    holders: tuple[str, ...]
    first_tokens: tuple[int, ...]
    beside: tuple[Beside, ...] = ()


class OperatorReply(msgspec.Struct, frozen=True, array_like=True):
    """What every answer begins with: the number of its request."""

    call: int


class Status(OperatorReply, frozen=True, tag="status"):
    """The snapshot."""

    snapshot: Snapshot


class Tree(OperatorReply, frozen=True, tag="tree"):
    """``nodes`` in display order, parents first; ``total`` counts those not shown too."""

    nodes: tuple[TreeNode, ...]
    total: int


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a thing, and how long ago."""

    ago_s: float
    what: str


class Because(OperatorReply, frozen=True, tag="because"):
    """One sentence that answers, then the facts and the story behind it.

    ``links`` are what has to do with it, to be asked about next: ``lease:7``, ``node:3``,
    ``room:12``, ``peer:prefill-0``, ``client:2``, ``page:17``. ``marks`` are its last transitions,
    oldest first: of a handoff, or of a node's locks.
    """

    sentence: str
    facts: tuple[str, ...]
    links: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


class OtherEnd(msgspec.Struct, frozen=True, array_like=True):
    """The other end of one part here, which is ``ours``: ``receive:4``, ``send:4``.

    As ``peer`` tells it: nothing of it is checked. ``why_none``: why there is nothing to tell; else
    empty. ``side`` is the peer's. ``deadline_in_s`` and the marks count from the answer's arrival.
    """

    ours: str
    peer: str
    side: str
    state: str = ""
    waiting_for: str = ""
    prompt_tokens: int = 0
    decode_prefix_len: int = 0
    moved_bytes: int = 0
    total_bytes: int = 0
    outstanding_posts: int = 0
    deadline_in_s: float = 0.0
    marks: tuple[Mark, ...] = ()
    round_trip_s: float = 0.0
    why_none: str = ""


class OtherEnds(OperatorReply, frozen=True, tag="other-ends"):
    """One for each part of the room here."""

    ends: tuple[OtherEnd, ...]


class Frame(OperatorReply, frozen=True, tag="frame"):
    """The answer to a ``Look``: ``answers`` are a ``Table`` or a ``PageMap`` each, in order.

    ``lost`` events had left the ring before they were asked for, ``skipped`` did not fit. All up to
    number ``upto`` were looked at: ask for those after it next. Where some were lost, all since
    ``since_s`` were there; of those before it what changed the node is, and what failed.
    """

    vitals: Vitals
    answers: tuple[msgspec.Raw, ...]
    events: tuple[Event, ...]
    lost: int
    skipped: int
    upto: int = 0
    since_s: float = 0.0


class EventPage(OperatorReply, frozen=True, tag="event-page"):
    """Events in order; ``lost`` of them had already left the ring."""

    lost: int
    events: tuple[Event, ...]


class Report(OperatorReply, frozen=True, tag="report"):
    """What changed (figures by name), and what was refused and why."""

    changed: dict[str, int]
    refused: tuple[str, ...]
    standing: AuditState | None = None
    """Of an audit: what the standing one has found, and how it runs."""
    notes: tuple[str, ...] = ()
    """What becomes of single things: which nodes go, whose pages wait for whom."""


class Recorded(OperatorReply, frozen=True, tag="recorded"):
    """The recording, on the daemon's host, readable by the daemon's user only.

    ``steps`` and ``last_event`` are the node's at its end; ``state_hash`` is of the live node
    there, empty if it has too many objects.
    """

    path: str
    seconds: float
    inputs: int
    file_bytes: int
    steps: int
    last_event: int
    state_hash: str


class Changed(msgspec.Struct, frozen=True, array_like=True):
    """One key of the configuration, or one entry of a table, and its values as TOML.

    Empty where it has none.
    """

    key: str
    before: str
    after: str


class Reloaded(OperatorReply, frozen=True, tag="reloaded"):
    """``changed`` holds now, ``needs_restart`` is as it was. With ``errors`` nothing was changed.

    An error is a sentence: where, what, and what to do.
    """

    changed: tuple[Changed, ...]
    needs_restart: tuple[Changed, ...]
    errors: tuple[str, ...] = ()


class AdminFailed(OperatorReply, frozen=True, tag="failed"):
    """The request was refused as a whole."""

    refusal: Refusal


AdminReply = (
    Status
    | Tree
    | Because
    | OtherEnds
    | Frame
    | EventPage
    | Report
    | AdminFailed
    | Recorded
    | Reloaded
)
