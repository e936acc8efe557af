"""Copies between regions of this node: their numbers, and who hears when each is over.

A copy is a ticket of the transfer process. It is over by ``Copied``, by ``CopyFailed``, or by the
end of that process, and until then neither side's pages are anybody else's; that is kept by who
ordered it. At the end of the process every asker hears of it from the node, not from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvd.core import effects

if TYPE_CHECKING:
    from kvd.core.inputs import Copied, CopyFailed
    from kvd.types import Pages


class CopyAsker(Protocol):
    """Who ordered a copy."""

    def copied(self, got: Copied) -> None:
        """Every byte of it is in its place."""

    def copy_failed(self, got: CopyFailed) -> None:
        """It was refused, and wrote nothing."""


class Copies:
    """The copies under way, by ticket. Invariant: a ticket is used once."""

    def __init__(self, out: effects.Outbox) -> None:
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
        self._last_ticket += 1
        self.under_way[self._last_ticket] = asker
        self._out.effects.append(
            effects.Copy(self._last_ticket, source_region, source, destination_region, destination)
        )
        return self._last_ticket

    def copied(self, got: Copied) -> None:
        """One copy is done; one of a process that is gone interests nobody."""
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
