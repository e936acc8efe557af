"""When a process of the daemon that has ended is started again: at once, or later each time.

One that had served for ``STEADY_S`` did not fail to start: its successor comes at once. One that
does not come up, or ends soon, is tried again after a pause that doubles.

What must not live here: the process, and who is told of its end (``transfer_supervisor``,
``storage_supervisor``).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

FIRST_PAUSE_S = 0.1
STEADY_S = 10.0


class Revival:
    """Of one process after the other; no pause is longer than ``longest_s``."""

    def __init__(self, clock: Callable[[], float], longest_s: float) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._pause_s = FIRST_PAUSE_S
        self._up_s = 0.0

    def came_up(self) -> None:
        """One serves from now on."""
        self._up_s = self._clock()

    async def until_up(self, start: Callable[[], Awaitable[bool]]) -> None:
        """Start until one serves, which ``start`` says; wait longer each time it does not."""
        if self._clock() - self._up_s >= STEADY_S:
            self._pause_s = 0.0
        is_up = False
        while not is_up:
            await asyncio.sleep(self._pause_s)
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), self._longest_s)
            is_up = await start()
