"""Copies between regions of this node: their numbers, and who hears when each is over.

A copy is a ticket of the transfer process. It is over by ``Copied``, by ``CopyFailed``, or by the
end of that process, and until then neither side's pages are anybody else's; that is kept by who
ordered it. At the end of the process every asker hears of it from the node, not from here.

Between the pool and the saved area a lease has one for each component that is copied, and of each
shard of it. What comes of it is known when the last is over: a refusal of one is no reason to touch
pages that another still reads or writes.

What must not live here: what becomes of the lease (``retraction``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.layout.spec import region_names, saved_region

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inputs import Copied, CopyFailed
    from kvd.core.layout.spec import Component, PoolSpec
    from kvd.core.leases.saved_area import SavedMove
    from kvd.core.outbox import Outbox
    from kvd.types import Pages


class CopyAsker(Protocol):
    """Who ordered a copy."""

    def copied(self, got: Copied) -> None:
        """Every byte of it is in its place."""

    def copy_failed(self, got: CopyFailed) -> None:
        """It was refused, and wrote nothing."""


class OwnTransfer(Protocol):
    """The process that copies; ``Peers`` knows which one serves, because it tells them."""

    @property
    def generation(self) -> int:
        """Which one serves; 0: none does, and no copy can be ordered."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Copies:
    """The copies under way, by ticket. Invariant: a ticket is used once."""

    def __init__(self, out: Outbox) -> None:
        self.under_way: dict[int, CopyAsker] = {}
        self._last_ticket = 0
        self._out = out

    def order(
        self,
        asker: CopyAsker,
        source_region: str,
        source: Pages,
        destination_region: str,
        destination: Pages,
    ) -> int:
        """Copy ``source[i]`` over ``destination[i]``; the ticket that ``asker`` will hear of."""
        # Counted on over the end of a process: a late report of the one before finds no new copy.
        self._last_ticket += 1
        self.under_way[self._last_ticket] = asker
        self._out.effects.append(
            effects.Copy(
                ticket=self._last_ticket,
                source_region=source_region,
                source=source,
                destination_region=destination_region,
                destination=destination,
            )
        )
        return self._last_ticket

    def copied(self, got: Copied) -> None:
        """One copy is done; one of a process that is gone interests nobody."""
        # Unknown is no error: a report may come behind the end of the process that made it, and
        # then its asker was told already that the copy was cut.
        asker = self.under_way.pop(got.ticket, None)
        if asker is not None:
            asker.copied(got)

    def copy_failed(self, got: CopyFailed) -> None:
        """One copy was refused."""
        asker = self.under_way.pop(got.ticket, None)
        if asker is not None:
            asker.copy_failed(got)

    def transfer_gone(self) -> None:
        """No copy is under way any more."""
        self.under_way = {}


def _pairs(spec: PoolSpec, component: Component) -> list[tuple[str, str]]:
    pools = region_names(spec, component.name)
    return list(zip(pools, region_names(spec, saved_region(component)), strict=True))


@mypyc_attr(allow_interpreted_subclasses=True)
class CopyRound:
    """All copies of one lease, and what came of those that are over."""

    __slots__ = ("lease", "n_bytes", "tickets", "why")

    def __init__(self, lease: LeaseRecord) -> None:
        self.lease = lease
        self.tickets: set[int] = set()
        self.n_bytes = 0
        self.why = ""
        """Why one of them was refused; empty: none was."""


@mypyc_attr(allow_interpreted_subclasses=True)
class LeaseCopies:
    """Those that are under way. ``by_ticket``: to the copies of the same lease."""

    def __init__(self, spec: PoolSpec, copies: Copies) -> None:
        self.by_ticket: dict[int, CopyRound] = {}
        self._regions = {component.name: _pairs(spec, component) for component in spec.components}
        """By component: its regions, each with that of its saved pages."""
        self._copies = copies

    def leases(self) -> list[LeaseRecord]:
        """Those that have copies under way, each as often as it has."""
        return [copies.lease for copies in self.by_ticket.values()]

    def save(self, asker: CopyAsker, lease: LeaseRecord, moved: list[SavedMove]) -> None:
        """Order the copies out."""
        copying, order = CopyRound(lease), self._copies.order
        for move in moved:
            for region, saved in self._regions[move.component]:
                self._note(copying, order(asker, region, move.pages, saved, move.slots))

    def restore(self, asker: CopyAsker, lease: LeaseRecord, moved: list[SavedMove]) -> None:
        """Order the copies back."""
        copying, order = CopyRound(lease), self._copies.order
        for move in moved:
            for region, saved in self._regions[move.component]:
                self._note(copying, order(asker, saved, move.slots, region, move.pages))

    def _note(self, copying: CopyRound, ticket: int) -> None:
        copying.tickets.add(ticket)
        self.by_ticket[ticket] = copying

    def over(self, ticket: int, n_bytes: int, why: str) -> CopyRound | None:
        """One is over; all of its lease's if it was the last, None before."""
        copying = self.by_ticket.pop(ticket)
        copying.tickets.discard(ticket)
        copying.n_bytes += n_bytes
        copying.why = copying.why or why
        return None if copying.tickets else copying

    def cut(self) -> list[LeaseRecord]:
        """The process is gone, and all of them with it; the leases whose they were."""
        # Each lease once, however many copies it had: whoever is told moves it to another state.
        leases = {lease.id: lease for lease in self.leases()}
        self.by_ticket = {}
        return list(leases.values())
