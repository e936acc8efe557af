"""What views may read, at one moment between two steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvd.console.seen import Biggest, Progress, Since
from kvd.console.survey import Surveyor

if TYPE_CHECKING:
    from kvd.console.recent import Recent
    from kvd.core.node import Node


class Engines(Protocol):
    """What the shell knows of the sessions, beside the core."""

    def calls(self, session: int) -> int:
        """Requests that it has made."""

    def is_alive(self, pid: int) -> bool:
        """Whether that process still runs."""


class Scene:
    """The node, what happened lately, and what the shell knows. Read, never written."""

    __slots__ = (
        *("biggest", "engines", "lag_s", "node", "now_s", "progress", "recent", "since"),
        "surveyor",
    )

    def __init__(self, node: Node, recent: Recent, engines: Engines) -> None:
        self.node = node
        self.recent = recent
        self.engines = engines
        self.surveyor = Surveyor(node)
        """Asked for all pages by what is about them; the desk says what that may cost."""
        self.now_s = node.out.at_s
        """Of this look; ages are told by those who show them."""
        self.lag_s = 0.0
        """How late the loop's timer was, at worst lately."""
        self.progress = Progress()
        self.biggest = Biggest()
        self.since = Since()
