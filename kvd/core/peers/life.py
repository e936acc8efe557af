"""How sure we are that a peer lives. When it changes is ``peer``'s question."""

from __future__ import annotations

import enum


class Life(enum.Enum):
    """How sure we are that a peer lives."""

    UP = "up"
    SUSPECT = "suspect"
    LOST = "lost"
