"""The last transitions of one handoff, so that a bug report and ``kvd why`` carry its history."""

from __future__ import annotations

from collections import deque

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
