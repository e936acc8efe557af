"""The view of the standing audit: one row, how it runs and what it costs.

What it has found is among the concerns, one row each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console.view import Field, View

if TYPE_CHECKING:
    from kvd.console.scene import Scene
    from kvd.wire.console import Query
    from kvd.wire.snapshot import AuditState


def _states(scene: Scene, _: Query) -> list[AuditState]:
    return [scene.node.audit.state()]


def _state(_: Scene, one: AuditState) -> str:
    if one.findings:
        return "broken"
    return "ok" if one.sweeps else "waiting"


def _ended(scene: Scene, one: AuditState) -> float | None:
    """When the last sweep ended; None before any has."""
    return scene.node.out.at_s - one.last_sweep_ago_s if one.sweeps else None


def _looked_at(one: AuditState, figure: float) -> float | None:
    return figure if one.sweeps else None


AUDIT: View[AuditState] = View(
    "audit",
    (
        Field("state", "state", _state),
        Field("findings", "count", lambda _, one: one.findings, "rules that are broken now"),
        Field("sweeps", "count", lambda _, one: one.sweeps, "counter"),
        Field("ended", "since", _ended, "of the last sweep"),
        Field("took_s", "seconds", lambda _, one: _looked_at(one, one.sweep_s)),
        Field("objects", "count", lambda _, one: _looked_at(one, one.objects)),
        Field("pages", "pages", lambda _, one: _looked_at(one, one.pages)),
        Field("spent_s", "seconds", lambda _, one: one.spent_s, "of processor time, in all"),
        Field("core", "share", lambda _, one: one.share, "of a core, between the last two sweeps"),
    ),
    objects=_states,
    key=lambda _: "audit:standing",
)
