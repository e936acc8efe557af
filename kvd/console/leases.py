"""The view of the leases: who holds or locks what, since when, and what it waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

from kvd.console.view import Field, View, client_ref, owner
from kvd.core.cache.lease import Lease
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.inspect.words import lease_waits_for, lease_word
from kvd.types import count

if TYPE_CHECKING:
    from kvd.console.context import Context


_AWAY = {LeaseStage.RETRACTED, LeaseStage.RESUMING, LeaseStage.RESTORING}


def _pid(context: Context, lease: Lease) -> int | None:
    session = context.node.sessions.by_id.get(lease.session)
    return session.pids[0] if session is not None else None


def _held(_: Context, lease: Lease) -> int:
    return 0 if lease.quarantine is not None else lease.held_pages


def _quarantined(_: Context, lease: Lease) -> int:
    return lease.held_pages if lease.quarantine is not None else 0


def _beside(context: Context, lease: Lease) -> str:
    """``swa 12, state 1``."""
    own = [
        (one.component.name, count(one.own_pages(lease)))
        for one in context.node.leases.components.each
    ]
    return ", ".join(f"{name} {pages}" for name, pages in own if pages)


def _why(_: Context, lease: Lease) -> str:
    return lease.quarantine.why if lease.quarantine is not None else ""


def _away(_: Context, lease: Lease) -> float | None:
    if lease.quarantine is not None:
        return lease.quarantine.since_s
    return lease.retracted_s if lease.state in _AWAY else None


class Leases(View[Lease]):
    """Leases may be gone before their row is made."""

    @override
    def is_there(self, context: Context, one: Lease) -> bool:
        """Whether it has not been released meanwhile."""
        return one.id in context.node.leases.leases


LEASES = Leases(
    "leases",
    (
        Field("id", "count", lambda _, one: one.id),
        Field("state", "state", lambda _, one: lease_word(one)),
        Field("owner", "text", lambda context, one: owner(context, one.session)),
        Field("client", "ref", lambda _, one: client_ref(one.session)),
        Field("pid", "count", _pid, "of the first process of its session"),
        Field("reason", "text", lambda _, one: one.reason),
        Field("room", "count", lambda _, one: one.room or None),
        Field("held", "pages", _held, "pages of its own"),
        Field(
            "row", "pages", lambda _, one: count(one.page_table), "cached ones of its prefix too"
        ),
        Field("quarantined", "pages", _quarantined, "that a remote may still write"),
        Field("beside", "text", _beside, "pages of the other components"),
        Field(
            "locked",
            "tokens",
            lambda _, one: one.anchor.end_tokens if one.anchor is not None else 0,
            "cached tokens that it keeps from eviction",
        ),
        Field("prefix_tokens", "tokens", lambda _, one: one.prefix_tokens, "cached when it opened"),
        Field("prompt_tokens", "tokens", lambda _, one: count(one.tokens), "known by now"),
        Field(
            "locked_node",
            "ref",
            lambda _, one: f"node:{one.anchor.id}" if one.anchor and one.anchor.parent else None,
            "where its lock begins; everything above is locked too",
        ),
        Field("holders", "text", lambda _, one: ", ".join(sorted(one.holders))),
        Field("waiting_for", "text", lambda context, one: lease_waits_for(context.node, one)),
        Field("why", "text", _why, "why it is in quarantine"),
        Field("since", "since", lambda _, one: one.since_s),
        Field(
            "touched",
            "since",
            lambda _, one: one.touched_s,
            "opened, extended or committed last",
        ),
        Field("away_since", "since", _away, "in quarantine or retracted"),
        Field("saved", "pages", lambda _, one: one.saved_pages, "kept for it in host memory"),
        Field("priority", "count", lambda _, one: one.priority),
        Field("namespace", "text", lambda _, one: one.namespace),
    ),
    objects=lambda context, _: context.node.leases.leases.values(),
    key=lambda one: f"lease:{one.id}",
    sort="since",
)
