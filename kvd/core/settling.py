"""Pages that a remote may still write: who may, and what gives them back.

A part that ends gives its delta back at once where nothing can land any more. Otherwise the pages
go into quarantine, and come back when the writer has settled, is proven gone, or was fenced. Where
the writer is over but what it sent may still sit in this host's own socket buffers, they come back
when our transfer process says Quiet. No timer gives a page back.

What must not live here: transitions (``decode``), and whose turn it is then (``admission``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core import effects
from kvd.core.lease import ARRIVAL, Quarantine, Writer
from kvd.types import short

if TYPE_CHECKING:
    from kvd.core.lease import Lease
    from kvd.core.lease_table import LeaseTable
    from kvd.core.parts import DecodePart
    from kvd.core.peer import Peers
    from kvd.core.settings import Settings


class Settling:
    """Quarantined leases whose writer is over, until this host is quiet; and the way there."""

    def __init__(
        self, settings: Settings, leases: LeaseTable, peers: Peers, out: effects.Outbox
    ) -> None:
        self.leases: dict[int, Lease] = {}
        """By lease id."""
        self._settings = settings
        self._table = leases
        self._peers = peers
        self._out = out
        self._fenced_generation = 0

    def quarantine(self, lease: Lease, parts: list[DecodePart], why: str) -> None:
        """The writers of these parts may still write its pages: keep them from everybody."""
        writers = tuple([Writer(part.peer, part.incarnation) for part in parts])
        self._table.quarantine(lease, Quarantine(writers, self._out.at_s, why))

    def narrow(self, lease: Lease, parts: list[DecodePart]) -> None:
        """Of the writers of a quarantined lease, those of these parts are left."""
        self._table.narrow_quarantine(
            lease, tuple([Writer(part.peer, part.incarnation) for part in parts])
        )

    def free(self, part: DecodePart, lease: Lease, cause: str, *, in_doubt: bool) -> None:
        """Give the delta back, at once or when the bytes in doubt have come to rest."""
        if in_doubt:
            self.quarantine(lease, [part], cause)
            self._await_quiet(lease)
        else:
            self._table.release(lease, ARRIVAL, cause)

    def end(self, lease: Lease, proof: str, *, in_doubt: bool) -> None:
        """The writer of a quarantined lease is over."""
        if in_doubt:
            self._await_quiet(lease)
        else:
            self._table.end_quarantine(lease, proof)

    def quiet(self, lease_id: int) -> None:
        """Nothing that had reached this host for the lease's pages can land any more."""
        lease = self.leases.pop(lease_id, None)
        if lease is not None:
            self._table.end_quarantine(lease, "quiet")

    def fenced(self) -> None:
        """Our receiving transfer process is reaped: nothing can land through it any more."""
        for lease_id in list(self.leases):
            self.quiet(lease_id)

    def fence_if_due(self) -> None:
        """The configured policy: a quarantine that outlives ``fence_after_s`` costs a restart."""
        limit_s = self._settings.fence_after_s
        generation = self._peers.generation
        if not limit_s or generation <= self._fenced_generation:
            return
        late = [
            lease
            for lease in self._table.leases.values()
            if lease.quarantine is not None and self._out.at_s - lease.quarantine.since_s >= limit_s
        ]
        if late:
            self._fenced_generation = generation
            why = f"{len(late)} leases in quarantine for {limit_s:g} s (transfer.fence_after_s)"
            self._out.effects.append(effects.RestartTransfer(why))

    def waits_for(self, lease: Lease) -> str:
        """What would give a quarantined lease's pages back, in words."""
        held = lease.quarantine
        if held is None or lease.id in self.leases:
            return "what had reached this host to come to rest"
        by_itself = ""
        if self._settings.fence_after_s:
            rest_s = held.since_s + self._settings.fence_after_s - self._out.at_s
            by_itself = f", which comes by itself in {max(0.0, rest_s):.1f} s"
        writers = " and ".join(
            [f"{writer.peer} ({short(writer.incarnation)})" for writer in held.writers]
        )
        return f"{writers} to settle, to restart, or a fence{by_itself}"

    def _await_quiet(self, lease: Lease) -> None:
        """The writer is gone, but what it sent may still be in our own socket buffers."""
        self.leases[lease.id] = lease
        if self._peers.generation:
            self._out.effects.append(effects.Quiesce(lease.id))
        else:
            self.quiet(lease.id)
