"""Leases that are held for nobody's sake who would miss them at once.

A prompt that a peer has asked for and not come for yet, a room that has been received, a pin. Such
a lease **gives way**: where a claim finds no room, those leases go, oldest first and pins last,
until there is. Who held them is told in the same step (``gone``), before anything could read their
pages.

What must not live here: when they have to go (``page_supply``), and how (``lease_ends``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import PIN
from kvd.core.cache.lease_record import LeaseSends

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.leased_pool import LeasedPool


@mypyc_attr(allow_interpreted_subclasses=True)
class GivingWay:
    """Which leases have a holder that gives way, and which of them have gone."""

    def __init__(self, leased: LeasedPool) -> None:
        self.leases: dict[int, LeaseRecord] = {}
        """Those with a holder that gives way, in the order in which they go."""
        self.gone: list[LeaseRecord] = []
        """Those that went in this step; whoever ends what held them clears it."""
        self._leased = leased

    def let_give_way(self, lease: LeaseRecord, holder: str) -> None:
        """From now on the lease is not in the way for that holder's sake."""
        assert lease.sends is not None  # the holder is one of them
        lease.sends.gives_way = (*lease.sends.gives_way, holder)
        self.leases[lease.id] = lease
        self.note_idle(lease)

    def let_pin_give_way(self, lease: LeaseRecord) -> None:
        """It is held by a pin, and by nobody else."""
        lease.sends = LeaseSends()
        self.let_give_way(lease, PIN)

    def keep_for(self, lease: LeaseRecord, holder: str) -> None:
        """That holder needs it after all: its pages are going to be read."""
        sends = lease.sends
        if sends is None or holder not in sends.gives_way:
            return
        sends.gives_way = tuple([one for one in sends.gives_way if one != holder])
        if not sends.gives_way:
            del self.leases[lease.id]

    def forget(self, lease: LeaseRecord) -> None:
        """It has ended, whoever gave way."""
        if lease.sends is not None and lease.sends.gives_way:
            del self.leases[lease.id]

    def note_idle(self, lease: LeaseRecord) -> None:
        """Somebody may have waited for pages that can be had from now on."""
        self._leased.releases += self.is_idle(lease)

    def is_idle(self, lease: LeaseRecord) -> bool:
        """Whether all who hold it give way, and nothing reads its pages."""
        sends = lease.sends
        if sends is None or not sends.gives_way or lease.reads:
            return False
        return lease.holders.issubset(sends.gives_way)

    def idle(self) -> list[LeaseRecord]:
        """Those that could go now, in the order in which they go: pins are the last."""
        idle = [lease for lease in self.leases.values() if self.is_idle(lease)]
        return sorted(idle, key=_is_pinned)


def _is_pinned(lease: LeaseRecord) -> bool:
    return PIN in lease.holders
