"""All tables by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.console.audit import AUDIT
from kvd.console.clients import CLIENTS
from kvd.console.concerns import CONCERNS, worry
from kvd.console.leases import LEASES
from kvd.console.order import EVICTION
from kvd.console.peers import PEERS
from kvd.console.pools import POOLS
from kvd.console.rooms import ROOMS
from kvd.console.tree import LOCKED, ORPHANS, TREE
from kvd.console.waiting import WAITING

if TYPE_CHECKING:
    from kvd.console.view import View

__all__ = ["VIEWS", "worry"]

HELD = (POOLS, LEASES, ROOMS, PEERS, CLIENTS, WAITING)
CACHED = (TREE, LOCKED, ORPHANS, EVICTION)

# Any, because each view has objects of its own kind.
VIEWS: dict[str, View[Any]] = {view.name: view for view in (CONCERNS, AUDIT, *HELD, *CACHED)}
