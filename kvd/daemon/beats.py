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

from kvd.core.peers.peer import Life

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from kvd.core.node import NodeState
    from kvd.core.peers.peer import Peer
    from kvd.core.settings import Settings
    from kvd.daemon.reactor import Reactor

TICK_S: Final = 0.05
"""Resolution of deadlines and repetitions."""

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
        ours, nodes = self._dues(), node_dues(self._reactor.node)
        if was_stirred or not ours or not nodes:
            return
        dues = [*ours, *nodes, now_s + REST_S]
        # All that is due within one tick waits for the last of it, as it would for a tick.
        until_s = max(min(dues), now_s) + TICK_S
        due_s = max(due for due in dues if due <= until_s)
        if due_s > now_s + TICK_S:
            self.end()
            self._go_at(due_s)


def node_dues(node: NodeState) -> list[float]:
    """When a ``Tick`` has something to do next, if nothing else happens.

    None while anything is under way that has a deadline: then every tick counts.
    """
    if _is_under_way(node):
        return []
    settings = node.settings
    silences = [
        due for peer in node.peers.by_name.values() for due in _silence_dues(peer, settings)
    ]
    return [node.peers.pulse.due_s, *silences]


def _is_under_way(node: NodeState) -> bool:
    return bool(
        node.decoder.open.parts
        or node.decoder.quarantines.leases
        or node.prefiller.rooms.by_room
        or node.prefiller.settled_sends.settled
        or node.prefiller.expired_rooms.by_room
        or node.admission.queue
        or node.inquiries.open
        or node.drainer.drain is not None
        or not node.peers.generation
    )


def _silence_dues(peer: Peer, settings: Settings) -> Iterator[float]:
    """When this peer becomes suspect, or lost, if it stays silent."""
    if peer.life is Life.UP:
        yield peer.heard_s + settings.suspect_s
    if peer.life is not Life.LOST:
        yield peer.heard_s + settings.lost_s
