"""What the prefill side remembers of one decode incarnation: its handoffs, in the order of ids.

Every Ping asks which closed ones are below the floor, every beat which is the lowest open one. Both
cost what they answer, not what is remembered: a peer that leaves sixteen thousand tombstones here
makes neither dearer.

Invariant: ``open`` and ``closed`` are ascending, have no id in common, and together all of
``parts``.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvd.core.parts import PrefillPart


class Records:
    """The handoffs of one decode incarnation that this side answers for."""

    __slots__ = ("closed", "kept_bytes", "open", "parts")

    def __init__(self) -> None:
        self.parts: dict[int, PrefillPart] = {}
        """By handoff id."""
        self.open: list[int] = []
        """Those that may still be asked for pages, or wait for Closed."""
        self.closed: list[int] = []
        """Tombstones."""
        self.kept_bytes = 0
        """Of page ids in the Offers of the open ones."""

    def join(self, part: PrefillPart) -> None:
        """It has met its Offer or Abort."""
        self.parts[part.handoff] = part
        insort(self.open, part.handoff)

    def bury(self, handoff: int) -> None:
        """It is CLOSED: a tombstone from now on."""
        del self.open[bisect_left(self.open, handoff)]
        insort(self.closed, handoff)

    def fold(self, floor: int) -> None:
        """Forget the tombstones below the floor."""
        n_over = bisect_left(self.closed, floor)
        for handoff in self.closed[:n_over]:
            del self.parts[handoff]
        del self.closed[:n_over]
