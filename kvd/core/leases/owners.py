"""Which session a lease belongs to: the one that a request names, and who holds a page, in words.

``Owners`` has what is read for that; a node has the same parts under the same names, so the
functions that only name a holder take either (``HolderView``).
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvd.core.cache.lease import ARRIVAL, COPY, ENGINE
from kvd.core.cache.lease_state import LeaseStage
from kvd.errors import Code, Refusal
from kvd.types import count

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.leases.former_leases import FormerLeases
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.session_table import Session, SessionTable
    from kvd.core.outbox import Outbox

HOLDERS_NAMED = 3
"""Of the leases that hold the most pages: enough to act on, few enough for a sentence."""


class KnownSessions(Protocol):
    """Anything that has the living sessions by number."""

    @property
    def by_id(self) -> Mapping[int, Session]:
        """Read it."""

    @property
    def gone(self) -> Mapping[int, str]:
        """The names of those that were there last."""


class HolderView(Protocol):
    """What is read to name a holder: ``Owners`` has it, and so does a node."""

    @property
    def sessions(self) -> KnownSessions:
        """The living ones."""

    @property
    def former_leases(self) -> FormerLeases:
        """Leases of before the restart."""

    @property
    def out(self) -> Outbox:
        """For the time of this step."""


def owner_of(held_in: HolderView, session: int) -> tuple[str, int]:
    """Name of a session and the first pid of those that keep it; a dead one says so."""
    if not session:
        return "kvd", 0
    found = held_in.sessions.by_id.get(session)
    return (found.name, found.pids[0]) if found else (f"session {session} (gone)", 0)


def told_owner(held_in: HolderView, session: int) -> str:
    """Name and process of a session; of one that outlives its engine, whose it is."""
    found = held_in.sessions.by_id.get(session)
    if found is not None:
        return f"{found.name} ({found.told_keeper(held_in.out.at_s)})"
    name, pid = owner_of(held_in, session)
    return f"{name} (pid {pid})"


def name_of(held_in: HolderView, session: int) -> str:
    """Who that is or was, as short as it can be told."""
    if not session:
        return "kvd"
    found = held_in.sessions.by_id.get(session)
    if found is not None:
        return found.name
    return f"{held_in.sessions.gone.get(session, f'session {session}')} (gone)"


def describe_holder(held_in: HolderView, lease: LeaseRecord) -> str:
    """A lease as one short phrase."""
    owner = told_owner(held_in, lease.session)
    shunned = hung_up_words(held_in, lease)
    if lease.state is LeaseStage.FORMER:
        former = f"lease {lease.id} of {owner}, {said_of_former(held_in, lease)}"
        return f"{former}, {shunned}" if shunned else former
    room = f" room {lease.room}" if lease.room else ""
    age_s = held_in.out.at_s - lease.since_s
    said = f"lease {lease.id} of {owner} for {lease.reason}{room}, {age_s:.1f} s"
    if COPY in lease.holders and ENGINE not in lease.holders:
        said += ", let go of and still copied"
    return f"{said}, {shunned}" if shunned else said


def hung_up_words(held_in: HolderView, lease: LeaseRecord) -> str:
    """That kvd hung up on its engine, which holds it until it is dead; empty where it did not."""
    session = held_in.sessions.by_id.get(lease.session)
    if session is None or session.hang_up is None or ENGINE not in lease.holders:
        return ""
    return f"hung up on for {held_in.out.at_s - session.hang_up.since_s:.1f} s"


def said_of_former(held_in: HolderView, lease: LeaseRecord) -> str:
    """Why it is there, of a lease of before the restart."""
    age_s = held_in.out.at_s - lease.since_s
    session = held_in.sessions.by_id.get(lease.session)
    if lease is held_in.former_leases.unproven:
        n_leases = len(held_in.former_leases.leases)
        by = f"{n_leases} leases of that time" if n_leases else "an engine that is not back yet"
        why = f"not proven, and {by} may still read them"
    elif session is not None and session.is_former:
        why = f"it has not come back yet, for {age_s:.1f} s"
    else:
        why = f"it is back and still uses it, {age_s:.1f} s after the restart"
    return f"from before the restart: {why}"


class Kept(NamedTuple):
    """What one lease keeps of a component: its own pages, cached ones that it locks, promised."""

    pages: int
    locked: int
    promised: int
    lease: LeaseRecord


class Owners:
    """Who has which lease, and who holds most of the pool."""

    def __init__(
        self,
        name: str,
        leases: LeaseTable,
        sessions: SessionTable,
        former_leases: FormerLeases,
        out: Outbox,
    ) -> None:
        self.sessions = sessions
        self.former_leases = former_leases
        self.out = out
        self._leases = leases
        self._name = name

    # ---- the lease that a request names ------------------------------------------------------

    def lease_of(self, session: int, lease_id: int) -> LeaseRecord | Refusal:
        """The session's lease, in whatever state."""
        lease = self._leases.leases.get(lease_id)
        # One that is still received, or that only a send holds, is nobody's to command: to its
        # session it is as if it were not there.
        if lease is None or lease.session != session or ENGINE not in lease.holders:
            return Refusal(
                Code.UNKNOWN_LEASE,
                f"session {session} holds no lease {lease_id}: it was released, or never its own",
                side=self._name,
                numbers={"lease": lease_id},
            )
        return lease

    def running_lease_of(self, session: int, lease_id: int) -> LeaseRecord | Refusal:
        """The session's lease, which has its pages and may use them."""
        found = self._leases.leases.get(lease_id)
        # What nearly every request names, asked at once; why it is not is found out below.
        if (
            found is not None
            and found.session == session
            and found.state is LeaseStage.RUNNING
            and found.lost is None
            and ENGINE in found.holders
            and not found.is_arena
        ):
            return found
        lease = self.lease_of(session, lease_id)
        if isinstance(lease, Refusal):
            return lease
        # Before its state: a broken lease is refused for that, whatever else would be.
        if lease.lost is not None:
            return lease.lost
        if lease.state is LeaseStage.RUNNING:
            return self._only_pages(lease) if lease.is_arena else lease
        if lease.state is LeaseStage.FORMER:
            return self.before_restart(lease)
        todo = {
            LeaseStage.RETRACTED: "resume it first",
            LeaseStage.SAVING: "wait until it is retracted, then resume it",
        }.get(lease.state, "wait until it runs again")
        return Refusal(
            Code.WRONG_STATE,
            f"lease {lease_id} is {lease.state.value}: {todo}",
            side=self._name,
        )

    def readable_lease_of(self, session: int, lease_id: int) -> LeaseRecord | Refusal:
        """The same; also one that is still received, of which nothing but what is there is read."""
        found = self._leases.leases.get(lease_id)
        if (
            found is not None
            and found.session == session
            and ARRIVAL in found.holders
            and found.lost is None
            and found.lent is None
        ):
            return found
        return self.running_lease_of(session, lease_id)

    def arena_of(self, session: int, lease_id: int) -> LeaseRecord | Refusal:
        """The session's arena, whose pages it may use."""
        lease = self.lease_of(session, lease_id)
        if isinstance(lease, Refusal):
            return lease
        if lease.lost is not None:
            return lease.lost
        if lease.state is LeaseStage.FORMER:
            return self.before_restart(lease)
        if lease.is_arena:
            return lease
        return Refusal(
            Code.WRONG_STATE,
            f"lease {lease_id} is no arena: its row says which pages are its own, name none",
            side=self._name,
        )

    def _only_pages(self, arena: LeaseRecord) -> Refusal:
        """What is said to whoever takes an arena for a lease with tokens."""
        return Refusal(
            Code.WRONG_STATE,
            f"lease {arena.id} is an arena: kvd does not know what is in its pages; send and "
            "receive with pages of it, or close it",
            side=self._name,
        )

    def before_restart(self, lease: LeaseRecord) -> Refusal:
        """What the engine of a former lease is told when it wants more than to be rid of it."""
        return Refusal(
            Code.BEFORE_RESTART,
            f"lease {lease.id} is from before this daemon was restarted: its pages stay as they "
            "are, and it can only be released; release it and open a new one, which finds what is "
            "cached",
            side=self._name,
            numbers={"lease": lease.id},
        )

    def former_lease_of(self, session: int, lease_id: int) -> LeaseRecord | None:
        """The session's lease, if it is one of before the restart."""
        lease = self.former_leases.leases.get(lease_id)
        return lease if lease is not None and lease.session == session else None

    def arriving(self, session: int, lease_id: int) -> Refusal | None:
        """Why the session's lease is not its own yet; None where that is not so (scenario A36)."""
        lease = self._leases.leases.get(lease_id)
        if lease is None or lease.session != session or ARRIVAL not in lease.holders:
            return None
        return Refusal(
            Code.WRONG_STATE,
            f"lease {lease_id} is still being received: only one that runs can be retracted; "
            "cancel the receive instead",
            side=self._name,
        )

    # ---- who holds most ----------------------------------------------------------------------

    def of_most_pages(self, budget: str) -> tuple[str, ...]:
        """The leases that keep the most pages of that component from others, in words.

        ``budget`` is its name; an unknown one stands for the first component, of whose cached
        pages a lease locks those of its prefix, maybe with others.
        """
        of = "" if self._leases.components.named(budget) is None else f" of {budget}"
        return tuple(
            f"{describe_holder(self, kept.lease)} ({kept.pages} pages{of}"
            f"{' in quarantine' if kept.lease.quarantine else ''}"
            f"{f', locks {kept.locked} cached' if kept.locked else ''}"
            f"{f', {kept.promised} promised' if kept.promised else ''})"
            for kept in self.biggest(budget)
        )

    def biggest(self, budget: str) -> tuple[Kept, ...]:
        """The same as they are, the biggest first; one look at all leases."""
        # Locked and promised pages count: nobody else gets those either while it lives.
        found = heapq.nlargest(HOLDERS_NAMED, self.kept(budget), key=lambda one: sum(one[:3]))
        return tuple(figures for figures in found if any(figures[:3]))

    def kept(self, budget: str) -> list[Kept]:
        """What each lease keeps of that component, maybe nothing."""
        table = self._leases
        component = table.components.named(budget)
        index = table.budgets.names.index(budget) if component is not None else 0
        return [
            Kept(lease.held_pages, lease.owned, lease.promised_of(index), lease)
            if component is None
            else Kept(count(component.own_pages(lease)), 0, lease.promised_of(index), lease)
            for lease in table.leases.values()
        ]
