"""The daemon's whole state as plain data: what ``kvd status --format json`` prints.

Durations are seconds and already computed, so that a reader needs no clock of the daemon's.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import UNSET, UnsetType

from kvd.wire.memory import ShardPlace


class CompanionState(msgspec.Struct, frozen=True):
    """A component in lockstep with another: each page of that has ``pages_each`` of this."""

    component: str
    page_size: int
    page_bytes: int
    pages_each: int
    total_pages: int
    tier: str


class WindowState(msgspec.Struct, frozen=True):
    """How much of the leases' sequences has window pages.

    ``mapped_pages`` are in the rows of live leases now, those of the tree that they read included;
    with a page for every token it would be ``full_pages``. ``slides`` since the daemon began.
    """

    window_tokens: int
    mapped_pages: int
    full_pages: int
    slides: int


class BufferState(msgspec.Struct, frozen=True):
    """How often a wanted page was in the device buffer already, since the daemon began.

    ``request_tokens`` is the most that a request has there.
    """

    request_tokens: int
    hits: int
    misses: int
    copied_bytes: int


class PoolState(msgspec.Struct, frozen=True):
    """Pages of one component by state: null + free + held + cached + quarantined = total (I1).

    There is one for each component with page ids of its own, the first component first; those in
    lockstep with it are its ``companions``. ``tier`` is ``device``, ``host`` or ``nowhere``: then
    pages are only counted. ``extent`` is ``whole``, ``tail``, ``per-request`` or ``buffer``.
    """

    pool: str
    component: str
    page_size: int
    page_bytes: int
    total_pages: int
    free_pages: int
    held_pages: int
    cached_pages: int
    quarantined_pages: int
    evictable_pages: int
    locked_pages: int
    saved_pages: int = 0
    """Pages of host memory that hold the KV of retracted leases, of ``saved_capacity_pages``."""
    saved_capacity_pages: int = 0
    placeholder_bytes: int = 0
    """Of one page of every layer, where pages are only counted (``page_bytes`` is 0 there): all
    that an engine needs in place of the pool, however many pages there are."""
    tier: str = "device"
    extent: str = "whole"
    companions: tuple[CompanionState, ...] = ()
    window: WindowState | None = None
    """Where the extent is ``tail``."""
    buffer: BufferState | None = None
    """Where the extent is ``buffer``."""
    shards: tuple[ShardPlace, ...] = ()
    """What of the model each shard has, where there are others than one with all of it. Pages are
    those of each of them alike, ``page_bytes`` of all of them together."""
    condemned_pages: int = 0
    """Found broken, and nobody's until the daemon is started again; they count in the sum too."""
    interior: str = "nhd"
    """How a page lies in each layer: ``nhd``, ``hnd`` or ``opaque``; a state has its own shape."""
    tag: str = ""
    """Who packs the pages of the pool, as its configuration says."""
    promised_pages: int = 0
    """Of those free or evictable: leases are sure of them, and nobody else gets them."""


class HeldState(msgspec.Struct, frozen=True):
    """What one lease has of a component beside the first.

    ``held_pages`` are its own; ``mapped_pages`` are in its row, shared ones of the tree included.
    ``needed_nodes`` are those of the tree whose part of this component it keeps from eviction.
    """

    component: str
    held_pages: int
    mapped_pages: int
    hits: int = 0
    """Pages that it wanted in its device buffer and that were there, since it has had the buffer;
    0 for any other component, as ``misses``."""
    misses: int = 0
    """Those that were copied for it."""
    needed_nodes: tuple[int, ...] = ()


class LeaseState(msgspec.Struct, frozen=True):
    """One claim: who, why, since when, on what.

    ``state`` is held, lingering, quarantined, or the standing of a lease on its way out of the pool
    and back: saving, retracted, resuming, restoring; ``retracted_s`` is since when. ``former`` is
    one of before the daemon's restart, which can only be released.
    """

    id: int
    state: str
    owner: str
    pid: int
    session: int
    reason: str
    room: int
    namespace: str
    age_s: float
    prompt_tokens: int
    prefix_tokens: int
    locked_node: int
    held_pages: int
    quarantined_pages: int
    holders: tuple[str, ...]
    waiting_for: str
    quarantined_s: float = 0.0
    because: str = ""
    """Why it is in quarantine."""
    saved_pages: int = 0
    saved_bytes: int = 0
    retracted_s: float = 0.0
    row_pages: int = 0
    """Pages of the first component, cached ones included: all its tokens and the reserve."""
    beside: tuple[HeldState, ...] = ()
    """One for each further component with page ids of its own, in the order of the pools."""
    written_tokens: int = 0
    """So many tokens have KV in its pages, by the word of its engine: no more is ever shared."""
    promised_pages: int = 0
    """Of the first component: it has not taken them, and is sure of them."""
    promised_tokens: int = 0
    """They are for so many tokens beyond those with a slot."""


class WaitingState(msgspec.Struct, frozen=True):
    """One request in the admission queue, and what it waits for.

    ``budget`` is the component that is short by ``missing_pages`` now; ``held_by`` names the leases
    with the most of it. ``ahead`` requests come first, ``overtaken`` ones went past it.
    """

    kind: str
    owner: str
    room: int
    priority: int
    waited_s: float
    deadline_in_s: float
    needed_pages: int
    why: str
    budget: str = ""
    missing_pages: int = 0
    ahead: int = 0
    overtaken: int = 0
    held_by: tuple[str, ...] = ()


class RoomState(msgspec.Struct, frozen=True):
    """One part of a handoff on this side. ``story`` is its last transitions, oldest first."""

    side: str
    part: int
    handoff: int
    room: int
    state: str
    peer: str
    incarnation: str
    owner: str
    lease: int
    prompt_tokens: int
    decode_prefix_len: int
    written_tokens: int
    posted_pages: int
    total_pages: int
    moved_bytes: int
    total_bytes: int
    outstanding_posts: int
    age_s: float
    deadline_in_s: float
    waiting_for: str
    story: tuple[str, ...]
    share: str = ""
    """Which part of a prompt that several sources send: ``part 2 of 3, pages 4..8``."""


class PeerState(msgspec.Struct, frozen=True):
    """One other daemon as we know it."""

    name: str
    address: str
    state: str
    incarnation: str
    generation: int
    agent: str
    silent_s: float
    round_trip_ms: float
    layout: str
    open_receives: int
    open_sends: int
    trouble: str = ""
    """Why the last handshake with it failed, if it has not been heard since."""
    drain: str = ""
    """That it begins nothing new, why, and since when we know; empty where it serves."""
    epochs: str = ""
    """That something was lately not handed over because it is in another epoch of a model, and
    what to run where."""
    path: str = ""
    """How bytes travel to it: of host memory, and as far as it was seen of devices."""
    slow_path: str = ""
    """Which of that is many times slower than it could be, and what to do; empty where none is."""


class ClientState(msgspec.Struct, frozen=True):
    """One session and the processes that map the pool for it."""

    session: int
    name: str
    pids: tuple[int, ...]
    age_s: float
    leases: int
    held_pages: int
    receives: int
    sends: int
    state: str = "attached"
    """``attached``; ``awaited``: it was there before the restart, and has not come back yet; or
    ``hung-up-on``: it is served no more, and what ``pids`` may write stays held until they end."""
    former_leases: int = 0
    """Of its leases, those of before the restart: they can only be released."""
    why: str = ""
    """Why kvd hung up on it."""
    prompts: int = 0
    prompt_bytes: int = 0
    """Prompts that it has told and names by a number; ``prompt_bytes`` are kept of them."""
    kind: str = ""
    """What the engine is, as its connector says: ``vllm 0.32.0``; empty: it does not say."""
    outlived: str = ""
    """Which process keeps it since when its opener is gone, and what ends that; else empty."""


class RecorderState(msgspec.Struct, frozen=True):
    """The flight recorder: ``off``, ``recording`` or ``ended``, since ``since_s`` ago, and why.

    ``covered_s``, ``inputs`` and ``record_bytes`` are what a file would hold, as of a moment ago.
    """

    state: str = "off"
    since_s: float = 0.0
    covered_s: float = 0.0
    inputs: int = 0
    record_bytes: int = 0
    why: str = ""


class KvEventState(msgspec.Struct, frozen=True):
    """What routers are told by KV events, and what became of it."""

    listen: str = ""
    replay: str = ""
    topic: str = ""
    last_number: int = -1
    """Of the last batch; -1: there was none ever."""
    subscribers: int = 0
    """Who listens now."""
    batches: int = 0
    """Published by this process, empty ones among them."""
    blocks: int = 0
    """In the pool: what a router knows that has heard all of it."""
    stored_blocks: int = 0
    """The same in the tiers of this node alone."""
    snapshots: int = 0
    """How often everything was told anew."""
    replays: int = 0
    """How often somebody asked for batches again."""
    cut: int = 0
    """Batches that one of the subscribers did not take, for it read too slowly."""
    dropped: int = 0
    """Batches that were published to nobody, because no number could be kept for them."""


class Totals(msgspec.Struct, frozen=True):
    """Counters since the incarnation began."""

    steps: int
    events: int
    leases_opened: int
    leases_released: int
    handoffs_delivered: int
    handoffs_failed: int
    sent_bytes: int
    received_bytes: int
    saved_bytes: int
    evicted_pages: int
    messages_refused: int
    violations: int
    leases_retracted: int = 0
    leases_resumed: int = 0
    restored_bytes: int = 0
    spared_bytes: int = 0
    """Saved for retracted leases, and not copied back because the tree still had them."""


class Finding(msgspec.Struct, frozen=True):
    """A rule that the audit found broken; ``state`` is broken or healed.

    ``transitions`` are whose it is, the story of the handoff and the last events about it.
    """

    rule: str
    check: str
    what: str
    state: str
    lease: int
    node: int
    owner: str
    pid: int
    room: int
    pages: int
    first_pages: tuple[int, ...]
    first_seen_ago_s: float
    last_seen_ago_s: float
    transitions: tuple[str, ...]
    component: str = ""
    """Whose pages are meant; empty for the first component's."""
    done: str = ""
    """What was done about it, beside telling."""


class AuditState(msgspec.Struct, frozen=True):
    """The standing audit: what it has found, and how it runs.

    ``findings`` are those that are broken now, which must stay 0. The last sweep took ``sweep_s``
    for ``objects`` (tree nodes, leases, parts) and all ``pages``; ``share`` of a core went into it,
    ``spent_s`` of processor time into all.
    """

    findings: int = 0
    sweeps: int = 0
    sweep_s: float = 0.0
    last_sweep_ago_s: float = 0.0
    objects: int = 0
    pages: int = 0
    spent_s: float = 0.0
    share: float = 0.0
    found: tuple[Finding, ...] = ()


class DrainState(msgspec.Struct, frozen=True):
    """Why nothing new is begun here, and what is still under way.

    ``deadline_in_s``: then the rest is given up; None: it has all the time that it takes.
    ``is_stop``: the process ends when it is drained.
    """

    who: str
    why: str
    since_s: float
    deadline_in_s: float | None
    is_stop: bool
    is_drained: bool
    receives: int
    sends: int
    waiting: int
    leases: int
    unwritten: int = 0
    """Cached pages that are still to be written to tiers before the process ends."""


class TierState(msgspec.Struct, frozen=True):
    """A tier below the pool: what lies there, what moves, and what was done since the daemon began.

    ``state`` is ``serving``, ``away`` (left alone after failures) or ``down`` (no storage process).
    Objects are pages over all layers, each of ``object_bytes``.
    """

    tier: str
    state: str
    why: str
    """It is away or down, or why nothing is written there while it serves; empty otherwise, or
    where nobody knows yet."""
    generation: int
    demotion: str
    objects: int
    capacity_objects: int
    object_bytes: int
    writing: int
    reading: int
    """Objects that are being written and read."""
    waiting: int
    """Requests that wait for what is being read."""
    written: int
    written_bytes: int
    unwritten: int
    """Objects that were to be written, and are not there."""
    evicted_unwritten: int
    """Pages that left the pool before they were written, of those that should have been."""
    dropped: int
    """The oldest objects, for the bound."""
    read: int
    read_bytes: int
    bad: int
    """Objects that were not there, or did not verify: dropped, never used."""
    waits: int
    """Requests that waited; ``hits`` got pages, ``late`` went on when their time was over."""
    hits: int
    late: int
    no_room: int
    """Requests whose pages were here, when the pool had no room for them."""
    failed_orders: int
    cut: int
    """Orders that ended with their storage process."""
    read_bytes_per_s: float
    written_bytes_per_s: float
    """As measured of the last orders; 0: there was none."""
    is_shared: bool = False
    """Other nodes write there too: ``objects`` are those that this one knows of, and its bound is
    one of the index alone."""
    probes: int = 0
    """Questions for what others have written; ``probe_hits`` found some of it."""
    probe_hits: int = 0
    unasked: int = 0
    """Prompts that were not asked for: they were not there a moment ago, or were flushed."""
    missed: int = 0
    """Objects that were removed and asked for again; ``missed_soon`` before as much as the tier
    holds had gone, and within an hour."""
    missed_soon: int = 0
    over_ceiling: int = 0
    """Pages that left the pool unwritten because their namespace was at its ceiling there."""
    gives_way_s: float | None = None
    """For how long now what is written has made way for handoffs; None: it does not."""
    gave_way_s: float = 0.0
    """How long it has in all, since the daemon began."""


IN_POOL: Final = "pool"
"""The place of a quota that is in no tier."""


class QuotaState(msgspec.Struct, frozen=True):
    """What a namespace has in one place, beside its quota there; all in pages of that place.

    ``place`` is ``IN_POOL`` or the name of a tier. One more row is for ``(all others)``. Of a store
    that nodes share ``pages`` are those that this node has written there within its ``ttl_s``.
    """

    namespace: str
    place: str
    pages: int
    page_bytes: int
    floor_pages: int
    ceiling_pages: int | None
    """None: it has none."""
    over_pages: int
    """Above its ceiling, now: the first to go when anybody needs room."""
    went_over_pages: int
    """Went since the daemon began because they were; of a store: were not written there."""
    taken_pages: int
    """Of its floor, since the daemon began: nothing else could be evicted."""
    taken_ago_s: float | None
    """When the last of these went; None: none did."""
    why: str = ""
    """What is so of its bounds now, in words."""


class EvictedPrefix(msgspec.Struct, frozen=True):
    """A cached prefix that has left the pool: ``pages`` for ``start_tokens`` to ``end_tokens``.

    ``prefix`` is a digest of its namespace, where it begins and its first page of tokens: the same
    for what is cached there again. ``wrote`` had brought it, ``kvd`` where it came from a tier or
    is of before a restart; ``needed_by`` needed its pages, for ``need``: the reason of a lease,
    ``operator`` or ``flush``. ``tier`` has it; empty: it was dropped. It had been used ``hits``
    times, and not for ``unused_s`` when it left.
    """

    prefix: str
    namespace: str
    start_tokens: int
    end_tokens: int
    pages: int
    hits: int
    wrote: str
    needed_by: str
    need: str
    tier: str
    ago_s: float
    unused_s: float
    because: str = ""
    """Why it went out of its turn: for the ceiling of its namespace, or in spite of its floor."""


class MissedAgain(msgspec.Struct, frozen=True):
    """A request of ``missed_by``, ``ago_s``, found gone what had left ``after_s`` before that."""

    missed_by: str
    after_s: float
    ago_s: float
    evicted: EvictedPrefix


class ThrashState(msgspec.Struct, frozen=True):
    """The same prefixes go for ``needed_by`` and are asked for again by ``hurt``, each time soon.

    ``rounds`` in the last ``since_s``; both may be the same engine. ``why`` says it in words.
    """

    needed_by: str
    hurt: str
    rounds: int
    since_s: float
    last: MissedAgain
    why: str = ""
    place: str = "pool"
    """Or the name of a tier: there both are namespaces, the one that writes and the one that loses.
    """
    tokens: int = 0
    """Of a tier: so many were missed since it began."""


class EvictionState(msgspec.Struct, frozen=True):
    """What has left the pool: counters since the daemon began, and the last rows, the last first.

    ``prefixes`` have left; ``hurt`` requests found gone what they asked for, ``hurt_soon`` of them
    within a minute. ``thrashing`` are the pairs that do now. As it was at the last tick.
    """

    prefixes: int = 0
    hurt: int = 0
    hurt_soon: int = 0
    evicted: tuple[EvictedPrefix, ...] = ()
    missed: tuple[MissedAgain, ...] = ()
    thrashing: tuple[ThrashState, ...] = ()


class PinKeptState(msgspec.Struct, frozen=True):
    """What one tier has of a pin: so many of its first pages.

    Of a store that has all of them and removes them by age: until when, and when they are written
    again. Where it has not all, or not again in time: ``why``, and for how long now.
    """

    tier: str
    pages: int
    of_pages: int
    left_s: float | None = None
    due_in_s: float | None = None
    words: str = ""
    why: str = ""
    for_s: float | None = None


class PinState(msgspec.Struct, frozen=True):
    """A cached prefix that is kept softly, under ``lease``: it goes last, for requests alone.

    ``tier`` below the pool has all of it too, if that is not empty. Where ``lease`` is 0 its pages
    in the pool were needed, and the tier alone keeps it. Of an operator where ``session`` is 0. It
    ends in ``ttl_s``, and with its session.
    """

    pin: int
    owner: str
    session: int
    lease: int
    namespace: str
    tokens: int
    pages: int
    age_s: float
    ttl_s: float
    tier: str = ""
    kept: tuple[PinKeptState, ...] = ()
    """By tier, what it has of it."""


class LateMark(msgspec.Struct, frozen=True):
    """Orders of an engine to copy that wait for what it computes first, for long; the oldest.

    ``left_s``: until its process gives it up; less than 0 where that says nothing any more.
    """

    session: int
    lease: int
    waited_s: float
    left_s: float
    words: str = ""
    device: str = ""
    """Whose copy engine is to move it; empty: a processor."""
    orders: int = 1
    """So many of this engine and device wait."""


class Snapshot(msgspec.Struct, frozen=True):
    """Everything, at one moment between two steps."""

    node: str
    incarnation: str
    version: str
    uptime_s: float
    state: str
    transport: str
    generation: int
    last_event: int
    pools: tuple[PoolState, ...]
    leases: tuple[LeaseState, ...]
    waiting: tuple[WaitingState, ...]
    rooms: tuple[RoomState, ...]
    peers: tuple[PeerState, ...]
    clients: tuple[ClientState, ...]
    totals: Totals
    audit: AuditState = AuditState()
    recorder: RecorderState = RecorderState()
    drain: DrainState | None = None
    """None while the node serves."""
    epochs: dict[str, int] = {}
    """By base of namespaces, those that were told of new weights; the others are in epoch 0."""
    slow_path: str = ""
    """What of this node's own copies is many times slower than it could be, and what to do."""
    pinned_bytes: dict[str, int] = {}
    """By region of host memory that copies of devices read or write: so much is registered with
    CUDA. A region is missing until it has been tried."""
    tiers: tuple[TierState, ...] = ()
    """Below the pool, the nearest first."""
    quotas: tuple[QuotaState, ...] = ()
    """Of namespaces, as they are configured, of the pool and then of the disk."""
    evictions: EvictionState = EvictionState()
    pins: tuple[PinState, ...] = ()
    pins_gave_way: int = 0
    """Pins that ended because a request had no other pages."""
    late_marks: tuple[LateMark, ...] = ()
    """Of engines that copy between pages and blocks of their own: one for each and its device."""
    kv_events: KvEventState | UnsetType = UNSET
    """Left out where nobody is told."""
