"""What all connections of one loop share: whose turn it is to be read, and when to write.

As long as few have something to be dealt with, each is served when it becomes readable, and nothing
is spent here. Once they have taken ``turn_s`` since the loop last came round, whoever else becomes
readable waits in line, unread, and the line is served for ``turn_s`` in each round of the loop:
timers, other lines and other sockets come between. Whoever stands in line gets a share of a turn
that is smaller the longer the line is, so that one message waits for one message of each of the
others, not for their floods.

What is sent goes out together when all who are readable have had their turn: one system call for
each connection in each round of the loop, whoever it was that made us speak. A line is served
after that: what was answered to those who do not stand in it waits for nobody in it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

from mypy_extensions import mypyc_attr

from kvd.zmtp.bounds import TURN_MESSAGES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

_UNTIMED: Final = 8
"""Served before a round is timed: noticing that it is over costs a callback."""


@mypyc_attr(allow_interpreted_subclasses=True)
class TurnTaker:
    """Whoever may stand in a line, and have something to write."""

    def turn(self, messages: int) -> None:
        """It is its turn: deal with so many messages at most, and stand in line for the rest."""

    def flush(self) -> None:
        """Write what was gathered since the last time."""


@mypyc_attr(allow_interpreted_subclasses=True)
class FairTurns:
    """One line, and ``turn_s`` for it in each round of the loop."""

    def __init__(self, batch: WriteBatch, turn_s: float, untimed: int = _UNTIMED) -> None:
        """``untimed``: so many are served in a round before it is timed, however long they take."""
        self.turn_s = turn_s
        self._batch = batch
        self._untimed = untimed
        self._line: deque[TurnTaker] = deque()
        self._pump: asyncio.Handle | None = None
        self._served = 0
        self._end_s = 0.0

    def is_open(self) -> bool:
        """Whether one that has just become readable is served at once."""
        if self._line:
            return False
        self._served += 1
        if self._served < self._untimed:
            return True
        if self._served == self._untimed:
            self._end_s = time.monotonic() + self.turn_s
            self._batch.loop.call_soon(self._come_round)
            return True
        return time.monotonic() < self._end_s

    def _come_round(self) -> None:
        self._served = 0

    def wait(self, waiting: TurnTaker) -> None:
        """Put it in line; it reads nothing until it is its turn."""
        self._line.append(waiting)
        self._serve_later()

    def _serve_later(self) -> None:
        if self._line and self._pump is None:
            self._pump = self._batch.loop.call_soon(self._serve)

    def _serve(self) -> None:
        """One round of the line, or as much of it as there is time for."""
        self._pump = None
        line = self._line
        try:
            self._batch.flush()
            end_s = time.monotonic() + self.turn_s
            share = max(1, TURN_MESSAGES // len(line))
            for _ in range(len(line)):
                line.popleft().turn(share)
                if time.monotonic() >= end_s:
                    break
        finally:
            self._serve_later()


def keep_memory() -> None:
    """Leave it to the allocator what is given back."""


@mypyc_attr(allow_interpreted_subclasses=True)
class WriteBatch:
    """One for each loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, relieve: Callable[[], None] = keep_memory
    ) -> None:
        """``relieve`` is called when much that was kept is not needed any more."""
        self.loop = loop
        self.relieve = relieve
        self._written: list[TurnTaker] = []
        self._ahead: list[Callable[[], None]] = []
        self._is_awaited = False
        """Whether the loop comes back to write before it waits for anything."""

    def written(self, writer: TurnTaker) -> None:
        """It has something to write; once until it is flushed."""
        self._written.append(writer)
        self._await()

    def ahead(self, speak: Callable[[], None]) -> None:
        """Call ``speak`` once before this turn's writing: it sends what was gathered for that."""
        self._ahead.append(speak)
        self._await()

    def _await(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write now what there is; of no meaning where there is nothing."""
        # Awaited still: what is sent by them is written below, and not in a turn of its own.
        ahead, self._ahead = self._ahead, []
        try:
            for speak in ahead:
                speak()
        finally:
            self._is_awaited = False
            if self._ahead:  # what one of them has brought about
                self._await()
        # Taken off first: whoever ends while it is written to may make others speak.
        written, self._written = self._written, []
        for writer in written:
            writer.flush()
