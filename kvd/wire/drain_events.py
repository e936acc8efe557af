"""Events about a node that begins nothing new; ``events.Event`` has them too."""

from __future__ import annotations

import msgspec


class DrainBegan(msgspec.Struct, frozen=True, tag="drain-began"):
    """From here on nothing new is begun; ``refused`` waited and were told so.

    ``receives`` and ``sends`` are under way and go on; ``deadline_s`` from now what is left of them
    is given up, 0: never. ``is_stop``: the process ends when it is drained.
    """

    seq: int
    at_s: float
    who: str
    why: str
    receives: int
    sends: int
    leases: int
    refused: int
    deadline_s: float = 0.0
    is_stop: bool = False


class Drained(msgspec.Struct, frozen=True, tag="drained"):
    """No handoff is under way and nobody waits; ``cut`` of them were given up at the deadline."""

    seq: int
    at_s: float
    lasted_s: float
    cut: int
    leases: int


class DrainEnded(msgspec.Struct, frozen=True, tag="drain-ended"):
    """The node serves again."""

    seq: int
    at_s: float
    lasted_s: float


class PeerDraining(msgspec.Struct, frozen=True, tag="peer-draining"):
    """A peer said that it is ``draining`` or ``leaving``, or that it is ``serving`` again."""

    seq: int
    at_s: float
    peer: str
    state: str
    why: str
    refused: int
    """Receives from it that waited here and were told so."""


DrainEvent = DrainBegan | Drained | DrainEnded | PeerDraining
