"""The one queue in front of the pool: who gets room, in which order, and why the rest waits.

Higher priority first, then first come first served. The first request that does not fit blocks
those behind it (head of line): a small late one never overtakes, so a large one cannot starve. A
blocked head is not matched again until pages were given back. What waits for its peer and not for
memory is passed over, because it would block everybody for a reason that is not theirs.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING, Protocol

from kvd.core.lease import Claim, Lease, Shortage
from kvd.errors import Code, Refusal
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.effects import Outbox
    from kvd.core.lease_table import LeaseTable


class Asker(Protocol):
    """Who asked for room, and what becomes of the answer."""

    def admitted(self, lease: Lease) -> None:
        """There is room: this is the lease."""

    def refused(self, refusal: Refusal) -> None:
        """It gave up, or can never fit."""

    def blocked(self) -> str | None:
        """What it waits for apart from memory; None when only memory counts."""


class Waiter:
    """One request in the queue.

    Args:
        claim: What it asks for.
        deadline_s: When it gives up, on the node's clock.
        asker: Who hears of it.
    """

    __slots__ = ("asker", "claim", "deadline_s", "needed_pages", "number", "since_s")

    def __init__(self, claim: Claim, deadline_s: float, asker: Asker) -> None:
        self.claim = claim
        self.deadline_s = deadline_s
        self.asker = asker
        self.since_s = 0.0
        self.number = 0
        self.needed_pages = 0

    @property
    def rank(self) -> tuple[int, int]:
        """Order in the queue: higher priority, then earlier."""
        return (-self.claim.priority, self.number)


class Admission:
    """The queue. Invariant: sorted by ``rank``."""

    def __init__(self, leases: LeaseTable, max_queue: int, out: Outbox) -> None:
        self.queue: list[Waiter] = []
        self._leases = leases
        self._max_queue = max_queue
        self._out = out
        self._count = 0
        self._seen_releases = -1

    def at_once(self, claim: Claim) -> Lease | Shortage | None:
        """The lease, if nobody waits and there is room: the common case, without a queue.

        Otherwise submit a waiter with what came back, so that nothing is looked for twice.
        """
        return None if self.queue else self._leases.open(claim)

    def submit(self, waiter: Waiter, shortage: Shortage | None = None) -> None:
        """Admit, queue, or refuse what can never fit (scenario A16)."""
        refusal = self._unfit(waiter.claim)
        if refusal is not None:
            waiter.asker.refused(refusal)
            return
        self._count += 1
        waiter.number = self._count
        waiter.since_s = self._out.at_s
        bisect.insort(self.queue, waiter, key=lambda one: one.rank)
        if shortage is not None:
            waiter.needed_pages = shortage.needed_pages
            self._seen_releases = self._leases.releases
        elif not self._is_behind(waiter):
            self.wake()
        if waiter in self.queue:
            out = self._out
            out.emit(
                events.Waiting(
                    out.next_seq(),
                    out.at_s,
                    waiter.claim.session,
                    waiter.claim.room,
                    waiter.needed_pages,
                    self._leases.headroom_pages,
                )
            )

    def _unfit(self, claim: Claim) -> Refusal | None:
        """Why the claim is not even queued."""
        table = self._leases
        needed = table.pages_for(claim.room_tokens)
        if needed > table.capacity_pages:
            return Refusal(
                Code.TOO_LARGE,
                f"{claim.room_tokens} tokens need {needed} pages, the pool has "
                f"{table.capacity_pages}: it can never fit; enlarge pool.pages",
                numbers={"needed_pages": needed, "pool_pages": table.capacity_pages},
            )
        if len(self.queue) >= self._max_queue:
            return Refusal(
                Code.NO_ROOM,
                f"{len(self.queue)} requests wait already, the limit is {self._max_queue}",
                numbers={"waiting": len(self.queue), "limit": self._max_queue},
            )
        return None

    def pump(self) -> None:
        """Admit from the front until one does not fit; nothing to do if no page came back."""
        while self.queue and self._seen_releases != self._leases.releases:
            self._seen_releases = self._leases.releases
            self._admit_ready()

    def wake(self) -> None:
        """Something other than memory changed, a peer for example: look again."""
        self._seen_releases = -1
        self.pump()

    def withdraw(self, waiter: Waiter) -> None:
        """Leave the queue without a word; nothing is held yet."""
        if waiter in self.queue:
            self.queue.remove(waiter)
            self.wake()

    def cancel(self, session: int, call: int, refusal: Refusal) -> None:
        """The caller of a waiting request went away: answer it with ``refusal``, hold nothing."""
        for waiter in self.queue:
            if (waiter.claim.session, waiter.claim.call) == (session, call):
                self.withdraw(waiter)
                waiter.asker.refused(refusal)
                return

    def withdraw_session(self, session: int) -> None:
        """A session is over: none of its requests is ever admitted. The caller wakes the rest."""
        self.queue = [waiter for waiter in self.queue if waiter.claim.session != session]

    def expire(self) -> None:
        """Refuse what has waited until its deadline."""
        now_s = self._out.at_s
        late = [waiter for waiter in self.queue if waiter.deadline_s <= now_s]
        for waiter in late:
            self.queue.remove(waiter)
            waiter.asker.refused(self._too_late(waiter))
        if late:
            self.wake()

    def _is_behind(self, waiter: Waiter) -> bool:
        """Whether somebody before ``waiter`` waits for memory, so that looking is no use."""
        for one in self.queue:
            if one is waiter:
                return False
            if one.asker.blocked() is None:
                return True
        return False

    def _admit_ready(self) -> None:
        kept: list[Waiter] = []
        waiting = self.queue
        self.queue = []
        for index, waiter in enumerate(waiting):
            if waiter.asker.blocked() is not None:
                kept.append(waiter)
                continue
            lease = self._leases.open(waiter.claim)
            if isinstance(lease, Shortage):
                waiter.needed_pages = lease.needed_pages
                kept.extend(waiting[index:])
                break
            waiter.asker.admitted(lease)
        self.queue = kept

    def _too_late(self, waiter: Waiter) -> Refusal:
        table = self._leases
        waited_s = self._out.at_s - waiter.since_s
        other = waiter.asker.blocked()
        why = other or (
            f"{waiter.needed_pages} pages are needed and {table.headroom_pages} obtainable "
            f"({table.pool.free_pages} free, {table.tree.evictable_pages} evictable)"
        )
        return Refusal(
            Code.DEADLINE,
            f"waited {waited_s:.1f} s for room: {why}; the oldest leases are in `kvd locks`",
            numbers={
                "waited_s": round(waited_s, 3),
                "needed_pages": waiter.needed_pages,
                "headroom_pages": table.headroom_pages,
            },
        )
