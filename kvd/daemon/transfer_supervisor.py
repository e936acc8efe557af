"""The life of the transfer process: start it, order, translate its reports, restart it.

Generations count from 1. The next one starts only when the old process is reaped and its memory map
is gone, which is what makes a restart a fence. A process that keeps dying is started again after a
pause that doubles, and the node says meanwhile that it is restarting.

Invariants:
  - Only a transport that is alive is installed and announced: one that ended before ``start``
    could resume counts as one that did not start.
  - A transport whose loop no longer answers is replaced: counted in probes, not in seconds, so that
    a host that slept does not blame it.
  - ``_transport`` is the last one whose end was not seen, so ``stop`` can always await its end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from kvd.core import effects, inputs
from kvd.daemon.pagesums import PageSums
from kvd.daemon.revival import Revival
from kvd.transfer.orders import (
    Alive,
    Collapsed,
    Dying,
    Probe,
    Ready,
    Summed,
)
from kvd.transfer.process import TransportDown

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.daemon.reactor import Reactor
    from kvd.transfer.orders import Order, Report, SharedRegion
    from kvd.transfer.process import TransferProcess

LONGEST_PAUSE_S = 10.0
PROBE_EVERY_S = 0.5


class TransferSupervisor:
    """One transfer process after the other."""

    def __init__(
        self,
        reactor: Reactor,
        make: Callable[[int], TransferProcess],
        silent_s: float,
        *,
        region: str,
        page_bytes: int,
        on_pool_lost: Callable[[str], None],
    ) -> None:
        """Prepare; nothing is started before ``start``.

        Args:
            reactor: takes what is reported.
            make: the transport of a generation.
            silent_s: so long one may not answer before it is replaced.
            region: of the pages that the daemon has summed.
            page_bytes: of one of them.
            on_pool_lost: takes why the pool is gone, where it was memory of the transfer process:
                no other one is started then, for the next one would have another pool.
        """
        self._reactor = reactor
        self._patience = max(1, round(silent_s / PROBE_EVERY_S))
        self._asked = self._answered = self._unanswered_beats = 0
        self.due_s = 0.0
        """When the transfer process is to be asked next."""
        self._make = make
        self._generation = 0
        self._transport: TransferProcess | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._revival = Revival(reactor.clock, LONGEST_PAUSE_S)
        self._down_s: float | None = None
        self._why_down = ""
        self.shared: tuple[SharedRegion, ...] = ()
        """What of the pool lies on devices, in memory of the transfer process that serves."""
        self.sums = PageSums(self.order, region, page_bytes)
        """For whoever has pages of ours summed; what a process takes with it is not answered."""
        self._on_pool_lost = on_pool_lost

    def trouble(self, limit_s: float) -> str:
        """Why no transfer process has served for longer than ``limit_s``; empty if one has."""
        if self._down_s is None or self._reactor.clock() - self._down_s <= limit_s:
            return ""
        return f"no transfer process has come up for {limit_s:g} s: {self._why_down}"

    async def start(self, why: str) -> None:
        """Start the next generation.

        Raises:
            TransportDown: it cannot serve; the message says why.
        """
        self._generation += 1
        transport = self._make(self._generation)
        ended: list[str] = []

        def on_exit(why: str) -> None:
            # Only of the one that serves: the end of one that is still starting is the caller's to
            # handle.
            if self._transport is transport:
                self._on_exit(why)
            else:
                ended.append(why)

        ready = await transport.start(self._on_reports, on_exit)
        # It was ready and died before this went on: announced, it would never be replaced.
        if ended:
            raise TransportDown(f"{ended[0]} as soon as it was ready")
        self._transport = transport
        self.shared = ready.shared
        self._down_s = None
        # What the one before left unanswered is not this one's fault.
        self._answered = self._asked
        self._revival.came_up()
        self._reactor.feed(
            inputs.TransferReady(
                at_s=self._reactor.clock(),
                generation=self._generation,
                metadata=ready.metadata,
                transport=ready.transport,
                why=why,
            )
        )
        # Behind the node: whoever asks for sums now orders from a process that has been announced.
        self.sums.transfer_ready()

    async def stop(self) -> None:
        """Kill and reap."""
        if self._restarting is not None:
            self._restarting.cancel()
            await asyncio.wait([self._restarting])
        # Off first: what is ordered while it ends is dropped.
        transport, self._transport = self._transport, None
        if transport is not None:
            await transport.stop()

    def restart(self, effect: effects.RestartTransfer) -> None:
        """Carry out ``RestartTransfer``: a fence."""
        if self.shared:
            self._on_pool_lost(f"fenced: {effect.why}")
        elif self._restarting is None:
            self._restarting = asyncio.get_running_loop().create_task(self._replace(effect.why))

    def beat(self) -> None:
        """Ask the transfer process whether its loop runs; replace one that has stopped answering.

        Called with every tick; it does something every ``PROBE_EVERY_S``.
        """
        now_s = self._reactor.clock()
        if self._transport is None or self._restarting is not None or now_s < self.due_s:
            return
        # By the clock, not from now on: whatever else is due as often falls on the same beat.
        self.due_s = (now_s // PROBE_EVERY_S + 1) * PROBE_EVERY_S
        # Counted in beats of ours: a host that slept has lost none.
        if self._answered < self._asked:
            self._unanswered_beats += 1
            if self._unanswered_beats >= self._patience:
                silent_s = self._unanswered_beats * PROBE_EVERY_S
                self.restart(
                    effects.RestartTransfer(
                        f"the transfer process has not answered for {silent_s:.1f} s "
                        "(transfer.silent_s)"
                    )
                )
            return
        self._unanswered_beats = 0
        self._asked += 1
        self.order(Probe(self._asked))

    # ---- orders ------------------------------------------------------------------------------

    def order(self, order: Order) -> None:
        """Carry out an effect of the node, or have pages summed.

        Forgotten where no transfer process serves, and when one ends: what the node wants of the
        next one it orders again.
        """
        if self._transport is not None:
            self._transport.order(order)

    # ---- reports -----------------------------------------------------------------------------

    def _on_reports(self, reports: list[Report]) -> None:
        now_s = self._reactor.clock()
        for report in reports:
            match report:
                case Alive(number):
                    self._answered = number
                case Summed():
                    self.sums.summed(report)
                case Ready() | Dying() | Collapsed():
                    pass  # of the process itself, no input of the node
                case _:
                    # Stamped here: the node's clock never goes back, and by the process's own a
                    # report could be older than the last step.
                    self._reactor.feed(msgspec.structs.replace(report, at_s=now_s))

    def _on_exit(self, why: str) -> None:
        """The transport that serves ended by itself, and is reaped."""
        self._transport = None
        self._is_down(why)
        self._reactor.feed(inputs.TransferGone(self._reactor.clock(), why))
        self.sums.transfer_gone()
        if self.shared:
            self._on_pool_lost(why)
        elif self._restarting is None:
            self._restarting = asyncio.get_running_loop().create_task(self._revive(why))

    def _is_down(self, why: str) -> None:
        """Since when and why nothing moves; a restart that fails says why, and is no new outage."""
        self._why_down = why
        if self._down_s is None:
            self._down_s = self._reactor.clock()

    async def _replace(self, why: str) -> None:
        self._is_down(why)
        if self._transport is not None:
            # Reaped, and its map gone, before the node hears of it: only that makes a restart a
            # fence.
            await self._transport.stop()
            # Before the node is told: what it orders then is for a process that is gone, and must
            # be dropped.
            self._transport = None
            self._reactor.feed(inputs.TransferGone(self._reactor.clock(), why))
            self.sums.transfer_gone()
        await self._revive(why)

    async def _revive(self, why: str) -> None:
        """Start again until it serves."""

        async def start() -> bool:
            nonlocal why
            try:
                await self.start(why)
            except TransportDown as down:
                why = str(down)
                self._is_down(why)
                return False
            return True

        await self._revival.until_up(start)
        # Last: until it serves, a second restart would start a second process.
        self._restarting = None
