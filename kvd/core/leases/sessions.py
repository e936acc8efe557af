"""Sessions of engines: who they are, and what happens when one is over.

A session is what an engine opened on the attach socket, with every process that maps the pool for
it. When the last of them is gone its handoffs are given up and its leases released; what it had
committed, or said to be written, stays cached. When one that spoke for a rank is gone and others
are not, only the sends that wait for its word are given up. One of before a restart
(``former_leases``) waits for its engine.

The daemon may have to hang up on a session whose processes live: one that does not read, say. They
map the pool and may go on writing, so only what they cannot know of is given up: requests that
wait, handoffs, leases whose pages they gave back by a retraction. Every other lease keeps what it
has until the last of them is dead::

    attached --HungUpOn--> hung up on --ClientHungUp--> over
        |                      | it holds no lease
        +----ClientHungUp------+--> over
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvd.core.cache.lease import ENGINE, FORMER_COPY, LASTING
from kvd.core.cache.lease_state import LeaseStage
from kvd.core.leases.session_table import DeadRank, HangUp
from kvd.errors import Code, Refusal
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.cache.lease_record import LeaseRecord
    from kvd.core.inputs import (
        ClientCameBack,
        ClientHungUp,
        HungUpOn,
        RankLeft,
        SessionWhole,
    )
    from kvd.core.leases.admission import Admission
    from kvd.core.leases.engine_copies import EngineCopies
    from kvd.core.leases.fetch import Fetcher
    from kvd.core.leases.lease_table import LeaseTable
    from kvd.core.leases.owners import Owners
    from kvd.core.leases.retraction import Retractor
    from kvd.core.leases.session_table import Session
    from kvd.core.outbox import Outbox


KEEPS_PAGES = {LeaseStage.RUNNING, LeaseStage.FORMER}
"""States of leases whose engine knows their pages, and may be writing them."""


class ReceivingSide(Protocol):
    """The decode side, as far as the end of a session or a lease touches it."""

    def cancel_session(self, session: int, why: Refusal) -> int:
        """End all its receives; how many they were."""

    def lease_ended(self, lease_id: int) -> None:
        """A delivered handoff behind that lease is over too."""


class PullingSide(Protocol):
    """Receives whose source has not answered yet, as far as the end of a session touches them."""

    def cancel_session(self, session: int, why: Refusal) -> int:
        """End all its pulls; how many they were."""


class SendingSide(Protocol):
    """The prefill side, as far as the end of a session touches it."""

    def abandon_session(self, session: int, why: Refusal) -> int:
        """End all its sends, and forget those that have failed; how many were open."""

    def rank_left(self, session: int, rank: int, ranks: int, why: str) -> int:
        """End the sends that wait for a word of a rank that nobody speaks for; how many."""


class HandoffSides:
    """What a session may have open with other nodes: receives, pulls and sends."""

    __slots__ = ("pulling", "receiving", "sending")

    def __init__(
        self, receiving: ReceivingSide, pulling: PullingSide, sending: SendingSide
    ) -> None:
        self.receiving = receiving
        self.pulling = pulling
        self.sending = sending


class Sessions:
    """How sessions come back and end, and what ends with them."""

    def __init__(
        self,
        owners: Owners,
        leases: LeaseTable,
        admission: Admission,
        retractor: Retractor,
        fetcher: Fetcher,
        copies: EngineCopies,
        sides: HandoffSides,
        out: Outbox,
    ) -> None:
        self._open = owners.sessions
        self.by_id = owners.sessions.by_id
        self.gone = owners.sessions.gone
        """Those of the table: read them."""
        self._name = owners.sessions.name
        self._leases = leases
        self._admission = admission
        self._retractor = retractor
        self._fetcher = fetcher
        self._copies = copies
        self._receiving = sides.receiving
        self._pulling = sides.pulling
        self._sending = sides.sending
        self._former_leases = owners.former_leases
        self._out = out

    def returned(self, got: ClientCameBack) -> None:
        """Its engine is here again: what it does not use any more is given back."""
        session = self.by_id.get(got.session)
        if session is None:
            return
        # Before the unproven pages are looked at: as long as it counts as former it may read them.
        session.is_former = False
        session.saw(got.pid)
        session.opener = got.pid
        session.kind = got.kind
        former = self._former_leases.of_session(session.id)
        session.keeps_blocks = session.keeps_blocks or got.keeps_blocks
        self._open.came_back(session, is_whole=got.is_whole)
        if not got.is_whole:
            # Another process of it may be copying them, and does not know of the restart yet.
            for lease in former:
                lease.holders.add(FORMER_COPY)
        unused = [lease for lease in former if lease.id not in got.leases]
        for lease in unused:
            self.end_lease(lease, "not used after the restart")
        self._former_leases.free_unproven()
        out, n_kept = self._out, len(former) - len(unused)
        out.emit(
            events.ClientReturned(
                session=session.id,
                name=session.name,
                pid=got.pid,
                kept=n_kept,
                ended=len(unused),
            )
        )

    def became_whole(self, got: SessionWhole) -> None:
        """Nothing of before the restart is copied any more."""
        session = self.by_id.get(got.session)
        if session is not None and not session.is_whole:
            self._open.came_back(session, is_whole=True)
            self._end_former_copies(session)
            self._former_leases.free_unproven()
            self._admission.wake()

    def _end_former_copies(self, session: Session) -> None:
        held = [
            lease
            for lease in self._leases.leases.values()
            if lease.session == session.id and FORMER_COPY in lease.holders
        ]
        for lease in held:
            self._leases.holders.release(lease, FORMER_COPY, "copied")

    def hung_up_on(self, got: HungUpOn) -> None:
        """It is served no more, and its processes live: what they may write stays held."""
        session = self.by_id.get(got.session)
        if session is None:
            return
        # Also when it is known to be hung up on: a later word only knows better who is left.
        session.pids = list(got.pids) or session.pids
        if session.hang_up is not None:
            return
        session.hang_up = HangUp(got.why, got.at_s)
        handoffs = self._give_up(session, got.why)
        kept = []
        for lease in self._leases_of(session):
            # We cannot stop a living process from writing: these pages would be written under their
            # next owner.
            if lease.state in KEEPS_PAGES:
                kept.append(lease)
            else:
                self.end_lease(lease, Code.CLIENT_GONE.value)
        self._out.emit(
            events.ClientHungUpOn(
                session=session.id,
                name=session.name,
                pids=tuple(session.pids),
                code=got.why.code.value,
                why=got.why.message,
                leases=len(kept),
                held_pages=sum(lease.held_pages for lease in kept),
                handoffs=handoffs,
            )
        )
        # A former one may read pages under a lease that nobody here knows of, so it is waited for.
        if not kept and not self.may_write(session.id):
            # Nothing that it could write is held for it, and nothing ever will be again.
            self._over(session, 0)
        self._admission.wake()

    def hung_up(self, got: ClientHungUp) -> None:
        """Its last process is gone: give up its handoffs, release its leases."""
        session = self.by_id.get(got.session)
        if session is None:
            return
        why = Refusal(
            Code.CLIENT_GONE,
            f"the last process of {session.name} (pid {session.pids[-1]}) is gone",
            side=self._name,
        )
        self._open.end(session)  # first: nobody is told what becomes of its requests
        self._copies.session_gone(session.id)
        self._over(session, self._give_up(session, why))
        self._admission.wake()

    def rank_left(self, got: RankLeft) -> None:
        """A process that wrote a part of every page is gone: nobody waits for its next word.

        What it has said stays said, and what it has not is never shared. The leases stay: others
        of the session map their pages.
        """
        session = self.by_id.get(got.session)
        if session is None or session.hang_up is not None:
            return
        why = f"rank {got.rank} of {got.ranks} of {session.name} (pid {got.pid}) is gone"
        session.dead_ranks[got.rank] = DeadRank(got.at_s, got.ranks, why)
        self._sending.rank_left(session.id, got.rank, got.ranks, why)
        self._admission.wake()

    def may_write(self, number: int) -> bool:
        """Whether processes of that session, if they live, may write pages or read former ones."""
        session = self.by_id.get(number)
        if session is None:
            return False
        if session.is_former or not session.is_whole:
            return True
        return any(
            lease.session == number
            and (
                (ENGINE in lease.holders and lease.state in KEEPS_PAGES)
                or not lease.holders.isdisjoint(LASTING)
            )
            for lease in self._leases.leases.values()
        )

    def _give_up(self, session: Session, why: Refusal) -> int:
        """Its requests that wait and its handoffs; how many handoffs they were."""
        # The queue first: each page given back below may admit somebody, and not one of these.
        self._admission.withdraw_session(session.id)
        ended = self._receiving.cancel_session(session.id, why)
        ended += self._pulling.cancel_session(session.id, why)
        return ended + self._sending.abandon_session(session.id, why)

    def _leases_of(self, session: Session) -> list[LeaseRecord]:
        """Those that its engine holds."""
        return [
            lease
            for lease in self._leases.leases.values()
            if lease.session == session.id and ENGINE in lease.holders
        ]

    def _over(self, session: Session, handoffs: int) -> None:
        """No process of it writes any more."""
        self._open.end(session)
        # By its holder and not by the session alone: what only a send or a copy holds ends with
        # that.
        leases = self._leases_of(session)
        for lease in leases:
            self.end_lease(lease, Code.CLIENT_GONE.value)
        self._end_former_copies(session)
        self._former_leases.free_unproven()
        self._out.emit(
            events.ClientGone(
                session=session.id,
                name=session.name,
                leases=len(leases),
                handoffs=handoffs,
            )
        )

    def is_asked_about(self, lease: LeaseRecord) -> bool:
        """Whether ``lease_ends`` of a fetch or of a retraction has anything to do for it."""
        number, retractor = lease.id, self._retractor
        return (
            number in self._fetcher.turns
            or number in retractor.callers
            or number in retractor.uncopied
        )

    def engine_leases(self) -> list[LeaseRecord]:
        """Those that an engine has not let go of."""
        return [lease for lease in self._leases.leases.values() if ENGINE in lease.holders]

    def end_lease(self, lease: LeaseRecord, cause: str) -> None:
        """The engine lets go of a lease; a delivered handoff behind it is over too."""
        # Who waits for it is told while there is a lease to be named.
        self._fetcher.lease_ends(lease)
        self._retractor.lease_ends(lease)
        self._leases.holders.release(lease, ENGINE, cause)
        self._receiving.lease_ended(lease.id)
        # After its release: with the last former lease the unproven pages go, which it may have
        # read.
        if lease.state is LeaseStage.FORMER:
            self._former_leases.lease_ended(lease)
