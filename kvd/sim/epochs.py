"""What a simulated node keeps for its next daemon: epochs of namespaces, and what was flushed.

    KeepEpochs --> on its way --> on disk --> EpochsKept, when the daemon is awake
                        |
                        +--> the daemon dies: it is on disk, or is not, and nobody was told

What must not live here: whether what a node finds is of an epoch that is over (``contents``), or
was flushed (``storage``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from kvd.core import inputs
from kvd.core.effects import KeptFlush
from kvd.core.leases.flushes import FlushStamp
from kvd.wire.admin import RaiseEpoch

if TYPE_CHECKING:
    from random import Random

    from kvd.core.effects import KeepEpochs
    from kvd.core.inputs import Input
    from kvd.sim.agenda import Agenda
    from kvd.wire.admin import AdminRequest

KEEP_S, SAID_AGAIN_S = 0.2, 1.0
"""At most, until what a node wants kept is on disk, and until an operator looks whether it is."""


class KeptWrite(msgspec.Struct, frozen=True):
    """What a node wants kept, on its way to a disk."""

    ticket: int
    epochs: dict[str, int]
    flushed: dict[str | None, FlushStamp]


class KeepingHost(Protocol):
    """What is asked of the node."""

    life: int
    is_up: bool
    asleep_until_s: float

    def feed(self, happened: Input) -> None:
        """It hears that."""
        ...

    def ask(self, request: AdminRequest) -> None:
        """An operator asks that of it."""
        ...


class SimEpochs:
    """Of one node, over all lives of its daemon."""

    def __init__(self, host: KeepingHost, agenda: Agenda, rng: Random, *, is_found: bool) -> None:
        """``is_found``: whether a daemon is told of epochs also where none was kept."""
        self.said: dict[str, int] = {}
        """Of each base that was said to this life to have new weights."""
        self.kept: dict[str, int] = {}
        self.flushed: dict[str | None, FlushStamp] = {}
        """What is on disk of epochs, and of what was flushed."""
        self._host = host
        self._agenda = agenda
        self._rng = rng
        self._is_found = is_found
        self._writing: KeptWrite | None = None

    def begin_life(self) -> None:
        """A daemon finds what the one before has kept."""
        host, now_s = self._host, self._agenda.now_s
        self.said = dict(self.kept)
        if not (self._is_found or self.flushed):
            return
        flushes = [
            KeptFlush(namespace=name, stamp=of.stamp, ago_s=now_s - of.at_s)
            for name, of in self.flushed.items()
        ]
        host.feed(inputs.EpochsFound(at_s=now_s, by_base=dict(self.said), flushes=tuple(flushes)))

    def end_life(self) -> None:
        """It has died."""
        if self._writing is not None and self._rng.random() < 0.5:
            self._has_kept(self._writing)  # and nobody was told
        self._writing = None

    def raise_epoch(self, base: str, epoch: int) -> None:
        """An operator says that a base has new weights, until it is on disk here."""
        host = self._host
        if self.kept.get(base, 0) >= epoch:
            return
        if host.is_up and host.asleep_until_s <= self._agenda.now_s:
            self.said[base] = max(epoch, self.said.get(base, 0))
            host.ask(RaiseEpoch(1, base, epoch))
        self._agenda.after(SAID_AGAIN_S, self.raise_epoch, base, epoch)

    def keep(self, effect: KeepEpochs) -> None:
        """Have it written."""
        host, now_s = self._host, self._agenda.now_s
        flushed = {
            flush.namespace: FlushStamp(flush.stamp, now_s - flush.ago_s)
            for flush in effect.flushes
        }
        self._writing = write = KeptWrite(effect.ticket, dict(effect.by_base), flushed)
        self._agenda.after(KEEP_S * self._rng.random(), self._keep, write, host.life)

    def _keep(self, write: KeptWrite, life: int) -> None:
        """It is on disk, unless the daemon has died before; what was written is heard of later."""
        if self._host.life == life and self._host.is_up:
            self._has_kept(write)
            self._tell(write.ticket, life)

    def _has_kept(self, write: KeptWrite) -> None:
        self.kept, self.flushed = write.epochs, write.flushed
        self._writing = None

    def _tell(self, ticket: int, life: int) -> None:
        host, agenda = self._host, self._agenda
        if host.life != life or not host.is_up:
            return
        if host.asleep_until_s > agenda.now_s:
            agenda.at(host.asleep_until_s, self._tell, ticket, life)
        else:
            host.feed(inputs.EpochsKept(agenda.now_s, ticket))
