"""What views may read, at one moment between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvd.console.history import Biggest, LastMoved, Since
from kvd.console.survey import Surveyor

if TYPE_CHECKING:
    from kvd.console.console_view import ConsoleView
    from kvd.console.history import Recent


class KnownProcesses(Protocol):
    """What the shell knows of the sessions, beside the core."""

    def calls(self, session: int) -> int:
        """Requests that it has made."""

    def is_alive(self, pid: int) -> bool:
        """Whether that process still runs."""


class Context:
    """The node, what happened lately, and what the shell knows. Read, never written."""

    def __init__(self, node: ConsoleView, recent: Recent, engines: KnownProcesses) -> None:
        self.node = node
        self.recent = recent
        self.engines = engines
        self.surveyor = Surveyor(node)
        """Asked for all pages by what is about them; the server says what that may cost."""
        self.now_s = node.out.at_s
        """Of this look; ages are told by those who show them."""
        self.lag_s = 0.0
        """How late the loop's timer was, at worst lately."""
        self.progress = LastMoved()
        self.biggest = Biggest(engines.is_alive)
        self.since = Since()
