"""The one queue in front of the pool: who gets room, in which order, and why the rest waits.

Higher priority first, then first come first served. The first request that does not fit blocks
those behind it (head of line), so that a large one cannot starve; ``overtakers`` of the settings
lets so many smaller ones go past it before it does. Whatever a step admits is given room by one
eviction for all of it. A blocked request is not matched again until it may fit: there are as many
pages as it lacked, or the cache has grown.

What waits for its peer and not for memory is in the side queue, because it would block everybody
for a reason that is not theirs. A thousand receives may wait for one peer that is away: while
memory moves nobody looks at them. When what they wait for has changed they are taken out by its
name and asked again, and get the place that their priority and the time of their arrival give.
"""

from __future__ import annotations

import bisect
from itertools import chain
from operator import add, attrgetter
from typing import TYPE_CHECKING, Protocol

from mypy_extensions import mypyc_attr

from kvd.core.cache.lease import Claim, Claimed, Demand, Shortage
from kvd.errors import Code, Refusal
from kvd.wire import events

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.owners import Owners
    from kvd.core.outbox import Outbox
    from kvd.core.settings import Settings


OWN_TRANSFER = ""
"""What waits for this node's own transfer process: no peer has this name."""


@mypyc_attr(allow_interpreted_subclasses=True)
class SideQueue:
    """Who waits for something other than memory, by what; ``waiters`` are all of them by number.

    It knows no order, and not what a request waits for: its asker says so.

    Invariant: each waiter stands here under every name in its ``awaits``, and under no other.
    """

    __slots__ = ("by_name", "waiters")

    def __init__(self) -> None:
        self.waiters: dict[int, Waiter] = {}
        self.by_name: dict[str, dict[int, Waiter]] = {}

    def put(self, waiter: Waiter) -> None:
        """It waits for what its ``awaits`` names."""
        self.waiters[waiter.number] = waiter
        for name in waiter.awaits:
            self.by_name.setdefault(name, {})[waiter.number] = waiter

    def remove(self, waiter: Waiter) -> None:
        """It waits for nothing of that any more."""
        del self.waiters[waiter.number]
        # Empty names go: they are of peers, of which there may come any number.
        for name in waiter.awaits:
            here = self.by_name[name]
            del here[waiter.number]
            if not here:
                del self.by_name[name]
        waiter.awaits = ()

    def take_out(self, name: str) -> list[Waiter]:
        """All that wait for this; they stand here no longer."""
        found = list(self.by_name.get(name, {}).values())
        for waiter in found:
            self.remove(waiter)
        return found


_REMEDIES = {
    "swa": "compute it in steps (step_tokens, and slide), or enlarge pool.window_pages",
    "state": "enlarge pool.states",
    "buffer": "enlarge pool.buffer_pages",
}
"""What to do where a component can never hold a request."""


class Asker(Protocol):
    """Who asked for room, and what becomes of the answer."""

    def admitted(self, lease: LeaseRecord) -> None:
        """There is room: this is the lease."""

    def refused(self, refusal: Refusal) -> None:
        """It gave up, or can never fit."""

    def blocked(self) -> str | None:
        """What it waits for other than memory, in words; None when only memory counts."""

    def awaits(self) -> tuple[str, ...]:
        """The same as names for ``Admission.changed``; none when only memory counts."""


class OtherWait(Protocol):
    """What a request waits for before its asker is asked: pages of its prompt from a tier."""

    def awaits(self) -> tuple[str, ...]:
        """As of an asker; none where it need not wait any more."""

    def blocked(self) -> str | None:
        """The same in words."""


@mypyc_attr(allow_interpreted_subclasses=True)
class MemoryAsker:
    """An asker that waits for memory and nothing else."""

    __slots__ = ()

    def blocked(self) -> str | None:
        """Nothing."""
        return None

    def awaits(self) -> tuple[str, ...]:
        """Nothing."""
        return ()


@mypyc_attr(allow_interpreted_subclasses=True)
class Waiter:
    """One request in the queue.

    Args:
        claim: What it asks for.
        deadline_s: When it gives up, on the node's clock.
        asker: Who hears of it.
        tier: What it waits for first, if there is anything.
    """

    __slots__ = (
        "asker",
        "awaits",
        "budget",
        "claim",
        "deadline_s",
        "needed_pages",
        "number",
        "obtainable_pages",
        "overtaken",
        "seen_growth",
        "since_s",
        "tier",
    )

    def __init__(
        self, claim: Claim, deadline_s: float, asker: Asker, tier: OtherWait | None = None
    ) -> None:
        self.claim = claim
        self.deadline_s = deadline_s
        self.asker = asker
        self.tier = tier
        self.awaits: tuple[str, ...] = ()
        """The names under which it is in the side queue; none: it is in the line."""
        self.since_s = 0.0
        self.number = 0
        self.budget = ""
        """The component that was short when it was last matched; empty: never matched."""
        self.needed_pages = 0
        """Of that component, beyond what is cached of it."""
        self.obtainable_pages = 0
        """Then, its cached prefix locked."""
        self.seen_growth = 0
        """What the cache had grown to then."""
        self.overtaken = 0

    def waits_for(self) -> tuple[str, ...]:
        """The names of what it waits for other than memory."""
        tier = self.tier
        return (tier.awaits() if tier is not None else ()) or self.asker.awaits()

    def blocked(self) -> str | None:
        """The same in words; None when only memory counts."""
        tier = self.tier
        return (tier.blocked() if tier is not None else None) or self.asker.blocked()

    @property
    def missing_pages(self) -> int:
        """What kept it waiting when it was last matched."""
        return max(0, self.needed_pages - self.obtainable_pages)

    @property
    def rank(self) -> tuple[bool, int, int]:
        """Order in the queue: retracted leases that resume, then higher priority, then earlier."""
        return (not self.claim.resumes, -self.claim.priority, self.number)


_rank = attrgetter("rank")


@mypyc_attr(allow_interpreted_subclasses=True)
class Admission:
    """The line of those who wait for memory, and the side queue of the others.

    Invariants: the line is sorted by ``rank``; nobody is in the side queue whom only memory keeps
    waiting. The other way round a waiter is found out when its turn to be looked at comes.
    """

    def __init__(self, settings: Settings, leases: LeaseTable, owners: Owners, out: Outbox) -> None:
        self.line: list[Waiter] = []
        """Who waits for memory; read it."""
        self.side_queue = SideQueue()
        self.looks = 0
        """How many waiters were looked at, ever."""
        self._soonest_s = float("inf")
        """No deadline in the queue is before."""
        self._leases = leases
        self._owners = owners
        self._max_queue = settings.max_queue
        self._overtakers = settings.overtakers
        self._out = out
        self._count = 0
        self._seen = (-1, -1)
        """The table's releases and growth when the queue was last looked at."""

    def __len__(self) -> int:
        return len(self.line) + len(self.side_queue.waiters)

    @property
    def queue(self) -> list[Waiter]:
        """Everybody who waits, by ``rank``; made for whoever asks."""
        if not self.side_queue.waiters:
            return self.line.copy()
        return sorted([*self.line, *self.side_queue.waiters.values()], key=_rank)

    def retune(self, *, max_queue: int, overtakers: int) -> None:
        """Other bounds from now on; who waits already waits on, and is looked at again."""
        self._max_queue = max_queue
        self._overtakers = overtakers
        self._seen = (-1, -1)

    def at_once(self, claim: Claim) -> LeaseRecord | Shortage | None:
        """The lease, if nobody waits for memory and there is room: the common case, no queue.

        Otherwise submit a waiter with what came back, so that nothing is looked for twice.
        """
        # Whoever waits was here first, even where this one would fit and that one does not.
        return None if self.line else self._leases.grants.open_lease(claim)

    def submit(self, waiter: Waiter, shortage: Shortage | None = None) -> None:
        """Admit, queue, or refuse what can never fit (scenario A16)."""
        if shortage is not None:
            self._note(waiter, shortage)
        refusal = self._unfit(waiter)
        if refusal is not None:
            waiter.asker.refused(refusal)
            return
        self.enter(waiter)
        if shortage is not None:
            # Matched in this very step: looking again before a page moves would find the same.
            self._seen = self._now()
        # ``wake`` and not ``pump``, which would not look: no page has moved since it looked last.
        elif not waiter.awaits and not self._is_behind(waiter):
            self.wake()
        if waiter.awaits or waiter in self.line:
            if waiter.deadline_s <= self._out.at_s:
                # Who does not wait hears it in this very step, not at the next tick.
                self._strike([waiter])
                waiter.asker.refused(self._too_late(waiter))
                return
            self._out.emit(
                events.Waiting(
                    session=waiter.claim.session,
                    room=waiter.claim.room,
                    needed_pages=waiter.needed_pages,
                    headroom_pages=self._leases.budgets.headroom(waiter.budget),
                )
            )

    def enter(self, waiter: Waiter) -> None:
        """Give it its place: all that one has to do who takes no page (``Claim.only_cached``)."""
        self._count += 1
        waiter.number = self._count
        waiter.since_s = self._out.at_s
        self._soonest_s = min(self._soonest_s, waiter.deadline_s)
        self._stand(waiter)

    def _unfit(self, waiter: Waiter) -> Refusal | None:
        """Why the claim is not even queued."""
        budgets, claim = self._leases.budgets, waiter.claim
        for budget, needed in zip(budgets.names, budgets.least(claim), strict=True):
            if needed > budgets.capacity(budget):
                return self._never(claim, budget, needed)
        if self._is_hopeless(waiter):
            return self._never(claim, waiter.budget, waiter.needed_pages)
        if len(self) >= self._max_queue:
            return Refusal(
                Code.NO_ROOM,
                f"{len(self)} requests wait already, the limit is {self._max_queue}",
                numbers={"waiting": len(self), "limit": self._max_queue},
            )
        return None

    def _is_hopeless(self, waiter: Waiter) -> bool:
        """Whether it lacked more, when last matched, than there is; what was cached of it is gone.

        It would keep everybody behind it waiting until its deadline.
        """
        budget = waiter.budget
        return bool(budget) and waiter.needed_pages > self._leases.budgets.capacity(budget)

    def _never(self, claim: Claim, budget: str, needed: int) -> Refusal:
        capacity = self._leases.budgets.capacity(budget)
        return Refusal(
            Code.TOO_LARGE,
            f"{claim.room_tokens} tokens need {needed} pages of {budget}, the pool has "
            f"{capacity}: it can never fit; {_REMEDIES.get(budget, 'enlarge pool.pages')}",
            numbers={"needed_pages": needed, "pool_pages": capacity},
        )

    def pump(self) -> None:
        """Admit from the front until one does not fit; nothing to do if no page came back.

        The node does so after every step: whoever frees a page need not think of who waits for it.
        """
        # Again and again, because what is admitted may end at once and give its pages back. What is
        # seen is noted first: what changes meanwhile is looked at in the next round.
        while self.line and self._seen != self._now():
            self._seen = self._now()
            self._admit_ready()

    def _now(self) -> tuple[int, int]:
        return self._leases.releases, self._leases.growth

    def wake(self) -> None:
        """Something other than memory changed: look at the line again."""
        self._seen = (-1, -1)
        self.pump()

    def changed(self, name: str) -> None:
        """What ``Asker.awaits`` calls by this name is otherwise now: ask who waits for it again."""
        for waiter in self.side_queue.take_out(name):
            self._stand(waiter)
        self.wake()  # it may also be that somebody in the line waits for this from now on

    def withdraw(self, waiter: Waiter) -> None:
        """Leave the queue without a word; nothing is held yet."""
        if waiter.awaits:
            self.side_queue.remove(waiter)
        elif waiter in self.line:
            self.line.remove(waiter)
            self.wake()

    def cancel(self, session: int, call: int, refusal: Refusal) -> None:
        """The caller of a waiting request went away: answer it with ``refusal``, hold nothing."""
        for waiter in self._all():
            if (waiter.claim.session, waiter.claim.call) == (session, call):
                # It returns after the first: this changes what the loop walks over.
                self.withdraw(waiter)
                waiter.asker.refused(refusal)
                return

    def turn_away(self, waiters: list[Waiter], refusal: Refusal) -> None:
        """Answer these with ``refusal``: none of them is ever admitted."""
        # All leave before the first hears: an answer may free pages, and admit the next of them.
        self._strike(waiters)
        for waiter in waiters:
            waiter.asker.refused(refusal)
        if waiters:
            self.wake()

    def withdraw_session(self, session: int) -> None:
        """A session is over: none of its requests is ever admitted. The caller wakes the rest."""
        self._strike([waiter for waiter in self._all() if waiter.claim.session == session])

    def expire(self) -> None:
        """Refuse what has waited until its deadline."""
        now_s = self._out.at_s
        # Every tick comes here. The bound may be of somebody who has left: that costs one walk, no
        # more.
        if now_s < self._soonest_s:
            return
        late = [waiter for waiter in self.queue if waiter.deadline_s <= now_s]
        self._strike(late)
        # Before anybody is told: who hears may ask anew, and lowers it then.
        self._soonest_s = min([one.deadline_s for one in self._all()], default=float("inf"))
        for waiter in late:
            waiter.asker.refused(self._too_late(waiter))
        if late:
            self.wake()

    def sort(self) -> None:
        """The order again, whoever broke it."""
        self.line.sort(key=_rank)

    def _all(self) -> Iterator[Waiter]:
        return chain(self.line, self.side_queue.waiters.values())

    def _stand(self, waiter: Waiter) -> None:
        """Give it the place where it belongs now: in the line, or in the side queue."""
        # Asked anew each time: what it waited for may have come while something else went.
        waiter.awaits = waiter.waits_for()
        if waiter.awaits:
            self.side_queue.put(waiter)
        elif waiter.claim.only_cached:
            self._open_cached(waiter)
        else:
            bisect.insort(self.line, waiter, key=_rank)

    def _open_cached(self, waiter: Waiter) -> None:
        """It takes no page, so nobody who waits for some is before it."""
        lease = self._leases.grants.open_prefix(waiter.claim)
        if isinstance(lease, Shortage):  # of what is cached, where it is promised to a lease
            waiter.asker.refused(Refusal(Code.NO_ROOM, lease.words))
        else:
            waiter.asker.admitted(lease)

    def _strike(self, waiters: list[Waiter]) -> None:
        """None of them waits any more."""
        gone = {waiter.number for waiter in waiters}
        for waiter in waiters:
            if waiter.awaits:
                self.side_queue.remove(waiter)
        self.line = [waiter for waiter in self.line if waiter.number not in gone]

    def shortage(self, waiter: Waiter) -> str:
        """Which budget was short when the waiter was last matched, and by how much."""
        promised = self._leases.budgets.promised(waiter.budget)
        # Less than none: its cached prefix is promised to others, or kept for those before it.
        below = min(0, waiter.obtainable_pages)
        return (
            f"needs {waiter.needed_pages - below} pages of {waiter.budget} beyond what is cached "
            f"of it, {waiter.obtainable_pages - below} obtainable: {waiter.missing_pages} missing"
            f"{f'; {promised} are promised to leases' if promised else ''}"
        )

    def _is_behind(self, waiter: Waiter) -> bool:
        """Whether somebody before ``waiter`` blocks it, so that looking is no use."""
        for one in self.line:
            if one is waiter:
                return False
            # One whose peer has gone since bars nobody: it steps aside when it is looked at.
            if self._is_barring(one) and not one.waits_for():
                return True
        return False

    def _is_barring(self, waiter: Waiter) -> bool:
        """Whether nobody may go past it any more; past a lease that resumes nobody ever may."""
        return bool(waiter.claim.resumes) or waiter.overtaken >= self._overtakers

    def _note(self, waiter: Waiter, shortage: Shortage) -> None:
        waiter.budget = shortage.budget
        waiter.needed_pages = shortage.needed_pages
        waiter.obtainable_pages = shortage.headroom_pages
        waiter.seen_growth = self._leases.growth

    def _may_fit(self, waiter: Waiter, kept_pages: Demand) -> bool:
        """False where matching it again cannot find room: as much is lacking, nothing is cached."""
        table = self._leases
        # When more is cached than then, what it lacked then says nothing.
        if not waiter.budget or waiter.seen_growth != table.growth or table.giving_way.leases:
            return True
        taken = kept_pages[table.budgets.names.index(waiter.budget)]
        return waiter.needed_pages <= table.budgets.headroom(waiter.budget) - taken

    def _admit_ready(self) -> None:
        """Lock for each that fits after those before it, then one eviction, then the pages."""
        waiting, kept, aside = self.line, [], []
        admitted: list[Waiter] = []
        claimed: list[Claimed] = []
        kept_pages = self._leases.budgets.nothing
        blocking: list[Waiter] = []
        hopeless: list[Waiter] = []
        for index, waiter in enumerate(waiting):
            self.looks += 1
            awaits = waiter.waits_for()
            if awaits:
                aside.append((waiter, awaits))
                continue
            # Each is counted against what is kept for those before it: the pages themselves are
            # taken below, by one eviction for all, when every prefix that it must spare is locked.
            found = self._claim(waiter, kept_pages)
            if isinstance(found, Claimed):
                kept_pages = tuple(map(add, kept_pages, found.kept))
                admitted.append(waiter)
                claimed.append(found)
                for one in blocking:
                    one.overtaken += 1
            elif self._is_hopeless(waiter):
                hopeless.append(waiter)
            else:
                kept.append(waiter)
                blocking.append(waiter)
            if any(self._is_barring(one) for one in blocking):
                kept.extend(waiting[index + 1 :])
                break
        # The line is whole before anybody is told: who hears may withdraw somebody, or ask anew.
        self.line = kept
        for waiter, waiter.awaits in aside:
            self.side_queue.put(waiter)
        leases = self._leases.grants.open_leases(claimed)
        for waiter, lease in zip(admitted, leases, strict=True):
            waiter.asker.admitted(lease)
        for waiter in hopeless:
            refusal = self._never(waiter.claim, waiter.budget, waiter.needed_pages)
            waiter.asker.refused(refusal)

    def _claim(self, waiter: Waiter, kept_pages: Demand) -> Claimed | None:
        """The waiter's locked prefix, if there are pages for it after those kept."""
        if not self._may_fit(waiter, kept_pages):
            return None
        found = self._leases.grants.claim(waiter.claim, kept_pages)
        if isinstance(found, Shortage):
            self._note(waiter, found)
            return None
        return found

    def _too_late(self, waiter: Waiter) -> Refusal:
        table = self._leases
        waited_s = self._out.at_s - waiter.since_s
        other = waiter.blocked()
        # Without a budget it was never matched: those before it kept the line.
        before = f"{len(self)} requests wait in front of it"
        why = other or (self.shortage(waiter) if waiter.budget else before)
        holders = self._owners.of_most_pages(waiter.budget) if other is None else ()
        who = f"; most are held by {'; '.join(holders)}" if holders else ""
        return Refusal(
            Code.DEADLINE,
            f"waited {waited_s:.1f} s for room: {why}{who}",
            numbers={
                "waited_s": round(waited_s, 3),
                "needed_pages": waiter.needed_pages,
                "headroom_pages": table.budgets.headroom(waiter.budget),
            },
        )
