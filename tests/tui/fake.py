"""A link to a real node in a situation: what app tests get their frames from.

The frames come from the real server over the real core, and verbs really act. Time passes when a
test says so, and a frame comes when it asks for one: the same seed and steps give the same bytes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvd.console.context import Context
from kvd.console.history import recalled
from kvd.console.server import ConsoleServer, Watch
from kvd.core import inputs
from kvd.errors import Code, Refusal
from kvd.wire import admin
from kvd.wire.codec import ADMIN_REPLIES
from kvd.wire.console import MapQuery, Query
from tests.tui.town import SITUATIONS, Resident, Town

if TYPE_CHECKING:
    from collections.abc import Callable

    from tui.model.mirror import Mirror, Subscription

BEAT_S = 0.1
BEATS_OF_A_LOOK = 5
OTHERS_LOOK = admin.Look(1, (Query("rooms"), MapQuery("", "state")))
ANSWER_S = 1.2
"""So long an answer may take that needs another node."""


class Engines:
    """What the shell knows of the sessions of a town."""

    def __init__(self, town: Town) -> None:
        self._town = town

    def calls(self, session: int) -> int:
        return 1000 + 37 * session

    def is_alive(self, pid: int) -> bool:
        return pid not in self._town.dead


class FakeLink:
    """A link as ``tui.link`` has one; ``frame``, ``pass_time`` and ``down`` are for the test.

    ``clock`` is the console's own: seconds since some moment of its own, as ``time.monotonic``.
    """

    fps = 10.0
    interval_s = 0.1

    def __init__(self, situation: str = "normal", seed: int = 1, name: str = "decode-0") -> None:
        self.town = SITUATIONS[situation](seed)
        self.side: Resident = self.town.sides[name]
        self.down = ""
        """Why there is no daemon to be reached; empty while there is one."""
        self._calls = 0
        self._mirror: Mirror | None = None
        self._wanted: Callable[[], Subscription] | None = None
        self._hurry = asyncio.Event()
        self._desk = self._new_desk()
        self.pass_time(self.town.watched_s)

    def clock(self) -> float:
        """The console's clock, which is not the daemon's."""
        return self.town.now_s - 86_000.0

    # ---- the console's side ------------------------------------------------------------------

    def connect(self, mirror: Mirror, wanted: Callable[[], Subscription]) -> FakeLink:
        """Whom the frames are for, and who says what they shall have."""
        self._mirror, self._wanted = mirror, wanted
        return self

    async def run(self) -> None:
        """A frame at first, and whenever something else is wanted; the others by ``frame``."""
        while True:
            self._hurry.clear()
            self.frame()
            await self._hurry.wait()

    async def ask(self, request: admin.AdminRequest, limit_s: float = 5.0) -> admin.AdminReply:
        """What the daemon says to a request beside the frames."""
        return self.answer(request)

    def hurry(self) -> None:
        """Something else is wanted."""
        self._hurry.set()

    def painted(self, took_s: float) -> None:
        """Frames come when the test says so, however long painting takes."""

    # ---- the test's side ---------------------------------------------------------------------

    def frame(self) -> None:
        """One round: the mirror asks for what is wanted now, and gets it."""
        assert self._mirror is not None
        assert self._wanted is not None
        if self.down:
            self._mirror.failed(self.down, self.clock())
            return
        self._calls += 1
        self._mirror.take(self.look(self._mirror.look(self._calls, self._wanted())), self.clock())

    def look(self, asked: admin.Look) -> admin.Frame:
        """The server's answer, over the wire and back."""
        now_s = self.town.now_s
        reply = ADMIN_REPLIES.decode(self._desk.frame(Watch(asked, now_s), now_s))
        assert isinstance(reply, admin.Frame)
        return reply

    def answer(self, request: admin.AdminRequest) -> admin.AdminReply:
        """The core's answer; what it changes is changed."""
        match request:
            case _ if self.down:
                return _failed(request, Code.UNREACHABLE, self.down)
            case admin.Look():
                return self.look(request)
            case admin.ListEvents():
                lost, found = self.side.bus.after(request.after_seq)
                return admin.EventPage(request.call, lost, tuple(found))
            case admin.Record():
                why = Refusal(
                    Code.NOT_SUPPORTED, "nothing is recorded here: recorder.enabled is off"
                )
                return admin.AdminFailed(request.call, why)
            case _:
                return self._from_core(request)

    def pass_time(self, seconds: float) -> None:
        """The nodes live on for so long, and another console looks at them meanwhile."""
        for beat in range(1, round(seconds / BEAT_S) + 1):
            self.town.pass_time(BEAT_S)
            self._desk.turn(self.town.now_s)
            if beat % BEATS_OF_A_LOOK == 0:
                self.look(OTHERS_LOOK)

    def restart(self) -> None:
        """The daemon comes back as another incarnation."""
        self.town.restart(self.side)
        self._desk = self._new_desk()

    def _from_core(self, request: admin.AdminRequest) -> admin.AdminReply:
        town, reports = self.town, self.side.reports
        before, until_s = len(reports), self.town.now_s + ANSWER_S
        self.side.feed(inputs.FromOperator(town.now_s, b"console", request))
        town.run()
        while len(reports) == before and town.now_s < until_s:
            town.pass_time(0.1)
        if len(reports) == before:
            return _failed(request, Code.UNREACHABLE, f"no answer to {type(request).__name__}")
        if not isinstance(request, admin.Why):
            return reports[-1]
        happened, side = lambda: self.side.bus.after(0)[1], self.side
        return recalled(request, reports[-1], side.node, side.recent, happened, town.now_s)

    def _new_desk(self) -> ConsoleServer:
        """Its looks cost nothing, so that it never answers with an older one."""
        context = Context(self.side.node, self.side.recent, Engines(self.town))
        return ConsoleServer(context, self.side.bus.after, 1.0, lambda: 0.0)


def _failed(request: admin.AdminRequest, code: Code, why: str) -> admin.AdminFailed:
    return admin.AdminFailed(request.call, Refusal(code, why))
