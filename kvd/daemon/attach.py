"""The attach socket: where engine processes get the pool's memory, and how their death is noticed.

What lives here: the connections of a unix SOCK_SEQPACKET socket, and what they say. What must not:
leases, handoffs, the ZMQ socket; which session a token is of is in ``sessions``, who is let into
one in ``session_entries``, how one ends in ``session_ends``. Packets, not a stream: each message
arrives whole or not at all, and a file descriptor travels with the message it belongs to.

Theory of operation. One connection is one process. It says one thing (``Attach`` or ``Join``), is
told one thing (``Attached`` with the memory descriptors, or ``Rejected``), and then says nothing
but how far its rank has written and what it copies, until it says ``Leave``: the kernel closes it
when the process dies, however it dies, and that hang-up is the news. ::

    accepted --Attach/Join--> attached --Leave, death: hang-up--> gone
       |  '--Join(key)--> waits --'   | anything else, or its session is hung up on
       |                    |         '--> Rejected, shut --Leave, death: hang-up--> gone
       +--5 s, garbage, limits, wait_s--> Rejected, closed

A process that has joined as a rank says how far it is here, and not on the client socket, because a
client socket has one connection for a session, which is that of the process that decides.

A process that lives may write the pages of its session, whatever becomes of its connections, so
nothing that we do to it frees any: it is told why it is served no more, and its connection is kept
for the hang-up. One that closes it without ``Leave`` and lives is awaited, as those of before a
restart are. When the last process of a session has left or is dead, the node hears so, once.

A descriptor inherited by a forked child keeps the connection open: such a child maps the pool too,
and is found (``inherited``).

Invariants: every attached connection belongs to exactly one session; ``session_of`` answers for
sessions that are served only; at most ``processes_per_session`` processes keep a session, and at
most ``max_sessions`` times as many connections are open; one that has not attached lasts 5 s, or
as long as it asked to wait for a key, and at most ``waiting_per_user`` of a user do.
"""

from __future__ import annotations

import array
import itertools
import socket
from typing import TYPE_CHECKING, Final

from kvd import __version__
from kvd.core.effects import AnswerWorker
from kvd.core.inputs import FromWorker, Unreadable, WorkerCopies
from kvd.core.layout.spec import region_names
from kvd.daemon.former_processes import process_now
from kvd.daemon.session_ends import MAX_REQUEST_BYTES, SessionEnds, hear_out, tell
from kvd.daemon.session_entries import AttachLimits, SessionEntries, ToldMemory
from kvd.daemon.session_keys import SessionKeys
from kvd.daemon.sessions import NO_PAST, AttachConnection, EngineSessions
from kvd.errors import Code, Refusal
from kvd.journal.engines import NO_NOTES
from kvd.wire.attach import (
    PROTOCOL,
    Attach,
    Join,
    KeepsBlocks,
    Leave,
    ProcessWord,
    RankAnswer,
    RankWritten,
    Speaker,
    versions_differ,
)
from kvd.wire.client import SayWritten
from kvd.wire.codec import ATTACH_REPLIES, ATTACH_REQUESTS, SPEAKERS
from kvd.wire.memory import DeviceMemory
from kvd.zmtp.acceptor import PAUSE_S, Acceptor, peer_credentials

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Iterable, Sequence

    from kvd.core.layout.spec import PoolSpec
    from kvd.daemon.reactor import Reactor
    from kvd.daemon.session_ends import AnsweredSessions
    from kvd.daemon.sessions import EngineSession, Past
    from kvd.journal.engines import SessionNotes
    from kvd.transfer.orders import SharedRegion
    from kvd.wire.memory import PoolMemory

_WORD_BYTES: Final = 4096
"""Of what an attached process says: far less."""

_REPLY_BUFFER_BYTES: Final = 2 * 1024 * 1024
"""Asked for each connection (Linux grants up to twice that): a reply is one packet that names
every tensor of every layer, about 100 KB for a thousand layers; clients read up to 4 MiB."""

DEFAULT_LIMITS: Final = AttachLimits()

_WE_SPEAK: Final = Speaker(PROTOCOL, __version__)


class AttachServer:
    """Serves the attach socket from ``start`` to ``close``."""

    def __init__(
        self,
        reactor: Reactor,
        pools: tuple[PoolMemory, ...],
        fds: Sequence[int],
        *,
        on_devices: tuple[DeviceMemory, ...] = (),
        past: Past = NO_PAST,
        notes: SessionNotes = NO_NOTES,
        limits: AttachLimits = DEFAULT_LIMITS,
        endpoint: str = "",
    ) -> None:
        """Prepare; nobody is let in before ``start``.

        Args:
            reactor: of the node; takes who joins, is hung up on, comes back and is gone.
            pools: what engines are told of the memory.
            fds: descriptors of it, in the order that ``pools`` says.
            on_devices: of it, what has no descriptor.
            past: the sessions of before a restart.
            notes: who writes down the sessions, for the daemon after this one.
            limits: bounds.
            endpoint: of the client socket. This socket lies beside it, and whoever was looking for
                another one that would is told whose it is.
        """
        self._reactor = reactor
        self._node = reactor.node.settings.name
        self._limits = limits
        self._notes = notes
        self._max_processes = limits.max_sessions * limits.processes_per_session
        self._connections: set[AttachConnection] = set()
        self._by_number: dict[int, AttachConnection] = {}
        self._numbers = itertools.count(1)
        self._keys = SessionKeys()
        self._sessions = EngineSessions(past)
        self._ends = SessionEnds(reactor, self._sessions, self._keys, notes, self._drop)
        self._entries = SessionEntries(
            reactor,
            self._sessions,
            self._keys,
            notes,
            self._ends,
            memory=ToldMemory(pools, array.array("i", fds), on_devices, endpoint),
            limits=limits,
            turn_away=self._turn_away,
        )
        self._acceptor: Acceptor | None = None

    def start(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, clients: AnsweredSessions
    ) -> None:
        """Serve ``sock``, bound and listening; ``clients`` hears who is served no more."""
        self._loop = loop
        self._acceptor = Acceptor(loop, sock, self._welcome)
        self._ends.start(loop, clients)
        self._entries.start(loop)

    def close(self) -> None:
        """Hang up on everybody; says nothing of it; repeatable."""
        if self._acceptor is None:
            return
        self._acceptor.close()
        self._acceptor = None
        self._ends.close()
        for connection in list(self._connections):
            self._drop(connection)
        self._sessions.clear()

    def session_of(self, route: bytes) -> int | None:
        """The session that is served and that a ZMQ routing id belongs to."""
        session = self._sessions.of_route(route)
        return None if session is None else session.number

    def hang_up(self, session: int, refusal: Refusal) -> None:
        """Serve a session no more, and tell each of its processes why; they live and may write."""
        served = self._sessions.of_number(session)
        if served is not None and served.refusal is None:
            self._ends.shut(served, refusal)

    def answer(self, effect: AnswerWorker) -> None:
        """Carry out ``AnswerWorker``; a process that has gone hears nothing."""
        connection = self._by_number.get(effect.worker)
        if connection is None or connection.is_shut:
            return
        try:
            packet = ATTACH_REPLIES.encode(RankAnswer(effect.call, effect.refusal))
            connection.sock.send(packet)
        except BlockingIOError:
            why = f"pid {connection.pid} does not read the answers to what it says"
            self._fall_silent(connection, self._refuse(Code.CLIENT_GONE, why))
        except OSError:
            return  # it is gone, and its hang-up is on its way

    # ---- connections -----------------------------------------------------------------------------

    def _welcome(self, sock: socket.socket, _address: object) -> None:
        # A reply is one packet: where it does not fit the buffer it is refused, and never sent in
        # part.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REPLY_BUFFER_BYTES)
        # Its start is read now, while it certainly lives: later the number may be another
        # process's.
        pid, uid = peer_credentials(sock)
        number = next(self._numbers)
        connection = AttachConnection(sock, process_now(pid), uid=uid, number=number)
        self._connections.add(connection)
        self._by_number[number] = connection
        self._loop.add_reader(sock.fileno(), self._read, connection)
        if len(self._connections) > self._max_processes:
            full = Refusal(
                Code.NO_ROOM,
                f"{self._max_processes} processes are attached to {self._node}, which is its "
                "limit: end some, or raise limits.max_clients",
                side=self._node,
                numbers={"limit": self._max_processes},
            )
            self._turn_away(connection, full)
            return
        connection.timer = self._loop.call_later(
            self._limits.request_within_s, self._too_late, connection
        )

    def _too_late(self, connection: AttachConnection) -> None:
        pid, within_s = connection.pid, self._limits.request_within_s
        late = Refusal(
            Code.DEADLINE,
            f"pid {pid} connected and said nothing for {within_s:g} s: send Attach or Join at once",
            side=self._node,
            numbers={"within_s": within_s, "pid": pid},
        )
        self._turn_away(connection, late)

    def _read(self, connection: AttachConnection) -> None:
        """Something came from a process, or it hung up; runs on the loop."""
        # A buffer for the longest request costs 5 us, and an attached process says little.
        size = MAX_REQUEST_BYTES if connection.session is None else _WORD_BYTES
        try:
            packet, _, flags, _ = connection.sock.recvmsg(size)
        except BlockingIOError:
            return
        except OSError:
            packet, flags = b"", 0
        if not packet:
            self._hang_up(connection)
            return
        # It has said what it had to: from here on only ``Leave`` and a ``ProcessWord`` are words.
        if connection.session is not None:
            self._said_more(connection, connection.session, packet)
            return
        if connection.waits_for is not None:
            # It gives up, or is confused: in either case it waits no more.
            self._hang_up(connection)
            return
        refusal = self._answer(connection, packet, flags)
        if refusal is not None:
            self._turn_away(connection, refusal)

    def _said_more(
        self, connection: AttachConnection, session: EngineSession, packet: bytes
    ) -> None:
        """An attached process leaves, says how far it is, or is served no more."""
        said = ATTACH_REQUESTS.decode(packet)
        if isinstance(said, Leave):
            connection.has_left = True
        elif connection.is_shut:
            self._look_away(connection)
        elif isinstance(said, ProcessWord):
            self._take_word(connection, session, said)
        else:
            refusal = self._refuse(
                Code.WRONG_STATE,
                f"pid {connection.pid} is attached already and sent {len(packet)} more bytes: this "
                "socket takes what a rank has written, requests go to the client socket",
            )
            self._fall_silent(connection, refusal)

    def _take_word(
        self, connection: AttachConnection, session: EngineSession, said: ProcessWord
    ) -> None:
        """How far a rank of the session has written, or what it copies; the node answers."""
        rank = connection.rank
        reactor = self._reactor
        if not isinstance(said, RankWritten):
            if isinstance(said, KeepsBlocks):
                # Before it is answered: the daemon after this one must know it as well.
                self._notes.session_keeps_blocks(session.number)
            reactor.feed(
                WorkerCopies(
                    at_s=reactor.clock(),
                    session=session.number,
                    worker=connection.number,
                    message=said,
                    rank=0 if rank is None else rank.rank,
                    ranks=1 if rank is None else rank.ranks,
                )
            )
            return
        if rank is None:
            why = (
                f"pid {connection.pid} has joined session {session.number} as no rank of it, and "
                "says what it has written: join with rank= and ranks="
            )
            refusal = self._refuse(Code.WRONG_STATE, why)
            self.answer(AnswerWorker(connection.number, said.call, refusal))
            return
        word = SayWritten(
            call=said.call,
            lease=said.lease,
            upto_tokens=said.upto_tokens,
            rank=rank.rank,
            ranks=rank.ranks,
            after=said.after,
        )
        number = session.number
        reactor.feed(
            FromWorker(at_s=reactor.clock(), session=number, worker=connection.number, message=word)
        )

    def _fall_silent(self, connection: AttachConnection, refusal: Refusal) -> None:
        """A process that has broken the rules is served no more."""
        self._say_refused(connection, refusal)
        connection.is_shut = True
        # The others of the session have kept the rules, and go on.
        session = connection.session
        if session is not None and all(connection.is_shut for connection in session.connections):
            self._ends.shut(session, refusal)

    def _look_away(self, connection: AttachConnection) -> None:
        """It goes on talking, and only its hang-up is news: read slowly."""
        loop = self._loop
        loop.remove_reader(connection.sock.fileno())

        def look_again() -> None:
            if connection in self._connections:
                loop.add_reader(connection.sock.fileno(), self._read, connection)

        loop.call_later(PAUSE_S, look_again)

    def _answer(self, connection: AttachConnection, packet: bytes, flags: int) -> Refusal | None:
        """Attach it, or say why not."""
        # It has spoken in time, whatever it said.
        if connection.timer is not None:
            connection.timer.cancel()
        # Before it is decoded: the rest of the packet is lost, and half a message may look like a
        # whole one.
        if flags & socket.MSG_TRUNC:
            return self._refuse(
                Code.TOO_LARGE, f"the request is longer than {MAX_REQUEST_BYTES} bytes"
            )
        # Before the request itself: what another version says may be no request here.
        client = SPEAKERS.decode(packet)
        if isinstance(client, Speaker) and client.is_foreign:
            return versions_differ(
                client=client, daemon=_WE_SPEAK, node=self._node, side=self._node
            )
        request = ATTACH_REQUESTS.decode(packet)
        if isinstance(request, Refusal):
            return request
        if isinstance(request, Leave | ProcessWord):
            what = type(request).__name__
            return self._refuse(Code.WRONG_STATE, f"{what} is for a process that is attached")
        match request:
            case Attach():
                return self._entries.attach(connection, request)
            case Join():
                return self._entries.join(connection, request)

    def _refuse(self, code: Code, message: str) -> Refusal:
        return Refusal(code, message, side=self._node)

    # ---- ends ------------------------------------------------------------------------------------

    def _turn_away(self, connection: AttachConnection, refusal: Refusal) -> None:
        """Reject it for a fault of its own: say why, then hang up."""
        self._say_refused(connection, refusal)
        self._hang_up(connection)

    def _say_refused(self, connection: AttachConnection, refusal: Refusal) -> None:
        """Tell the node, and the process that it is of."""
        self._reactor.feed(
            Unreadable(
                at_s=self._reactor.clock(),
                socket="attach",
                sender=f"pid {connection.pid}",
                refusal=refusal,
            )
        )
        tell(connection, refusal)

    def _hang_up(self, connection: AttachConnection) -> None:
        """A process is gone, or is sent away; with the last one its session ends."""
        # Before it is dropped: a ``Leave`` may be among what it said last, and makes the difference
        # between a session that ends and one that is awaited.
        hear_out(connection)
        self._drop(connection)
        if connection.session is not None:
            self._ends.hung_up(connection, connection.session)

    def _drop(self, connection: AttachConnection) -> None:
        # While the socket is open: a closed one has no number, and its old one may be another's by
        # then.
        self._loop.remove_reader(connection.sock.fileno())
        if connection.timer is not None:
            connection.timer.cancel()
        self._keys.wait_no_more(connection)
        self._connections.discard(connection)
        self._by_number.pop(connection.number, None)
        connection.sock.close()


def device_memory(spec: PoolSpec, shared: Iterable[SharedRegion]) -> tuple[DeviceMemory, ...]:
    """Each region of the pool on a device, by component and shard."""
    regions = {
        name: (component.name, shard)
        for component in spec.components
        for shard, name in enumerate(region_names(spec, component.name))
    }
    return tuple(
        DeviceMemory(spec.name, *regions[region.region], bus_id=region.bus_id, handle=region.handle)
        for region in shared
    )
