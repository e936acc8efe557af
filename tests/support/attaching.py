"""An attach server without a daemon: who listens to it is told what it says to node and clients."""

from __future__ import annotations

import os
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvd.core.inputs import (
    ClientCameBack,
    ClientHungUp,
    ClientJoined,
    FromWorker,
    HungUpOn,
    ProcessesNow,
    RankLeft,
    SessionWhole,
    Unreadable,
    WorkerCopies,
    WorkerGone,
)
from kvd.daemon.attach import AttachServer
from kvd.daemon.listeners import listen_at, remove_own

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Collection, Sequence

    from kvd.errors import Refusal
    from kvd.wire.memory import PoolMemory


class _AnySession:
    """The node has every session, and each may write."""

    def __contains__(self, session: object) -> bool:
        return True


class AttachListener:
    """Hears what an attach server says; override what is of interest."""

    kept: Collection[int] = ()
    """The leases of before a restart that are kept."""

    def opened(self, session: int, name: str, pid: int) -> None: ...

    def joined(self, session: int, pid: int) -> None: ...

    def gone(self, session: int) -> None: ...

    def hung_up_on(self, session: int, why: Refusal, pids: tuple[int, ...]) -> None: ...

    def refused(self, pid: int, why: Refusal) -> None: ...

    def worker_said(self, got: FromWorker) -> None: ...

    def rank_left(self, session: int, rank: int, ranks: int, pid: int) -> None: ...

    def returned(self, session: int, pid: int, leases: tuple[int, ...]) -> None: ...


class ListenedAttach(AttachServer):
    """One server at ``path``, whose file goes with it."""

    def __init__(
        self,
        path: str,
        told: AttachListener,
        pools: tuple[PoolMemory, ...],
        fds: Sequence[int],
        *,
        incarnation: str,
        **rest: Any,
    ) -> None:
        self._path = path
        self._told = told
        self.workers_gone: list[int] = []
        """Connections of which it was said that they copy no more."""
        self.whole: list[int] = []
        """Sessions of before of which nobody is away."""
        self.left: list[ProcessesNow] = []
        """Who keeps a session, each time that it was said."""
        node = SimpleNamespace(
            settings=SimpleNamespace(name="node-a", incarnation=incarnation),
            sessions=SimpleNamespace(by_id=_AnySession(), may_write=lambda _: True),
            former_leases=SimpleNamespace(
                of_session=lambda _: [SimpleNamespace(id=one) for one in told.kept]
            ),
        )
        reactor = SimpleNamespace(node=node, clock=time.monotonic, feed=self._fed)
        super().__init__(reactor, pools, fds, **rest)

    def serve(self, loop: asyncio.AbstractEventLoop) -> None:
        sock = listen_at(self._path, socket.SOCK_SEQPACKET, mode=0o660, group=None)
        self._inode = os.stat(self._path).st_ino
        clients = SimpleNamespace(over=lambda _: None, hang_up=lambda _: None)
        self.start(loop, sock, clients)

    def close(self) -> None:
        super().close()
        remove_own(self._path, self._inode)

    def _fed(self, happened: object) -> None:
        if isinstance(happened, WorkerGone):
            self.workers_gone.append(happened.worker)
        elif isinstance(happened, SessionWhole):
            self.whole.append(happened.session)
        elif isinstance(happened, ProcessesNow):
            self.left.append(happened)
        else:
            self._tell(happened)

    def _tell(self, happened: object) -> None:
        match happened:
            case ClientJoined(session=session, name="", pid=pid):
                self._told.joined(session, pid)
            case ClientJoined(session=session, name=name, pid=pid):
                self._told.opened(session, name, pid)
            case FromWorker() | WorkerCopies():
                self._told.worker_said(happened)
            case RankLeft(session=session, rank=rank, ranks=ranks, pid=pid):
                self._told.rank_left(session, rank, ranks, pid)
            case ClientHungUp(session=session):
                self._told.gone(session)
            case HungUpOn(session=session, why=why, pids=pids):
                self._told.hung_up_on(session, why, pids)
            case Unreadable(sender=sender, refusal=why):
                self._told.refused(int(sender.removeprefix("pid ")), why)
            case ClientCameBack(session=session, pid=pid, leases=leases, is_whole=is_whole):
                if is_whole:
                    self.whole.append(session)
                self._told.returned(session, pid, leases)
            case _:
                raise AssertionError(happened)
