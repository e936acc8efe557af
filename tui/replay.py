"""A recording in place of a daemon: brings its frames to the mirror as they once came.

It can be held, wound to any place, and played faster or slower. Going somewhere means beginning at
the key before it and taking what came since at once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvd.errors import Code, Refusal
from kvd.wire.admin import AdminFailed
from tui.link import ASK_S
from tui.tape import SHOT

if TYPE_CHECKING:
    from kvd.wire.admin import AdminReply, AdminRequest
    from tui.model.mirror import Mirror
    from tui.tape import RecordedFrame, RecordingFile

SLOWEST, FASTEST = 0.1, 100.0


class ReplayLink:
    """A ``link.FrameLink`` that plays ``tape``; closes it when it ends."""

    def __init__(self, tape: RecordingFile, mirror: Mirror, *, speed: float = 1.0) -> None:
        self.fps = 10.0
        self.speed = speed
        self.is_held = False
        self.at_end = False
        self.position_s = 0.0
        """How far from the start of the recording the last frame is."""
        self._tape = tape
        self._mirror = mirror
        self._wanted_s: float | None = 0.0
        self._changed = asyncio.Event()
        self._next: RecordedFrame | None = None

    @property
    def length_s(self) -> float:
        """How long the recording is."""
        return self._tape.length_s

    @property
    def interval_s(self) -> float:
        """A recording is never late."""
        return float("inf")

    @property
    def where(self) -> str:
        """How far it has been played, for the head."""
        state = " HELD" if self.is_held else " END" if self.at_end else ""
        speed = "" if self.speed == 1.0 else f" x{self.speed:g}"
        return f"REPLAY{state}{speed} {self.position_s:.1f} of {self.length_s:.1f}s"

    def hurry(self) -> None:
        """What is wanted does not matter: there is what there is."""

    def painted(self, took_s: float) -> None:
        """How long painting takes does not matter: frames are taken when they are due."""

    async def ask(self, request: AdminRequest, limit_s: float = ASK_S) -> AdminReply:
        """Nobody is there to answer."""
        del request, limit_s
        why = "this is a recording: it shows what was, and answers no questions"
        return AdminFailed(0, Refusal(Code.NOT_SUPPORTED, why, side="client"))

    def hold(self) -> None:
        """Stand still."""
        self.is_held = True
        self._changed.set()

    def play(self) -> None:
        """Go on; from the start where it had come to its end."""
        if self.at_end:
            self._wanted_s = 0.0
        self.is_held = False
        self._changed.set()

    def seek(self, position_s: float) -> None:
        """Go to so many seconds from the start; stops at both ends."""
        self._wanted_s = max(0.0, min(self.length_s, position_s))
        self._changed.set()

    def pace(self, speed: float) -> None:
        """Play so many times as fast as it was."""
        self.speed = max(SLOWEST, min(FASTEST, speed))
        self._changed.set()

    async def run(self) -> None:
        """Play until cancelled; at the end it stands still."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._changed.clear()
                if self._wanted_s is not None:
                    self._wind(self._wanted_s, loop.time())
                if self._next is None or self.is_held:
                    await self._changed.wait()
                elif await self._is_due(self._next):
                    self._show(self._next, loop.time())
                    self._next = self._following()
                    self.at_end = self._next is None
        finally:
            self._tape.close()

    async def _is_due(self, record: RecordedFrame) -> bool:
        """Wait for the moment of a frame; whether it has come before anything else was wanted."""
        gap_s = record.heard_s - self._tape.head.heard_s - self.position_s
        try:
            async with asyncio.timeout(max(0.0, gap_s) / self.speed):
                await self._changed.wait()
        except TimeoutError:
            return True
        return False

    def _wind(self, position_s: float, now_s: float) -> None:
        """Make the mirror what it was ``position_s`` after the start."""
        until_s = self._tape.head.heard_s + position_s
        self._wanted_s = None
        self._tape.seek(until_s)
        self._mirror.rewind()
        record = self._tape.next()
        while record is not None and record.heard_s <= until_s:
            self._show(record, now_s)
            record = self._tape.next()
        self.position_s = position_s
        self._next = record
        self.at_end = record is None

    def _following(self) -> RecordedFrame | None:
        """The next frame that brings something: keys repeat what is here."""
        record = self._tape.next()
        while record is not None and record.kind != SHOT:
            record = self._tape.next()
        return record

    def _show(self, record: RecordedFrame, now_s: float) -> None:
        self._mirror.expect(record.shot.look)
        self._mirror.take(record.shot.frame, now_s)
        self.position_s = max(0.0, record.heard_s - self._tape.head.heard_s)
