"""The views of the leases and of the sessions: who holds or locks what, and for how long.

The columns of leases are declared in ``kvd.core.inspect.schema``, with the fields of the snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.console.view import Field, View, field_of, owner
from kvd.core.cache.lease import LeaseRecord
from kvd.core.inspect.schema import LEASE_COLUMNS
from kvd.core.leases.sessions import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.context import Context
    from kvd.wire.console import Query


class Leases(View[LeaseRecord]):
    """Leases may be gone before their row is made."""

    @override
    def is_there(self, context: Context, one: LeaseRecord) -> bool:
        """Whether it has not been released meanwhile."""
        return one.id in context.node.leases.leases


LEASES = Leases(
    "leases",
    [field_of(row) for row in LEASE_COLUMNS],
    objects=lambda context, _: context.node.leases.leases.values(),
    key=lambda one: f"lease:{one.id}",
    sort="since",
)


class ClientRow:
    """One session, its leases, and how many handoffs it has open."""

    __slots__ = ("leases", "receives", "sends", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.leases: list[LeaseRecord] = []
        self.receives = self.sends = 0


def sessions_held(context: Context) -> dict[int, ClientRow]:
    """By session, those that are gone and still have leases too; one look at all leases."""
    node = context.node
    held = {one.id: ClientRow(one) for one in node.sessions.by_id.values()}
    for lease in node.leases.leases.values():
        found = held.get(lease.session)
        if found is None and not lease.session:
            continue  # the node's own: what may still be read of before a restart
        if found is None:
            gone = Session(lease.session, owner(context, lease.session), lease.since_s)
            found = held[lease.session] = ClientRow(gone)
        found.leases.append(lease)
    for receive in node.decoder.parts.values():
        if receive.session in held:
            held[receive.session].receives += 1
    for send in node.prefiller.by_send.values():
        if send.session in held:
            held[send.session].sends += 1
    return held


def _clients(context: Context, _: Query) -> Iterator[ClientRow]:
    yield from sessions_held(context).values()


def _state(context: Context, one: ClientRow) -> str:
    if one.session.hang_up is not None:
        return "hung up on"
    if one.session.is_former:
        return "awaited"
    alive = [context.engines.is_alive(pid) for pid in one.session.pids]
    if not any(alive):
        return "gone"
    return "alive" if all(alive) else "partly gone"


CLIENTS: View[ClientRow] = View(
    "clients",
    (
        Field("name", "text", lambda _, one: one.session.name),
        Field(
            "state",
            "state",
            _state,
            "whether its processes run; awaited: of before the restart; hung up on: served no more",
        ),
        Field("pids", "text", lambda _, one: " ".join(map(str, one.session.pids))),
        Field("leases", "count", lambda _, one: len(one.leases)),
        Field(
            "held",
            "pages",
            lambda _, one: sum([lease.held_pages for lease in one.leases]),
            "pages of its own, in quarantine or not",
        ),
        Field(
            "locked",
            "tokens",
            lambda _, one: sum([lease.anchor.end_tokens for lease in one.leases if lease.anchor]),
            "cached tokens that its leases keep from eviction",
        ),
        Field(
            "oldest",
            "since",
            lambda _, one: min([lease.since_s for lease in one.leases], default=None),
            "its oldest lease",
        ),
        Field("receives", "count", lambda _, one: one.receives),
        Field("sends", "count", lambda _, one: one.sends),
        Field("calls", "count", lambda context, one: context.engines.calls(one.session.id)),
        Field("since", "since", lambda _, one: one.session.since_s, "attached"),
    ),
    objects=_clients,
    key=lambda one: f"client:{one.session.id}",
    sort="-held",
)
