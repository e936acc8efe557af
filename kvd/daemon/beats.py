"""When the loop beats: often while anything happens, and at rest when something is due.

A beat is a ``Tick`` and all that goes with it: a third of a millisecond, because at rest nothing of
it is in the processor's caches any more. Twenty a second are most of what an idle daemon costs.

    often  --nothing happened since the last beat, and nothing is under way--> at rest
    at rest --any input but those that come to every node; a console looks--> often

Invariant: nothing is done later than with beats that come often. At rest a beat comes within
``TICK_S`` after the first thing is due, and within ``TICK_S`` after anything has happened.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.core.rest import TICK_S, next_tick_s, tick_dues

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvd.daemon.reactor import Reactor

REST_S: Final = 0.5
"""From beat to beat at most."""


class Beats:
    """The beats of one daemon: ``begin`` and ``end`` them once.

    Args:
        loop: has its timers.
        reactor: whose inputs end a rest, and whose node says what is due.
        beat: carries one out; takes the time, and how late it came.
        dues: when something of the shell is due; none where every beat counts.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        reactor: Reactor,
        *,
        beat: Callable[[float, float], None],
        dues: Callable[[], list[float]],
    ) -> None:
        self._loop = loop
        self._reactor = reactor
        self._beat = beat
        self._dues = dues
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0
        self._is_stirred = True
        """Whether anything has happened since the last beat."""

    def begin(self) -> None:
        """Beat now, and go on."""
        self._go(self._reactor.clock())

    def end(self) -> None:
        """No more of them."""
        if self._timer is not None:
            self._timer.cancel()

    def stir(self) -> None:
        """Something happens: beats come often."""
        self._is_stirred = True
        soon_s = self._reactor.clock() + TICK_S
        if self._due_s > soon_s:
            self.end()
            self._go_at(soon_s)

    def _go_at(self, due_s: float) -> None:
        self._due_s = due_s
        self._timer = self._loop.call_later(due_s - self._reactor.clock(), self._go, due_s)

    def _go(self, due_s: float) -> None:
        now_s = self._reactor.clock()
        # First, so that whatever becomes of this beat, there is a next one.
        self._go_at(now_s + TICK_S)
        self._beat(now_s, max(0.0, now_s - due_s))
        self._rest(now_s)

    def _rest(self, now_s: float) -> None:
        """Sleep until something is due, where nothing happens."""
        was_stirred, self._is_stirred = self._is_stirred, False
        self._reactor.tell_of_stir(self.stir)
        ours, nodes = self._dues(), tick_dues(self._reactor.node)
        if was_stirred or not ours or not nodes:
            return
        due_s = next_tick_s(now_s, [*ours, *nodes, now_s + REST_S])
        if due_s > now_s + TICK_S:
            self.end()
            self._go_at(due_s)
