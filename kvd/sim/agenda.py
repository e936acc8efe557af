"""What happens next: the only clock of a simulation."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

START_S = 100.0
"""When a simulation begins: not zero, so that a forgotten timestamp shows."""


class Agenda:
    """Calls in the order of their time; calls for the same time in the order they were made."""

    __slots__ = ("_count", "_heap", "now_s")

    def __init__(self) -> None:
        self.now_s = START_S
        # Any: each call takes its own arguments.
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, at_s: float, call: Callable[..., None], *args: object) -> None:
        """Call ``call(*args)`` when it is ``at_s``; not before everything that comes first."""
        self._count += 1
        heapq.heappush(self._heap, (at_s, self._count, call, args))

    def after(self, delay_s: float, call: Callable[..., None], *args: object) -> None:
        """The same, ``delay_s`` from now."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_s + delay_s, self._count, call, args))

    @property
    def is_waiting(self) -> bool:
        """Whether anything is still to come."""
        return bool(self._heap)

    def step(self) -> None:
        """Do what comes next; there must be something."""
        self.now_s, _, call, args = heapq.heappop(self._heap)
        call(*args)
