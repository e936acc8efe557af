"""The view of the sessions: who they are, whether their processes live, what they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.view import Field, View

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.console.scene import Scene
    from kvd.core.lease import Lease
    from kvd.core.sessions import Session
    from kvd.wire.console import Query


class Held:
    """One session and its leases."""

    __slots__ = ("leases", "session")

    def __init__(self, session: Session) -> None:
        self.session = session
        self.leases: list[Lease] = []


def _clients(scene: Scene, _: Query) -> Iterator[Held]:
    """Every session, with one look at all leases."""
    by_id = {one.id: Held(one) for one in scene.node.sessions.by_id.values()}
    for lease in scene.node.leases.leases.values():
        held = by_id.get(lease.session)
        if held is not None:
            held.leases.append(lease)
    yield from by_id.values()


def _state(scene: Scene, one: Held) -> str:
    alive = [scene.engines.is_alive(pid) for pid in one.session.pids]
    return "alive" if all(alive) else "partly gone" if any(alive) else "gone"


CLIENTS: View[Held] = View(
    "clients",
    (
        Field("name", "text", lambda _, one: one.session.name),
        Field("state", "state", _state, "whether its processes run"),
        Field("pids", "text", lambda _, one: " ".join(map(str, one.session.pids))),
        Field("leases", "count", lambda _, one: len(one.leases)),
        Field("held", "pages", lambda _, one: sum(lease.held_pages for lease in one.leases)),
        Field(
            "locked",
            "tokens",
            lambda _, one: sum(lease.anchor.end_tokens for lease in one.leases if lease.anchor),
            "cached tokens that its leases keep from eviction",
        ),
        Field(
            "oldest",
            "since",
            lambda _, one: min((lease.since_s for lease in one.leases), default=None),
            "its oldest lease",
        ),
        Field(
            "receives",
            "count",
            lambda scene, one: sum(
                part.session == one.session.id for part in scene.node.decoder.parts.values()
            ),
        ),
        Field(
            "sends",
            "count",
            lambda scene, one: sum(
                part.session == one.session.id for part in scene.node.prefiller.by_send.values()
            ),
        ),
        Field("calls", "count", lambda scene, one: scene.engines.calls(one.session.id)),
        Field("since", "since", lambda _, one: one.session.since_s),
    ),
    objects=_clients,
    key=lambda one: f"client:{one.session.id}",
    sort="-held",
)
