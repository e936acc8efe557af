"""What an operator should look at, the gravest first.

Each concern is a function of the node's state and of what looks remember; there is none on a
healthy node, however busy. Rules are in ``concerns_holding``, ``concerns_moving`` and
``concerns_running``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.console import concerns_holding, concerns_moving, concerns_running
from kvd.console.concern import GRAVEST, Concern
from kvd.console.view import Field, View
from kvd.console.vitals import Worry

if TYPE_CHECKING:
    from kvd.console.scene import Scene

_LOOKS = (
    concerns_holding.violations,
    concerns_running.transfer,
    concerns_moving.peers,
    concerns_moving.receives,
    concerns_moving.sends,
    concerns_holding.waiting,
    concerns_holding.quarantines,
    concerns_holding.gone_clients,
    concerns_holding.awaited_clients,
    concerns_holding.hung_up_clients,
    concerns_holding.full_pools,
    concerns_holding.lingering,
    concerns_holding.old_leases,
    concerns_running.draining,
    concerns_running.refused,
    concerns_running.recorder,
    concerns_running.loop,
)


def concerns(scene: Scene) -> list[Concern]:
    """All there are: the gravest first, of those the oldest."""
    scene.progress.look(scene)
    found = [one for look in _LOOKS for one in look(scene)]
    scene.since.end_look()
    found.sort(key=lambda one: (GRAVEST.index(one.severity), one.since_s))
    return found


def worry(scene: Scene) -> Worry:
    """What the head of a frame says of them."""
    found = concerns(scene)
    return Worry(len(found), found[0].severity if found else "")


CONCERNS: View[Concern] = View(
    "concerns",
    (
        Field("severity", "state", lambda _, one: one.severity),
        Field("kind", "text", lambda _, one: one.kind),
        Field("subject", "ref", lambda _, one: one.subject or None),
        Field("evidence", "text", lambda _, one: one.evidence),
        Field("since", "since", lambda _, one: one.since_s),
        Field("rule", "text", lambda _, one: one.rule, "what should be so"),
        Field("action", "text", lambda _, one: one.action, "what to do about it"),
    ),
    objects=lambda scene, _: concerns(scene),
    key=lambda one: one.key,
)
