"""The sessions of engines: their numbers, their tokens, and what keeps each of them alive.

What lives here: which session a token or a routing id is of. What must not: reading or writing
sockets, leases, the clock.

A session lives while a process of it maps the pool, so that nobody is given its pages: while one is
attached, and while one is *awaited*. Awaited are those of before a restart of this daemon that have
not attached again, and those that closed their connection without ``Leave`` and live. Where one is
dead and children that it had forked have its connection, those keep it. A session is
*hung up on* for a fault of its own, or when nobody of it is attached and one that lives closed its
connection: it is served no more, and is over when its last process leaves or is dead::

    opened --------------> attached --last one left or is dead--> over
                              |  hung up on --> shut --last one left or is dead--> over
    known from before --> awaited --Attach(resumes)--> attached
                              |  all its processes have ended --> over

Invariants: numbers never repeat, also not those of before the restart; a routing id is of a session
that is served, and of this daemon's life: what was on its way to the one before finds nobody.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from kvd.daemon.former_processes import is_alive
from kvd.errors import Code, Refusal
from kvd.journal.engines import EngineRecord, Process

if TYPE_CHECKING:
    import asyncio
    from socket import socket

    from kvd.core.inputs import ProcessesNow
    from kvd.wire.attach import Join

TOKEN_HEAD: Final = b"S"
TOKEN_BYTES: Final = 16
"""Random bytes behind it; unguessable, so that knowing a token is being of the session."""

ROUTE_BYTES: Final = 8
"""Random bytes behind a token, in the routing id of a session that came back."""


UNSEEN: Final = (Process(0),)
"""Of a session whose processes nobody wrote down."""


class Past(msgspec.Struct, frozen=True):
    """What is known of the daemon's life before; ``first_session`` is above every number of it.

    ``engines`` are sessions whose processes are not proven dead.
    """

    engines: tuple[EngineRecord, ...] = ()
    first_session: int = 1


NO_PAST: Final = Past()


class Rank(NamedTuple):
    """Which part of every page a process writes: number ``rank`` of ``ranks``."""

    rank: int
    ranks: int


class KeyOfUser(NamedTuple):
    """A key, and the user whose processes it is for."""

    uid: int
    key: str


class AttachConnection:
    """One process. ``session`` is None until it has been attached."""

    def __init__(self, sock: socket, process: Process, *, uid: int, number: int) -> None:
        self.sock = sock
        self.process = process
        self.uid = uid
        """Of the user whose process it is, as the kernel says."""
        self.number = number
        """What the node calls it; never used again."""
        self.rank: Rank | None = None
        """As which it has joined."""
        self.join: Join | None = None
        """What it asked for, while it waits for a session."""
        self.waits_for: KeyOfUser | None = None
        self.session: EngineSession | None = None
        self.has_left = False
        """It has said that it writes no page any more, or never had one mapped."""
        self.is_shut = False
        """It is served no more, and its hang-up is awaited."""
        self.timer: asyncio.TimerHandle | None = None
        self.is_outlived = False
        """Its process is dead, and others have it open: ``heirs``, as far as they are seen."""
        self.heirs: tuple[Process, ...] = ()

    @property
    def pid(self) -> int:
        """Of the process; 0 where it cannot be seen from here."""
        return self.process.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that have it open, as far as they are seen."""
        return tuple([heir.pid for heir in self.heirs]) or (self.pid,)

    @property
    def may_write(self) -> bool:
        """Whether it maps the pool though it hung up: it lives, and has not said ``Leave``.

        Of one that cannot be seen from here the hang-up is all that can be known.
        """
        # The cheap questions first: the last one reads /proc.
        return self.pid > 0 and not self.has_left and is_alive(self.process)


class EngineSession:
    """One engine. ``awaited``: its processes that have no connection and may map the pool."""

    def __init__(self, number: int, token: bytes, awaited: tuple[Process, ...] = ()) -> None:
        self.number = number
        self.token = token
        self.route = token
        self.is_former = bool(awaited)
        self.awaited = awaited
        self.former = list(awaited)
        """Of before the restart, and neither back nor dead."""
        self.is_partly_back = False
        """It came back while others of before were still away."""
        self.unheard: list[tuple[Process, int]] = []
        """Processes that closed a connection without ``Leave``, with what the node calls each."""
        self.main: AttachConnection | None = None
        """Of the process that opened it, or came back for it; None while that is gone."""
        self.key: KeyOfUser | None = None
        self.connections: set[AttachConnection] = set()
        self.lingers = False
        """A process of it closed its connection without ``Leave``, and lived."""
        self.refusal: Refusal | None = None
        """Why it was hung up on; None while it is served."""
        self.told: frozenset[int] = frozenset()
        """Its processes, as they were last said since then."""
        self.told_kept: ProcessesNow | None = None
        """Who keeps it, as was last said since one of them has ended; None since one has come."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that keep it, each once."""
        attached = sorted([pid for connection in self.connections for pid in connection.pids])
        return tuple(dict.fromkeys([*attached, *[process.pid for process in self.awaited]]))

    @property
    def is_over(self) -> bool:
        """Whether nothing keeps it any more."""
        return not self.connections and not self.awaited

    @property
    def n_processes(self) -> int:
        """How many keep it, as far as they can be told apart."""
        return len(self.connections) + len(self.awaited)

    def why_no_rank(self, wanted: Rank) -> Refusal | None:
        """Why no process can join as that rank."""
        ranked = [
            (connection, connection.rank)
            for connection in self.connections
            if connection.rank is not None
        ]
        for connection, rank in ranked:
            if rank.ranks != wanted.ranks:
                return Refusal(
                    Code.BAD_REQUEST,
                    f"rank {wanted.rank} of {wanted.ranks} cannot join session {self.number}, "
                    f"which is of {rank.ranks} ranks: name the same number in every process",
                    numbers={"ranks": wanted.ranks, "session_ranks": rank.ranks},
                )
            # Of one that is dead the hang-up is on its way.
            if rank.rank == wanted.rank and (connection.pid == 0 or is_alive(connection.process)):
                return Refusal(
                    Code.WRONG_STATE,
                    f"rank {rank.rank} of session {self.number} is pid {connection.pid}, "
                    "which lives: each rank joins once",
                    numbers={"rank": rank.rank, "pid": connection.pid},
                )
        return None

    def has_rank(self, rank: Rank) -> bool:
        """Whether a process that lives speaks for it, as far as is known."""
        return any(one.rank == rank and not one.is_outlived for one in self.connections)

    def knows(self, pid: int) -> bool:
        """Whether a process of that number is awaited."""
        return any(process.pid == pid for process in self.awaited)

    def take(self, connection: AttachConnection) -> bool:
        """A process attached; returns whether it was awaited.

        One that cannot be seen from here stands for one such process.
        """
        connection.session = self
        self.connections.add(connection)
        self.told_kept = None
        mine = [process for process in self.awaited if process.pid == connection.pid]
        gone = mine[:1] if connection.pid == 0 else mine
        # One by one: of processes that cannot be seen from here several look alike, and only one
        # came.
        for process in gone:
            left = list(self.awaited)
            left.remove(process)
            self.awaited = tuple(left)
            # One that came back already may be awaited for another reason by now.
            if process in self.former:
                self.former.remove(process)
        return bool(gone)

    def drop(self, connection: AttachConnection) -> None:
        """A process hung up; one that may write is awaited."""
        self.connections.discard(connection)
        if self.main is connection:
            self.main = None
        # One that is dying may count as alive still: it is looked for again soon.
        if connection.may_write:
            self.awaited = (*self.awaited, connection.process)
            self.unheard.append((connection.process, connection.number))
            self.lingers = True
        # Nobody has it any more, and who lives maps the pool still.
        heirs = [heir for heir in connection.heirs if is_alive(heir)]
        if heirs:
            self.awaited = (*self.awaited, *heirs)
            self.lingers = True

    def dead(self, processes: tuple[Process, ...]) -> list[int]:
        """Some that were awaited are dead; what the node calls their closed connections."""
        self.awaited = tuple([process for process in self.awaited if process not in processes])
        self.former = [process for process in self.former if process not in processes]
        workers = [number for process, number in self.unheard if process in processes]
        self.unheard = [kept for kept in self.unheard if kept[0] not in processes]
        return workers


class EngineSessions:
    """Every session that is not over."""

    def __init__(self, past: Past = NO_PAST) -> None:
        self._by_token = {
            engine.token: EngineSession(engine.session, engine.token, engine.processes or UNSEEN)
            for engine in past.engines
        }
        self._by_route: dict[bytes, EngineSession] = {}
        self._next = past.first_session

    def __len__(self) -> int:
        """How many there are, those that are awaited too: their places are kept."""
        return len(self._by_token)

    def open(self) -> EngineSession:
        """A session with the next number and a token that nobody can guess."""
        session = EngineSession(self._next, TOKEN_HEAD + secrets.token_bytes(TOKEN_BYTES))
        self._next += 1
        self._by_token[session.token] = session
        self._by_route[session.route] = session
        return session

    def resumable(self, token: bytes) -> EngineSession | None:
        """The session of before the restart that ``token`` is of, which may be attached again.

        None when there is none, or when the process that it is of is attached already.
        """
        session = self._by_token.get(token)
        if session is None or not session.is_former or session.main is not None:
            return None
        return session if session.refusal is None else None

    def renew_route(self, session: EngineSession) -> None:
        """Its engine is back: what it says comes by another route from now on."""
        # It may have come back before, and that route must not lead here beside the new one.
        self._by_route.pop(session.route, None)
        # A new one: what was sent to the daemon before under the old one must not be taken for a
        # request of this session.
        session.route = session.token + secrets.token_bytes(ROUTE_BYTES)
        self._by_route[session.route] = session

    def of_token(self, token: bytes) -> EngineSession | None:
        """The session whose token that is."""
        return self._by_token.get(token)

    def of_route(self, route: bytes) -> EngineSession | None:
        """The attached session whose routing id that is."""
        return self._by_route.get(route)

    def of_number(self, number: int) -> EngineSession | None:
        """The session of that number."""
        return next(
            (session for session in self._by_token.values() if session.number == number), None
        )

    def shut(self, session: EngineSession, refusal: Refusal) -> None:
        """It is served no more."""
        # The token stays known: a process that joins by it hears why, instead of that there is
        # none.
        session.refusal = refusal
        self._by_route.pop(session.route, None)

    def forget(self, session: EngineSession) -> None:
        """Neither its token nor its route is of a session any more."""
        del self._by_token[session.token]
        self._by_route.pop(session.route, None)

    def attached(self) -> list[AttachConnection]:
        """Every connection of every session."""
        return [one for session in self._by_token.values() for one in session.connections]

    def awaited(self) -> dict[int, tuple[Process, ...]]:
        """Session to its processes that have no connection and are not proven dead."""
        return {
            session.number: session.awaited
            for session in self._by_token.values()
            if session.awaited
        }

    def clear(self) -> None:
        """Forget all of them."""
        self._by_token.clear()
        self._by_route.clear()
