"""What an operator may change of a running node, and that they did.

The figures live where they are used; this is the one place that changes them. Every other figure of
``Settings`` stays as it was when the node was made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.core import inputs
from kvd.wire.events import ConfigRefused, ConfigReloaded

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.node import Node


class Retuned:
    """Takes what the shell read again."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # Any, because each takes its own type of input.
        self.handlers: dict[type, Callable[[Any], None]] = {
            inputs.Reconfigured: self.reconfigured,
            inputs.ReloadRefused: self.refused,
        }

    def reconfigured(self, got: inputs.Reconfigured) -> None:
        """New figures: for the next Hello, and for the queue as it is now."""
        node = self._node
        node.peers.allow = got.allow
        node.admission.retune(max_queue=got.max_queue, overtakers=got.overtakers)
        out = node.out
        out.emit(ConfigReloaded, changed=got.changed, needs_restart=got.needs_restart)

    def refused(self, got: inputs.ReloadRefused) -> None:
        """Nothing changes."""
        out = self._node.out
        out.emit(ConfigRefused, errors=got.errors)
