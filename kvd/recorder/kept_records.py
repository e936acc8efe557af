"""The records that lie in the ring: how many, how far back, whether the oldest must give way.

What must not live here: what a record says. To count them takes nothing of the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.recorder.orders import Covered

if TYPE_CHECKING:
    from kvd.recorder.ring import RecordRing


class KeptRecords:
    """From the oldest on. ``look`` before anything else is asked.

    Args:
        ring: where they lie.
        at_s: the time of the node before the first of them.
    """

    def __init__(self, ring: RecordRing, at_s: float) -> None:
        self.ring = ring
        self.at = ring.begin
        """The oldest record."""
        self.oldest_s = at_s
        """The time before it."""
        self._newest_s = at_s
        self._seen = ring.begin
        """Everything before this was counted."""
        self._inputs = 0

    def look(self) -> None:
        """Count what the daemon has written since the last look."""
        end = self.ring.end
        while self._seen < end:
            is_mark, self._newest_s, self._seen = self.ring.skim(self._seen)
            self._inputs += not is_mark

    def is_due(self, now_s: float, *, keep_s: float, full_share: float) -> bool:
        """Whether the oldest must give way: to time, or to newer ones in so much of the ring."""
        if self.at >= self._seen:
            return False
        if self._seen - self.at > full_share * self.ring.size:
            return True
        _, at_s, _ = self.ring.skim(self.at)
        return at_s < now_s - keep_s

    def drop(self, *, after: int, at_s: float, is_mark: bool) -> None:
        """The oldest one, of ``at_s``, is gone: the next begins at ``after``."""
        self.oldest_s = at_s
        self._inputs -= not is_mark
        self.at = after
        self.ring.forget(after)

    def covered(self) -> Covered:
        """How far back they reach."""
        seconds = max(0.0, self._newest_s - self.oldest_s)
        return Covered(seconds, self._inputs, self._seen - self.at)

    def before(self, upto: int) -> tuple[int, float]:
        """Inputs before ``upto``, and the time of the last; the daemon has written on since."""
        inputs, newest_s, at = 0, self.oldest_s, self.at
        while at < upto:
            is_mark, newest_s, at = self.ring.skim(at)
            inputs += not is_mark
        return inputs, newest_s
