"""Events about the flight recorder; ``events.Event`` has them too."""

from __future__ import annotations

import msgspec


class RecordingStarted(msgspec.Struct, frozen=True, tag="recording-started"):
    """From here on the flight recorder has every input."""

    seq: int
    at_s: float


class RecordingEnded(msgspec.Struct, frozen=True, tag="recording-ended"):
    """The flight recorder has lost the thread; the node goes on unrecorded."""

    seq: int
    at_s: float
    why: str


class RecordingSaved(msgspec.Struct, frozen=True, tag="recording-saved"):
    """A recording was written: ``kvd replay`` reads it."""

    seq: int
    at_s: float
    path: str
    why: str
