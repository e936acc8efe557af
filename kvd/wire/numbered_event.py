"""What every event has; the events themselves are in ``events``."""

from __future__ import annotations

import msgspec


class NumberedEvent(msgspec.Struct, frozen=True):
    """What every event begins with. Who makes one leaves it out: ``Outbox.emit`` fills it in."""

    seq: int = 0
    at_s: float = 0.0
