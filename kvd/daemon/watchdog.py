"""Feeds systemd's watchdog, and keeps its status line fresh; only while the daemon does its work.

A daemon that hangs is killed by its manager and started again, with the pool that it had. So the
watchdog is fed from the event loop, three times as often as it wants, and only if

  - no beat of the loop was late by more than half of what the watchdog allows,
  - the core has stepped a ``Tick`` since the last time, without a bug,
  - a transfer process serves, or has been down for no longer than the watchdog allows: one that is
    dead or deaf is replaced by the daemon itself, and its rooms are settled.

Why it is not fed is in the log, once, and in the status line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvd.core.peers.peer import Life
from kvd.observe.log import Fed, Unfed

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.core.node import NodeState
    from kvd.daemon.reactor import Reactor
    from kvd.daemon.systemd import Systemd
    from kvd.daemon.transfer_supervisor import TransferSupervisor
    from kvd.observe.log import EventLog

FEEDS: Final = 3
"""In the time that the watchdog waits."""

LINE_EVERY_S: Final = 1.0
"""How often the status line is made; the systemd says it less often."""


class Watchdog:
    """``beat`` it with every beat of the loop, after the ``Tick``."""

    def __init__(
        self,
        systemd: Systemd,
        reactor: Reactor,
        transfer: TransferSupervisor,
        log: EventLog,
        state: Callable[[], str],
    ) -> None:
        """Watch from now on.

        Args:
            systemd: whom to tell.
            reactor: whose steps prove that the core works.
            transfer: which keeps the transfer process.
            log: takes why it is not fed.
            state: of the node, in a word or two.
        """
        self._systemd = systemd
        self._reactor = reactor
        self._transfer = transfer
        self._log = log
        self._state = state
        self._limit_s = systemd.watchdog_s
        self._next_line_s = self._worst_lag_s = 0.0
        self.due_s = 0.0 if self._limit_s else float("inf")
        """When it is to be fed next."""
        self._looked_s = float("-inf")
        self._unfed_s = 0.0
        self._why = ""

    def beat(self, now_s: float, lag_s: float) -> None:
        """A beat that came ``lag_s`` late."""
        self._worst_lag_s = max(self._worst_lag_s, lag_s)
        if now_s >= self.due_s:
            self.due_s = now_s + self._limit_s / FEEDS
            self._look(now_s)
        if self._systemd.is_there and now_s >= self._next_line_s:
            self._next_line_s = now_s + LINE_EVERY_S
            line = status_line(self._reactor.node, self._state())
            self._systemd.say(f"watchdog not fed: {self._why}; {line}" if self._why else line)

    def _look(self, now_s: float) -> None:
        """Feed it, or say once why not."""
        before, self._why = self._why, self._trouble()
        self._worst_lag_s, self._looked_s = 0.0, now_s
        if not self._why:
            self._systemd.feed()
        if self._why and not before:
            self._unfed_s = now_s
            self._log.write(Unfed(why=self._why))
        elif before and not self._why:
            self._log.write(Fed(unfed_s=round(now_s - self._unfed_s, 3)))

    def _trouble(self) -> str:
        """Why the daemon does not do its work; empty if it does."""
        if self._worst_lag_s > self._limit_s / 2:
            return f"a beat of the event loop was {self._worst_lag_s:.1f} s late"
        # By what was stepped, and not by what was fed: a core that raises at each tick is no core.
        if self._reactor.ticked_s <= self._looked_s:
            return "the core does not step its ticks: the log has the bug"
        return self._transfer.trouble(self._limit_s)


def status_line(node: NodeState, state: str) -> str:
    """What ``systemctl status`` shows: one line, no walk over anything that grows."""
    peers = node.peers
    known = {*peers.by_name, *(link.name for link in peers.dialed.values())}
    up = sum(peer.life is Life.UP for peer in peers.by_name.values())
    table = node.leases
    rooms = len(node.decoder.open.parts) + len(node.prefiller.rooms.by_room)
    return (
        f"{state}; peers {up}/{len(known)} up, clients {len(node.sessions.by_id)}, "
        f"pages {table.tree.cached_pages} cached {table.pool.free_pages} free, "
        f"handoffs {rooms} in flight"
    )
