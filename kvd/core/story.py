"""The last transitions of one handoff, so that a bug report and ``kvd why`` carry its history."""

from __future__ import annotations

from collections import deque

from kvd.wire.admin import Mark

STORY_LENGTH = 16
"""Transitions kept per part: twice the longest path through either table."""


class Story:
    """A bounded list of (time, sentence)."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[tuple[float, str]] = deque(maxlen=STORY_LENGTH)

    def tell(self, at_s: float, line: str) -> None:
        """Append what happened."""
        self._lines.append((at_s, line))

    def lines(self, now_s: float) -> tuple[str, ...]:
        """Oldest first, each with its age."""
        return tuple(f"{now_s - at_s:.3f} s ago: {line}" for at_s, line in self._lines)

    def marks(self, now_s: float) -> tuple[Mark, ...]:
        """The same as data."""
        return tuple(Mark(now_s - at_s, line) for at_s, line in self._lines)

    @property
    def last_s(self) -> float:
        """When the last transition was; 0 where there was none."""
        return self._lines[-1][0] if self._lines else 0.0
