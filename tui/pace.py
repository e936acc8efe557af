"""How often the screen is painted: as asked for, or less where the terminal does not keep up."""

from __future__ import annotations

SLOW_S = 0.05
"""A frame that takes longer than this is a slow one."""
QUICK_S = 0.02
SLOW_FRAMES = 5
"""So many slow ones in a row halve the rate."""
QUICK_FRAMES = 50
"""So many quick ones double it again, up to what was asked for."""
MIN_FPS = 1.0
MAX_FPS = 20.0


class Pace:
    """Frames a second: ``wanted`` by the operator, ``fps`` in effect."""

    def __init__(self, wanted: float) -> None:
        self._slow = self._quick = 0
        self.ask(wanted)

    def ask(self, wanted: float) -> None:
        """This rate is wanted from now on, within what is sensible."""
        self.wanted = max(MIN_FPS, min(MAX_FPS, wanted))
        self._turn(self.wanted)

    @property
    def slowed_from(self) -> float:
        """What was wanted, where less is in effect; else 0."""
        return self.wanted if self.fps < self.wanted else 0.0

    def painted(self, took_s: float) -> bool:
        """A frame took so long; whether ``fps`` is another now."""
        self._slow = self._slow + 1 if took_s > SLOW_S else 0
        self._quick = self._quick + 1 if took_s < QUICK_S else 0
        if self._slow >= SLOW_FRAMES and self.fps > MIN_FPS:
            return self._turn(max(MIN_FPS, self.fps / 2))
        if self._quick >= QUICK_FRAMES and self.fps < self.wanted:
            return self._turn(min(self.wanted, self.fps * 2))
        return False

    def _turn(self, fps: float) -> bool:
        self.fps, self._slow, self._quick = fps, 0, 0
        return True
