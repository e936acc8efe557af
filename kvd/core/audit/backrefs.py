"""Who refers to whom, turned round: made when a rule first asks for it, thrown away after a look.

Between two steps everything here is exact. It must not outlive the step in which it was made.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import COPY, FETCH, MOVING, PIN
from kvd.core.handoff.protocol import Decode
from kvd.core.inspect.page_states import needed_nodes

if TYPE_CHECKING:
    from kvd.core.cache.radix_node import RadixNode
    from kvd.core.handoff.parts import ReceivePart, SendPart
    from kvd.core.inspect.view import NodeView
    from kvd.core.leases.admission import Waiter
    from kvd.core.leases.lease_table import LeaseTable


UNDER_WAY = MOVING | {FETCH, COPY, PIN}
"""Holders for as long as something is under way for a lease: see ``Backrefs.under_way``."""

Needs = tuple[Counter["RadixNode"], ...]
"""For each component beside the first: by node, how many leases need what lies there."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Backrefs:
    """The cross-references of one node at one moment. Each costs one pass, once."""

    # Each is kept by hand: compiled, ``functools.cached_property`` is a plain property, which would
    # count everything anew for every lease that a rule looks at.
    def __init__(self, node: NodeView) -> None:
        self._node = node
        self._anchored: Counter[RadixNode | None] | None = None
        self._needs: Needs | None = None
        self._receives: dict[int, ReceivePart] | None = None
        self._sends: dict[int, SendPart] | None = None
        self._reads: Counter[int] | None = None
        self._copies: Counter[int] | None = None
        self._engine_copies: Counter[int] | None = None
        self._may_read_former: bool | None = None
        self._moving: Counter[int] | None = None
        self._queued: set[int] | None = None

    @property
    def anchored(self) -> Counter[RadixNode | None]:
        """By tree node, the leases whose lock ends there."""
        if self._anchored is None:
            leases = self._node.leases.leases.values()
            self._anchored = Counter([lease.anchor for lease in leases])
        return self._anchored

    @property
    def needs(self) -> Needs:
        """For each component beside the first, by tree node, the leases that need what is there."""
        if self._needs is None:
            self._needs = _needs(self._node.leases)
        return self._needs

    @property
    def receives(self) -> dict[int, ReceivePart]:
        """By lease id, the part whose pages it holds until the writer is over."""
        if self._receives is None:
            parts = self._node.decoder.open.parts.values()
            self._receives = {part.lease.id: part for part in parts if part.lease is not None}
        return self._receives

    @property
    def sends(self) -> dict[int, SendPart]:
        """By send id, the parts that may still read their lease."""
        if self._sends is None:
            self._sends = {part.id: part for part in self._node.prefiller.rooms.live()}
        return self._sends

    @property
    def reads(self) -> Counter[int]:
        """By lease id, the posts, the fetches and the engines' copies under way."""
        if self._reads is None:
            found = Counter([copy.lease.id for copy in self._node.fetcher.copies.values()])
            found += self.engine_copies
            for part in self._node.prefiller.posts.parts.values():
                if part.engine is not None:
                    found[part.engine.lease.id] += 1
            self._reads = found
        return self._reads

    @property
    def engine_copies(self) -> Counter[int]:
        """By lease id, the copies of engines that are under way."""
        if self._engine_copies is None:
            self._engine_copies = Counter([copy.lease for copy in self._node.engine_copies])
        return self._engine_copies

    @property
    def moving(self) -> Counter[int]:
        """By lease id, the orders of a storage process that are under way."""
        if self._moving is None:
            moves = self._node.tiers.moves.under_way.values()
            self._moving = Counter([move.lease.id for move in moves])
        return self._moving

    def under_way(self, holder: str) -> Counter[int]:
        """By lease id, what is under way for the sake of which such a holder is there."""
        if holder in MOVING:
            return self.moving
        if holder == PIN:
            pins = self._node.pins.by_id.values()
            return Counter([pin.lease.id for pin in pins if pin.lease is not None])
        return self.reads if holder == FETCH else self.engine_copies

    @property
    def copies(self) -> Counter[int]:
        """By lease id, the copies to the saved area and back that are under way or still to be."""
        if self._copies is None:
            retractor = self._node.retractor
            # Those that wait for a process too: what they hold is held for a copy that is still
            # to be ordered.
            waiting = [*retractor.copies.leases(), *retractor.uncopied.values()]
            self._copies = Counter([lease.id for lease in waiting])
        return self._copies

    @property
    def may_read_former(self) -> bool:
        """Whether an engine may still read what it had before the restart."""
        if self._may_read_former is None:
            self._may_read_former = self._node.former_leases.may_read()
        return self._may_read_former

    @property
    def queued(self) -> set[int]:
        """The waiters in the admission queue, by identity."""
        if self._queued is None:
            self._queued = {id(waiter) for waiter in self._node.admission.queue}
        return self._queued

    def is_alive(self, session: int) -> bool:
        """Whether that session is open."""
        return session in self._node.sessions.by_id

    def is_asked(self, waiter: Waiter) -> bool:
        """Whether somebody waits for the answer: an open session, or a peer that pulls."""
        return self.is_alive(waiter.claim.session) or bool(self._node.pull_source.puller_of(waiter))

    def is_awaited(self, session: int) -> bool:
        """Whether a process of it of before the restart is away."""
        found = self._node.sessions.by_id.get(session)
        return found is not None and not found.is_whole

    def is_draining(self, lease_id: int) -> bool:
        """Whether something will end this lease's quarantine: its part, or this host's quiet."""
        part = self.receives.get(lease_id)
        is_drained = part is not None and part.state is Decode.DRAINING
        return is_drained or lease_id in self._node.decoder.quarantines.leases


def _needs(table: LeaseTable) -> Needs:
    """Every lease's, counted from scratch: one walk for each lease that needs anything."""
    leases = table.leases
    return tuple(
        Counter(
            [
                edge
                for number in keeper.leases
                if number in leases
                for edge in needed_nodes(keeper, leases[number])
            ]
        )
        for keeper in table.components.each
    )
