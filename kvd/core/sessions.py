"""Sessions of engines: who they are, and what happens when one is over.

A session is what an engine opened on the attach socket, with every process that maps the pool for
it. When the last of them is gone its handoffs are given up and its leases released; what it had
committed stays cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.core.lease import ENGINE
from kvd.errors import Code, Refusal
from kvd.wire import events

if TYPE_CHECKING:
    from kvd.core.inputs import ClientHungUp, ClientJoined
    from kvd.core.lease import Lease
    from kvd.core.node import Node


class Session:
    """One engine: its name, and the processes that map the pool for it."""

    __slots__ = ("id", "name", "pids", "since_s")

    def __init__(self, session_id: int, name: str, since_s: float) -> None:
        self.id = session_id
        self.name = name
        self.pids: list[int] = []
        self.since_s = since_s


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
        session.pids.append(got.pid)
        out = self._out
        out.emit(events.ClientAttached(out.next_seq(), out.at_s, session.id, session.name, got.pid))

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
        receives = [p for p in node.decoder.parts.values() if p.session == session.id]
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
