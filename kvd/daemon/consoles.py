"""Consoles (``kvd-tui``): the server that serves them, and what the shell knows for it.

What must not live here: what a console may see, and what that may cost (``kvd.console``).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvd.console.context import Context
from kvd.console.history import Recent, recalled
from kvd.console.server import ConsoleServer, Watch
from kvd.daemon.former_processes import started_ticks
from kvd.types import Sent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvd.core.node import NodeState
    from kvd.observe.bus import Bus
    from kvd.wire.admin import AdminReply, Look, Why
    from kvd.wire.events import Event

LAGS = 20
"""Beats of the loop whose worst lag is shown: a second of them."""
EARLY_S = 0.025
"""Half a beat: a frame goes with the beat that is nearest."""
BEAT_S = 0.005
"""For so long frames are made and sent in one beat; whoever is left is the first in the next."""
BACKLOG_FRAMES = 256
"""Frames are large: an operator who has so many unread is owed no more answers."""
SEEN_S = 1.0
"""So long a process is taken to live on without another look."""


class EngineProcesses:
    """The processes of engines: how often each session has called, and which are alive."""

    def __init__(self, calls: Callable[[int], int], clock: Callable[[], float]) -> None:
        self.calls = calls
        self._clock = clock
        self._seen: dict[int, bool] = {}
        self._seen_s = float("-inf")

    def is_alive(self, pid: int) -> bool:
        """Whether there is such a process; one in a pid namespace that we do not see is."""
        now_s = self._clock()
        if now_s - self._seen_s >= SEEN_S:
            self._seen, self._seen_s = {}, now_s
        found = self._seen.get(pid)
        if found is None:
            found = self._seen[pid] = started_ticks(pid) is not None
        return found


class Looked(NamedTuple):
    """What a look is answered at once."""

    frame: bytes | None
    """Its first frame, encoded; None: that comes with the next beat."""
    ended_call: int | None
    """Of the look that it ended, where no frame of that was sent: nobody else answers it."""


class Consoles:
    """Serves all consoles of one daemon. ``calls``: requests of a session so far.

    At most one watch for each; one whose socket does not take a frame is forgotten. So a console
    that vanishes costs one frame more, and one that reads no more as many as it asked for.
    """

    def __init__(
        self,
        node: NodeState,
        bus: Bus,
        budget: float,
        calls: Callable[[int], int],
        clock: Callable[[], float],
    ) -> None:
        self._node, self._bus = node, bus
        self._recent = recent = Recent()
        bus.subscribe(recent.take, wants=recent.wants)
        self._desk = ConsoleServer(
            Context(node, recent, EngineProcesses(calls, clock)), bus.after, budget
        )
        self._clock = clock
        self._watches: dict[bytes, Watch] = {}
        """Who has waited for longest comes first."""
        self._busy_s = 0.0
        """With frames, since the last beat began."""
        self._lags: deque[float] = deque(maxlen=LAGS)

    @property
    def is_watched(self) -> bool:
        """Whether a console waits for frames."""
        return bool(self._watches)

    def look(self, console: bytes, asked: Look) -> Looked:
        """Its first frame, unless frames have taken their time of this beat already.

        The others come with ``beat``.
        """
        now_s = self._clock()
        watch = Watch(asked, now_s)
        # One for each: a console that looks elsewhere wants no more frames of what it saw before.
        before = self._watches.pop(console, None)
        ended_call = None if before is None or before.is_answered else before.asked.call
        if self._busy_s >= BEAT_S:
            self._watches[console] = watch
            return Looked(None, ended_call)
        frame = self._frame(watch, now_s)
        if watch.left:
            self._watches[console] = watch
        return Looked(frame, ended_call)

    def recall(self, asked: Why, reply: AdminReply) -> AdminReply:
        """The core's answer, with what is remembered here of what is over."""
        now_s = self._clock()
        return recalled(asked, reply, self._node, self._recent, self._happened, now_s)

    def _happened(self) -> Sequence[Event]:
        """All that is in the ring."""
        return self._bus.after(0)[1]

    def beat(self, send: Callable[[bytes, bytes], Sent]) -> None:
        """Send the frames that are due, each made when its console takes it; and look on."""
        now_s = self._clock()
        # With the beat, whatever was due: what is left over is the first of the next.
        self._busy_s = 0.0
        self._desk.turn(now_s)
        due = [
            (console, watch)
            for console, watch in self._watches.items()
            if watch.due_s - EARLY_S <= now_s
        ]
        for console, watch in due:
            if self._busy_s >= BEAT_S:
                break
            del self._watches[console]  # first, so that a bug here costs this console only
            if send(console, self._frame(watch, now_s)) is Sent.TAKEN and watch.left:
                self._watches[console] = watch

    def _frame(self, watch: Watch, now_s: float) -> bytes:
        begun_s = self._clock()
        frame = self._desk.frame(watch, now_s)
        watch.sent(now_s)
        self._busy_s += self._clock() - begun_s
        return frame

    def set_budget(self, budget: float) -> None:
        """Let all consoles together cost so much of a core from now on."""
        self._desk.set_budget(budget)

    def lagged(self, lag_s: float) -> None:
        """A beat of the loop came so late."""
        self._lags.append(lag_s)
        self._desk.lag_s = max(self._lags)
