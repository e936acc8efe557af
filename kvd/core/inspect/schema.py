"""What is known of a thing, said once: its name, its unit, how it is read, and what it means.

A ``StateTable`` is all that is known of one kind of thing. A ``StateField`` of it is a column of a
console's table, a field of the snapshot (``--format json``), or both. The snapshot's structs are
declared in ``kvd.wire.snapshot``, because their JSON is a promise; their values come from here, and
so do the columns. So a new field of a lease, a room, a peer, a client or a pool is one line:

- what is an attribute of its row already (a lease is its own row; for a room, add it to
  ``rows.HandoffRow`` and to the two functions that make one): its line in the struct. It
  is in the snapshot, is said by ``kvd why``, and is a column, whose unit is that of its name. A
  moment is none: the snapshot has ages;
- what consoles alone show, or is worked out: its ``StateField``, with ``wire`` where the snapshot
  has it under another name.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
import numpy as np

from kvd.core.cache.lease_state import LeaseStage
from kvd.core.cache.namespaces import told
from kvd.core.components.device_buffer import Buffers
from kvd.core.components.windows import WindowPages
from kvd.core.handoff.parts import ReceivePart, SendPart
from kvd.core.inspect.page_states import needed_nodes
from kvd.core.inspect.words import (
    agent_words,
    asked_word,
    asker_name,
    epochs_words,
    is_nearly_full,
    layout_words,
    lease_waits_for,
    lease_word,
    receive_share,
    receive_waits_for,
    send_share,
    send_waits_for,
    why_waits,
)
from kvd.core.layout.geometry import shard_places
from kvd.core.layout.spec import (
    companion_factor,
    extent_tokens,
    has_bytes,
    is_companion,
    kind,
    node_page_bytes,
)
from kvd.core.leases.owners import owner_of
from kvd.core.peers.peer import drain_words
from kvd.core.peers.ways import slow_words, way_words
from kvd.types import NULL_PAGE, count
from kvd.wire.events import HandoffEnded
from kvd.wire.snapshot import (
    BufferState,
    ClientState,
    CompanionState,
    HeldState,
    LeaseState,
    PeerState,
    PoolState,
    RoomState,
    WaitingState,
    WindowState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inspect.rows import ClientRow, HandoffRow, PeerRow, PoolRow, WaitingRow
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.peers.peer import Peer
    from kvd.types import Pages

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

NOTHING: dict[str, str | float | None] = {"": None, **dict.fromkeys(("text", "state", "ref"), "")}
NOTHING |= dict.fromkeys(("since", "until", "seconds", "ms", "share"), 0.0)
"""What the snapshot has in place of None, by unit; of all others 0."""


class StateField(Generic[T]):
    """One thing that is known of an object. ``column`` or ``wire`` is empty where it is not shown.

    ``unit`` is the kind of the column: see ``wire.console.Column``. ``get`` is a function, or the
    path of an attribute: ``places.pool.free_pages``; empty: the attribute named as the column.
    """

    __slots__ = ("column", "get", "help", "unit", "wire")

    def __init__(
        self,
        column: str,
        unit: str,
        get: str | Callable[[NodeView, T], Any] = "",  # Any: a cell, or what the snapshot has
        help_: str = "",
        *,
        wire: str = "",
    ) -> None:
        self.column = column
        self.unit = unit
        self.get = _attribute(get or column) if isinstance(get, str) else get
        self.help = help_
        self.wire = wire


def _attribute(path: str) -> Callable[[NodeView, Any], Any]:
    get = attrgetter(path)
    return lambda _, one: get(one)


class StateTable(Generic[T, S]):
    """All that is known of one kind of thing, of which the snapshot has the struct ``kind``.

    A column of the same name as a field of the snapshot is that field, unless another row says so
    with its ``wire``. ``unshown`` are attributes that the snapshot has and no console shows.
    ``plain`` are those that nothing here speaks of: they are columns, each at the end.
    """

    def __init__(self, kind: type[S], *rows: StateField[T], unshown: Sequence[str] = ()) -> None:
        self._kind = kind
        self.rows = (
            *rows,
            *[StateField("", _unit_of(kind, name), name, wire=name) for name in unshown],
        )
        by_name = {row.column: row for row in rows if row.column}
        # Behind the columns: what says with its ``wire`` that it is the field wins over an equal
        # name.
        by_name |= {row.wire: row for row in self.rows if row.wire}
        self.plain: tuple[StateField[T], ...] = tuple(
            StateField(name, _unit_of(kind, name))
            for name in kind.__struct_fields__
            if name not in by_name
        )
        self.columns = (*[row for row in rows if row.column], *self.plain)
        by_name |= {row.column: row for row in self.plain}
        fields = [by_name[name] for name in kind.__struct_fields__]
        self._read = [(field.get, field.unit, NOTHING.get(field.unit, 0)) for field in fields]

    def state(self, node: NodeView, one: T) -> S:
        """What the snapshot has of it, as of the running step.

        Nothing is None, and a moment is how long ago it was, or will be: readers have no clock.
        """
        at_s, values = node.out.at_s, []
        for get, unit, nothing in self._read:
            found = get(node, one)
            if found is None:
                found = nothing
            elif unit == "since":
                found = at_s - found
            elif unit == "until":
                found -= at_s
            values.append(found)
        return self._kind(*values)


def _unit_of(kind: type[msgspec.Struct], name: str) -> str:
    """Names of figures end with their unit."""
    last = name.rpartition("_")[2]
    if last in {"pages", "bytes", "tokens"}:
        return last
    if last == "s":
        return "seconds"
    # A struct annotates only the fields that it adds to its bases.
    declared = [vars(one).get("__annotations__", {}).get(name) for one in kind.__mro__]
    return "text" if "str" in declared else "count"


# ---- references: what to open --------------------------------------------------------------------


def client_ref(session: int) -> str | None:
    """For a session."""
    return f"client:{session}" if session else None


def lease_ref(lease: LeaseRecord | None) -> str | None:
    """For a lease."""
    return f"lease:{lease.id}" if lease is not None else None


def peer_ref(name: str) -> str | None:
    """For a peer."""
    return f"peer:{name}" if name else None


def session_name(node: NodeView, session: int) -> str:
    """The name of a session; of one that is gone its number, of none nothing."""
    return owner_of(node, session)[0] if session else ""


# ---- leases --------------------------------------------------------------------------------------

# RESTORING too, unlike the audit's AWAY: it has pages again, and its engine waits for it still.
_AWAY = {LeaseStage.RETRACTED, LeaseStage.RESUMING, LeaseStage.RESTORING}


def _pid(node: NodeView, lease: LeaseRecord) -> int | None:
    return owner_of(node, lease.session)[1] or None


def _held(_: NodeView, lease: LeaseRecord) -> int:
    return 0 if lease.quarantine is not None else lease.held_pages


def _quarantined(_: NodeView, lease: LeaseRecord) -> int:
    return lease.held_pages if lease.quarantine is not None else 0


def _beside(node: NodeView, lease: LeaseRecord) -> str:
    """``swa 12, state 1``."""
    own = [
        (keeper.component.name, count(keeper.own_pages(lease)))
        for keeper in node.leases.components.each
    ]
    return ", ".join(f"{name} {pages}" for name, pages in own if pages)


def _locked_ref(_: NodeView, lease: LeaseRecord) -> str | None:
    return f"node:{lease.anchor.id}" if lease.anchor and lease.anchor.parent else None


def _why(_: NodeView, lease: LeaseRecord) -> str:
    return lease.quarantine.why if lease.quarantine is not None else ""


def _quarantined_since(_: NodeView, lease: LeaseRecord) -> float | None:
    return lease.quarantine.since_s if lease.quarantine is not None else None


def _retracted_since(_: NodeView, lease: LeaseRecord) -> float | None:
    return lease.retracted_s if lease.state in _AWAY else None


def _away_since(node: NodeView, lease: LeaseRecord) -> float | None:
    if lease.quarantine is not None:
        return lease.quarantine.since_s
    return _retracted_since(node, lease)


def held_states(table: LeaseTable, lease: LeaseRecord) -> tuple[HeldState, ...]:
    """What the lease has of each component beside the first."""
    found = []
    for keeper in table.components.each:
        buffer = keeper.resident.get(lease.id) if isinstance(keeper, Buffers) else None
        found.append(
            HeldState(
                component=keeper.component.name,
                held_pages=count(keeper.own_pages(lease)),
                mapped_pages=mapped_pages(keeper.page_table(lease)),
                hits=buffer.hits if buffer is not None else 0,
                misses=buffer.misses if buffer is not None else 0,
                needed_nodes=tuple(sorted(edge.id for edge in needed_nodes(keeper, lease))),
            )
        )
    return tuple(found)


def mapped_pages(row: Pages) -> int:
    """Ids in a row that are of a page; the null page stands for none."""
    return int(np.count_nonzero(np.frombuffer(row, dtype="<i4")))


LEASE: StateTable[LeaseRecord, LeaseState] = StateTable(
    LeaseState,
    StateField("id", "count"),
    StateField("state", "state", lambda _, one: lease_word(one)),
    StateField("owner", "text", lambda node, one: session_name(node, one.session)),
    StateField("client", "ref", lambda _, one: client_ref(one.session)),
    StateField("pid", "count", _pid, "of the first process of its session"),
    StateField("reason", "text"),
    StateField("room", "count", lambda _, one: one.room or None),
    StateField("held", "pages", _held, "pages of its own", wire="held_pages"),
    StateField(
        "row",
        "pages",
        lambda _, one: count(one.page_table),
        "cached ones of its prefix too",
        wire="row_pages",
    ),
    StateField(
        "quarantined",
        "pages",
        _quarantined,
        "that a remote may still write",
        wire="quarantined_pages",
    ),
    StateField("beside", "text", _beside, "pages of the other components"),
    StateField(
        "promised", "pages", "promised_pages", "it is sure of more pages", wire="promised_pages"
    ),
    StateField(
        "",
        "tokens",
        lambda _, one: one.promised_tokens if one.promised_pages else 0,
        wire="promised_tokens",
    ),
    StateField(
        "locked",
        "tokens",
        lambda _, one: one.anchor.end_tokens if one.anchor is not None else 0,
        "cached tokens that it keeps from eviction",
    ),
    StateField("prefix_tokens", "tokens", "", "cached when it opened"),
    StateField("prompt_tokens", "tokens", lambda _, one: count(one.tokens), "known by now"),
    StateField(
        "written",
        "tokens",
        "written_tokens",
        "whose KV is in its pages, as its engine has said",
        wire="written_tokens",
    ),
    StateField(
        "locked_node", "ref", _locked_ref, "where its lock begins; everything above is locked too"
    ),
    StateField("holders", "text", lambda _, one: ", ".join(sorted(one.holders))),
    StateField("waiting_for", "text", lease_waits_for),
    StateField("why", "text", _why, "why it is in quarantine", wire="because"),
    StateField("since", "since", "since_s", wire="age_s"),
    StateField("touched", "since", "touched_s", "opened, extended or committed last"),
    StateField("away_since", "since", _away_since, "in quarantine or retracted"),
    StateField("saved", "pages", "saved_pages", "kept for it in host memory"),
    StateField("priority", "count"),
    StateField("namespace", "text", lambda _, one: told(one.namespace)),
    # What the snapshot alone has, or says in another way than a table does.
    StateField("", "text", lambda node, one: owner_of(node, one.session)[0], wire="owner"),
    StateField("", "count", lambda _, one: one.anchor.id if one.anchor else 0, wire="locked_node"),
    StateField("", "text", lambda _, one: tuple(sorted(one.holders)), wire="holders"),
    StateField("", "since", _quarantined_since, wire="quarantined_s"),
    StateField("", "since", _retracted_since, wire="retracted_s"),
    StateField("", "pages", lambda node, one: held_states(node.leases, one), wire="beside"),
    unshown=("session", "saved_pages", "saved_bytes"),
)

# ---- rooms ---------------------------------------------------------------------------------------


def _done_bytes(node: NodeView, one: HandoffRow) -> int:
    """Of posts under way too, where they are ours."""
    if isinstance(one.record, SendPart):
        return node.prefiller.posts.live_bytes(one.record)
    return one.record.moved_bytes


def _waits_for(node: NodeView, one: HandoffRow) -> str:
    """What would take it further; of one that failed, why."""
    part = one.record
    if isinstance(part, HandoffEnded):
        return f"{part.code}: {part.reason}" if part.code else ""
    if isinstance(part, ReceivePart):
        return receive_waits_for(node.decoder, part)
    return send_waits_for(part)


def _carried_by(node: NodeView, one: HandoffRow) -> str:
    """What does, and of a send over ways that are known, which."""
    peer = node.peers.by_name.get(one.record.peer)
    # Of host memory alone there is nothing to tell.
    if not isinstance(one.record, SendPart) or peer is None or len(peer.ways) < 2:
        return node.transport
    return f"{node.transport}; {way_words(peer)}"


def _share(node: NodeView, one: HandoffRow) -> str:
    if isinstance(one.record, ReceivePart):
        return receive_share(node.settings, one.record)
    return send_share(node.prefiller, one.record) if isinstance(one.record, SendPart) else ""


def _story(node: NodeView, one: HandoffRow) -> tuple[str, ...]:
    if isinstance(one.record, HandoffEnded):
        return ()
    return one.record.history.lines(node.out.at_s)


ROOM: StateTable[HandoffRow, RoomState] = StateTable(
    RoomState,
    StateField("room", "count", "record.room"),
    StateField("side", "text"),
    StateField("state", "state"),
    StateField("peer", "ref", lambda _, one: peer_ref(one.record.peer)),
    StateField("owner", "text", lambda node, one: session_name(node, one.session)),
    StateField("client", "ref", lambda _, one: client_ref(one.session)),
    StateField("lease", "ref", lambda _, one: lease_ref(one.lease)),
    StateField("prompt_tokens", "tokens", "record.prompt_tokens"),
    StateField("decode_prefix_len", "tokens", "", "cached on the decode side: not sent"),
    StateField("done_bytes", "bytes", _done_bytes),
    StateField("total_bytes", "bytes"),
    StateField(
        "done_pages", "pages", "posted_pages", "given to the transfer process", wire="posted_pages"
    ),
    StateField("total_pages", "pages", lambda node, one: node.leases.pages_for(one.delta_tokens)),
    StateField("posts", "count", "", "under way", wire="outstanding_posts"),
    StateField("path", "text", _carried_by, "what carries the bytes"),
    StateField("since", "since", "since_s", wire="age_s"),
    StateField("until", "until", "until_s", "its deadline", wire="deadline_in_s"),
    StateField("moved", "since", "moved_s", "last byte or change of state, as far as was seen"),
    StateField("ended", "since", "ended_s"),
    StateField("waiting_for", "text", _waits_for, "or why it failed"),
    StateField("share", "text", _share, "of one of several sources: which part of the prompt"),
    # What the snapshot alone has, or says in another way than a table does.
    StateField("", "text", "record.peer", wire="peer"),
    StateField("", "text", "record.incarnation", wire="incarnation"),
    StateField("", "count", "record.handoff", wire="handoff"),
    StateField("", "count", lambda _, one: one.lease.id if one.lease else 0, wire="lease"),
    StateField("", "bytes", "record.moved_bytes", wire="moved_bytes"),
    StateField("", "text", _story, wire="story"),
    unshown=("part", "written_tokens"),
)

# ---- peers ---------------------------------------------------------------------------------------


def _of_peer(
    read: Callable[[Peer], Any], unknown: Any = None
) -> Callable[[NodeView, PeerRow], Any]:
    """What is only known of one that has said Hello."""
    return lambda _, one: unknown if one.peer is None else read(one.peer)


def _drain(node: NodeView, one: PeerRow) -> str:
    return drain_words(one.peer, node.out.at_s) if one.peer is not None else ""


def _epochs(node: NodeView, one: PeerRow) -> str:
    return epochs_words(node, one.peer) if one.peer is not None else ""


PEER: StateTable[PeerRow, PeerState] = StateTable(
    PeerState,
    StateField("name", "text"),
    StateField("address", "text"),
    StateField("state", "state", _of_peer(lambda peer: peer.life.value, "silent")),
    StateField("incarnation", "text", _of_peer(attrgetter("incarnation"), "")),
    StateField(
        "generation", "count", _of_peer(attrgetter("generation")), "of its transfer process"
    ),
    StateField("agent", "text", _of_peer(agent_words, "none"), "whether we can send to it"),
    StateField("agent_since", "since", _of_peer(lambda peer: peer.agent_since_s or None)),
    StateField("rtt", "ms", _of_peer(lambda peer: peer.round_trip_s * 1e3), wire="round_trip_ms"),
    StateField("heard", "since", _of_peer(attrgetter("heard_s")), wire="silent_s"),
    StateField(
        "layout", "text", _of_peer(layout_words, "unknown"), "whether its pages are like ours"
    ),
    StateField("receives", "count", "", "under way from it"),
    StateField("sends", "count", "", "under way to it"),
    StateField("posts", "count", "", "under way to it"),
    StateField("in_bytes", "bytes", "", "counter"),
    StateField("out_bytes", "bytes", "", "counter"),
    StateField("delivered", "count", "", "counter"),
    StateField("failed", "count", "", "counter"),
    StateField("trouble", "text", lambda node, one: node.peers.trouble(one.name)),
    StateField("epochs", "text", _epochs),
    # What the snapshot alone has.
    StateField("", "text", _of_peer(way_words, ""), wire="path"),
    StateField("", "text", _of_peer(slow_words, ""), wire="slow_path"),
    StateField("", "count", "live_receives", wire="open_receives"),
    StateField("", "count", "live_sends", wire="open_sends"),
    StateField("", "text", _drain, wire="drain"),
)

# ---- clients -------------------------------------------------------------------------------------


def _is_there(_: NodeView, one: ClientRow) -> str:
    if one.session.hang_up is not None:
        return "hung up on"
    if one.session.is_former:
        return "awaited"
    if one.session.is_outlived:
        return "outlived"
    if not any(one.alive):
        return "gone"
    return "alive" if all(one.alive) else "partly gone"


def _is_served(_: NodeView, one: ClientRow) -> str:
    if one.session.hang_up is not None:
        return "hung-up-on"
    return "awaited" if one.session.is_former else "attached"


def _why_hung_up(_: NodeView, one: ClientRow) -> str:
    return one.session.hang_up.why.message if one.session.hang_up is not None else ""


CLIENT: StateTable[ClientRow, ClientState] = StateTable(
    ClientState,
    StateField("name", "text", "session.name"),
    StateField(
        "state",
        "state",
        _is_there,
        "whether its processes run; awaited: of before the restart; hung up on: served no more; "
        "outlived: others than its opener keep it",
    ),
    StateField("pids", "text", lambda _, one: " ".join(map(str, one.session.pids))),
    StateField("leases", "count", lambda _, one: len(one.leases)),
    StateField(
        "held", "pages", "held_pages", "pages of its own, in quarantine or not", wire="held_pages"
    ),
    StateField(
        "locked",
        "tokens",
        lambda _, one: sum([lease.anchor.end_tokens for lease in one.leases if lease.anchor]),
        "cached tokens that its leases keep from eviction",
    ),
    StateField(
        "oldest",
        "since",
        lambda _, one: min([lease.since_s for lease in one.leases], default=None),
        "its oldest lease",
    ),
    StateField("receives", "count"),
    StateField("sends", "count"),
    StateField("calls", "count"),
    StateField("since", "since", "session.since_s", "attached", wire="age_s"),
    # What the snapshot alone has, or says in another way than a table does.
    StateField("", "count", "session.id", wire="session"),
    StateField("", "text", lambda _, one: tuple(one.session.pids), wire="pids"),
    StateField("", "text", _is_served, wire="state"),
    StateField(
        "", "text", lambda node, one: one.session.told_outlived(node.out.at_s), wire="outlived"
    ),
    StateField(
        "",
        "count",
        lambda node, one: len(node.former_leases.of_session(one.session.id)),
        wire="former_leases",
    ),
    StateField("", "text", _why_hung_up, wire="why"),
    StateField("", "count", lambda _, one: len(one.session.prompts.by_number), wire="prompts"),
    StateField("", "count", "session.prompts.n_bytes", wire="prompt_bytes"),
)

# ---- pools ---------------------------------------------------------------------------------------


def _headroom(node: NodeView, one: PoolRow) -> int:
    return node.leases.budgets.headroom(one.component.name)


def _locked_pages(_: NodeView, one: PoolRow) -> int:
    return one.cache.cached_pages - one.cache.evictable_pages


def _pool_word(node: NodeView, one: PoolRow) -> str:
    """The gravest that is so."""
    pool = one.places.pool
    known = NULL_PAGE + 1 + pool.free_pages + one.cache.cached_pages + one.condemned_pages
    if known + one.held_pages + one.quarantined_pages != pool.total_pages:
        return "does not add up"
    if one.condemned_pages:
        return f"{one.condemned_pages} condemned"
    if one.waiting:
        return "short"
    if not _headroom(node, one):
        return "full"
    if is_nearly_full(node.leases.budgets, one.component.name):
        return "short"
    return "quarantined" if one.quarantined_pages else "ok"


def _page_bytes(node: NodeView, one: PoolRow) -> int:
    return node_page_bytes(node.settings.spec, one.component) if has_bytes(one.component) else 0


def _placeholder_bytes(node: NodeView, one: PoolRow) -> int:
    return 0 if has_bytes(one.component) else node_page_bytes(node.settings.spec, one.component)


def _evicted(node: NodeView, one: PoolRow) -> int | None:
    """Only those of the first component are counted."""
    return node.leases.evictor.evicted_pages if one.places.keeper is None else None


def _companions(node: NodeView, one: PoolRow) -> tuple[CompanionState, ...]:
    spec = node.settings.spec
    if one.places.keeper is not None:
        return ()
    return tuple(
        CompanionState(
            component=other.name,
            page_size=other.page_size,
            page_bytes=node_page_bytes(spec, other),
            pages_each=companion_factor(spec, other),
            total_pages=pages,
            tier=kind(other.tier),
        )
        for other, pages in zip(spec.components, spec.pages, strict=True)
        if is_companion(spec, other)
    )


def _companion_words(node: NodeView, one: PoolRow) -> str:
    each = [(other.component, other.pages_each) for other in _companions(node, one)]
    return ", ".join([f"{name} ({pages} for each page)" for name, pages in each])


def _window(node: NodeView, one: PoolRow) -> WindowState | None:
    keeper = one.places.keeper
    if not isinstance(keeper, WindowPages):
        return None
    running = [lease for lease in node.leases.leases.values() if lease.quarantine is None]
    return WindowState(
        window_tokens=extent_tokens(keeper.component),
        mapped_pages=sum([mapped_pages(keeper.page_table(lease)) for lease in running]),
        full_pages=sum([count(lease.page_table) for lease in running]),
        slides=keeper.slides,
    )


def _window_words(node: NodeView, one: PoolRow) -> str:
    window = _window(node, one)
    if window is None:
        return ""
    return (
        f"{window.window_tokens} tokens, {window.mapped_pages} of {window.full_pages} pages "
        f"mapped, {window.slides} slides"
    )


def _buffer(_: NodeView, one: PoolRow) -> BufferState | None:
    keeper = one.places.keeper
    if not isinstance(keeper, Buffers):
        return None
    return BufferState(
        request_tokens=extent_tokens(keeper.component),
        hits=keeper.hits,
        misses=keeper.misses,
        copied_bytes=keeper.copied_bytes,
    )


def _buffer_words(node: NodeView, one: PoolRow) -> str:
    buffer = _buffer(node, one)
    if buffer is None:
        return ""
    return f"{buffer.request_tokens} tokens a request, {buffer.hits} hits, {buffer.misses} misses"


POOL: StateTable[PoolRow, PoolState] = StateTable(
    PoolState,
    StateField("component", "text", "component.name"),
    StateField("tier", "text", lambda _, one: kind(one.component.tier)),
    StateField("extent", "text", lambda _, one: kind(one.component.extent)),
    StateField("state", "state", _pool_word),
    StateField("total", "pages", "places.pool.total_pages", wire="total_pages"),
    StateField("free", "pages", "places.pool.free_pages", wire="free_pages"),
    StateField("held", "pages", "held_pages", wire="held_pages"),
    StateField("cached", "pages", "cache.cached_pages", wire="cached_pages"),
    StateField("quarantined", "pages", "quarantined_pages", wire="quarantined_pages"),
    StateField("locked", "pages", _locked_pages, "cached, and in use", wire="locked_pages"),
    StateField(
        "evictable", "pages", "cache.evictable_pages", "cached, not in use", wire="evictable_pages"
    ),
    StateField("headroom", "pages", _headroom, "to be had now: free or evictable, not promised"),
    StateField(
        "promised",
        "pages",
        lambda node, one: node.leases.budgets.promised(one.component.name),
        "free or evictable, and a lease is sure of them",
        wire="promised_pages",
    ),
    StateField("waiting", "count", "", "requests that lack pages of it"),
    StateField(
        "saved",
        "pages",
        lambda node, one: node.leases.saved.used_pages(one.component.name),
        "of retracted leases",
        wire="saved_pages",
    ),
    StateField(
        "saved_capacity",
        "pages",
        lambda node, one: node.leases.saved.capacity_pages(one.component.name),
        wire="saved_capacity_pages",
    ),
    StateField("page_size", "tokens", "component.page_size"),
    StateField("page_bytes", "bytes", _page_bytes),
    StateField("interior", "text", lambda _, one: one.component.interior.value, "of a page"),
    StateField("tag", "text", lambda node, _: node.settings.spec.tag, "who packs its pages"),
    StateField("evicted", "pages", _evicted, "counter"),
    StateField("companions", "text", _companion_words, "in lockstep with it"),
    StateField("window", "text", _window_words),
    StateField("buffer", "text", _buffer_words),
    StateField("held_by", "holders", "", "who keeps the most of it"),
    # What the snapshot alone has, or says in another way than a table does.
    StateField("", "text", lambda node, _: node.settings.spec.name, wire="pool"),
    StateField("", "bytes", _placeholder_bytes, wire="placeholder_bytes"),
    StateField("", "", _companions, wire="companions"),
    StateField("", "", _window, wire="window"),
    StateField("", "", _buffer, wire="buffer"),
    StateField(
        "",
        "",
        lambda node, one: () if one.places.keeper else shard_places(node.settings.spec),
        wire="shards",
    ),
    unshown=("condemned_pages",),
)

# ---- requests that wait --------------------------------------------------------------------------


def _what(_: NodeView, one: WaitingRow) -> str | None:
    lease, receive = one.waiter.claim.resumes, one.receive
    return f"lease:{lease}" if lease else (f"receive:{receive}" if receive else None)


WAITING: StateTable[WaitingRow, WaitingState] = StateTable(
    WaitingState,
    StateField("place", "count", lambda _, one: one.ahead + 1, "in the queue"),
    StateField("kind", "text", lambda _, one: asked_word(one.waiter)),
    StateField("what", "ref", _what, "the handoff, or the lease that comes back"),
    StateField("owner", "text", lambda node, one: asker_name(node, one.waiter)),
    StateField("client", "ref", lambda _, one: client_ref(one.waiter.claim.session)),
    StateField("room", "count", lambda _, one: one.waiter.claim.room or None),
    StateField("priority", "count", "waiter.claim.priority"),
    StateField("since", "since", "waiter.since_s", wire="waited_s"),
    StateField("until", "until", "waiter.deadline_s", "it gives up then", wire="deadline_in_s"),
    StateField(
        "budget",
        "text",
        lambda node, one: one.waiter.budget or node.leases.pool.name,
        "the component that is short",
    ),
    StateField("needed_pages", "pages", "waiter.needed_pages"),
    StateField("missing_pages", "pages", "waiter.missing_pages"),
    StateField("ahead", "count", "", "requests that come first"),
    StateField("overtaken", "count", "waiter.overtaken", "how many went past it"),
    StateField("why", "text", lambda node, one: why_waits(node.admission, one.waiter, one.ahead)),
    StateField("held_by", "holders", "", "who has the most of what is short"),
    StateField(
        "lacks",
        "text",
        lambda _, one: "pages" if one.lacks_pages else one.blocked_by or "its turn",
        "pages, a peer, a tier, or its turn",
    ),
)
