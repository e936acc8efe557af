"""What is known of a thing, said once: its name, its unit, how it is read, and what it means.

A ``StateField`` is a column of a console's table, a field of the snapshot (``--format json``), or
both. The snapshot's structs are declared in ``kvd.wire.snapshot``, because their JSON is a promise;
their values come from here, and so do the columns. So a new field of a lease is one line:

- what is an attribute of the lease already: its line in ``LeaseState``. It is in the snapshot, is
  said by ``kvd why lease``, and is a column, whose unit is that of its name. A moment is none:
  the snapshot has ages;
- what consoles alone show, or is worked out: its row in ``LEASE``, with ``wire`` where the snapshot
  has it.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from kvd.core.cache.lease_state import LeaseStage
from kvd.core.components.device_buffer import Buffers
from kvd.core.inspect.page_states import needed_nodes
from kvd.core.inspect.words import lease_waits_for, lease_word
from kvd.core.leases.owners import owner_of
from kvd.types import count
from kvd.wire.snapshot import HeldState, LeaseState

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import msgspec

    from kvd.core.cache.lease import LeaseRecord
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.types import Pages

T = TypeVar("T")

TEXTS = frozenset({"text", "state", "ref"})
"""Units of what is a text; everything else is a number, a moment, or a tuple."""


class StateField(Generic[T]):
    """One thing that is known of an object. ``column`` or ``wire`` is empty where it is not shown.

    ``unit`` is the kind of the column: see ``wire.console.Column``.
    """

    __slots__ = ("column", "get", "help", "unit", "wire")

    def __init__(
        self,
        column: str,
        unit: str,
        get: Callable[[NodeView, T], Any],  # Any: a cell, or what the snapshot has in its place
        help_: str = "",
        *,
        wire: str = "",
    ) -> None:
        self.column = column
        self.unit = unit
        self.get = get
        self.help = help_
        self.wire = wire

    def snapshot_value(self, node: NodeView, one: T) -> Any:
        """The same without None, and a moment as how long ago it was: readers have no clock."""
        found = self.get(node, one)
        if self.unit == "since":
            return 0.0 if found is None else node.out.at_s - found
        if found is None:
            return "" if self.unit in TEXTS else 0
        return found


def plain_fields(
    kind: type[msgspec.Struct], rows: Sequence[StateField[T]]
) -> tuple[StateField[T], ...]:
    """The fields of a snapshot's struct that no row speaks of: attributes of the same name."""
    spoken_of = {row.wire for row in rows}
    return tuple(
        StateField(name, _unit_of(kind, name), _attribute(name), wire=name)
        for name in kind.__struct_fields__
        if name not in spoken_of
    )


def _attribute(name: str) -> Callable[[NodeView, Any], Any]:
    get = attrgetter(name)
    return lambda _, one: get(one)


def _unit_of(kind: type[msgspec.Struct], name: str) -> str:
    """Names of figures end with their unit."""
    last = name.rpartition("_")[2]
    if last in {"pages", "bytes", "tokens"}:
        return last
    if last == "s":
        return "seconds"
    return "text" if kind.__annotations__[name] == "str" else "count"


# ---- leases --------------------------------------------------------------------------------------

_AWAY = {LeaseStage.RETRACTED, LeaseStage.RESUMING, LeaseStage.RESTORING}


def session_name(node: NodeView, session: int) -> str:
    """The name of a session; of one that is gone its number, of none nothing."""
    return owner_of(node, session)[0] if session else ""


def _pid(node: NodeView, lease: LeaseRecord) -> int | None:
    return owner_of(node, lease.session)[1] or None


def _held(_: NodeView, lease: LeaseRecord) -> int:
    return 0 if lease.quarantine is not None else lease.held_pages


def _quarantined(_: NodeView, lease: LeaseRecord) -> int:
    return lease.held_pages if lease.quarantine is not None else 0


def _beside(node: NodeView, lease: LeaseRecord) -> str:
    """``swa 12, state 1``."""
    own = [(one.component.name, count(one.own_pages(lease))) for one in node.leases.components.each]
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


LEASE: tuple[StateField[LeaseRecord], ...] = (
    StateField("id", "count", lambda _, one: one.id, wire="id"),
    StateField("state", "state", lambda _, one: lease_word(one), wire="state"),
    StateField("owner", "text", lambda node, one: session_name(node, one.session)),
    StateField("client", "ref", lambda _, one: f"client:{one.session}" if one.session else None),
    StateField("pid", "count", _pid, "of the first process of its session", wire="pid"),
    StateField("reason", "text", lambda _, one: one.reason, wire="reason"),
    StateField("room", "count", lambda _, one: one.room or None, wire="room"),
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
        "locked",
        "tokens",
        lambda _, one: one.anchor.end_tokens if one.anchor is not None else 0,
        "cached tokens that it keeps from eviction",
    ),
    StateField(
        "prefix_tokens",
        "tokens",
        lambda _, one: one.prefix_tokens,
        "cached when it opened",
        wire="prefix_tokens",
    ),
    StateField(
        "prompt_tokens",
        "tokens",
        lambda _, one: count(one.tokens),
        "known by now",
        wire="prompt_tokens",
    ),
    StateField(
        "locked_node",
        "ref",
        _locked_ref,
        "where its lock begins; everything above is locked too",
    ),
    StateField("holders", "text", lambda _, one: ", ".join(sorted(one.holders))),
    StateField("waiting_for", "text", lease_waits_for, wire="waiting_for"),
    StateField("why", "text", _why, "why it is in quarantine", wire="because"),
    StateField("since", "since", lambda _, one: one.since_s, wire="age_s"),
    StateField(
        "touched", "since", lambda _, one: one.touched_s, "opened, extended or committed last"
    ),
    StateField("away_since", "since", _away_since, "in quarantine or retracted"),
    StateField(
        "saved",
        "pages",
        lambda _, one: one.saved_pages,
        "kept for it in host memory",
        wire="saved_pages",
    ),
    StateField("priority", "count", lambda _, one: one.priority),
    StateField("namespace", "text", lambda _, one: one.namespace, wire="namespace"),
    # What the snapshot alone has, or says in another way than a table does.
    StateField("", "text", lambda node, one: owner_of(node, one.session)[0], wire="owner"),
    StateField("", "count", lambda _, one: one.session, wire="session"),
    StateField("", "count", lambda _, one: one.anchor.id if one.anchor else 0, wire="locked_node"),
    StateField("", "text", lambda _, one: tuple(sorted(one.holders)), wire="holders"),
    StateField("", "since", _quarantined_since, wire="quarantined_s"),
    StateField("", "since", _retracted_since, wire="retracted_s"),
    StateField("", "bytes", lambda _, one: one.saved_bytes, wire="saved_bytes"),
    StateField("", "pages", lambda node, one: held_states(node.leases, one), wire="beside"),
)
PLAIN_OF_LEASE = plain_fields(LeaseState, LEASE)
LEASE_COLUMNS = (*[row for row in LEASE if row.column], *PLAIN_OF_LEASE)
_LEASE_ON_WIRE = {row.wire: row for row in (*LEASE, *PLAIN_OF_LEASE) if row.wire}


def lease_state(node: NodeView, lease: LeaseRecord) -> LeaseState:
    """One claim in words and figures, as of the running step."""
    found = {name: row.snapshot_value(node, lease) for name, row in _LEASE_ON_WIRE.items()}
    return LeaseState(**found)
