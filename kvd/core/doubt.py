"""What of a writer that is over may still land: how far the bytes in doubt reach."""

from __future__ import annotations

import enum


class Doubt(enum.Enum):
    """Which bytes for a lease's pages must come to rest before anybody else gets these pages."""

    NONE = 0
    """None: every byte has landed, or was never sent."""
    ARRIVED = 1
    """What has reached this host: the writer says that it was all, and what it says is doubted."""
    SENT = 2
    """What the writer has sent: the network or a dead writer's system may still bring it."""


def worse(one: Doubt, other: Doubt) -> Doubt:
    """The one that reaches further."""
    return max(one, other, key=_reach)


def _reach(doubt: Doubt) -> int:
    return doubt.value
