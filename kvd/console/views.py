"""All tables by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.console.clients import CLIENTS
from kvd.console.leases import LEASES
from kvd.console.order import EVICTION
from kvd.console.peers import PEERS
from kvd.console.pools import POOLS
from kvd.console.rooms import ROOMS
from kvd.console.tree import LOCKED, ORPHANS, TREE
from kvd.console.vitals import Worry
from kvd.console.waiting import WAITING

if TYPE_CHECKING:
    from kvd.console.scene import Scene
    from kvd.console.view import View

# Any, because each view has objects of its own kind.
VIEWS: dict[str, View[Any]] = {
    view.name: view
    for view in (POOLS, LEASES, ROOMS, PEERS, CLIENTS, WAITING, TREE, LOCKED, ORPHANS, EVICTION)
}


def worry(scene: Scene) -> Worry:
    """What the head of a frame says of the concerns."""
    broken = scene.node.audit.state().findings
    return Worry(broken, "high" if broken else "")
