"""What moves between the pool and its tiers: each order with its lease, until its last word.

An order is over by its answer, or when the storage process that had it is reaped, and by nothing
else; so long the pages are its lease's, whatever became of those who wanted them. Tickets are
counted on over the end of a process: a late answer of the one before finds no order.

A process that is silent is killed: where an order is not answered for ``deadline_s`` of its tier,
counted from when all in front of it in its line were. A line is of one tier, one way. Answers of
other lines, and to later orders, say nothing of it: one disk may hang where a store answers, and a
read that overtakes another one does not prove that the other ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, TypeVar

from mypy_extensions import mypyc_attr

from kvd.core import effects
from kvd.core.tiers.keys import KEY_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.outbox import Outbox
    from kvd.core.tiers.tier import StorageEnding, StorageTier

M = TypeVar("M", bound="TierMove")


@mypyc_attr(allow_interpreted_subclasses=True)
class TierMove:
    """One order: these objects of one namespace, which follow each other behind ``before``.

    ``lease`` has the pages; ``keys`` are of a node, or of what is promoted.
    """

    __slots__ = ("before", "is_void", "keys", "lease", "namespace", "since_s", "ticket", "tier")

    verb: ClassVar[str] = "move"

    def __init__(
        self,
        tier: StorageTier,
        lease: LeaseRecord,
        namespace: str,
        before: bytes,
        keys: list[bytes],
    ) -> None:
        self.tier = tier
        self.lease = lease
        self.namespace = namespace
        self.before = before
        self.keys = keys
        self.ticket = 0
        self.since_s = 0.0
        self.is_void = False
        """Whether what it moves is to be forgotten: its namespace was flushed."""

    @property
    def n_objects(self) -> int:
        """How many were ordered."""
        return len(self.keys)

    @property
    def line(self) -> str:
        """What it stands in, behind those that were ordered before."""
        return f"{self.verb} {self.tier.name}"

    @property
    def words(self) -> str:
        """For people."""
        return f"{self.verb} of {self.n_objects} pages, order {self.ticket}"


@mypyc_attr(allow_interpreted_subclasses=True)
class TierMoves:
    """The orders under way, by ticket; the order in which they stand is that of their orders."""

    __slots__ = ("_last_ticket", "_out", "ending", "heard_s", "under_way")

    def __init__(self, ending: StorageEnding, out: Outbox) -> None:
        self.ending = ending
        self.under_way: dict[int, TierMove] = {}
        self.heard_s: dict[str, float] = {}
        """By line, when the first in it was answered last."""
        self._last_ticket = 0
        self._out = out

    @property
    def last_ticket(self) -> int:
        """Of the last order."""
        return self._last_ticket

    def take_ticket(self) -> int:
        """Of an order that is given now."""
        self._last_ticket += 1
        return self._last_ticket

    def begin(self, move: TierMove) -> int:
        """It is under way from now on; its ticket."""
        move.ticket = self.take_ticket()
        move.since_s = self._out.at_s
        self.under_way[move.ticket] = move
        return move.ticket

    def end(self, ticket: int, kind: type[M]) -> M | None:
        """It was answered; None for one that nobody waits for any more."""
        move = self.under_way.get(ticket)
        if not isinstance(move, kind):
            return None
        line = move.line
        if next(one for one in self.under_way.values() if one.line == line) is move:
            self.heard_s[line] = self._out.at_s
        del self.under_way[ticket]
        return move

    def cut(self) -> list[TierMove]:
        """The process is reaped, and all of them with it."""
        moves, self.under_way = list(self.under_way.values()), {}
        self.ending.why = ""
        return moves

    def of_lease(self, lease: int) -> TierMove | None:
        """The order that a lease is kept for."""
        return next((move for move in self.under_way.values() if move.lease.id == lease), None)

    def n_objects(self, tier: StorageTier, kind: type[TierMove]) -> int:
        """How many are under way of a tier, one way."""
        return sum(
            [
                move.n_objects
                for move in self.under_way.values()
                if move.tier is tier and isinstance(move, kind)
            ]
        )

    def restart_if_silent(self) -> TierMove | None:
        """End a process that answers nothing; the order that it was ended for."""
        if self.ending.why:
            return None
        for move in self.under_way.values():
            silent_s = self._out.at_s - max(move.since_s, self.heard_s.get(move.line, 0.0))
            if silent_s >= move.tier.settings.deadline_s:
                self.restart(f"{move.words} of tier {move.tier.name}", silent_s)
                return move
        return None

    def restart(self, of: str, silent_s: float) -> None:
        """End the process, which has not answered an order for so long."""
        if not self.ending.why:
            self.ending.why = f"{of}: no answer for {silent_s:.1f} s"
            self._out.effects.append(effects.RestartStorage(self.ending.why))

    def drop(self, tier: StorageTier, namespace: str, keys: Sequence[bytes]) -> None:
        """Have these objects removed, before anything that is ordered from now on.

        Not of a tier that is shared: what is there is not ours alone, and goes by its lifetime.
        """
        if keys and tier.writes is None:
            self._out.effects.append(
                effects.DropObjects(tier.name, tier.stored_as(namespace), joined(keys))
            )


def joined(keys: Sequence[bytes]) -> bytes:
    """Keys as an order has them."""
    assert all(len(key) == KEY_BYTES for key in keys)
    return b"".join(keys)
