"""Pages on their way from one simulated pool into another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.sim.contents import TORN
from kvd.sim.violation import require
from kvd.types import page_ids

if TYPE_CHECKING:
    from kvd.core import effects
    from kvd.core.cache.lease import LeaseRecord
    from kvd.sim.host import SimHost

LANDING_S = 0.002

Agent = tuple[str, int]
"""The incarnation and generation that a sending agent leads to."""


class Flight:
    """Pages on their way from one pool into another."""

    __slots__ = (
        "agent",
        "arrived",
        "component",
        "contents",
        "destination",
        "done",
        "handoff",
        "is_reported",
        "lease",
        "pace_s",
        "post",
        "source",
        "sums",
        "to",
    )

    def __init__(self, post: effects.Post, to: SimHost, handoff: int, lease: LeaseRecord) -> None:
        self.post = post.post
        self.agent = (post.incarnation, post.generation)
        self.to = to
        self.handoff = handoff
        self.lease = lease
        """The source's: it must live while its pages are read."""
        self.component = post.component
        self.source = page_ids(post.source)
        self.destination = page_ids(post.destination)
        self.contents: list[int] = []
        """What the source pages held when they were posted: nobody may write them meanwhile."""
        self.sums = b""
        self.done = 0
        """Pages that have landed."""
        self.arrived = 0
        """Of what its sender has left behind: pages that have reached the receiver's sockets."""
        self.pace_s = LANDING_S
        self.is_reported = False
        """Its end, good or bad, is told once."""

    @property
    def is_reachable(self) -> bool:
        """Whether the process that its pages were granted through still serves."""
        to = self.to
        return (
            to.is_up
            and to.transfer.is_alive
            and self.agent == (to.settings.incarnation, to.transfer.generation)
        )

    def land(self, n_pages: int) -> None:
        """So many pages land whole, and the next one in part."""
        first, last = self.done, self.done + n_pages
        to, landing = self.to, self.destination[first : last + 1]
        if not landing:
            return
        require(self.handoff in to.grants, f"{to.name}: handoff {self.handoff} granted nothing")
        to.check_landing(self.handoff, to.grants[self.handoff], self.component, landing)
        memory = to.memory.regions[self.component]
        for k, page in enumerate(landing, start=first):
            memory[page] = self.contents[k] if k < last else TORN
        self.done = min(last, len(self.source))
