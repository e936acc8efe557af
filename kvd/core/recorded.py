"""What the node knows of its flight recorder, so that the snapshot and the events say it too.

The recorder watches the node from outside; nothing here is needed for recording.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from mypy_extensions import mypyc_attr

from kvd.wire import events
from kvd.wire.snapshot import RecorderState

if TYPE_CHECKING:
    from kvd.core.inputs import RecorderSaid, RecorderSaved
    from kvd.core.outbox import Outbox

RECORDING = "recording"


@mypyc_attr(allow_interpreted_subclasses=True)
class RecorderFacts:
    """The recorder's last word about itself."""

    def __init__(self, out: Outbox) -> None:
        self._state = RecorderState()
        self.since_s = out.at_s
        """When it began to be as it is."""
        self._out = out

    @property
    def state(self) -> RecorderState:
        """As the snapshot shows it."""
        return msgspec.structs.replace(self._state, since_s=self._out.at_s - self.since_s)

    def said(self, got: RecorderSaid) -> None:
        """It says how it does; a change of state is an event."""
        before, self._state = self._state.state, got.recorder
        if got.recorder.state == before:
            return
        out = self._out
        self.since_s = out.at_s
        if got.recorder.state == RECORDING:
            out.emit(events.RecordingStarted())
        else:
            out.emit(events.RecordingEnded(why=got.recorder.why))

    def saved(self, got: RecorderSaved) -> None:
        """It wrote a file."""
        self._out.emit(events.RecordingSaved(path=got.path, why=got.why))
