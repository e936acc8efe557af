"""All tables by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.console.clients import CLIENTS
from kvd.console.vitals import Worry

if TYPE_CHECKING:
    from kvd.console.scene import Scene
    from kvd.console.view import View

# Any, because each view has objects of its own kind.
VIEWS: dict[str, View[Any]] = {view.name: view for view in (CLIENTS,)}


def worry(scene: Scene) -> Worry:
    """What the head of a frame says of the concerns."""
    broken = scene.node.audit.state().findings
    return Worry(broken, "high" if broken else "")
