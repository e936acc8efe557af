"""Sessions of engines: who they are, and what happens when one is over.

A session is what an engine opened on the attach socket, with every process that maps the pool for
it. When the last of them is gone its handoffs are given up and its leases released; what it had
committed stays cached. One of before a restart (``adopt``) waits for its engine to come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.lease import ENGINE
from kvd.core.standing import Standing
from kvd.errors import Code, Refusal
from kvd.wire import events, restart_events

if TYPE_CHECKING:
    from kvd.core.inputs import ClientHungUp, ClientJoined, ClientReturned, FormerSession
    from kvd.core.lease import Lease
    from kvd.core.node import Node


class Session:
    """One engine: its name, and the processes that map the pool for it."""

    __slots__ = ("id", "is_former", "name", "pids", "since_s")

    def __init__(self, session_id: int, name: str, since_s: float) -> None:
        self.id = session_id
        self.name = name
        self.pids: list[int] = []
        self.since_s = since_s
        self.is_former = False
        """Whether it is of before the restart, and its engine has not come back yet."""

    def saw(self, pid: int) -> None:
        """One more process of it, or one that was known from before the restart."""
        if pid not in self.pids:
            self.pids.append(pid)


class Sessions:
    """The living sessions, by number."""

    def __init__(self, node: Node) -> None:
        self.by_id: dict[int, Session] = {}
        self._node = node
        self._out = node.out

    def joined(self, got: ClientJoined) -> None:
        """A process opened the session or joined it."""
        session = self.by_id.get(got.session)
        if session is None:
            session = self.by_id[got.session] = Session(got.session, got.name, got.at_s)
        session.saw(got.pid)
        out = self._out
        out.emit(events.ClientAttached(out.next_seq(), out.at_s, session.id, session.name, got.pid))

    def awaits(self, former: FormerSession) -> None:
        """It was there before the restart; its engine may come back."""
        session = self.by_id[former.id] = Session(former.id, former.name, self._out.at_s)
        session.pids = list(former.pids) or [0]
        session.is_former = True

    def returned(self, got: ClientReturned) -> None:
        """Its engine is here again: what it does not use any more is given back."""
        session = self.by_id.get(got.session)
        if session is None:
            return
        session.is_former = False
        session.saw(got.pid)
        former = self._node.former.of_session(session.id)
        unused = [lease for lease in former if lease.id not in got.leases]
        for lease in unused:
            self.end_lease(lease, "not used after the restart")
        self._node.former.settle()
        out, n_kept = self._out, len(former) - len(unused)
        out.emit(
            restart_events.ClientReturned(
                out.next_seq(), out.at_s, session.id, session.name, got.pid, n_kept, len(unused)
            )
        )

    def hung_up(self, got: ClientHungUp) -> None:
        """Its last process is gone: give up its handoffs, release its leases."""
        session = self.by_id.pop(got.session, None)
        if session is None:
            return
        node = self._node
        why = Refusal(
            Code.CLIENT_GONE,
            f"the last process of {session.name} (pid {session.pids[-1]}) is gone",
            side=node.settings.name,
        )
        # All of them before anything else: each page given back below may admit somebody.
        node.admission.withdraw_session(session.id)
        receives = [r for r in node.decoder.receptions.values() if r.session == session.id]
        sends = [p for p in node.prefiller.by_send.values() if p.session == session.id]
        for receive in receives:
            node.decoder.cancel(receive, why)
        for send in sends:
            node.prefiller.abandon(send, why)
        node.prefiller.end_session(session.id)
        leases = [
            lease
            for lease in node.leases.leases.values()
            if lease.session == session.id and ENGINE in lease.holders
        ]
        for lease in leases:
            self.end_lease(lease, Code.CLIENT_GONE.value)
        node.former.settle()
        out = self._out
        out.emit(
            events.ClientGone(
                out.next_seq(),
                out.at_s,
                session.id,
                session.name,
                len(leases),
                len(receives) + len(sends),
            )
        )
        node.admission.wake()

    def end_lease(self, lease: Lease, cause: str) -> None:
        """The engine lets go of a lease; a delivered handoff behind it is over too."""
        self._node.fetcher.lease_ends(lease)
        self._node.retractor.lease_ends(lease)
        self._node.leases.release(lease, ENGINE, cause)
        self._node.decoder.lease_ended(lease.id)
        if lease.standing is Standing.FORMER:
            self._node.former.ended(lease)
