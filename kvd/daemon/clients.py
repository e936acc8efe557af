"""The client socket: requests of engines in, answers and pushes out.

The routing id is the session's token, issued on the attach socket: who knows it is of the session.
One connection has it at a time, and a second one is not let in. A message that cannot be read, or
is of no session, is answered with ``Failed`` and costs nobody else anything.

What one connection is told in one turn of the loop goes out as one message, in order.

Events share the way of answers, and give way to them: they are sent only where little waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, get_args

from mypy_extensions import mypyc_attr
from typing_extensions import override

from kvd.core import effects
from kvd.core.inputs import FromClient, Unreadable
from kvd.errors import Code, Refusal
from kvd.types import NO_TOKENS, Sent, Tokens, amount
from kvd.wire import client
from kvd.wire.codec import (
    CLIENT_REPLIES,
    CLIENT_REQUESTS,
    NO_CALL,
    check_tokens,
    joined_replies,
)
from kvd.zmtp.events import ConnectionFault
from kvd.zmtp.listener import ListenerOwner

if TYPE_CHECKING:
    from kvd.daemon.attach import AttachServer
    from kvd.daemon.reactor import Reactor
    from kvd.observe.bus import Bus
    from kvd.observe.metrics import Metrics
    from kvd.wire.events import Event
    from kvd.zmtp.connection import ZmtpConnection
    from kvd.zmtp.events import ConnectionClosed, Frames

EVENTS_UNSENT_BYTES: Final = 64 * 1024
"""Events are lost, and counted, to a session that has more than this unread of what is sent."""

OPS: dict[type, str] = {kind: str(kind.__struct_config__.tag) for kind in get_args(client.Request)}
"""What metrics call each request: its tag on the wire."""

UNKNOWN_OP = "client"
"""What metrics call a request that could not be read, or that was refused after a wait."""

SUBSCRIPTIONS: Final = (client.Subscribe, client.Unsubscribe)
"""What is served here, and is no input."""

WITH_TOKENS: Final = 2

FRAMES: dict[type, int] = {
    kind: WITH_TOKENS if kind in client.TAKES_TOKENS else WITH_TOKENS - 1 for kind in OPS
}
"""Frames of each request."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ClientPort(ListenerOwner):
    """Requests of all sessions on one listener."""

    def __init__(
        self,
        reactor: Reactor,
        bus: Bus,
        sessions: AttachServer,
        metrics: Metrics,
    ) -> None:
        self._reactor = reactor
        self._bus = bus
        self._sessions = sessions
        self._metrics = metrics
        self._by_route: dict[bytes, ZmtpConnection] = {}
        """Who has which routing id now."""
        self._session_of: dict[ZmtpConnection, int] = {}
        self._at: dict[int, ZmtpConnection] = {}
        """Where each session is answered."""
        self._calls: dict[int, int] = {}
        self._max_tokens = reactor.node.settings.max_prompt_tokens
        self._subscribers: dict[int, int] = {}
        """Session to number of events lost since the last that was taken."""
        self._fresh: list[Event] = []
        self._gathered: dict[ZmtpConnection, list[bytes]] = {}
        """What each is told in this turn of the loop, encoded, in order."""
        self._is_listening = False
        self._call, self._op = NO_CALL, UNKNOWN_OP
        """The request that is being carried out: most are answered at once."""

    def over(self, session: int) -> None:
        """Serve the connection of that session no more, and let it make place for others."""
        connection = self._at.pop(session, None)
        # The connection may outlive its session: it is of none from now on, and none that stays.
        if connection is not None:
            self._session_of.pop(connection, None)
            self.listener.let_go(connection)
        self._calls.pop(session, None)
        self._subscribers.pop(session, None)

    def hang_up(self, session: int) -> None:
        """The session is served no more: what it has not read is not kept for it."""
        # Kept before it is forgotten: it is closed when nothing leads to it any more.
        connection = self._at.get(session)
        self.over(session)
        if connection is not None:
            connection.close()

    def calls(self, session: int) -> int:
        """Messages that this living session has sent so far."""
        return self._calls.get(session, 0)

    def answer(self, effect: effects.AnswerEngine) -> None:
        """Carry out ``AnswerEngine``; a session that has gone hears nothing."""
        connection = self._at.get(effect.session)
        if connection is None:
            return
        message = effect.message
        if isinstance(message, client.Failed):
            # What answers another call than the one that is carried out had waited: its kind is not
            # kept.
            op = self._op if message.call == self._call else UNKNOWN_OP
            self._metrics.rpc_failed(op, message.refusal.code.value)
        self._gather(connection, message)

    def _gather(self, connection: ZmtpConnection, message: client.Reply) -> None:
        """Say it with whatever else this turn of the loop has for that connection."""
        # Encoded now: what cannot be is a bug that costs this message alone.
        said = CLIENT_REPLIES.encode(message)
        if not self._gathered:
            self.batch.ahead(self._say)
        gathered = self._gathered.get(connection)
        if gathered is None:
            self._gathered[connection] = [said]
        else:
            gathered.append(said)

    def _say(self) -> None:
        # Taken off first: of what giving up brings about the next turn tells.
        gathered, self._gathered = self._gathered, {}
        for connection, encoded in gathered.items():
            # One by one where something waits still: of who does not read, messages are counted.
            frames = encoded if connection.unsent_bytes else joined_replies(encoded)
            for frame in frames:
                if connection.send([frame]) is Sent.FULL:
                    session = self._session_of.get(connection)
                    if session is not None and self._at.get(session) is connection:
                        self._give_up(session)
                    break

    @override
    async def close(self) -> None:
        self._say()
        await super().close()

    @override
    def knows(self, connection: ZmtpConnection) -> bool:
        # Until its routing id is that of a session it has shown nothing but that it may connect.
        return False

    @override
    def welcome(self, connection: ZmtpConnection) -> bool:
        route = connection.routing_id
        # The first keeps it: whoever has the token too would otherwise read another process's
        # answers.
        if route in self._by_route:
            return not route  # without one it is of no session, like all others without
        self._by_route[route] = connection
        self._recognise(connection)
        return True

    @override
    def gone(self, connection: ZmtpConnection, closed: ConnectionClosed) -> None:
        if self._by_route.get(connection.routing_id) is connection:
            del self._by_route[connection.routing_id]
        session = self._session_of.pop(connection, None)
        # It may have been followed by another connection already: that one stays where answers go.
        if session is None or self._at.get(session) is not connection:
            return
        del self._at[session]
        if (
            closed.fault not in {ConnectionFault.HUNG_UP, ConnectionFault.ENDED}
            and connection.unsent_bytes
        ):
            self._give_up(session)  # we hung up for a fault of it, on answers that it did not read

    def _recognise(self, connection: ZmtpConnection) -> int | None:
        """The session that a connection is of, if there is one; it then stays."""
        session = self._sessions.session_of(connection.routing_id)
        if session is not None and self._at.get(session) is not connection:
            self._session_of[connection] = session
            self._at[session] = connection
            self.listener.keep(connection, f"session {session}")
        return session

    @override
    def take(self, connection: ZmtpConnection, frames: Frames) -> None:
        # With every message: it may have connected before its session was attached.
        session = self._recognise(connection)
        if session is None:
            refusal = Refusal(
                Code.UNKNOWN_SESSION,
                "this routing id belongs to no session: attach first, and again after a restart",
                side=self._reactor.node.settings.name,
            )
            self._refuse(connection, refusal, frames)
            return
        # Counted before it is read: what cannot be read is a message of it too.
        self._calls[session] = self._calls.get(session, 0) + 1
        message = CLIENT_REQUESTS.decode(frames[0])
        if isinstance(message, Refusal):
            call = CLIENT_REQUESTS.call_of(frames[0])
            self._refuse(connection, message, frames, call=call)
            return
        kind = type(message)
        tokens: Tokens | Refusal = NO_TOKENS
        n_frames = len(frames)
        if n_frames != FRAMES[kind]:
            tokens = _wrong_frames(message, n_frames)
        elif n_frames == WITH_TOKENS:
            tokens = check_tokens(frames[1], max_tokens=self._max_tokens)
        if isinstance(tokens, Refusal):
            self._refuse(connection, tokens, frames, call=message.call)
            return
        if isinstance(message, SUBSCRIPTIONS):
            self._subscribe(session, message)
            return
        # By what is asked: how its prompt is named is not of interest.
        op = OPS[type(message.request) if isinstance(message, client.AboutPrompt) else kind]
        self._call, self._op = message.call, op
        reactor = self._reactor
        began_s = reactor.clock()
        happened = FromClient(at_s=began_s, session=session, message=message, tokens=tokens)
        reactor.feed(happened, frames[0])
        self._call = NO_CALL
        self._metrics.rpc(self._op, reactor.clock() - began_s)

    def _subscribe(self, session: int, asked: client.Subscribe | client.Unsubscribe) -> None:
        # Not before somebody wants events: they would be looked at for nobody.
        if not self._is_listening:
            self._is_listening = True
            self._bus.subscribe(self._tell)
        if isinstance(asked, client.Subscribe):
            self._subscribers[session] = 0
        else:
            self._subscribers.pop(session, None)
        self.answer(effects.AnswerEngine(session, client.Done(asked.call)))

    def _give_up(self, session: int) -> None:
        """A lost answer may be a lease that nobody would ever release: we hang up instead."""
        bounds = self.listener.bounds
        refusal = Refusal(
            Code.CLIENT_GONE,
            f"session {session} has left {bounds.backlog_messages} messages of the daemon "
            f"unread, or {amount(bounds.backlog_bytes)} of them, so the next could not be "
            "sent: it is served no more, and what its processes may write stays held until they "
            "leave or end; close it, attach anew and read every answer",
            side=self._reactor.node.settings.name,
            numbers={"unread": bounds.backlog_messages},
        )
        sender = f"session {session}"
        # Told first, so that the log has the reason before what follows from it.
        self._reactor.feed(
            Unreadable(at_s=self._reactor.clock(), socket="client", sender=sender, refusal=refusal)
        )
        self._sessions.hang_up(session, refusal)

    def _refuse(
        self, connection: ZmtpConnection, refusal: Refusal, frames: Frames, *, call: int = NO_CALL
    ) -> None:
        self._metrics.rpc_failed(UNKNOWN_OP, refusal.code.value)
        self._gather(connection, client.Failed(call, refusal))
        sender = f"{connection.routing_id[:4].hex()}, {sum(map(len, frames))} bytes"
        self._reactor.feed(
            Unreadable(at_s=self._reactor.clock(), socket="client", sender=sender, refusal=refusal)
        )

    def _tell(self, event: Event) -> None:
        """Push an event to the subscribers, batched per turn of the loop."""
        if not self._subscribers:
            return
        # With the first of a turn: the ones behind it go in the same message.
        if not self._fresh:
            self.batch.loop.call_soon(self._push)
        self._fresh.append(event)

    def _push(self) -> None:
        # First what the engines are told themselves, of which most events tell.
        self._say()
        # Taken off before anything is sent: an event that this brings about is of the next turn.
        events, self._fresh = tuple(self._fresh), []
        for session, lost in list(self._subscribers.items()):
            connection = self._at.get(session)
            is_taken = False
            if connection is not None and connection.unsent_bytes <= EVENTS_UNSENT_BYTES:
                message = CLIENT_REPLIES.encode(client.Events(lost, events))
                is_taken = connection.send([message]) is Sent.TAKEN
            self._subscribers[session] = 0 if is_taken else lost + len(events)


def _wrong_frames(message: client.Request, n_frames: int) -> Refusal:
    kind = type(message)
    return Refusal(
        Code.BAD_REQUEST,
        f"{kind.__name__} came in {n_frames} frames, it has {FRAMES[kind]}",
        numbers={"frames": n_frames},
    )
