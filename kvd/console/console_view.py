"""What consoles may read of a node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from kvd.core.inspect.view import NodeView

if TYPE_CHECKING:
    from kvd.core.audit.audit import StandingAudit


class ConsoleView(NodeView, Protocol):
    """Consoles see what the audit has found, too."""

    @property
    @override
    def audit(self) -> StandingAudit:
        """With its findings."""
